"""Steps on the worker's control side: committed once, answered once, or as if never begun."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest
from protocol.messages import (
    CHECKPOINT,
    RELEASE,
    RESET,
    REWIND,
    Acknowledge,
    Answer,
    Close,
    Configure,
    Feed,
    Open,
    Output,
    RaiseFloor,
    Report,
    Run,
    Signal,
    StageEvent,
    Stop,
    TurnEnded,
    TurnStatus,
    Update,
)
from sessions.steps.refusals import no_checkpoint
from tests.workers.test_control import DATA, FENCE, PIECE, Bench, applied, code, sequences
from workers.control_events import (
    AbandonTurn,
    Action,
    CancelTurn,
    CommitTurn,
    ControlLimits,
    Emitted,
    FeedTurn,
    FreeSession,
    GatewayDown,
    OutputRefused,
    RepeatTurn,
    SignalSession,
    StartTurn,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
    VoidTurn,
)


def nothing() -> None:
    """A commit: the control side hands it on and never calls it."""


def step(number: int, turn: int | None = None, **fields: Any) -> Run:
    """A run of step `number`, as a turn of the same number where none is said."""
    return Run(FENCE, turn or number, "default", step=number, **fields)


def finish(bench: Bench, turn: int, outcome: TurnOutcome = TurnOutcome.COMPLETED) -> list[Action]:
    """The engine's run ends, with something to commit."""
    return bench.tell(TurnFinished("s", turn, outcome, None, {}, nothing))


def commit(bench: Bench, number: int, turn: int | None = None) -> None:
    """Carry a step out to its end."""
    turn = turn or number
    bench.command(step(number, turn))
    bench.tell(Emitted("s", turn, PIECE))
    assert finish(bench, turn) == [CommitTurn("s", turn, nothing)]
    bench.tell(TurnCommitted("s", turn))


def ends(reports: list[Report]) -> list[tuple[int, TurnStatus, str | None, int | None]]:
    return [
        (r.turn, r.status, code(r), r.committed_step) for r in reports if isinstance(r, TurnEnded)
    ]


def after(steps: int, limits: ControlLimits | None = None) -> Bench:
    """A session whose last committed step is `steps`."""
    bench = Bench(limits or ControlLimits()).open()
    for number in range(1, steps + 1):
        commit(bench, number)
    bench.take()
    return bench


# One step


def test_a_step_is_committed_before_it_is_answered() -> None:
    bench = after(1)
    (started,) = bench.command(step(2))
    assert isinstance(started, StartTurn)
    assert started.step == 2
    assert finish(bench, 2) == [CommitTurn("s", 2, nothing)]
    assert bench.take() == []
    bench.tell(TurnCommitted("s", 2))
    assert ends(bench.take()) == [(2, TurnStatus.COMPLETED, None, 2)]


def test_a_step_without_anything_to_commit_counts_too() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    assert ends(bench.take()) == [(1, TurnStatus.COMPLETED, None, 1)]


def test_a_turn_that_is_no_step_leaves_the_counter_alone() -> None:
    bench = after(1)
    bench.command(Run(FENCE, 7, "aside"))
    assert finish(bench, 7) == [CommitTurn("s", 7, nothing)]
    bench.tell(TurnCommitted("s", 7))
    commit(bench, 2, turn=8)
    assert ends(bench.take()) == [
        (7, TurnStatus.COMPLETED, None, None),
        (8, TurnStatus.COMPLETED, None, 2),
    ]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [(TurnOutcome.FAILED, "engine_failed"), (TurnOutcome.CANCELLED, "engine_failed")],
)
def test_a_failed_step_leaves_the_counter_and_can_be_tried_again(
    outcome: TurnOutcome, expected: str
) -> None:
    bench = after(1)
    bench.command(step(2))
    bench.tell(TurnFinished("s", 2, outcome))
    assert ends(bench.take()) == [(2, TurnStatus.FAILED, expected, 1)]
    commit(bench, 2, turn=3)
    assert ends(bench.take()) == [(3, TurnStatus.COMPLETED, None, 2)]


@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_step_ahead_is_refused_with_the_committed_step(number: int) -> None:
    bench = after(0 if number == 1 else 1)
    assert bench.command(step(number + 1, inputs=[DATA])) == []
    assert ends(bench.take()) == [
        (number + 1, TurnStatus.FAILED, "step_out_of_order", 0 if number == 1 else 1)
    ]
    assert bench.discarded == 1


# A step that is cancelled while it finishes


