"""The control loop of a robot: answered in time whatever happens, and held still when asked to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.arrays import array_of, array_payload
from protocol.errors import DeadlineMissed, EngineFailed, InvalidRequest
from protocol.messages import Run, Signal, Stop, TurnStatus
from protocol.payloads import Payload, PayloadType
from sessions.client import Refused
from sessions.lifecycle import CloseReason
from sessions.pipeline import Control, Kind, Limits, Pipeline
from sessions.steps.events import (
    NEXT,
    EmergencyStop,
    EmergencyStopped,
    ReleaseStop,
    Reset,
    SafeAction,
    Step,
    StepDone,
    StepFailed,
    StepOutput,
    StoppedBy,
    StopReleased,
    WasReset,
)
from tests.sessions.steps.harness import MOVE, StepHarness

CHUNK = np.arange(6, dtype="<f4").reshape(3, 2)
"""Three actions of two dimensions."""


def actions(values: Any = CHUNK, key: str = "actions", dtype: str = "<f4") -> Payload:
    piece = array_payload(PayloadType.ACTIONS, np.asarray(values, dtype), key=key, infer_ms=3.0)
    return Payload(piece.type, bytes(piece.data), piece.dtype, piece.shape, piece.attributes)


def robot(restore_ms: int = 30_000, **control: Any) -> StepHarness:
    """A robot with a deadline of 100 ms that holds, unless told otherwise."""
    control = {"deadline_ms": 100.0, "safe_action": "hold", **control}
    pipeline = Pipeline(
        "arm",
        ("world",),
        (),
        {"actions": "world"},
        kind=Kind.ROBOT,
        limits=Limits(restore_ms=restore_ms),
        control=Control(**control),
    )
    return StepHarness(pipeline)


def driving(*chunks: Payload, **control: Any) -> StepHarness:
    """A robot that has had its first fresh answer, which arms its deadline."""
    harness = robot(**control)
    harness.step(1)
    for chunk in chunks or (actions(),):
        harness.produce(payload=chunk)
    harness.end(1)
    harness.clear()
    return harness


def observe(harness: StepHarness, ref: str = "o", **more: Any) -> None:
    harness.say(Step(NEXT, [MOVE], ref=ref, **more))


def said(outputs: list[StepOutput]) -> list[tuple[Any, ...]]:
    short: list[tuple[Any, ...]] = []
    for output in outputs:
        match output:
            case StepDone():
                short.append(("done", output.step, output.committed_step))
            case StepFailed():
                short.append(("failed", output.step, output.committed_step, output.error.code))
            case SafeAction():
                where = "in flight" if output.in_flight else "over"
                short.append(("safe", output.step, output.reason.value, where))
            case _:
                short.append((type(output).__name__,))
    return short


def said_of(outputs: list[StepOutput]) -> list[tuple[tuple[Any, ...], str | None]]:
    """The same with what each is of."""
    return [
        (short, getattr(output, "ref", None))
        for output, short in zip(outputs, said(outputs), strict=True)
    ]


def given(output: StepOutput) -> list[list[float]]:
    """The actions of a safe answer."""
    assert isinstance(output, SafeAction)
    (piece,) = output.outputs["actions"]
    values: list[list[float]] = array_of(piece).tolist()
    return values


# Deadlines


def test_the_first_answer_may_take_as_long_as_it_likes() -> None:
    harness = robot()
    harness.step(1)
    harness.later(60_000)
    assert harness.take() == []
    assert "stale_ms" not in harness.run().parameters
    harness.produce(payload=actions())
    harness.end(1)
    assert said(harness.take()) == [("done", 1, 1)]


def test_what_is_late_is_answered_safely_and_its_result_is_dropped_and_told() -> None:
    harness = driving()
    observe(harness)
    harness.later(99)
    assert harness.take() == []
    harness.later(1)
    (answer,) = harness.take()
    assert said([answer]) == [("safe", 2, "late", "in flight")]
    assert given(answer) == [[4.0, 5.0]] * 3
    assert [(it.reason, it.safe, it.late) for it in harness.not_fresh] == [("late", True, True)]
    harness.produce(payload=actions(CHUNK + 10))
    harness.end(2)
    # It was committed, and its output is nobody's answer; asked again it is the same.
    assert said(harness.take()) == [("failed", 2, 2, "step_late")]
    assert [turn.status for turn in harness.measured] == ["late"]
    harness.step(2)
    assert said(harness.take()) == [("failed", 2, 2, "step_late")]
    harness.step(3)
    harness.produce(payload=actions())
    harness.end(3)
    assert said(harness.take()) == [("done", 3, 3)]


def test_the_deadline_travels_with_the_step() -> None:
    harness = driving()
    observe(harness, since_ms=harness.now_ms - 30)
    assert harness.run().parameters == {"deadline_ms": 70.0, "stale_ms": 70.0}


def test_what_waits_for_a_late_step_is_answered_in_time_as_well_and_never_computed() -> None:
    harness = driving()
    observe(harness, "a")
    harness.later(100)
    harness.take()
    observe(harness, "b")
    harness.later(50)
    observe(harness, "c")
    assert said(harness.take()) == [("safe", 0, "superseded", "over")]
    harness.later(99)
    assert harness.take() == []
    harness.later(1)
    assert said(harness.take()) == [("safe", 0, "late", "over")]
    harness.end(2)
    assert said(harness.take()) == [("failed", 2, 2, "step_late")]
    assert len(harness.sent(Run)) == 1


def test_the_newest_begins_with_what_is_left_of_its_time() -> None:
    harness = driving()
    observe(harness, "a")
    harness.later(100)
    observe(harness, "b")
    harness.later(40)
    # The worker says that it has not begun the first, so that one never was.
    harness.end(1, status=TurnStatus.FAILED, error=DeadlineMissed("too late").info())
    run = harness.run()
    assert (run.step, run.parameters["stale_ms"]) == (2, 60.0)
    harness.produce(payload=actions())
    harness.end(2)
    assert said(harness.take()) == [
        ("safe", 2, "late", "in flight"),
        ("failed", 2, 1, "deadline_missed"),
        ("done", 2, 2),
    ]


def test_an_observation_that_comes_too_late_is_answered_and_not_computed() -> None:
    harness = driving()
    observe(harness, since_ms=harness.now_ms - 100)
    assert said(harness.take()) == [("safe", 0, "late", "over")]
    assert harness.sent(Run) == []


def test_a_worker_that_gives_up_first_is_late_as_well() -> None:
    harness = driving()
    observe(harness)
    harness.end(1, status=TurnStatus.FAILED, error=DeadlineMissed("too late").info())
    assert said(harness.take()) == [("safe", 2, "late", "over")]


def test_without_a_safe_action_a_missed_deadline_is_an_error() -> None:
    harness = driving(safe_action=None)
    observe(harness)
    harness.later(100)
    assert said(harness.take()) == [("failed", 2, 1, "deadline_missed")]
    assert [(it.reason, it.safe) for it in harness.not_fresh] == [("late", False)]
    harness.end(2)
    assert said(harness.take()) == [("failed", 2, 2, "step_late")]


def test_only_what_is_done_in_time_keeps_a_session_from_being_idle() -> None:
    harness = driving()
    observe(harness)
    harness.later(100)
    assert harness.progressed == 0
    harness.end(2)
    harness.step(3)
    harness.produce(payload=actions())
    harness.end(3)
    assert harness.progressed == 1


# The safe action


def test_what_is_held_is_the_row_that_the_robot_is_at() -> None:
    harness = driving(rate_hz=20.0)
    harness.later(60)
    observe(harness, since_ms=harness.now_ms - 100)
    observe(harness, since_ms=harness.now_ms - 100)
    harness.later(1000)
    observe(harness, since_ms=harness.now_ms - 100)
    # Once it holds still it stays there.
    assert [given(output) for output in harness.take()] == [[[2.0, 3.0]] * 3] * 3


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("zero", [[0.0, 0.0]] * 3),
        ((7.0, 8.0), [[7.0, 8.0]] * 3),
        (((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        ({"actions": "zero"}, [[0.0, 0.0]] * 3),
    ],
)
def test_the_safe_action_has_the_form_of_the_last_answer(configured: Any, expected: Any) -> None:
    harness = driving(safe_action=configured)
    observe(harness, since_ms=harness.now_ms - 100)
    (answer,) = harness.take()
    assert isinstance(answer, SafeAction)
    (piece,) = answer.outputs["actions"]
    assert (piece.dtype, piece.shape, piece.attributes) == ("<f4", (3, 2), {"key": "actions"})
    assert given(answer) == expected


def test_each_array_of_an_answer_has_its_own() -> None:
    gripper, state = actions([1.0, 2.0, 3.0], "gripper"), actions([[9.0]], "state")
    harness = driving(
        actions(), gripper, state, safe_action={"actions": "hold", "gripper": (0.0,) * 3}
    )
    observe(harness, since_ms=harness.now_ms - 100)
    (answer,) = harness.take()
    assert isinstance(answer, SafeAction)
    found = {p.attributes["key"]: array_of(p).tolist() for p in answer.outputs["actions"]}
    assert found == {"actions": [[4.0, 5.0]] * 3, "gripper": [0.0] * 3}
    # A word for all holds those as well that have no rows.
    harness = driving(actions(), gripper, state)
    observe(harness, since_ms=harness.now_ms - 100)
    (answer,) = harness.take()
    assert isinstance(answer, SafeAction)
    found = {p.attributes["key"]: array_of(p).tolist() for p in answer.outputs["actions"]}
    assert found == {"actions": [[4.0, 5.0]] * 3, "gripper": [3.0] * 3, "state": [[9.0]]}


@pytest.mark.parametrize(
    ("dtype", "safe_action"),
    [
        ("<f4", (1.0, 2.0, 3.0)),
        # No motor is told another number than the one that was chosen.
        ("<f2", (1e6, 0.0)),
        ("<f4", (1e300, 0.0)),
        ("|u1", (300.0, 0.0)),
        ("|u1", (-1.0, 0.0)),
        ("<i4", (0.5, 0.0)),
        ("<i8", (1e300, 0.0)),
        ("|b1", (2.0, 0.0)),
    ],
)
def test_a_safe_action_that_does_not_fit_is_told_with_the_first_answer(
    dtype: str, safe_action: tuple[float, ...]
) -> None:
    harness = robot(safe_action=safe_action)
    harness.step(1)
    harness.produce(payload=actions(np.ones((3, 2)), dtype=dtype))
    harness.end(1)
    assert said(harness.take()) == [("failed", 1, 1, "safe_action_mismatch")]


@pytest.mark.parametrize("dtype", ["<f2", "<f8", "|u1", "<i8", "|b1"])
def test_a_safe_action_has_the_dtype_of_the_policy(dtype: str) -> None:
    chunk = actions(np.ones((3, 2)), dtype=dtype)
    harness = driving(chunk, safe_action=(1.0, 0.0))
    observe(harness, since_ms=harness.now_ms - 100)
    (answer,) = harness.take()
    assert isinstance(answer, SafeAction)
    (given,) = answer.outputs["actions"]
    assert given.dtype == chunk.dtype
    assert array_of(given).tolist() == [[1, 0]] * 3


def test_a_policy_that_raises_is_covered_and_what_the_client_did_wrong_is_not() -> None:
    harness = driving()
    observe(harness)
    harness.fail(1)
    observe(harness)
    refused = InvalidRequest("no such task", code="no_such_task").info()
    harness.end(1, status=TurnStatus.FAILED, error=refused)
    assert said(harness.take()) == [
        ("safe", 2, "failed", "over"),
        ("failed", 2, 1, "no_such_task"),
    ]


# Workers that die


def test_a_worker_that_dies_is_covered_while_there_is_none() -> None:
    harness = driving()
    observe(harness)
    harness.lose()
    observe(harness)
    harness.later(29_999)
    observe(harness)
    harness.later(1)
    observe(harness)
    assert said(harness.take()) == [
        ("safe", 2, "state_lost", "over"),
        ("StateLost",),
        ("safe", 0, "state_lost", "over"),
        ("safe", 0, "state_lost", "over"),
        ("failed", 0, 1, "session_state_lost"),
    ]


def test_with_the_next_worker_a_lost_state_is_an_error() -> None:
    harness = driving()
    harness.lose()
    harness.come_back()
    observe(harness)
    observe(harness)
    # It is told with a safe action once, in any case.
    assert said(harness.take()) == [
        ("StateLost",),
        ("safe", 0, "state_lost", "over"),
        ("failed", 0, 1, "session_state_lost"),
    ]
    harness.reset()
    harness.step(1)
    harness.produce(payload=actions())
    harness.end(1)
    assert said(harness.take()) == [("WasReset",), ("done", 1, 1)]


def test_what_is_stored_goes_on_when_a_worker_has_it() -> None:
    harness = driving()
    observe(harness, "a")
    harness.lose(restorable=True)
    observe(harness, "b")
    harness.later(100)
    observe(harness, "c")
    assert said(harness.take()) == [
        ("safe", 2, "worker_lost", "over"),
        ("safe", 2, "worker_lost", "in flight"),
        # It was not sent to anybody, and nobody will compute it.
        ("failed", 2, 1, "step_cancelled"),
    ]
    harness.restore(1)
    run = harness.run()
    assert (run.step, run.parameters["stale_ms"]) == (2, 100.0)
    harness.produce(payload=actions())
    harness.end(2)
    assert said(harness.take()) == [("done", 2, 2)]


# Emergency stop


def test_a_stop_answers_at_once_whatever_runs_and_holds_until_it_is_released() -> None:
    harness = driving()
    observe(harness, "a")
    observe(harness, "b")
    harness.say(EmergencyStop())
    assert said(harness.take()) == [
        ("EmergencyStopped",),
        ("safe", 2, "stopped", "in flight"),
        ("safe", 0, "stopped", "over"),
    ]
    assert len(harness.sent(Stop)) == 1
    assert harness.machine.facts() == {"committed_step": 1, "stopped": True}
    assert harness.machine.snapshot().stopped
    observe(harness, "c")
    # The policy had finished it before it was told.
    harness.produce(payload=actions())
    harness.end(2)
    observe(harness, "d")
    assert said(harness.take()) == [
        ("safe", 0, "stopped", "over"),
        ("failed", 2, 2, "step_late"),
        ("safe", 0, "stopped", "over"),
    ]
    harness.clear()
    harness.say(ReleaseStop(StoppedBy.OPERATOR))
    observe(harness)
    assert harness.run().step == 3
    assert said(harness.take()) == [("StopReleased",)]
    assert not harness.machine.snapshot().stopped


def test_who_is_held_still_is_not_idle() -> None:
    harness = driving()
    harness.say(EmergencyStop())
    observe(harness)
    assert harness.progressed == 1


def test_its_client_releases_its_own_stop_by_a_reset_and_not_the_operators() -> None:
    harness = driving()
    harness.say(EmergencyStop())
    harness.reset()
    assert harness.take() == [EmergencyStopped(StoppedBy.CLIENT), WasReset(0), StopReleased()]
    harness.say(EmergencyStop(StoppedBy.OPERATOR))
    harness.say(EmergencyStop())
    harness.reset()
    assert harness.take() == [EmergencyStopped(StoppedBy.OPERATOR), WasReset(0)]
    observe(harness)
    assert said(harness.take()) == [("safe", 0, "stopped", "over")]
    harness.say(ReleaseStop(StoppedBy.OPERATOR))
    assert harness.take() == [StopReleased()]


def test_a_client_releases_its_own_stop_without_a_reset() -> None:
    harness = driving()
    harness.say(EmergencyStop())
    harness.say(ReleaseStop())
    assert harness.take() == [EmergencyStopped(StoppedBy.CLIENT), StopReleased()]
    observe(harness)
    assert harness.run().step == 2
    harness.say(EmergencyStop(StoppedBy.OPERATOR))
    harness.clear()
    harness.say(ReleaseStop(ref="r"))
    (refused,) = harness.take()
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.ref) == ("emergency_stopped", "r")


def test_what_was_said_before_a_stop_does_not_release_it() -> None:
    harness = driving()
    harness.say(EmergencyStop())
    before_ms = harness.now_ms - 1
    harness.now_ms += 10
    # Again, which is told to nobody, and counts as much.
    harness.say(EmergencyStop())
    harness.clear()
    for said_ms in (before_ms, before_ms + 2):
        harness.say(ReleaseStop(ref="r", said_ms=said_ms))
        (refused,) = harness.take()
        assert isinstance(refused, Refused)
        assert (refused.error.code, refused.ref) == ("emergency_stopped", "r")
        harness.reset(said_ms=said_ms)
        assert harness.take() == [WasReset(0)]
        assert harness.machine.snapshot().stopped
    harness.reset(said_ms=harness.now_ms + 1)
    assert harness.take() == [WasReset(0), StopReleased()]


def test_without_a_safe_action_a_stop_is_an_error() -> None:
    harness = driving(safe_action=None)
    observe(harness)
    harness.say(EmergencyStop())
    observe(harness)
    assert said(harness.take()) == [
        ("EmergencyStopped",),
        ("failed", 2, 1, "emergency_stopped"),
        ("failed", 0, 1, "emergency_stopped"),
    ]


def test_a_session_may_begin_stopped_and_knows_what_is_safe_before_anything_was_fresh() -> None:
    harness = robot(stopped=frozenset({"pipeline"}), safe_action=(1.0, 2.0))
    observe(harness)
    (answer,) = harness.take()
    assert given(answer) == [[1.0, 2.0]]
    # There is nothing to hold yet.
    harness = robot(stopped=frozenset({"pipeline"}))
    observe(harness)
    assert said(harness.take()) == [("failed", 0, 0, "emergency_stopped")]


def test_a_loop_stands_still_while_anything_holds_it() -> None:
    harness = driving()
    holds = [StoppedBy.ROBOTS, StoppedBy.CLIENT, StoppedBy.PIPELINE, StoppedBy.OPERATOR]
    for hold in holds:
        harness.say(EmergencyStop(hold))
    assert harness.take() == [EmergencyStopped(StoppedBy.OPERATOR)]
    for hold in (StoppedBy.PIPELINE, StoppedBy.OPERATOR):
        harness.say(ReleaseStop(hold))
        observe(harness)
        assert said(harness.take()) == [("safe", 0, "stopped", "over")]
    harness.say(ReleaseStop())
    (refused,) = harness.take()
    assert isinstance(refused, Refused)
    harness.say(ReleaseStop(StoppedBy.ROBOTS))
    assert harness.take() == [StopReleased()]
    observe(harness)
    assert harness.run().step == 2


def test_a_client_s_stop_outlasts_the_release_of_its_pipeline() -> None:
    harness = driving()
    harness.say(EmergencyStop())
    harness.say(EmergencyStop(StoppedBy.PIPELINE))
    harness.say(ReleaseStop(StoppedBy.PIPELINE))
    assert harness.take() == [EmergencyStopped(StoppedBy.CLIENT)]
    assert harness.machine.snapshot().stopped
    harness.say(ReleaseStop())
    assert harness.take() == [StopReleased()]


# Resets


def reset(harness: StepHarness, since_ms: float | None = None, **parameters: Any) -> None:
    """A reset that is to have an answer in time; the worker has not said anything of it."""
    harness.say(Reset(parameters, ref="r", since_ms=since_ms or harness.now_ms))


def test_a_reset_is_answered_in_time_and_so_is_what_comes_behind_it() -> None:
    harness = driving()
    reset(harness)
    harness.later(40)
    observe(harness, "a")
    harness.later(20)
    observe(harness, "b")
    harness.later(40)
    superseded, late = ("safe", 0, "superseded", "over"), ("safe", 0, "late", "in flight")
    assert said_of(harness.take()) == [(superseded, "a"), (late, "r")]
    harness.later(60)
    assert said_of(harness.take()) == [(("safe", 0, "late", "over"), "b")]
    # What comes in time when it has been done is computed.
    observe(harness, "c")
    assert harness.sent(Run) == []
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("WasReset",)]
    assert harness.run().step == 1
    harness.produce(payload=actions())
    harness.end(1)
    assert said(harness.take()) == [("done", 1, 1)]


def test_a_reset_that_is_done_in_time_is_not_answered_twice() -> None:
    harness = driving()
    reset(harness)
    harness.later(99)
    harness.answer(harness.last_signal().command)
    harness.later(1_000)
    assert said(harness.take()) == [("WasReset",)]


def test_a_reset_of_whom_nobody_expects_an_answer_in_time_may_take_as_long_as_it_likes() -> None:
    harness = driving()
    harness.say(Reset(ref="r"))
    harness.later(10_000)
    harness.say(EmergencyStop())
    assert said(harness.take()) == [("EmergencyStopped",)]


def test_without_a_safe_action_a_reset_that_is_late_is_refused_and_goes_on() -> None:
    harness = driving(safe_action=None)
    reset(harness)
    harness.later(100)
    (refused,) = harness.take()
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.ref) == ("deadline_missed", "r")
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("WasReset",)]


def test_another_reset_is_the_one_that_is_under_way_once_that_was_answered() -> None:
    harness = driving()
    reset(harness)
    reset(harness)
    (refused,) = harness.take()
    assert isinstance(refused, Refused)
    assert refused.error.code == "reset_in_progress"
    harness.later(100)
    harness.take()
    reset(harness, seed=5)
    (refused,) = harness.take()
    assert isinstance(refused, Refused)
    assert refused.error.code == "reset_in_progress"
    reset(harness)
    assert len(harness.sent(Signal)) == 1
    harness.later(99)
    assert harness.take() == []
    harness.later(1)
    assert said(harness.take()) == [("safe", 0, "late", "in flight")]
    reset(harness)
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("WasReset",)]


def test_a_reset_without_a_worker_is_answered_in_time_and_its_end_is_told() -> None:
    harness = robot(restore_ms=1_000)
    harness.step(1)
    harness.produce(payload=actions())
    harness.end(1)
    harness.lose()
    harness.take()
    reset(harness)
    observe(harness)
    harness.later(100)
    assert said(harness.take()) == [
        ("safe", 0, "worker_lost", "in flight"),
        ("safe", 0, "worker_lost", "over"),
    ]
    harness.later(850)
    observe(harness)
    harness.later(50)
    (refused, *rest) = harness.take()
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.ref) == ("engine_lost", "r")
    # What waited for it hears of the state that is lost.
    assert said(rest) == [("safe", 0, "state_lost", "over")]


def test_a_stop_answers_a_reset_and_all_behind_it_at_once_and_is_not_released_by_it() -> None:
    harness = driving()
    reset(harness)
    observe(harness)
    harness.say(EmergencyStop())
    assert said(harness.take()) == [
        ("EmergencyStopped",),
        ("safe", 0, "stopped", "in flight"),
        ("safe", 0, "stopped", "over"),
    ]
    harness.answer(harness.last_signal().command)
    observe(harness)
    assert said(harness.take()) == [("WasReset",), ("safe", 0, "stopped", "over")]
    # One that comes after the stop releases it, also where another is under way.
    for both in (False, True):
        if both:
            reset(harness)
            harness.say(EmergencyStop())
        reset(harness)
        harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [
        ("WasReset",),
        ("StopReleased",),
        ("EmergencyStopped",),
        ("safe", 0, "stopped", "in flight"),
        ("WasReset",),
        ("StopReleased",),
    ]


def test_a_stop_that_holds_says_why_a_reset_is_late() -> None:
    harness = driving()
    harness.say(EmergencyStop(StoppedBy.OPERATOR))
    reset(harness)
    harness.later(100)
    assert said(harness.take()) == [("EmergencyStopped",), ("safe", 0, "stopped", "in flight")]


def test_no_reset_that_a_client_says_before_its_stop_releases_it() -> None:
    harness = driving()
    harness.say(Reset(ref="r"))
    harness.say(EmergencyStop())
    harness.answer(harness.last_signal().command)
    assert said(harness.take()) == [("EmergencyStopped",), ("WasReset",)]
    assert harness.machine.snapshot().stopped


# Steps that wait


def test_a_step_without_a_number_follows_whatever_is_in_flight() -> None:
    harness = StepHarness()
    observe(harness, "a")
    observe(harness, "b")
    observe(harness, "c")
    assert said(harness.take()) == [("failed", 0, 0, "superseded")]
    harness.end(1)
    assert harness.run().step == 2
    harness.end(2)
    assert said(harness.take()) == [("done", 1, 1), ("done", 2, 2)]


@pytest.mark.parametrize("ends", ["reset", "give_up", "end"])
def test_what_waits_is_answered_when_it_cannot_come_to_it(ends: str) -> None:
    harness = StepHarness()
    observe(harness, "a")
    observe(harness, "b")
    if ends == "reset":
        harness.say(Reset(ref="r"))
    elif ends == "give_up":
        harness.machine.give_up("stalled", harness.now_ms)
    else:
        harness.machine.end(CloseReason.CLIENT, None, harness.now_ms)
    first = harness.take()[0]
    assert isinstance(first, StepFailed)
    assert (first.ref, first.error.code) == ("b", "step_cancelled")


def test_what_waits_and_is_refused_then_is_told_why() -> None:
    harness = StepHarness().after(1)
    observe(harness, "a")
    observe(harness, "b")
    harness.lose()
    outputs = harness.take()
    assert [code for *_, code in said(outputs)[:1]] == ["engine_lost"]
    assert ("failed", 0, 1, "session_state_lost") in said(outputs)


def test_a_deadline_orders_the_worker_as_its_client_says() -> None:
    harness = driving()
    harness.say(Step(2, [MOVE], {"deadline_ms": 5.0}))
    assert harness.run().parameters == {"deadline_ms": 5.0, "stale_ms": 100.0}


def test_a_failure_that_is_nobodys_is_not_told_twice() -> None:
    harness = driving()
    observe(harness)
    harness.later(100)
    harness.fail(1)
    error = EngineFailed("on purpose").info()
    outputs = harness.take()
    assert said(outputs) == [("safe", 2, "late", "in flight"), ("failed", 2, 1, error.code)]


def test_each_session_has_its_own_control() -> None:
    pipeline = robot().pipeline
    other = replace(pipeline, control=replace(pipeline.control, deadline_ms=5.0))
    harness = StepHarness(other)
    harness.step(1)
    harness.produce(payload=actions())
    harness.end(1)
    observe(harness)
    assert harness.machine.deadline() == harness.now_ms + 5.0
