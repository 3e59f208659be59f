"""The step machine: one step at a time, answered once committed, never silently from nothing."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest, SessionBusy
from protocol.messages import (
    RESET,
    Acknowledge,
    Answer,
    Open,
    Park,
    RaiseFloor,
    Run,
    Signal,
    Stop,
    TurnStatus,
)
from protocol.payloads import Payload, PayloadType
from sessions import passed_on
from sessions.bindings import BindingState
from sessions.client import Refused
from sessions.lifecycle import CloseReason
from sessions.steps import answers, flight
from sessions.steps.events import (
    Interrupt,
    Reset,
    Restore,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    StepOutput,
    WasReset,
    WasRestored,
)
from tests.sessions.steps.harness import FRAME, MOVE, StepHarness, chain, world


def said(outputs: list[StepOutput]) -> list[tuple[Any, ...]]:
    """Outputs in short."""
    short: list[tuple[Any, ...]] = []
    for output in outputs:
        match output:
            case StepDone():
                short.append(("done", output.step, output.committed_step))
            case StepFailed():
                short.append(("failed", output.step, output.committed_step, output.error.code))
            case StateLost():
                short.append(("lost", output.committed_step, output.restorable_step))
            case WasReset():
                short.append(("reset", output.committed_step))
            case WasRestored():
                short.append(("restored", output.committed_step))
            case Refused():
                short.append(("refused", output.error.code, output.ref))
    return short


# One step


def test_a_step_runs_as_a_numbered_turn_of_the_stage_that_keeps_the_state() -> None:
    harness = StepHarness()
    harness.step(1, gain=2)
    run = harness.run()
    assert (run.step, run.parameters, run.last) == (1, {"gain": 2}, True)
    assert [d.payload for d in run.inputs] == [MOVE]  # type: ignore[union-attr]


def test_output_reaches_the_client_with_the_committed_answer_and_not_before() -> None:
    harness = StepHarness()
    harness.step(1)
    buffer = bytearray(b"frame")
    lent = Payload(PayloadType.FRAMES, memoryview(buffer), "|u1", (5,), {"index": 0})  # type: ignore[arg-type]
    harness.produce(payload=lent)
    # The bytes are lent only until they are acknowledged.
    buffer[:] = b"other"
    harness.produce()
    assert [a.through for a in harness.sent(Acknowledge)] == [1, 2]
    assert harness.outputs == []
    harness.end(1)
    timeline = {"world": {"done": 3.0}}
    assert harness.take() == [StepDone(1, 1, {"frames": [FRAME, FRAME]}, timeline)]
    assert [(m.turn, m.status, m.error) for m in harness.measured] == [(1, "completed", None)]


def test_settings_of_the_open_go_to_the_stage_that_keeps_the_state() -> None:
    harness = StepHarness(chain(), seed=3)
    assert harness.machine.settings == {"seed": 3}
    assert [harness.sent(Open, s)[0].settings for s in ("encode", "world", "decode")] == [
        {},
        {"seed": 3},
        {},
    ]


def test_settings_that_are_too_long_are_refused_by_name() -> None:
    harness = StepHarness()
    with pytest.raises(InvalidRequest) as refused:
        harness.machine.prepare({"prompt": "x" * passed_on.MAX_PARAMETERS_BYTES})
    assert refused.value.field == "settings"
    assert harness.machine.settings == {}


@pytest.mark.parametrize("fault", ["failed", "cancelled"])
def test_a_failed_step_leaves_the_committed_step_and_can_be_tried_again(fault: str) -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.produce()
    if fault == "failed":
        harness.fail(1, code="out_of_memory")
    else:
        harness.end(1, status=TurnStatus.CANCELLED)
    code = "out_of_memory" if fault == "failed" else "engine_lost"
    assert said(harness.take()) == [("failed", 2, 1, code)]
    harness.step(2)
    harness.end(2)
    # Nothing of the failed try is in the answer.
    assert harness.take() == [StepDone(2, 2, {}, {"world": {"done": 3.0}})]


# Numbers


@pytest.mark.parametrize(
    ("number", "code"),
    [(-1, "step_out_of_order"), (4, "step_out_of_order")],
)
def test_a_step_that_does_not_follow_is_refused_with_the_committed_step(
    number: int, code: str
) -> None:
    harness = StepHarness().after(2)
    harness.step(number)
    (failed,) = harness.take()
    assert isinstance(failed, StepFailed)
    assert (failed.committed_step, failed.error.code, failed.error.field) == (2, code, "step")
    assert failed.ref == f"step-{number}"
    assert not harness.sent(Run)


def test_a_repeated_step_gets_the_first_answer_and_is_not_done_again() -> None:
    harness = StepHarness().after(1)
    harness.done(2)
    first = harness.take()
    harness.step(2)
    harness.step(1)
    again, earlier = harness.take()
    assert [again] == first
    # The state is where it is, and not where it was when that was first answered.
    assert said([earlier]) == [("done", 1, 2)]
    assert len(harness.sent(Run)) == 1


def test_a_step_without_an_answer_says_where_the_state_is_whenever_it_is_asked_for() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.fail(1)
    harness.done(2)
    harness.clear()
    harness.step(1)
    assert said(harness.take()) == [("failed", 1, 2, "engine_failed")]


def test_a_step_repeated_in_flight_is_answered_once_for_all() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.step(1)
    assert len(harness.sent(Run)) == 1
    harness.end(1)
    assert said(harness.take()) == [("done", 1, 1)]


def test_the_step_after_the_one_in_flight_is_out_of_order() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.step(3)
    assert said(harness.take()) == [("failed", 3, 1, "step_out_of_order")]


def test_an_answer_too_old_to_be_remembered_is_stated_as_committed() -> None:
    harness = StepHarness().after(answers.REMEMBERED_ANSWERS + 1)
    harness.step(1)
    harness.step(2)
    committed = answers.REMEMBERED_ANSWERS + 1
    assert said(harness.take()) == [
        ("failed", 1, committed, "step_committed"),
        ("done", 2, committed),
    ]


def test_remembered_output_is_bounded_and_the_last_answer_always_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "REMEMBERED_BYTES", 9)
    harness = StepHarness().after(2)
    harness.step(1)
    harness.step(2)
    assert said(harness.take()) == [("failed", 1, 2, "step_committed"), ("done", 2, 2)]
    monkeypatch.setattr(answers, "REMEMBERED_BYTES", 1)
    harness.after(0)
    harness.done(3)
    harness.step(3)
    assert said(harness.take()) == [("done", 3, 3)] * 2


# Bounds of a step


def test_inputs_and_parameters_that_are_too_long_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passed_on, "MAX_INPUT_BYTES", 7)
    harness = StepHarness()
    harness.say(Step(1, [MOVE, MOVE]))
    long = {"prompt": "x" * passed_on.MAX_PARAMETERS_BYTES}
    harness.say(Step(1, [MOVE], long))
    harness.say(Reset(long))
    *failed, refused = harness.take()
    assert isinstance(refused, Refused)
    assert refused.error.field == "reset.parameters"
    assert [(f.error.code, f.error.field) for f in failed if isinstance(f, StepFailed)] == [
        ("payload_too_large", "inputs"),
        ("invalid_value", "parameters"),
    ]
    assert not harness.sent(Run)


@pytest.mark.parametrize("committed", [0, 1])
def test_a_step_that_makes_too_much_is_stopped_and_the_answer_says_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch, committed: int
) -> None:
    monkeypatch.setattr(flight, "MAX_OUTPUT_BYTES", 9)
    harness = StepHarness()
    harness.step(1)
    harness.produce()
    harness.produce()
    harness.produce()
    assert len(harness.sent(Stop)) == 1
    assert [a.through for a in harness.sent(Acknowledge)] == [1, 2, 3]
    status = TurnStatus.COMPLETED if committed else TurnStatus.CANCELLED
    harness.end(committed, status=status)
    assert said(harness.take()) == [("failed", 1, committed, "step_output_too_large")]
    harness.step(1)
    # A committed one is not done again, and its answer stays what it was.
    assert len(harness.sent(Run)) == 2 - committed
    assert len(harness.take()) == committed


# Interruption


def test_an_interrupted_step_is_answered_when_its_worker_has_stopped_it() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Interrupt())
    harness.say(Interrupt())
    assert [stop.turn for stop in harness.sent(Stop)] == [harness.run().turn]
    assert harness.outputs == []
    harness.end(1, status=TurnStatus.CANCELLED)
    assert said(harness.take()) == [("failed", 2, 1, "step_cancelled")]
    assert harness.measured[-1].status == "cancelled"
    # The state is whole: the same step may be tried again.
    harness.done(2)
    assert said(harness.take()) == [("done", 2, 2)]


def test_a_step_that_was_committed_before_it_could_be_stopped_is_answered_with_its_output() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Interrupt())
    harness.produce()
    harness.end(2)
    assert harness.take() == [StepDone(2, 2, {"frames": [FRAME]}, {"world": {"done": 3.0}})]


def test_a_step_that_failed_by_itself_is_not_called_interrupted() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.say(Interrupt())
    harness.fail(0)
    assert said(harness.take()) == [("failed", 1, 0, "engine_failed")]


def test_without_a_step_in_flight_there_is_nothing_to_interrupt() -> None:
    harness = StepHarness()
    harness.say(Interrupt(ref="i"))
    assert said(harness.take()) == [("refused", "step_not_active", "i")]


def test_a_step_that_waits_for_a_worker_is_interrupted_at_once() -> None:
    harness = StepHarness()
    harness.lose()
    harness.step(1)
    harness.say(Interrupt())
    assert said(harness.take()) == [("failed", 1, 0, "step_cancelled")]
    harness.come_back()
    assert not harness.sent(Run)


# Loss of the state's worker


def test_state_that_is_lost_is_stated_once_and_every_further_step_is_refused() -> None:
    harness = StepHarness().after(2)
    harness.lose()
    assert said(harness.take()) == [("lost", 2, None)]
    harness.step(3)
    harness.come_back()
    harness.step(3)
    harness.step(1)
    assert said(harness.take()) == [
        ("failed", 3, 2, "session_state_lost"),
        ("failed", 3, 2, "session_state_lost"),
        # What was answered stays answered.
        ("done", 1, 2),
    ]
    assert not harness.sent(Run)


def test_a_step_in_flight_fails_when_its_worker_dies_and_then_the_state_is_lost() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.produce()
    harness.lose()
    assert said(harness.take()) == [("failed", 2, 1, "engine_lost"), ("lost", 1, None)]


def test_before_the_first_committed_step_a_new_worker_goes_on_by_itself() -> None:
    harness = StepHarness()
    harness.lose()
    harness.come_back()
    harness.step(1)
    harness.lose()
    assert said(harness.take()) == [("failed", 1, 0, "engine_lost")]
    harness.step(1)
    harness.come_back()
    harness.end(1)
    assert said(harness.take()) == [("done", 1, 1)]


def test_the_first_step_waits_for_a_worker_and_not_for_ever() -> None:
    harness = StepHarness(world(restore_ms=4_000))
    harness.lose()
    harness.step(1)
    harness.later(3_999)
    assert harness.outputs == []
    harness.later(1)
    assert said(harness.take()) == [("failed", 1, 0, "engine_lost")]


def test_the_state_that_a_reset_gave_is_lost_with_its_worker_too() -> None:
    harness = StepHarness()
    harness.reset(seed=5)
    harness.clear()
    harness.lose()
    # A new worker would begin from the settings of the open.
    assert said(harness.take()) == [("lost", 0, None)]
    harness.come_back()
    harness.step(1)
    assert said(harness.take()) == [("failed", 1, 0, "session_state_lost")]


def test_a_commit_that_failed_is_a_loss_of_the_state() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.fail(1, code="session_state_lost")
    harness.step(2)
    assert said(harness.take()) == [
        ("failed", 2, 1, "session_state_lost"),
        ("lost", 1, None),
        ("failed", 2, 1, "session_state_lost"),
    ]


@pytest.mark.parametrize("committed", [None, 1])
def test_a_worker_that_knows_fewer_steps_has_lost_the_state(committed: int | None) -> None:
    harness = StepHarness().after(2)
    harness.step(3)
    harness.fail(committed, code="step_out_of_order")
    assert said(harness.take()) == [("failed", 3, 2, "step_out_of_order"), ("lost", 2, None)]


def test_a_new_worker_that_refuses_the_session_fails_what_waits() -> None:
    harness = StepHarness()
    harness.lose()
    harness.step(1)
    harness.machine.stage_refused("world", CapacityExceeded("full").info(), harness.now_ms)
    assert said(harness.take()) == [("failed", 1, 0, "capacity_exceeded")]
    harness.say(Reset(ref="r"))
    harness.machine.stage_refused("world", CapacityExceeded("full").info(), harness.now_ms)
    assert said(harness.take()) == [("refused", "capacity_exceeded", "r")]


# Reset


def test_a_reset_begins_with_step_one_again() -> None:
    harness = StepHarness().after(2)
    harness.say(Reset({"seed": 5}))
    signal = harness.last_signal()
    assert (signal.name, signal.arguments) == (RESET, {"seed": 5})
    harness.step(3)
    harness.say(Reset(ref="r"))
    harness.answer(signal.command)
    assert said(harness.take()) == [
        ("failed", 3, 2, "reset_in_progress"),
        ("refused", "reset_in_progress", "r"),
        ("reset", 0),
    ]
    # What was answered before is no answer to the new steps.
    harness.step(2)
    harness.done(1)
    assert said(harness.take()) == [("failed", 2, 0, "step_out_of_order"), ("done", 1, 1)]


def test_a_refused_reset_leaves_everything_as_it_was() -> None:
    harness = StepHarness().after(2)
    harness.say(Reset({"sed": 5}, ref="r"))
    harness.answer(harness.last_signal().command, InvalidRequest("no", field="sed").info())
    harness.done(3)
    assert said(harness.take()) == [("refused", "invalid_value", "r"), ("done", 3, 3)]


def test_a_reset_cancels_the_step_in_flight_and_waits_for_its_last_word() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Reset())
    assert len(harness.sent(Stop)) == 1
    assert not harness.sent(Signal)
    harness.end(1, status=TurnStatus.CANCELLED)
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("failed", 2, 1, "step_cancelled"), ("reset", 0)]


def test_lost_state_begins_anew_on_a_new_worker() -> None:
    harness = StepHarness(seed=1).after(2)
    harness.lose()
    harness.say(Reset({"seed": 2}))
    assert not harness.sent(Signal)
    harness.come_back()
    harness.answer(harness.last_signal().command)
    harness.done(1)
    assert said(harness.take()) == [("lost", 2, None), ("reset", 0), ("done", 1, 1)]


def test_a_reset_does_not_wait_for_a_worker_for_ever() -> None:
    harness = StepHarness(world(restore_ms=4_000)).after(1)
    harness.lose()
    harness.clear()
    harness.say(Reset(ref="r"))
    harness.later(4_000)
    assert said(harness.take()) == [("refused", "engine_lost", "r")]
    harness.come_back()
    assert not harness.sent(Signal)
    harness.step(2)
    assert said(harness.take()) == [("failed", 2, 1, "session_state_lost")]


def test_a_reset_whose_worker_dies_is_done_by_the_next() -> None:
    harness = StepHarness().after(1)
    harness.say(Reset({"seed": 2}))
    first = harness.last_signal().command
    harness.lose()
    harness.come_back()
    # The dead worker's answer is nobody's any more.
    harness.answer(first)
    assert said(harness.take()) == [("lost", 1, None)]
    assert len(harness.sent(Signal)) == 2
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("reset", 0)]


# What was stored


def test_a_step_goes_on_from_the_state_that_was_stored_after_the_last_one() -> None:
    harness = StepHarness().after(2)
    harness.lose(restorable=True)
    harness.step(3)
    assert harness.take() == []
    harness.restore(2)
    harness.produce()
    harness.end(3)
    assert said(harness.take()) == [("done", 3, 3)]


def test_a_step_in_flight_fails_and_the_same_one_can_be_asked_for_again() -> None:
    harness = StepHarness().after(2)
    harness.step(3)
    harness.lose(restorable=True)
    harness.restore(2)
    assert said(harness.take()) == [("failed", 3, 2, "engine_lost")]
    harness.done(3)
    assert said(harness.take()) == [("done", 3, 3)]


@pytest.mark.parametrize("step", [1, 3], ids=["an earlier one", "one that nobody was told of"])
def test_the_state_after_another_step_is_gone_on_from_when_the_client_says_so(step: int) -> None:
    harness = StepHarness().after(2)
    harness.lose(restorable=True)
    harness.step(3)
    harness.restore(step)
    assert said(harness.take()) == [("failed", 3, 2, "session_state_lost"), ("lost", 2, step)]
    harness.step(3)
    refused = harness.take()
    assert said(refused) == [("failed", 3, 2, "session_state_lost")]
    assert isinstance(refused[0], StepFailed)
    assert f"restore that after step {step}" in refused[0].error.message
    harness.say(Restore("again"))
    harness.done(step + 1)
    told = harness.take()
    assert said(told) == [("restored", step), ("done", step + 1, step + 1)]
    assert isinstance(told[0], WasRestored)
    assert told[0].ref == "again"


def test_there_is_nothing_to_restore_where_nothing_is_lost_or_nothing_was_stored() -> None:
    harness = StepHarness().after(1)
    harness.say(Restore("r"))
    harness.lose()
    harness.say(Restore("s"))
    assert said(harness.take()) == [
        ("refused", "nothing_to_restore", "r"),
        ("lost", 1, None),
        ("refused", "nothing_to_restore", "s"),
    ]


def test_what_a_reset_in_flight_came_to_is_not_guessed() -> None:
    harness = StepHarness().after(1)
    harness.say(Reset({"seed": 2}))
    harness.lose(restorable=True)
    harness.restore(0)
    assert said(harness.take()) == [("lost", 1, None)]
    harness.answer(harness.last_signal().command)
    harness.done(1)
    assert said(harness.take()) == [("reset", 0), ("done", 1, 1)]


# Several stages


def through_world(harness: StepHarness, number: int) -> None:
    """A step comes as far as decode."""
    harness.step(number)
    harness.produce("encode")
    harness.end(stage="encode")
    harness.produce("world")


def test_only_the_stage_that_keeps_the_state_is_given_the_number() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    assert [harness.run(s).step for s in ("encode", "world", "decode")] == [None, 1, None]
    harness.end(1)
    harness.produce("decode")
    assert harness.outputs == []
    harness.end(stage="decode")
    assert said(harness.take()) == [("done", 1, 1)]


def test_a_step_waits_for_the_answer_to_the_one_before_it_although_that_is_committed() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.step(2)
    (failed,) = harness.take()
    assert isinstance(failed, StepFailed)
    assert (failed.error.code, failed.committed_step) == ("step_out_of_order", 1)
    assert "step 1 is in flight" in failed.error.message


def test_a_step_whose_output_was_lost_behind_the_state_is_stated_as_committed() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.fail(stage="decode")
    harness.step(1)
    harness.step(2)
    assert said(harness.take()) == [("failed", 1, 1, "engine_failed")] * 2
    assert harness.run("encode").turn == 2


@pytest.mark.parametrize("committed", [0, 1])
def test_a_step_that_fails_behind_the_state_is_answered_when_the_state_has_settled(
    committed: int,
) -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.fail(stage="decode")
    assert harness.outputs == []
    assert harness.sent(RaiseFloor, "world")
    status = TurnStatus.COMPLETED if committed else TurnStatus.CANCELLED
    harness.end(committed, status=status)
    assert said(harness.take()) == [("failed", 1, committed, "engine_failed")]


def test_a_step_that_fails_behind_the_state_is_answered_when_the_states_worker_dies() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.fail(stage="decode")
    harness.lose("world")
    assert said(harness.take()) == [("failed", 1, 0, "engine_failed")]


def test_an_interruption_stops_the_step_where_its_state_is_decided() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.say(Interrupt())
    assert harness.sent(Stop, "world")
    assert not harness.sent(Stop, "decode")
    harness.end(0, status=TurnStatus.CANCELLED)
    assert said(harness.take()) == [("failed", 1, 0, "step_cancelled")]
    assert harness.sent(RaiseFloor, "decode")


def test_an_interruption_before_the_state_stops_what_runs() -> None:
    harness = StepHarness(chain())
    harness.step(1)
    harness.say(Interrupt())
    assert harness.sent(Stop, "encode")
    harness.end(stage="encode", status=TurnStatus.CANCELLED)
    assert said(harness.take()) == [("failed", 1, 0, "step_cancelled")]


def test_an_interruption_after_the_commit_changes_nothing() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.say(Interrupt())
    assert not harness.sent(Stop, "decode")
    harness.produce("decode")
    harness.end(stage="decode")
    assert said(harness.take()) == [("done", 1, 1)]


def test_another_stages_worker_may_die_without_loss_of_the_state() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.lose("decode")
    harness.come_back("decode")
    assert said(harness.take()) == [("failed", 1, 1, "engine_lost")]
    through_world(harness, 2)
    harness.end(2)
    harness.end(stage="decode")
    assert said(harness.take()) == [("done", 2, 2)]


def test_a_committed_step_is_answered_although_the_states_worker_dies_behind_it() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.lose("world")
    harness.produce("decode")
    harness.end(stage="decode")
    assert said(harness.take()) == [("done", 1, 1), ("lost", 1, None)]


def test_a_step_does_not_come_to_a_new_worker_of_the_state() -> None:
    harness = StepHarness(chain())
    through_world(harness, 1)
    harness.end(1)
    harness.end(stage="decode")
    harness.clear()
    harness.step(2)
    harness.lose("world")
    harness.come_back("world")
    assert harness.sent(Stop, "encode")
    harness.end(stage="encode", status=TurnStatus.CANCELLED)
    assert not harness.sent(Run, "world")
    assert said(harness.take()) == [("failed", 2, 1, "session_state_lost"), ("lost", 1, None)]


# The idle clock, the client's pace, the end


def test_only_steps_that_begin_and_that_are_done_are_progress() -> None:
    harness = StepHarness()
    harness.step(1)
    assert harness.progressed == 1
    harness.step(1)
    harness.step(5)
    harness.say(Interrupt())
    harness.end(0, status=TurnStatus.CANCELLED)
    harness.say(Interrupt())
    assert harness.progressed == 1
    harness.done(1)
    assert harness.progressed == 3
    harness.step(1)
    assert harness.progressed == 3


def test_answers_wait_for_a_client_that_does_not_read_and_no_step_begins_meanwhile() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.machine.blocked(True, harness.now_ms)
    harness.end(1)
    harness.step(1)
    harness.step(2)
    assert said(harness.take()) == [("failed", 2, 1, "capacity_exceeded")]
    harness.machine.blocked(False, harness.now_ms)
    harness.step(2)
    assert said(harness.take()) == [("done", 1, 1)]
    assert len(harness.sent(Run)) == 2


def test_a_client_that_never_reads_is_stalled_after_its_time() -> None:
    harness = StepHarness(world(stall_ms=500))
    harness.machine.blocked(True, 1_000.0)
    harness.machine.blocked(True, 1_400.0)
    assert harness.machine.deadline() == 1_500.0
    assert [harness.machine.stalled(at) for at in (1_499.0, 1_500.0)] == [False, True]


def test_a_client_is_stalled_at_the_very_deadline_whatever_is_lost_in_rounding() -> None:
    machine = StepHarness(world(stall_ms=500)).machine
    machine.blocked(True, 1_600.74)
    due_ms = machine.deadline()
    assert due_ms is not None
    assert due_ms - 1_600.74 < 500
    assert machine.stalled(due_ms)


def test_answers_that_wait_come_before_a_reset_that_forgets_them() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.machine.blocked(True, harness.now_ms)
    harness.end(1)
    harness.reset()
    assert said(harness.take()) == [("done", 1, 1), ("reset", 0)]


def test_what_is_under_way_gets_its_last_word_when_the_session_ends() -> None:
    harness = StepHarness().after(1)
    harness.step(2)
    harness.say(Reset(ref="r"))
    harness.machine.end(CloseReason.IDLE, None, harness.now_ms)
    assert said(harness.take()) == [
        ("failed", 2, 1, "step_cancelled"),
        ("refused", "step_cancelled", "r"),
    ]
    assert [m.status for m in harness.measured] == ["cancelled"]


def test_what_ended_the_session_is_what_ended_the_step() -> None:
    harness = StepHarness()
    harness.step(1)
    harness.machine.end(CloseReason.ERROR, EngineFailed("x").info(), harness.now_ms)
    assert said(harness.take()) == [("failed", 1, 0, "engine_failed")]


def test_the_state_has_a_canonical_value() -> None:
    one, other = StepHarness(), StepHarness()
    assert one.machine.freeze() == other.machine.freeze()
    one.step(1)
    assert one.machine.freeze() != other.machine.freeze()
    other.step(1)
    assert one.machine.freeze() == other.machine.freeze()
    one.end(1)
    assert one.machine.freeze() != other.machine.freeze()


@pytest.mark.parametrize("when", ["parked", "parking", "kept"])
def test_a_reset_of_a_parked_state_has_it_brought_back(when: str) -> None:
    harness = StepHarness()
    binding = harness.bindings["world"]
    binding.park(100)
    park = harness.sent(Park)[-1].command
    if when == "parked":
        binding.answered(Answer("s", park))
    harness.say(Reset())
    if when == "kept":
        binding.answered(Answer("s", park, SessionBusy("not now").info()))
        harness.machine.stage_ready("world", harness.now_ms)
    else:
        if when == "parking":
            binding.answered(Answer("s", park))
            binding.wake_if_wanted()
        assert binding.state is BindingState.BINDING
        harness.come_back()
    assert [signal.name for signal in harness.sent(Signal)] == [RESET]
