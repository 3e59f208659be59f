"""Checkpoints, rewinds and the release of what is held: between two steps of a loop."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import CHECKPOINT, RELEASE, REWIND, Run, Signal, TurnStatus
from sessions.client import Refused
from sessions.lifecycle import CloseReason
from sessions.steps.events import (
    NEXT,
    ActionsReleased,
    Checkpoint,
    CheckpointKept,
    ReleaseActions,
    Reset,
    Restore,
    Rewind,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    StepOutput,
    StepVerb,
    WasReset,
    WasRestored,
    WasRewound,
)
from sessions.steps.refusals import no_checkpoint
from tests.sessions.steps.harness import MOVE, StepHarness, chain, world

VERBS: list[StepVerb] = [Checkpoint(ref="c"), Rewind(1, ref="c"), ReleaseActions(ref="c")]


def kinds(outputs: list[StepOutput]) -> list[str]:
    return [type(output).__name__ for output in outputs]


def refused(outputs: list[StepOutput]) -> list[tuple[str, str | None]]:
    return [(it.error.code, it.ref) for it in outputs if isinstance(it, Refused)]


each_verb = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: type(verb).__name__)


@pytest.mark.parametrize(
    ("verb", "name", "arguments", "result", "told"),
    [
        (Checkpoint(), CHECKPOINT, {}, {"kept": [1, 3]}, CheckpointKept(3, [1, 3])),
        (Rewind(1), REWIND, {"step": 1}, {"committed_step": 1}, WasRewound(1)),
        (ReleaseActions(), RELEASE, {}, {}, ActionsReleased(3)),
    ],
)
def test_the_worker_is_asked_and_what_it_did_is_told(
    verb: StepVerb, name: str, arguments: dict[str, Any], result: dict[str, Any], told: StepOutput
) -> None:
    harness = StepHarness().after(3)
    harness.say(verb)
    signal = harness.last_signal()
    assert (signal.name, signal.arguments) == (name, arguments)
    assert harness.take() == []
    harness.answer(result=result)
    assert harness.take() == [told]
    harness.answer(signal.command, result=result)
    assert harness.take() == []


@each_verb
def test_it_waits_for_the_step_in_flight_and_cancels_nothing(verb: StepVerb) -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(verb)
    assert not harness.sent(Signal)
    harness.produce()
    harness.end(2)
    assert kinds(harness.take()) == ["StepDone"]
    assert len(harness.sent(Signal)) == 1


def test_a_step_that_waited_before_it_is_done_before_it() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Step(NEXT, [MOVE]))
    harness.say(Checkpoint())
    harness.end(2)
    assert [run.step for run in harness.sent(Run)] == [2, 3]
    assert not harness.sent(Signal)
    harness.end(3)
    harness.answer(result={"kept": [3]})
    done = harness.take()
    assert kinds(done) == ["StepDone", "StepDone", "CheckpointKept"]
    assert done[-1] == CheckpointKept(3, [3])


@each_verb
def test_steps_and_other_changes_are_refused_until_it_is_done(verb: StepVerb) -> None:
    harness = StepHarness().after(1)
    harness.say(verb)
    harness.step(2)
    harness.say(Reset(ref="r"))
    harness.say(Checkpoint(ref="k"))
    (step, *others) = harness.take()
    assert isinstance(step, StepFailed)
    assert step.error.code == "change_in_progress"
    assert refused(others) == [("change_in_progress", "r"), ("change_in_progress", "k")]
    assert harness.machine.working
    harness.answer(result={"kept": [1]})
    assert not harness.machine.working
    harness.clear()
    harness.done(2)
    assert kinds(harness.take()) == ["StepDone"]


def test_steps_go_on_from_where_the_loop_went_back_to() -> None:
    harness = StepHarness()
    for number in (1, 2, 3):
        harness.done(number)
    harness.say(Rewind(1))
    harness.answer()
    assert harness.machine.facts() == {"committed_step": 1}
    harness.take()
    harness.step(3)
    (failed,) = harness.take()
    assert isinstance(failed, StepFailed)
    assert (failed.error.code, failed.committed_step) == ("step_out_of_order", 1)
    # An answer to an earlier step is still known; one to a later never was.
    harness.step(1)
    (again,) = harness.take()
    assert isinstance(again, StepDone)
    assert again.step == 1
    before = len(harness.sent(Run))
    harness.done(2)
    assert len(harness.sent(Run)) == before + 1
    assert [it.step for it in harness.take() if isinstance(it, StepDone)] == [2]


def test_a_rewind_that_is_refused_changes_nothing() -> None:
    harness = StepHarness().after(3)
    harness.say(Rewind(2, ref="w"))
    harness.answer(error=no_checkpoint(2, [1]).info())
    (output,) = harness.take()
    assert isinstance(output, Refused)
    told = (output.error.code, output.error.field, output.ref)
    assert told == ("no_checkpoint", "rewind.step", "w")
    assert "those that are: 1" in output.error.message
    harness.done(4)
    assert kinds(harness.take()) == ["StepDone"]


def test_a_client_that_does_not_read_gets_its_answers_before_the_loop_goes_back() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.machine.blocked(True, harness.now_ms)
    harness.produce()
    harness.end(2)
    harness.say(Rewind(1))
    harness.answer()
    assert kinds(harness.take()) == ["StepDone", "WasRewound"]


# Without a worker, or without the state


@each_verb
def test_a_state_that_is_lost_is_neither_kept_nor_gone_back_from(verb: StepVerb) -> None:
    harness = StepHarness().after(1)
    harness.lose()
    harness.take()
    harness.say(verb)
    harness.come_back()
    assert refused(harness.take()) == [("session_state_lost", "c")]
    assert not harness.sent(Signal)


@each_verb
def test_it_is_refused_when_the_state_is_lost_meanwhile(verb: StepVerb) -> None:
    harness = StepHarness().after(1)
    harness.say(verb)
    harness.lose()
    harness.come_back()
    outputs = harness.take()
    assert [it for it in outputs if isinstance(it, StateLost)] == [StateLost(1, None, None)]
    assert refused(outputs) == [("session_state_lost", "c")]
    assert len(harness.sent(Signal)) == 1
    harness.reset()
    assert kinds(harness.take()) == ["WasReset"]


def test_it_is_refused_when_the_step_before_it_loses_the_state() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Checkpoint(ref="c"))
    harness.fail(0)
    assert refused(harness.take()) == [("session_state_lost", "c")]
    assert not harness.sent(Signal)


@pytest.mark.parametrize("verb", [Checkpoint(), ReleaseActions()], ids=["checkpoint", "release"])
def test_what_moves_no_state_is_asked_of_the_worker_that_has_it_back(verb: StepVerb) -> None:
    harness = StepHarness().after(2)
    harness.say(verb)
    harness.lose(restorable=True)
    harness.restore(2)
    assert len(harness.sent(Signal)) == 2
    harness.answer(result={"kept": [2]})
    assert kinds(harness.take()) in (["CheckpointKept"], ["ActionsReleased"])


def test_what_a_rewind_in_flight_came_to_is_not_guessed() -> None:
    harness = StepHarness().after(2)
    harness.say(Rewind(1, ref="w"))
    harness.lose(restorable=True)
    harness.restore(2)
    outputs = harness.take()
    assert kinds(outputs) == ["StateLost", "Refused"]
    assert isinstance(outputs[0], StateLost)
    assert outputs[0].restorable_step is None
    assert len(harness.sent(Signal)) == 1


def test_what_was_stored_before_a_rewind_takes_the_place_of_nothing_after_it() -> None:
    harness = StepHarness().after(2)
    binding = harness.bindings["world"]
    binding.restorable_step = 2
    harness.say(Rewind(1))
    harness.answer()
    assert binding.restorable_step is None


def test_a_change_waits_for_a_worker_for_as_long_as_a_turn_would() -> None:
    harness = StepHarness(world(restore_ms=4_000))
    harness.lose()
    harness.say(Checkpoint(ref="c"))
    harness.later(4_000)
    assert refused(harness.take()) == [("engine_lost", "c")]
    harness.come_back()
    assert not harness.sent(Signal)


def test_a_session_that_ends_says_so_of_what_is_under_way() -> None:
    harness = StepHarness().after(1)
    harness.say(Rewind(1, ref="w"))
    harness.machine.end(CloseReason.CLIENT, None, harness.now_ms)
    assert refused(harness.take()) == [("step_cancelled", "w")]


def test_a_step_in_an_earlier_stage_is_waited_for_as_well() -> None:
    harness = StepHarness(chain())
    harness.step(1)
    harness.say(Checkpoint())
    assert not harness.sent(Signal)
    harness.end(None, "encode", TurnStatus.FAILED)
    assert len(harness.sent(Signal)) == 1


def test_a_loop_that_went_back_can_begin_anew() -> None:
    harness = StepHarness().after(2)
    harness.say(Rewind(1))
    harness.answer()
    harness.reset()
    assert [it for it in harness.take() if isinstance(it, WasReset)] == [WasReset(0)]


def test_who_comes_knows_to_which_steps_the_loop_can_go_back() -> None:
    harness = StepHarness()
    for number in (1, 2, 3):
        harness.done(number)
        harness.say(Checkpoint())
        harness.answer(result={"kept": list(range(1, number + 1))})
    assert harness.machine.snapshot().kept == (1, 2, 3)
    harness.say(Rewind(2))
    harness.answer()
    assert harness.machine.facts() == {"committed_step": 2, "kept": [1, 2]}
    harness.say(Reset())
    harness.answer()
    assert harness.machine.snapshot().kept == ()


def test_what_was_kept_is_gone_with_the_state() -> None:
    harness = StepHarness().after(1)
    harness.say(Checkpoint())
    harness.answer(result={"kept": [1]})
    harness.lose()
    assert harness.machine.snapshot().kept == ()
    assert harness.machine.facts() == {
        "committed_step": 1,
        "lost": True,
        "restorable_step": None,
    }


def test_what_was_kept_at_the_very_beginning_is_not_lost_in_silence() -> None:
    harness = StepHarness()
    harness.say(Checkpoint())
    harness.answer(result={"kept": [0]})
    harness.clear()
    harness.lose()
    # A new worker begins at step 0 as well, but keeps nothing.
    assert harness.take() == [StateLost(0, None)]


def test_a_worker_that_has_a_stored_state_says_what_is_kept_with_it() -> None:
    harness = StepHarness().after(1)
    harness.say(Checkpoint())
    harness.answer(result={"kept": [1]})
    harness.done(2)
    harness.say(Checkpoint())
    harness.answer(result={"kept": [1, 2]})
    # It died before the second was stored.
    harness.lose(restorable=True)
    harness.restore(2, kept=[1])
    assert harness.machine.snapshot().kept == (1,)
    harness.lose(restorable=True)
    harness.clear()
    harness.restore(1, kept=[1])
    assert harness.machine.snapshot().kept == ()
    harness.say(Restore())
    (restored,) = [it for it in harness.take() if isinstance(it, WasRestored)]
    assert (restored.committed_step, restored.kept) == (1, [1])