@pytest.mark.parametrize("command", [RaiseFloor(FENCE, "default", 3), Stop(FENCE, 2)])
def test_a_step_that_finishes_after_its_cancellation_is_not_committed(command: Any) -> None:
    bench = after(1)
    bench.command(step(2))
    assert CancelTurn("s", 2) in bench.command(command)
    assert finish(bench, 2) == []
    assert ends(bench.take()) == [(2, TurnStatus.CANCELLED, None, 1)]


@pytest.mark.parametrize("command", [RaiseFloor(FENCE, "default", 3), Stop(FENCE, 2)])
def test_a_step_is_not_cancelled_between_its_end_and_its_commit(command: Any) -> None:
    bench = after(1)
    bench.command(step(2))
    finish(bench, 2)
    assert CancelTurn("s", 2) not in bench.command(command)
    bench.tell(OutputRefused("s", 2, CapacityExceeded("full").info()))
    bench.tell(TurnCommitted("s", 2))
    assert ends(bench.take()) == [(2, TurnStatus.COMPLETED, None, 2)]


def test_a_session_that_closes_in_between_waits_for_the_commit() -> None:
    bench = after(0)
    bench.command(step(1))
    finish(bench, 1)
    assert bench.command(Close(FENCE, "close", "client")) == []
    assert bench.tell(TurnCommitted("s", 1)) == [FreeSession("s")]
    assert ends(bench.take()) == [(1, TurnStatus.COMPLETED, None, 1)]


def test_an_abandoned_step_is_never_committed() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.command(Stop(FENCE, 1))
    assert bench.after(10_000) == [AbandonTurn("s", 1)]
    assert finish(bench, 1) == []
    assert ends(bench.take()) == [(1, TurnStatus.CANCELLED, None, 0)]
    assert [type(action) for action in bench.command(step(1, 2))] == [StartTurn]


def test_a_step_whose_output_cannot_be_sent_is_not_committed() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.tell(OutputRefused("s", 1, CapacityExceeded("full").info()))
    assert finish(bench, 1) == []
    assert ends(bench.take()) == [(1, TurnStatus.FAILED, "capacity_exceeded", 0)]


def test_a_step_whose_gateway_goes_is_not_committed() -> None:
    bench = after(1)
    bench.command(step(2))
    assert bench.tell(GatewayDown("g1")) == [CancelTurn("s", 2)]
    assert finish(bench, 2) == []


def test_stopping_a_turn_that_is_over_leaves_its_output_wanted() -> None:
    bench = after(1)
    assert bench.command(Stop(FENCE, 1)) == []
    assert bench.command(Stop(FENCE, 99)) == []
    assert bench.control.kept_bytes == 1
    assert bench.take() == []


# A step that is asked for again


def test_a_committed_step_is_answered_again_with_its_output() -> None:
    bench = after(2)
    actions = bench.command(step(2, turn=9, inputs=[DATA], readers={"a->b": "b"}))
    assert actions == [VoidTurn("s", 2), RepeatTurn("s", 9, {"a->b": "b"}, True)]
    output, ended = bench.take()
    assert output == Output("s", 9, 1, DATA)
    assert ends([ended]) == [(9, TurnStatus.COMPLETED, None, 2)]
    assert bench.discarded == 1
    assert bench.control.kept_bytes == 2
    bench.command(Acknowledge(FENCE, 9, 1))
    assert bench.control.kept_bytes == 1


def test_an_older_committed_step_is_answered_with_what_is_committed_now() -> None:
    bench = after(3)
    bench.command(step(1, turn=9))
    assert ends(bench.take()) == [(9, TurnStatus.COMPLETED, None, 3)]


def test_an_answer_can_be_repeated_any_number_of_times() -> None:
    bench = after(1)
    for turn in (5, 6, 7):
        bench.command(step(1, turn))
        assert sequences(bench.take()) == [1]


def test_output_of_a_committed_step_goes_when_its_floor_was_raised_in_between() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.tell(Emitted("s", 1, PIECE))
    finish(bench, 1)
    assert bench.command(RaiseFloor(FENCE, "default", 2)) == []
    assert bench.tell(TurnCommitted("s", 1)) == [VoidTurn("s", 1)]
    assert bench.control.kept_bytes == 0


@pytest.mark.parametrize("taken", [Acknowledge(FENCE, 1, 1), RaiseFloor(FENCE, "default", 2)])
def test_a_committed_step_whose_output_is_gone_is_an_error_that_says_so(taken: Any) -> None:
    bench = after(1)
    bench.command(taken)
    assert bench.command(step(1, turn=9)) == []
    assert ends(bench.take()) == [(9, TurnStatus.FAILED, "step_committed", 1)]


