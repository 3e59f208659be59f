"""The control loop of a robot, tick by tick."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon_client import Action, ControlOptions, ServerFailed, Source
from antiphon_client.arrays import from_payloads, to_payloads
from antiphon_client.control import MAX_OBSERVATION_BYTES, ControlMachine, Pace
from antiphon_client.stream import StreamMachine, Token
from protocol.native import MAX_FRAME_BYTES

PERIOD_MS = 100.0
SAFE = -1.0
HORIZON = 5


class Robot:
    """A loop on virtual time, and a policy whose action for a tick is that tick's number."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "safe_action": [SAFE],
            "rate_hz": 10,
            "deadline_ms": 50,
            "max_age_ms": 10_000,
        }
        self.machine = ControlMachine(ControlOptions(**{**defaults, **options}))
        self.now_ms = 0.0
        self.tick = 0
        self.asked: dict[str, Any] | None = None
        """The step that is in flight."""
        self.observed = 0
        """The tick of its observation."""
        self.sequence = 0
        """The last output's number."""
        self.attach()

    def attach(self, **snapshot: Any) -> None:
        stands = {"committed_step": 0, "lost": False, "in_flight": None, **snapshot}
        self.machine.attached({"snapshot": stands, "sequence": self.sequence})

    def come_back(self, *, missed: int, **snapshot: Any) -> None:
        """There is another connection, and so many outputs are told again behind `attached`."""
        self.sequence += missed
        self.attach(**snapshot)
        self.sequence -= missed

    def begin(self) -> None:
        """A tick begins, with an observation that says which."""
        self.tick += 1
        self.now_ms = self.tick * PERIOD_MS
        self.machine.begin({"tick": np.array([self.tick])}, self.now_ms)
        self.ask()

    def ask(self) -> None:
        step = self.machine.ask()
        if step is not None:
            assert self.asked is None
            self.asked = step
            self.observed = int(observation(step)["tick"][0])

    def answer(self, horizon: int = HORIZON, **fields: Any) -> None:
        """The policy answers what it was asked."""
        step = self.done()
        chunk = np.arange(self.observed, self.observed + horizon, dtype=np.float32)[:, np.newaxis]
        outputs = {"actions": received(to_payloads("actions", {"actions": chunk}))}
        self.tell("step_done", step=step, committed_step=step, outputs=outputs, **fields)

    def give_safely(self, reason: str, step: int, in_flight: bool = False) -> None:
        """The gateway gives its safe action."""
        outputs = {"actions": received(to_payloads("actions", {"actions": np.array([[9.0]])}))}
        self.tell(
            "safe_action",
            step=step,
            committed_step=self.machine.steps.committed,
            reason=reason,
            outputs=outputs,
            in_flight=in_flight,
        )

    def fail(self, code: str, committed_step: int) -> None:
        """The gateway says that the step has no answer."""
        error = {"code": code, "kind": "server", "message": "no"}
        self.tell("step_failed", step=self.done(), committed_step=committed_step, error=error)

    def done(self) -> int:
        assert self.asked is not None
        step: int = self.asked["step"]
        self.asked = None
        return step

    def tell(self, type: str, **fields: Any) -> None:
        self.sequence += 1
        self.machine.told(type, self.sequence, fields, self.now_ms)
        self.ask()

    def act(self) -> Action:
        """The action of a tick at whose deadline nothing more has come."""
        if not self.machine.decided(self.now_ms):
            self.now_ms = self.machine.deadline_ms
        return self.machine.end(self.now_ms)

    def turn(self) -> Action:
        """A whole tick."""
        self.begin()
        return self.act()