def test_a_committed_step_that_is_no_longer_remembered_is_an_error_that_says_so() -> None:
    bench = after(4, ControlLimits(remembered_turns=2))
    assert bench.command(step(1, turn=9)) == []
    assert ends(bench.take()) == [(9, TurnStatus.FAILED, "step_committed", 4)]


def test_a_step_that_comes_while_it_runs_is_answered_when_it_has_ended() -> None:
    bench = after(0)
    bench.command(step(1))
    assert bench.command(step(1, turn=2)) == []
    finish(bench, 1)
    bench.tell(TurnCommitted("s", 1))
    assert ends(bench.take()) == [
        (1, TurnStatus.COMPLETED, None, 1),
        (2, TurnStatus.COMPLETED, None, 1),
    ]


def test_a_step_that_comes_while_its_cancelled_run_stops_is_carried_out_after_it() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.command(Stop(FENCE, 1))
    assert bench.command(step(1, turn=2)) == []
    (started,) = finish(bench, 1)
    assert isinstance(started, StartTurn)
    assert started.turn == 2


def test_a_waiting_step_can_be_stopped() -> None:
    bench = after(0)
    bench.command(step(1))
    bench.command(step(2, inputs=[DATA]))
    bench.command(Stop(FENCE, 2))
    assert ends(bench.take()) == [(2, TurnStatus.CANCELLED, None, 0)]
    assert bench.discarded == 1
    assert bench.control.waiting == 1


# What waits for a running step


def test_a_running_step_gets_its_input_past_what_waits_for_its_end() -> None:
    bench = after(0)
    bench.command(step(1, last=False))
    bench.command(Signal(FENCE, "hint", "hint"))
    assert bench.command(Feed(FENCE, 1, DATA)) == [FeedTurn("s", 1, DATA, False)]
    assert bench.command(Feed(FENCE, 1, None, last=True)) == [FeedTurn("s", 1, None, True)]
    assert bench.take() == []


def test_signals_and_settings_wait_for_a_running_step_and_input_does_not() -> None:
    bench = after(0)
    bench.command(step(1))
    assert applied(bench.command(Update(FENCE, 1, DATA))) == [1]
    assert bench.command(Configure(FENCE, "set", {"a": 1})) == []
    assert bench.command(Signal(FENCE, "hint", "hint")) == []
    # Nothing is missing: it is the step that is waited for.
    assert bench.after(5_000) == []
    finish(bench, 1)
    actions = bench.tell(TurnCommitted("s", 1))
    assert [type(action).__name__ for action in actions] == ["ConfigureSession", "SignalSession"]
    assert not [report for report in bench.take() if isinstance(report, StageEvent)]


# Reset


def test_a_reset_begins_with_step_one_again() -> None:
    bench = after(2)
    bench.command(Signal(FENCE, "again", RESET, {"seed": 3}))
    assert bench.take() == [Answer("s", "again", None, {"done": RESET, "committed_step": 0})]
    # What was committed before is no answer any more.
    (started,) = bench.command(step(1, turn=9))
    assert isinstance(started, StartTurn)
    bench.command(Stop(FENCE, 9))
    finish(bench, 9)
    bench.command(step(2, turn=10))
    assert ends(bench.take())[-1] == (10, TurnStatus.FAILED, "step_out_of_order", 0)


def test_a_failed_reset_leaves_the_counter() -> None:
    bench = Bench(refusals={RESET: InvalidRequest("no such seed", field="seed")}).open()
    commit(bench, 1)
    bench.command(Signal(FENCE, "again", RESET))
    commit(bench, 2)
    _, _, answer, *_, ended = bench.take()
    assert code(answer) == "invalid_value"
    assert ends([ended]) == [(2, TurnStatus.COMPLETED, None, 2)]


def test_another_signal_is_no_reset() -> None:
    bench = after(1)
    bench.command(Signal(FENCE, "c", "hint"))
    assert bench.take() == [Answer("s", "c", None, {"done": "hint"})]
    commit(bench, 2)
    assert ends(bench.take()) == [(2, TurnStatus.COMPLETED, None, 2)]


def test_a_reset_waits_for_the_step_that_it_would_be_overwritten_by() -> None:
    bench = after(1)
    bench.command(step(2))
    assert bench.command(Signal(FENCE, "again", RESET)) == []
    finish(bench, 2)
    assert [type(a) for a in bench.tell(TurnCommitted("s", 2))] == [SignalSession]
    reports = bench.take()
    assert ends(reports) == [(2, TurnStatus.COMPLETED, None, 2)]
    assert reports[-1] == Answer("s", "again", None, {"done": RESET, "committed_step": 0})


# Checkpoints


def test_a_rewind_goes_on_from_the_step_that_was_kept() -> None:
    bench = after(3)
    bench.command(Signal(FENCE, "back", REWIND, {"step": 1}))
    assert bench.take() == [Answer("s", "back", None, {"done": REWIND, "committed_step": 1})]
    # The answer to a step that is kept stays one; those to later ones are none any more.
    bench.command(step(1, turn=8))
    assert ends(bench.take())[-1] == (8, TurnStatus.COMPLETED, None, 1)
    (started,) = bench.command(step(2, turn=9))
    assert isinstance(started, StartTurn)
    bench.command(Stop(FENCE, 9))
    finish(bench, 9)
    bench.command(step(3, turn=10))
    assert ends(bench.take())[-1] == (10, TurnStatus.FAILED, "step_out_of_order", 1)


def test_a_rewind_that_its_engine_refuses_leaves_the_counter() -> None:
    bench = Bench(refusals={REWIND: no_checkpoint(0, [])}).open()
    commit(bench, 1)
    bench.command(Signal(FENCE, "back", REWIND, {"step": 0}))
    commit(bench, 2)
    _, _, answer, *_, ended = bench.take()
    assert code(answer) == "no_checkpoint"
    assert ends([ended]) == [(2, TurnStatus.COMPLETED, None, 2)]


@pytest.mark.parametrize("arguments", [{}, {"step": "1"}, {"step": None}])
def test_a_rewind_names_its_step(arguments: dict[str, Any]) -> None:
    bench = after(1)
    assert bench.command(Signal(FENCE, "back", REWIND, arguments)) == []
    (answer,) = bench.take()
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert answer.error.field == "rewind.step"
    commit(bench, 2)


@pytest.mark.parametrize("name", [CHECKPOINT, REWIND, RELEASE])
def test_a_state_that_is_lost_is_neither_kept_nor_gone_back_from(name: str) -> None:
    bench = lost()
    assert bench.command(Signal(FENCE, "c", name, {"step": 1})) == []
    (answer,) = bench.take()
    assert code(answer) == "session_state_lost"


# State that is lost


def lost() -> Bench:
    """A session whose second step failed in its commit."""
    bench = after(1)
    bench.command(step(2))
    finish(bench, 2)
    bench.tell(TurnCommitted("s", 2, EngineFailed("no memory").info()))
    assert ends(bench.take()) == [(2, TurnStatus.FAILED, "session_state_lost", 1)]
    return bench


def test_after_a_failed_commit_nothing_works_on_the_state() -> None:
    bench = lost()
    assert bench.command(step(2, turn=3)) == []
    assert bench.command(step(1, turn=4)) == []
    assert bench.command(Run(FENCE, 5, "default")) == []
    assert bench.command(Signal(FENCE, "c", "hint")) == []
    assert bench.command(Configure(FENCE, "set", {})) == []
    assert [code(report) for report in bench.take()] == ["session_state_lost"] * 5


def test_a_reset_brings_lost_state_back_to_its_beginning() -> None:
    bench = lost()
    assert [type(a) for a in bench.command(Signal(FENCE, "again", RESET))] == [SignalSession]
    commit(bench, 1, turn=9)
    assert ends(bench.take()) == [(9, TurnStatus.COMPLETED, None, 1)]


def test_a_session_opened_anew_is_at_step_zero() -> None:
    bench = lost()
    bench.command(Open(FENCE, "anew"))
    bench.take()
    commit(bench, 1)
    assert ends(bench.take()) == [(1, TurnStatus.COMPLETED, None, 1)]


def test_a_commit_that_nobody_asked_for_is_a_fault() -> None:
    bench = after(0)
    bench.command(step(1))
    with pytest.raises(ValueError, match="turn 1"):
        bench.tell(TurnCommitted("s", 1))


# Any order of events, against a trivial model