def received(payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Payloads as the gateway sends them, with all their members."""
    return [{"dtype": "", "shape": [], "attributes": {}, **payload} for payload in payloads]


def observation(step: dict[str, Any]) -> dict[str, Any]:
    return from_payloads(received(step["inputs"]))


def is_tick(action: Action) -> bool:
    """Whether this is what the policy wants in that very tick."""
    return action.fresh and action.reason is None and action.values.tolist() == [action.tick]


def safe_for(action: Action, reason: str) -> bool:
    return (action.source, action.reason, action.values.tolist()) == (
        Source.WATCHDOG,
        reason,
        [SAFE],
    )


def test_an_answer_within_the_deadline_is_this_ticks_action() -> None:
    robot = Robot()
    robot.begin()
    assert not robot.machine.decided(robot.now_ms)
    robot.now_ms += 30
    robot.answer()
    assert robot.machine.decided(robot.now_ms)
    action = robot.act()
    assert is_tick(action)
    assert action.age_ms == 30


def test_what_comes_late_is_joined_on_where_the_robot_is() -> None:
    robot = Robot(max_age_ms=100_000)
    assert safe_for(robot.turn(), "not_started")
    assert safe_for(robot.turn(), "not_started")
    robot.begin()
    robot.answer()
    assert robot.observed == 3, "the newest observation is asked about at once"
    assert [is_tick(action) for action in (robot.act(), robot.turn(), robot.turn())] == [True] * 3
    assert safe_for(robot.turn(), "late")
    robot.answer()
    assert is_tick(robot.turn())


def test_a_chunk_that_is_over_before_it_comes_is_not_played() -> None:
    robot = Robot()
    for _ in range(HORIZON + 1):
        robot.turn()
    robot.answer()
    assert robot.machine.counts.stale == 1
    assert safe_for(robot.act(), "late")


def test_the_newest_observation_is_asked_about_and_the_others_are_counted() -> None:
    robot = Robot()
    for _ in range(4):
        robot.turn()
    assert robot.observed == 1
    robot.answer()
    assert robot.observed == 4
    counts = robot.machine.counts
    assert (counts.ticks, counts.sent, counts.superseded, counts.answered) == (4, 2, 2, 1)


def test_actions_of_an_old_observation_are_not_taken() -> None:
    robot = Robot(max_age_ms=250)
    robot.begin()
    robot.answer()
    assert [is_tick(action) for action in (robot.act(), robot.turn(), robot.turn())] == [True] * 3
    assert safe_for(robot.turn(), "late")


def test_the_gateways_safe_action_is_taken_where_the_policy_gave_none() -> None:
    robot = Robot()
    robot.begin()
    robot.give_safely("failed", step=robot.done())
    action = robot.act()
    assert (action.source, action.reason, action.values.tolist()) == (Source.GATEWAY, "failed", [9])
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())
    robot.begin()
    robot.give_safely("failed", step=robot.done())
    assert is_tick(robot.act()), "a plan that goes on is better"


def test_a_step_that_goes_on_behind_its_safe_action_is_waited_for() -> None:
    robot = Robot()
    robot.begin()
    robot.give_safely("late", step=1, in_flight=True)
    assert robot.act().source is Source.GATEWAY
    assert safe_for(robot.turn(), "not_started")
    assert robot.machine.steps.in_flight == 1
    robot.fail("step_late", committed_step=1)
    assert robot.machine.error is None
    assert robot.asked is not None
    assert (robot.asked["step"], robot.observed) == (2, 2)
    robot.answer()
    assert is_tick(robot.act())


def test_a_stop_outranks_everything_until_a_release() -> None:
    robot = Robot()
    robot.begin()
    robot.answer()
    robot.machine.stop()
    assert safe_for(robot.act(), "stopped")
    robot.begin()
    assert robot.asked is not None, "who asks is there"
    robot.answer()
    assert safe_for(robot.act(), "stopped")
    robot.machine.begin_reset()
    assert safe_for(robot.turn(), "stopped")
    robot.tell("was_reset", committed_step=0)
    robot.begin()
    assert not robot.machine.decided(robot.now_ms)
    robot.tell("stop_released")
    robot.answer()
    assert is_tick(robot.act())


def test_an_answer_from_before_the_stop_that_is_told_again_does_not_end_it() -> None:
    robot = Robot()
    robot.begin()
    robot.act()
    robot.machine.connected = False
    robot.turn()
    robot.come_back(missed=2, stopped=True)
    assert safe_for(robot.turn(), "stopped")
    robot.answer()
    assert robot.machine.stopped
    assert safe_for(robot.turn(), "stopped")
    robot.tell("emergency_stopped", by="operator")
    assert safe_for(robot.turn(), "stopped")
    robot.tell("stop_released")
    assert not robot.machine.stopped


def test_a_release_that_is_told_again_does_not_end_the_stop_behind_it() -> None:
    robot = Robot()
    robot.machine.connected = False
    robot.come_back(missed=4, stopped=True)
    robot.tell("emergency_stopped", by="client")
    robot.tell("was_reset", committed_step=0)
    assert safe_for(robot.turn(), "stopped")
    robot.tell("stop_released")
    assert safe_for(robot.turn(), "stopped")
    robot.tell("emergency_stopped", by="operator")
    assert safe_for(robot.turn(), "stopped")
    robot.tell("stop_released")
    assert not robot.machine.stopped


def test_a_stop_and_its_release_that_are_told_again_leave_nothing_of_before() -> None:
    robot = Robot()
    robot.begin()
    robot.machine.connected = False
    robot.come_back(missed=3, stopped=False)
    robot.answer()
    robot.tell("emergency_stopped", by="operator")
    assert safe_for(robot.act(), "stopped")
    robot.tell("stop_released")
    assert not robot.machine.stopped
    assert not robot.turn().fresh


def test_a_refusal_that_is_known_after_the_release_does_not_hold_for_good() -> None:
    robot = Robot()
    robot.begin()
    robot.done()
    robot.tell("stop_released")
    robot.machine.refused(ServerFailed("no", code="emergency_stopped"))
    assert safe_for(robot.act(), "stopped")
    robot.begin()
    robot.answer()
    assert not robot.machine.stopped
    assert is_tick(robot.act())


def test_an_operators_stop_outlives_a_reset() -> None:
    robot = Robot()
    robot.begin()
    robot.answer()
    robot.tell("emergency_stopped", by="operator")
    assert safe_for(robot.act(), "stopped")
    robot.machine.begin_reset()
    robot.tell("was_reset", committed_step=0)
    assert safe_for(robot.turn(), "stopped")
    robot.done()
    robot.machine.refused(ServerFailed("no", code="emergency_stopped"))
    robot.tell("stop_released")
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())


def test_a_stop_that_two_have_asked_for_outlives_what_one_of_them_does() -> None:
    robot = Robot()
    robot.machine.stop()
    robot.tell("emergency_stopped", by="client")
    robot.machine.begin_reset()
    robot.tell("was_reset", committed_step=0)
    assert not robot.machine.stopped, "as far as is known"
    robot.begin()
    robot.give_safely("stopped", step=robot.done())
    assert robot.machine.stopped
    assert safe_for(robot.act(), "stopped")
    robot.tell("stop_released")
    assert not robot.machine.stopped


def test_a_release_from_before_a_stop_does_not_end_it() -> None:
    robot = Robot()
    robot.tell("emergency_stopped", by="operator")
    robot.machine.stop()
    robot.tell("stop_released")
    assert safe_for(robot.turn(), "stopped")
    robot.machine.stop_known()
    robot.tell("stop_released")
    assert not robot.machine.stopped


def test_who_comes_back_is_told_whether_it_is_stopped() -> None:
    robot = Robot()
    robot.attach(stopped=True)
    assert safe_for(robot.turn(), "stopped")
    robot.attach(stopped=False)
    assert not robot.machine.stopped


def test_an_answer_from_before_a_stop_is_not_played_after_the_release() -> None:
    robot = Robot()
    robot.turn()
    robot.tell("emergency_stopped", by="operator")
    robot.turn()
    robot.tell("stop_released")
    robot.answer()
    assert not robot.turn().fresh


def test_so_much_of_a_chunk_is_executed_before_the_next_is_asked_for() -> None:
    robot = Robot(execute=3)
    asked = []
    for _ in range(9):
        robot.begin()
        if robot.asked is not None:
            asked.append(robot.tick)
            robot.answer()
        assert is_tick(robot.act())
    assert asked == [1, 4, 7]


def test_synchronous_control_plays_whole_chunks() -> None:
    robot = Robot(execute=HORIZON)
    for tick in range(1, 2 * HORIZON + 1):
        robot.begin()
        assert (robot.asked is not None) == (tick % HORIZON == 1)
        if robot.asked is not None:
            robot.answer()
        assert is_tick(robot.act())


def test_the_policy_is_told_the_actions_that_it_cannot_change_any_more() -> None:
    robot = Robot(prefix_key="prefix", prefix_steps=3)
    robot.begin()
    assert robot.asked is not None
    assert observation(robot.asked)["prefix"].tolist() == [[0], [0], [0]]
    assert observation(robot.asked)["prefix_length"] == 0
    robot.act()
    robot.turn()
    robot.begin()
    robot.answer()  # Two ticks late: so will the next one be.
    assert robot.asked is not None
    told = observation(robot.asked)
    assert told["prefix"].tolist() == [[3], [4], [0]]
    assert told["prefix"].dtype == np.float32
    assert type(told["prefix_length"]) is int
    assert told["prefix_length"] == 2
    assert robot.asked["parameters"]["deadline_ms"] == 3 * PERIOD_MS + 50


def test_no_more_actions_are_told_than_the_policy_takes() -> None:
    robot = Robot(prefix_key="prefix", prefix_steps=2)
    for _ in range(4):
        robot.turn()
    robot.answer(horizon=10)  # Three ticks late.
    assert robot.asked is not None
    told = observation(robot.asked)
    assert (told["prefix"].tolist(), told["prefix_length"]) == ([[4], [5]], 2)


def test_with_a_prefix_as_many_arrays_as_there_may_be_fit_in_a_step() -> None:
    robot = Robot(prefix_key="prefix", prefix_steps=2, safe_action=lambda last: [SAFE, SAFE])
    robot.machine.begin({f"array {number}": np.zeros(1) for number in range(100)}, robot.now_ms)
    step = robot.machine.ask()
    assert step is not None
    assert len(step["inputs"]) == 64
    told = observation(step)
    assert len(told) == 102
    assert told["prefix"].shape == (2, 2)


def test_a_step_that_failed_is_taken_again_with_what_is_sensed_then() -> None:
    robot = Robot()
    robot.begin()
    robot.fail("engine_failed", committed_step=0)
    action = robot.act()
    assert safe_for(action, "engine_failed")
    assert isinstance(robot.machine.error, ServerFailed)
    robot.begin()
    assert robot.asked is not None
    assert (robot.asked["step"], robot.observed) == (1, 2)
    robot.answer()
    assert is_tick(robot.act())
    assert robot.machine.error is None


def test_a_refused_step_is_taken_again() -> None:
    robot = Robot()
    robot.begin()
    robot.done()
    robot.machine.refused(ServerFailed("no", code="draining"))
    assert safe_for(robot.act(), "draining")
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())


def test_without_its_state_nothing_is_asked_until_a_reset() -> None:
    robot = Robot()
    robot.begin()
    robot.answer()
    robot.act()
    robot.tell("state_lost", committed_step=1, restorable_step=None, reason=None)
    for _ in range(HORIZON):
        robot.turn()
    assert safe_for(robot.turn(), "session_state_lost")
    assert robot.asked is None
    robot.machine.begin_reset()
    robot.turn()
    assert robot.asked is None, "the reset is not over"
    robot.tell("was_reset", committed_step=0)
    robot.begin()
    assert robot.asked is not None
    assert robot.asked["step"] == 1


def test_a_plan_outlives_the_connection_and_the_answer_comes_with_the_next() -> None:
    robot = Robot()
    robot.begin()
    robot.answer()
    robot.act()
    robot.begin()
    assert robot.asked is not None
    robot.machine.connected = False
    for _ in range(HORIZON - 1):
        assert is_tick(robot.act())
        robot.begin()
    assert robot.machine.decided(robot.now_ms), "nobody waits for what cannot come"
    assert safe_for(robot.act(), "disconnected")
    robot.attach(committed_step=2)
    robot.answer(horizon=2 * HORIZON)
    assert robot.machine.steps.committed == 2
    assert is_tick(robot.turn())


def test_an_answer_that_is_gone_is_not_waited_for() -> None:
    robot = Robot()
    robot.turn()
    robot.done()
    robot.machine.connected = False
    robot.turn()
    robot.attach(committed_step=1)
    robot.machine.outputs_lost()
    robot.begin()
    assert robot.asked is not None
    assert robot.asked["step"] == 2


def test_a_step_in_flight_is_waited_for_although_outputs_are_gone() -> None:
    robot = Robot()
    robot.turn()
    robot.attach(in_flight=1)
    robot.machine.outputs_lost()
    robot.turn()
    robot.answer()
    assert robot.machine.steps.committed == 1


def test_a_session_that_is_over_is_the_reason_of_all_that_follows() -> None:
    robot = Robot()
    robot.begin()
    robot.machine.end_session(ServerFailed("gone", code="session_expired"))
    assert safe_for(robot.act(), "session_expired")
    assert robot.machine.counts.safe == {"session_expired": 1}


def test_a_safe_action_may_be_made_of_the_last_one() -> None:
    def hold(last: npt.NDArray[Any] | None) -> npt.ArrayLike:
        return [0.0] if last is None else last

    machine = ControlMachine(
        ControlOptions(safe_action=hold, rate_hz=10, deadline_ms=50, max_age_ms=200)
    )
    robot = Robot()
    robot.machine = machine
    assert robot.turn().values.tolist() == [0.0]
    robot.attach()
    robot.begin()
    robot.answer(horizon=1)
    assert robot.act().values.tolist() == [2.0]
    action = robot.turn()
    assert (action.source, action.values.tolist()) == (Source.WATCHDOG, [2.0])


def test_nobody_changes_an_action_that_is_still_to_come() -> None:
    safe = np.array([SAFE])
    robot = Robot(safe_action=safe)
    safe[:] = 9
    robot.begin()
    robot.answer()
    first = robot.act()
    robot.machine.stop()
    second = robot.turn()
    for action in (first, second):
        with pytest.raises(ValueError, match="read-only"):
            action.values[:] = 9
    second.values.setflags(write=True)
    second.values[:] = 9
    assert safe_for(robot.turn(), "stopped")


def test_a_safe_action_that_its_maker_goes_on_to_change_is_a_copy() -> None:
    held = np.array([SAFE])
    robot = Robot(safe_action=lambda last: held)
    action = robot.turn()
    held[:] = 9
    assert safe_for(action, "not_started")


@pytest.mark.parametrize(
    "value",
    [np.zeros(MAX_OBSERVATION_BYTES, np.uint8), "x" * MAX_OBSERVATION_BYTES],
    ids=["array", "text"],
)
def test_an_observation_too_long_for_a_frame_is_refused_and_the_loop_goes_on(value: Any) -> None:
    robot = Robot()
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())
    with pytest.raises(ValueError, match=f"at most {MAX_OBSERVATION_BYTES} "):
        robot.machine.begin({"image": value}, robot.now_ms + PERIOD_MS)
    assert robot.machine.counts.ticks == 1
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())


def test_the_longest_observation_fits_in_a_frame() -> None:
    robot = Robot()
    longest = np.zeros(MAX_OBSERVATION_BYTES - 128, np.uint8)
    robot.machine.begin({"image": longest}, robot.now_ms)
    step = robot.machine.ask()
    assert step is not None
    stream = StreamMachine(Token("sess_1", "secret"), lambda: "c-1")
    stream.receive(
        msgspec.msgpack.encode({
            "type": "attached", "secret": "next", "limits": {}, "sequence": 0, "cursor": "0"
        })
    )  # fmt: skip
    stream.update(step)
    frame = stream.take()
    assert frame is not None
    assert len(frame) > MAX_FRAME_BYTES - 64 * 1024
    assert len(frame) <= MAX_FRAME_BYTES


def test_a_session_that_comes_from_another_process_has_its_step_to_finish_first() -> None:
    robot = Robot()
    robot.attach(committed_step=4, in_flight=5)
    robot.begin()
    assert robot.asked is None, "its answer would be of what the other has sensed"
    chunk = np.full((HORIZON, 1), 7.0, np.float32)
    outputs = {"actions": received(to_payloads("actions", {"actions": chunk}))}
    robot.tell("step_done", step=5, committed_step=5, outputs=outputs)
    assert robot.asked is not None
    assert (robot.asked["step"], robot.observed) == (6, 1)
    robot.answer()
    assert is_tick(robot.act())


def test_what_is_told_again_does_not_bring_back_where_the_loop_stood() -> None:
    robot = Robot()
    robot.come_back(missed=3, committed_step=4)
    robot.tell("step_failed", step=2, committed_step=1, error={"code": "c", "kind": "server"})
    robot.tell("state_lost", committed_step=1, restorable_step=None, reason=None)
    robot.begin()
    assert robot.asked is not None
    assert robot.asked["step"] == 5


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"actions": []},
        {"actions": received(to_payloads("actions", {"other": np.zeros((2, 1))}))},
        {"actions": received(to_payloads("actions", {"actions": "left"}))},
        {"actions": received(to_payloads("actions", {"actions": np.array(1.0)}))},
        {"actions": received(to_payloads("actions", {"actions": np.zeros((0, 1))}))},
        {"actions": received(to_payloads("actions", {"actions": np.zeros(1)}))},
        {"actions": received(to_payloads("actions", {"actions": np.zeros((5, 1, 1))}))},
        {"actions": received(to_payloads("actions", {"actions": np.zeros((5, 2))}))},
        {"actions": received(to_payloads("actions", {"actions": np.array([[1.0], [np.nan]])}))},
        {"actions": received(to_payloads("actions", {"actions": np.array([[np.inf]])}))},
        {"actions": received(to_payloads("actions", {"actions": np.array([[True]])}))},
    ],
)
def test_an_answer_that_no_robot_can_do_is_a_failure_and_the_loop_goes_on(
    outputs: dict[str, Any],
) -> None:
    robot = Robot()
    robot.begin()
    step = robot.done()
    robot.tell("step_done", step=step, committed_step=step, outputs=outputs)
    assert safe_for(robot.act(), "protocol_error")
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())
    robot.begin()
    step = robot.done()
    robot.tell(
        "safe_action", step=step, committed_step=1, reason="late", outputs=outputs, in_flight=False
    )
    assert is_tick(robot.act()), "a plan that goes on is better"


def test_a_safe_action_of_the_gateway_that_is_none_of_this_robot_is_not_done() -> None:
    robot = Robot()
    robot.begin()
    outputs = {"actions": received(to_payloads("actions", {"actions": np.zeros((5, 7))}))}
    place = {"step": robot.done(), "committed_step": 1, "in_flight": False}
    robot.tell("safe_action", **place, reason="late", outputs=outputs)
    assert safe_for(robot.act(), "protocol_error")


@pytest.mark.parametrize("jump_ms", [3_600_000.0, -3_600_000.0])
def test_a_clock_that_jumps_leaves_no_tick_without_an_action(jump_ms: float) -> None:
    robot = Robot(max_age_ms=300)
    robot.begin()
    robot.answer()
    assert is_tick(robot.act())
    robot.tick += 1
    robot.now_ms += jump_ms
    robot.machine.begin({"tick": np.array([robot.tick])}, robot.now_ms)
    robot.ask()
    action = robot.act()
    # What was sensed before a sleep is old; going back makes nothing older than it is.
    assert action.fresh == (jump_ms < 0)
    assert robot.machine.deadline_ms == robot.now_ms + 50 - (0 if action.fresh else 50)


def test_an_observation_that_may_not_be_written_to_is_sent_as_any() -> None:
    robot = Robot()
    state = np.arange(6, dtype=np.float32)[::2]
    state.flags.writeable = False
    robot.machine.begin({"state": state}, robot.now_ms)
    step = robot.machine.ask()
    assert step is not None
    assert observation(step)["state"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("made", [[float("nan")], [], "hold", [[1.0]]])
def test_a_function_that_makes_no_safe_action_is_refused_at_once(made: Any) -> None:
    with pytest.raises(ValueError, match="safe_action"):
        Robot(safe_action=lambda last: made)


def test_ticks_are_a_period_apart_and_none_is_made_up_for() -> None:
    pace = Pace(100)
    assert [pace.wait_ms(now_ms) for now_ms in (7, 150, 199, 380, 500, 1000)] == [
        100, 57, 108, 27, 7, 100,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"rate_hz": "20"},
        {"rate_hz": True},
        {"deadline_ms": None},
        {"max_age_ms": [1]},
        {"execute": 1.5},
        {"execute": float("nan")},
        {"prefix_key": 5, "prefix_steps": 2},
        {"prefix_key": "", "prefix_steps": 2},
        {"prefix_key": "a\0b", "prefix_steps": 2},
        {"prefix_steps": 2.5, "prefix_key": "a"},
        {"rate_hz": 0},
        {"deadline_ms": 0},
        {"deadline_ms": 101},
        {"max_age_ms": 49},
        {"max_age_ms": float("inf")},
        {"max_age_ms": float("nan")},
        {"safe_action": None},
        {"safe_action": "hold"},
        {"safe_action": ["hold"]},
        {"safe_action": []},
        {"safe_action": 0.0},
        {"safe_action": [[0.0]]},
        {"safe_action": [[0.0], [0.0, 1.0]]},
        {"safe_action": [True]},
        {"safe_action": [0.0, float("nan")]},
        {"safe_action": [float("-inf")]},
        {"execute": 0},
        {"prefix_key": "prefix"},
        {"prefix_steps": 3},
        {"prefix_steps": 0, "prefix_key": "prefix"},
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    sensible = {"safe_action": [0.0], "rate_hz": 10, "deadline_ms": 50, "max_age_ms": 200}
    with pytest.raises(ValueError, match=next(iter(options))):
        ControlOptions(**{**sensible, **options})


@pytest.mark.parametrize("name", ["prefix", "prefix_length"])
def test_a_member_that_is_the_prefixs_is_refused(name: str) -> None:
    robot = Robot(prefix_key="prefix", prefix_steps=2)
    with pytest.raises(ValueError, match="prefix_key"):
        robot.machine.begin({name: 1}, 0.0)
    assert robot.machine.counts.ticks == 0
    robot.begin()


@given(st.lists(st.sampled_from(["answer", "answer", "fail", "drop", "attach", "gone", "wait"])))
def test_every_tick_has_an_action_and_the_policys_are_those_of_that_tick(
    happenings: list[str],
) -> None:
    robot = Robot(max_age_ms=700)
    committed = 0
    for happening in happenings:
        robot.begin()
        match happening:
            case "answer" if robot.asked is not None and robot.machine.connected:
                committed += 1
                robot.answer()
            case "fail" if robot.asked is not None and robot.machine.connected:
                robot.fail("engine_failed", committed)
            case "drop":
                robot.machine.connected = False
            case "attach":
                in_flight = None if robot.asked is None else robot.asked["step"]
                robot.attach(committed_step=committed, in_flight=in_flight)
            case "gone" if robot.asked is not None:
                committed = robot.done()
                robot.attach(committed_step=committed)
                robot.machine.outputs_lost()
        action = robot.act()
        assert is_tick(action) or (action.reason is not None and action.values.tolist() == [SAFE])
        assert action.tick == robot.tick
        if action.age_ms is not None:
            assert action.age_ms <= 700