@dataclass
class Model:
    """What a session of steps is: a counter, whether it is lost, and one step that runs."""

    committed: int = 0
    lost: bool = False
    running: tuple[int, int] | None = None
    """(step, turn), or None."""
    cancelled: bool = False
    waiting: list[tuple[str, int, int]] = field(default_factory=list)
    """What waits for its end: ("run", step, turn) or ("reset", 0, id)."""
    ended: list[tuple[int, TurnStatus, str | None, int]] = field(default_factory=list)
    resets: list[str | None] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    """Committed steps whose output is all kept."""

    def run(self, number: int, turn: int) -> None:
        if self.running or self.waiting:
            self.waiting.append(("run", number, turn))
        else:
            self._carry_out_run(number, turn)

    def reset(self, number: int) -> None:
        if self.running or self.waiting:
            self.waiting.append(("reset", 0, number))
        else:
            self._carry_out_reset()

    def stop(self, turn: int) -> None:
        if self.running and self.running[1] == turn:
            self.cancelled = True
        for item in list(self.waiting):
            if item[0] == "run" and item[2] == turn:
                self.waiting.remove(item)
                self.ended.append((turn, TurnStatus.CANCELLED, None, self.committed))

    def finish(self, outcome: TurnOutcome, commits: bool) -> None:
        assert self.running
        (number, turn), self.running = self.running, None
        if self.cancelled:
            self.ended.append((turn, TurnStatus.CANCELLED, None, self.committed))
        elif outcome is not TurnOutcome.COMPLETED:
            self.ended.append((turn, TurnStatus.FAILED, "engine_failed", self.committed))
        elif not commits:
            self.lost = True
            self.ended.append((turn, TurnStatus.FAILED, "session_state_lost", self.committed))
        else:
            self.committed = number
            self.kept.add(number)
            self.ended.append((turn, TurnStatus.COMPLETED, None, self.committed))
        while self.waiting and not self.running:
            kind, number, turn = self.waiting.pop(0)
            if kind == "run":
                self._carry_out_run(number, turn)
            else:
                self._carry_out_reset()

    def _carry_out_run(self, number: int, turn: int) -> None:
        failed: str | None = None
        if self.lost:
            failed = "session_state_lost"
        elif number == self.committed + 1:
            self.running, self.cancelled = (number, turn), False
            self.started.append(turn)
            return
        elif number > self.committed:
            failed = "step_out_of_order"
        elif number not in self.kept:
            failed = "step_committed"
        status = TurnStatus.FAILED if failed else TurnStatus.COMPLETED
        self.ended.append((turn, status, failed, self.committed))

    def _carry_out_reset(self) -> None:
        self.committed, self.lost = 0, False
        self.kept.clear()
        self.resets.append(None)


plans = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(-1, 2)),
        st.tuples(st.just("stop"), st.integers(0, 2)),
        st.tuples(st.just("finish"), st.sampled_from(TurnOutcome), st.booleans()),
        st.tuples(st.just("finish"), st.just(TurnOutcome.COMPLETED), st.just(True)),
        st.tuples(st.just("take"), st.integers(0, 2)),
        st.tuples(st.just("reset")),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(plans)
def test_steps_do_what_the_model_says_in_any_order(plan: list[tuple[Any, ...]]) -> None:
    bench, model = Bench().open(), Model()
    turn = reset = 0
    answers: dict[int, int] = {}
    started: list[int] = []
    reports: list[Report] = []

    def observe(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartTurn):
                started.append(action.turn)
                # Output that comes before the step is committed.
                bench.tell(Emitted("s", action.turn, PIECE))

    for kind, *rest in plan:
        match kind:
            case "run":
                turn += 1
                number = max(1, model.committed + 1 + rest[0])
                answers[turn] = number
                model.run(number, turn)
                observe(bench.command(step(number, turn)))
            case "stop" if turn:
                model.stop(max(1, turn - rest[0]))
                observe(bench.command(Stop(FENCE, max(1, turn - rest[0]))))
            case "finish" if model.running:
                running = model.running[1]
                was_cancelled = model.cancelled
                outcome, commits = rest
                model.finish(outcome, commits)
                actions = finish(bench, running, outcome)
                committing = outcome is TurnOutcome.COMPLETED and not was_cancelled
                assert any(isinstance(a, CommitTurn) for a in actions) is committing
                if committing:
                    error = None if commits else EngineFailed("on purpose").info()
                    actions += bench.tell(TurnCommitted("s", running, error))
                observe(actions)
            case "take" if model.ended:
                number, status = model.ended[-1][0], model.ended[-1][1]
                if status is TurnStatus.COMPLETED:
                    model.kept.discard(answers[number])
                    bench.command(Acknowledge(FENCE, number, 1))
            case "reset":
                model.reset(turn)
                reset += 1
                observe(bench.command(Signal(FENCE, f"reset-{reset}", RESET)))
        reports += bench.take()
        assert ends(reports) == model.ended
        assert started == model.started
        resets = [code(r) for r in reports if isinstance(r, Answer) and r.command != "open"]
        assert len(resets) == len(model.resets)
    # Every completed answer has its output, whole and once.
    for number, status, _, _ in model.ended:
        if status is TurnStatus.COMPLETED:
            pieces = [r.sequence for r in reports if isinstance(r, Output) and r.turn == number]
            assert pieces == [1]
