"""The worker's control side: fences, order, turns, floors, closing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.connectors import InlineDescriptor
from protocol.device_bytes import HOST
from protocol.errors import AntiphonError, CapacityExceeded, EngineFailed, InvalidRequest
from protocol.messages import (
    Acknowledge,
    Answer,
    Close,
    Command,
    Configure,
    Feed,
    Fence,
    Open,
    Output,
    Park,
    RaiseFloor,
    ReceivedThrough,
    Replay,
    Report,
    Run,
    Signal,
    SnapshotOrder,
    StageEvent,
    Stop,
    TurnEnded,
    TurnStatus,
    Update,
)
from protocol.payloads import text_payload
from sessions.compute import ComputeSample
from sessions.ledger import Budget, Ledger
from workers.control import Control
from workers.control_events import (
    AbandonTurn,
    Action,
    Announce,
    ApplyInput,
    CancelTurn,
    CommandReceived,
    ComputeMeasured,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    Emitted,
    EngineReady,
    Event,
    FeedTurn,
    ForgetParked,
    FreeSession,
    GatewayDown,
    GatewayUp,
    InputFailed,
    InputTaken,
    LinkCrowded,
    Noticed,
    OpenSession,
    OperationDone,
    OutputRefused,
    PaceTurn,
    ParkSession,
    SendOutput,
    SendReport,
    SessionFreed,
    Settle,
    ShuttingDown,
    SignalSession,
    StartTurn,
    Tick,
    TurnFinished,
    TurnOutcome,
    VoidTurn,
)
from workers.retention import RetentionLimits
from workers.session_control import Declare

FENCE = Fence("s", 1, "g1")
PIECE = text_payload("x")
DATA = InlineDescriptor(PIECE)


@dataclass
class Bench:
    """A control side whose operations succeed at once, unless told otherwise."""

    limits: ControlLimits = field(default_factory=ControlLimits)
    ledger: Ledger = field(default_factory=Ledger)
    declare: Declare = lambda settings: {}
    parks: bool = False
    refusals: dict[str, AntiphonError] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    """What the engine never gets done."""
    now_ms: float = 0.0
    actions: list[Action] = field(default_factory=list)
    reports: list[tuple[str, Report]] = field(default_factory=list)
    discarded: int = 0

    def __post_init__(self) -> None:
        self.control = Control(self.limits, self.ledger, self.declare)
        self.tell(EngineReady())
        self.tell(GatewayUp("g1"))
        self.tell(GatewayUp("g2"))

    def tell(self, event: Event) -> list[Action]:
        """Handle `event` and what follows from it; the engine's actions."""
        mine: list[Action] = []
        for action in self.control.handle(event, self.now_ms):
            if isinstance(action, SendReport):
                self.reports.append((action.gateway, action.report))
                continue
            if isinstance(action, DiscardPayload):
                self.discarded += 1
                continue
            if isinstance(action, SendOutput):
                descriptor = InlineDescriptor(action.payload)
                output = Output(action.session, action.turn, action.sequence, descriptor)
                self.reports.append((action.gateway, output))
                continue
            mine.append(action)
            self.actions.append(action)
            if isinstance(action, OpenSession | ConfigureSession | SignalSession):
                name = action.name if isinstance(action, SignalSession) else "open"
                mine += self._done(action.session, name, {"done": name})
            elif isinstance(action, ParkSession):
                mine += self._done(action.session, "park", {"parked": 1})
            elif isinstance(action, FreeSession):
                refusal = self.refusals.get("close")
                error = refusal.info() if refusal else None
                mine += self.tell(SessionFreed(action.session, error))
        return mine

    def _done(self, session: str, name: str, result: dict[str, Any]) -> list[Action]:
        if name in self.hangs:
            return []
        refusal = self.refusals.get(name)
        if name == "open" and self.parks:
            result["parks"] = True
        return self.tell(OperationDone(session, refusal.info() if refusal else None, result))

    def command(self, command: Command, gateway: str = "g1") -> list[Action]:
        """A command arrives over the link."""
        return self.tell(CommandReceived(gateway, command))

    def open(self, fence: Fence = FENCE) -> Bench:
        """Open a session and forget that it was reported."""
        self.command(Open(fence, "open", {}), fence.owner)
        self.take()
        return self

    def take(self) -> list[Report]:
        """The reports since the last call."""
        reports, self.reports = [report for _, report in self.reports], []
        return reports

    def after(self, milliseconds: float) -> list[Action]:
        """Time passes and the timer fires."""
        self.now_ms += milliseconds
        return self.tell(Tick())


def code(report: Report) -> str | None:
    assert isinstance(report, Answer | TurnEnded)
    return report.error.code if report.error else None


def run(turn: int, lane: str = "default", **fields: Any) -> Run:
    return Run(FENCE, turn, lane, **fields)


# Fences


def test_an_open_is_carried_out_and_answered() -> None:
    bench = Bench()
    assert bench.command(Open(FENCE, "c1", {"a": 1})) == [OpenSession("s", 1, {"a": 1}, "g1")]
    assert bench.take() == [Answer("s", "c1", None, {"done": "open"})]


@pytest.mark.parametrize(
    ("fence", "sender", "admitted"),
    [
        (Fence("s", 5, "g1"), "g1", True),
        (Fence("s", 4, "g1"), "g1", False),
        (Fence("s", 5, "g2"), "g2", False),
        (Fence("s", 6, "g2"), "g2", True),
        (Fence("s", 4, "g2"), "g2", False),
        (Fence("s", 6, "g2"), "g1", False),
    ],
)
def test_a_fence_excludes_lower_epochs_and_other_owners(
    fence: Fence, sender: str, admitted: bool
) -> None:
    bench = Bench().open(Fence("s", 5, "g1"))
    bench.command(Signal(fence, "c", "x"), sender)
    bench.command(Run(fence, 1, "default"), sender)
    answer, *ended = bench.take()
    if admitted:
        assert code(answer) is None
        assert ended == []
    else:
        assert code(answer) == "fenced"
        assert code(ended[0]) == "fenced"


def test_a_fence_outlives_its_session() -> None:
    bench = Bench().open(Fence("s", 5, "g1"))
    bench.command(Close(Fence("s", 5, "g1"), "close", "client"))
    bench.take()
    bench.command(Open(Fence("s", 4, "g2"), "late"), "g2")
    assert [code(report) for report in bench.take()] == ["fenced"]


def test_a_higher_epoch_takes_the_session_over_with_its_running_turn() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.command(Signal(Fence("s", 2, "g2"), "c", "x"), "g2")
    bench.reports.clear()
    bench.tell(Emitted("s", 1, PIECE))
    assert bench.reports == [("g2", Output("s", 1, 1, DATA))]
    bench.command(Signal(FENCE, "c2", "x"))
    assert bench.reports[-1][0] == "g1"
    assert code(bench.reports[-1][1]) == "fenced"


# Opening


def test_before_the_model_is_loaded_an_open_is_refused() -> None:
    control = Control()
    control.handle(GatewayUp("g1"), 0)
    (action,) = control.handle(CommandReceived("g1", Open(FENCE, "c")), 0)
    assert isinstance(action, SendReport)
    assert code(action.report) == "not_ready"


def test_a_refused_open_leaves_nothing() -> None:
    bench = Bench(refusals={"open": InvalidRequest("no", field="a")})
    bench.command(Open(FENCE, "c1"))
    assert [code(report) for report in bench.take()] == ["invalid_value"]
    assert bench.control.sessions == 0
    bench.command(run(1))
    assert [code(report) for report in bench.take()] == ["session_state_lost"]


def test_an_owner_that_opens_a_session_again_gets_it_anew() -> None:
    bench = Bench().open()
    bench.command(Update(FENCE, 1, DATA))
    actions = bench.command(Open(FENCE, "other"))
    assert [type(action) for action in actions] == [FreeSession, OpenSession]
    assert bench.take() == [Answer("s", "other", None, {"done": "open"})]
    # Nothing is left of what was there: its input is counted from the beginning.
    assert applied(bench.command(Update(FENCE, 1, DATA))) == [1]


def test_a_session_is_opened_anew_once_its_turns_have_stopped() -> None:
    bench = Bench().open()
    bench.command(run(1))
    assert [type(action) for action in bench.command(Open(FENCE, "other"))] == [CancelTurn]
    assert [type(report) for report in bench.take()] == []
    actions = bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [type(action) for action in actions] == [FreeSession, OpenSession]
    assert bench.take()[-1] == Answer("s", "other", None, {"done": "open"})


def test_an_open_that_is_repeated_while_it_waits_for_turns_to_stop_is_answered_once() -> None:
    bench = Bench().open()
    bench.command(run(1))
    for _ in range(2):
        bench.command(Open(FENCE, "other"))
    assert bench.take() == []
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    opened = Answer("s", "other", None, {"done": "open"})
    assert [report for report in bench.take() if isinstance(report, Answer)] == [opened]


def test_a_full_worker_refuses() -> None:
    bench = Bench(ControlLimits(sessions=1)).open()
    bench.command(Open(Fence("t", 1, "g1"), "c"))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]


def test_commands_for_an_unknown_session_are_answered_with_the_truth() -> None:
    bench = Bench()
    bench.command(Signal(FENCE, "c1", "x"))
    bench.command(Configure(FENCE, "c2"))
    bench.command(run(1))
    assert [code(report) for report in bench.take()] == ["session_state_lost"] * 3


# Command ids


def test_a_repeated_id_gets_the_first_answer_and_is_not_carried_out_again() -> None:
    bench = Bench().open()
    first = bench.command(Signal(FENCE, "c1", "clear"))
    again = bench.command(Signal(FENCE, "c1", "clear"))
    assert (len(first), len(again)) == (1, 0)
    answers = bench.take()
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_a_refused_command_is_answered_with_its_error() -> None:
    bench = Bench(refusals={"nonsense": InvalidRequest("unknown signal")}).open()
    bench.command(Signal(FENCE, "c1", "nonsense"))
    assert [code(report) for report in bench.take()] == ["invalid_value"]


# Input


def applied(actions: list[Action]) -> list[int]:
    return [action.sequence for action in actions if isinstance(action, ApplyInput)]


def test_input_is_applied_once_in_order_and_reported_once_a_loop_turn() -> None:
    bench = Bench().open()
    actions = [bench.command(Update(FENCE, number, DATA)) for number in (1, 3, 3, 2, 2, 4)]
    assert [applied(some) for some in actions] == [[1], [], [], [2, 3], [], [4]]
    bench.tell(Settle())
    bench.tell(Settle())
    assert bench.take() == [ReceivedThrough("s", 4)]


def test_a_gap_that_stays_is_stated_and_the_rest_goes_on() -> None:
    bench = Bench().open()
    bench.command(Update(FENCE, 1, DATA))
    bench.command(Update(FENCE, 4, DATA))
    assert bench.control.deadline_ms == 1000
    assert applied(bench.after(1000)) == [4]
    # Said at once: no command may follow, because its sender waits for this.
    assert bench.take() == [
        StageEvent("s", "input_lost", {"first": 2, "last": 3}),
        ReceivedThrough("s", 4),
    ]


def test_held_input_is_bounded() -> None:
    bench = Bench(ControlLimits(held_inputs=2)).open()
    for number in (3, 4):
        assert applied(bench.command(Update(FENCE, number, DATA))) == []
    assert applied(bench.command(Update(FENCE, 6, DATA))) == [3, 4]
    assert bench.take() == [StageEvent("s", "input_lost", {"first": 1, "last": 2})]


def test_a_command_never_overtakes_input_that_came_before_it() -> None:
    bench = Bench().open()
    bench.command(Update(FENCE, 1, DATA))
    bench.command(Update(FENCE, 3, DATA))
    assert bench.command(run(1)) == []
    actions = bench.command(Update(FENCE, 2, DATA))
    assert [type(action) for action in actions] == [ApplyInput, ApplyInput, StartTurn]


def test_a_command_waits_for_the_input_that_it_names() -> None:
    bench = Bench().open()
    assert bench.command(Signal(FENCE, "c", "cut", after_input=2)) == []
    assert bench.command(Update(FENCE, 3, DATA)) == []
    assert applied(bench.command(Update(FENCE, 1, DATA))) == [1]
    actions = bench.command(Update(FENCE, 2, DATA))
    assert [type(action) for action in actions] == [ApplyInput, SignalSession, ApplyInput]


def test_input_never_overtakes_a_command_that_was_given_before_it() -> None:
    bench = Bench().open()
    # The input came through the arena, its two commands are still on the link.
    assert bench.command(Update(FENCE, 1, DATA, after_controls=1)) == []
    assert bench.command(Update(FENCE, 2, DATA, after_controls=2)) == []
    actions = bench.command(Configure(FENCE, "c1", {}, after_input=0))
    assert [type(action) for action in actions] == [ConfigureSession, ApplyInput]
    actions = bench.command(Signal(FENCE, "c2", "cut", after_input=1))
    assert [type(action) for action in actions] == [SignalSession, ApplyInput]


def test_a_command_that_finds_no_room_holds_no_input_back() -> None:
    bench = Bench(ControlLimits(waiting_commands=1)).open()
    bench.command(Signal(FENCE, "c1", "x", after_input=1))
    bench.command(Signal(FENCE, "c2", "x", after_input=1))
    assert applied(bench.command(Update(FENCE, 1, DATA))) == [1]
    assert applied(bench.command(Update(FENCE, 2, DATA, after_controls=2))) == [2]


def test_a_command_does_not_wait_for_ever_for_lost_input() -> None:
    bench = Bench().open()
    bench.command(Signal(FENCE, "c", "cut", after_input=2))
    actions = bench.after(1000)
    assert [type(action) for action in actions] == [SignalSession]
    assert bench.take()[0] == StageEvent("s", "input_lost", {"first": 1, "last": 2})


def test_input_that_the_engine_refuses_is_told() -> None:
    bench = Bench().open()
    bench.tell(InputFailed("s", 1, InvalidRequest("odd number of bytes").info()))
    (event,) = bench.take()
    assert isinstance(event, StageEvent)
    assert event.name == "input_failed"
    assert event.arguments["sequence"] == 1


def test_too_many_waiting_commands_are_refused() -> None:
    bench = Bench(ControlLimits(waiting_commands=1)).open()
    bench.command(Signal(FENCE, "c1", "x", after_input=9))
    bench.command(Signal(FENCE, "c2", "x", after_input=9))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]
    assert bench.control.waiting == 1


# Turns


def test_a_turn_numbers_its_outputs_and_ends_once() -> None:
    bench = Bench().open()
    assert bench.command(run(1, parameters={"a": 1}, inputs=[DATA])) == [
        StartTurn("s", 1, 1, "default", {"a": 1}, [DATA], True)
    ]
    bench.now_ms = 5
    bench.tell(Emitted("s", 1, PIECE))
    bench.now_ms = 9
    bench.tell(Emitted("s", 1, PIECE))
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED, None, {"tokens": 2}))
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    timeline = {"received": 0.0, "queued": 0.0, "started": 0.0, "first_output": 5.0, "done": 9.0}
    assert bench.take() == [
        Output("s", 1, 1, DATA),
        Output("s", 1, 2, DATA),
        TurnEnded("s", 1, TurnStatus.COMPLETED, None, {"tokens": 2}, timeline),
    ]


def test_a_repeated_run_is_not_run_again() -> None:
    bench = Bench().open()
    bench.command(run(1))
    assert bench.command(run(1)) == []
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    assert bench.command(run(1)) == []
    assert len(bench.take()) == 1


def test_an_engine_failure_fails_the_turn_only() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.tell(TurnFinished("s", 1, TurnOutcome.FAILED, EngineFailed("broke").info()))
    (ended,) = bench.take()
    assert isinstance(ended, TurnEnded)
    assert (ended.status, code(ended)) == (TurnStatus.FAILED, "engine_failed")
    assert [type(action) for action in bench.command(run(2))] == [StartTurn]


def test_a_turn_that_stops_without_being_cancelled_has_failed() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [code(report) for report in bench.take()] == ["engine_failed"]


def test_raising_the_floor_cancels_what_runs_below_it_in_its_lane() -> None:
    bench = Bench().open()
    for turn, lane in ((1, "default"), (2, "aside"), (3, "default")):
        bench.command(run(turn, lane))
    assert bench.command(RaiseFloor(FENCE, "default", 3)) == [CancelTurn("s", 1)]
    bench.tell(Emitted("s", 1, PIECE))
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    (ended,) = bench.take()
    assert isinstance(ended, TurnEnded)
    assert (ended.turn, ended.status, ended.error) == (1, TurnStatus.CANCELLED, None)


def test_a_run_below_the_floor_ends_cancelled_without_running() -> None:
    bench = Bench().open()
    bench.command(RaiseFloor(FENCE, "default", 5))
    bench.command(RaiseFloor(FENCE, "default", 3))
    assert bench.command(run(4)) == []
    assert bench.take() == [TurnEnded("s", 4, TurnStatus.CANCELLED)]
    assert bench.command(run(4)) == []
    assert [type(action) for action in bench.command(run(5))] == [StartTurn]


def test_a_run_that_waits_is_cancelled_by_the_floor() -> None:
    bench = Bench().open()
    bench.command(run(1, last=False, after_input=9))
    bench.command(Feed(FENCE, 1, DATA))
    bench.command(RaiseFloor(FENCE, "default", 2))
    assert bench.take() == [TurnEnded("s", 1, TurnStatus.CANCELLED)]
    assert bench.control.waiting == 0


def test_feeds_reach_a_running_turn_until_the_last() -> None:
    bench = Bench().open()
    bench.command(run(1, last=False))
    assert bench.command(Feed(FENCE, 1, DATA)) == [FeedTurn("s", 1, DATA, False)]
    assert bench.command(Feed(FENCE, 1, None, last=True)) == [FeedTurn("s", 1, None, True)]
    assert bench.command(Feed(FENCE, 1, DATA)) == []
    assert bench.command(Feed(FENCE, 2, DATA)) == []


def test_a_turn_with_too_much_queued_input_fails() -> None:
    bench = Bench(ControlLimits(fed_payloads=2)).open()
    bench.command(run(1, last=False))
    bench.command(Feed(FENCE, 1, DATA))
    bench.tell(InputTaken("s", 1, 1))
    bench.command(Feed(FENCE, 1, DATA))
    bench.command(Feed(FENCE, 1, DATA))
    assert bench.command(Feed(FENCE, 1, DATA)) == [CancelTurn("s", 1)]
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]


def test_a_turn_that_lost_a_feed_to_a_full_mailbox_does_not_start_without_it() -> None:
    bench = Bench(ControlLimits(waiting_commands=2)).open()
    bench.command(run(1, last=False, after_input=9))
    bench.command(Feed(FENCE, 1, DATA))
    bench.command(Feed(FENCE, 1, DATA))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]
    assert (bench.control.waiting, bench.discarded) == (0, 2)


def test_what_stands_behind_a_command_that_found_no_room_goes_on() -> None:
    bench = Bench(ControlLimits(waiting_commands=2)).open()
    bench.command(run(1, last=False, after_input=9))
    bench.command(Signal(FENCE, "c", "x", after_input=0))
    (signal,) = bench.command(Feed(FENCE, 1, DATA))
    assert isinstance(signal, SignalSession)


def test_the_input_of_a_turn_that_does_not_start_is_given_back() -> None:
    bench = Bench(ControlLimits(turns_per_session=1)).open()
    bench.command(RaiseFloor(FENCE, "default", 2))
    bench.command(run(1, inputs=[DATA, DATA]))
    assert bench.discarded == 2
    bench.command(run(2))
    bench.command(run(3, inputs=[DATA]))
    assert bench.discarded == 3
    bench.command(run(4, inputs=[DATA], after_input=9))
    bench.command(RaiseFloor(FENCE, "default", 5))
    assert bench.discarded == 4
    bench.command(run(6, inputs=[DATA], after_input=9))
    bench.command(Close(FENCE, "close", "client"))
    assert bench.discarded == 5
    bench.command(Run(Fence("unknown", 1, "g1"), 1, "default", inputs=[DATA]))
    assert bench.discarded == 6


def test_a_closing_session_cancels_also_a_turn_that_more_input_waits_for() -> None:
    bench = Bench().open()
    bench.command(run(1, last=False))
    bench.command(Signal(FENCE, "c", "x", after_input=9))
    bench.command(Feed(FENCE, 1, DATA))
    bench.command(Close(FENCE, "close", "client"))
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    (ended,) = [report for report in bench.take() if isinstance(report, TurnEnded)]
    assert (ended.status, ended.error) == (TurnStatus.CANCELLED, None)


def test_a_turn_whose_output_cannot_be_sent_fails() -> None:
    bench = Bench().open()
    bench.command(run(1))
    error = CapacityExceeded("full").info()
    assert bench.tell(OutputRefused("s", 1, error)) == [CancelTurn("s", 1)]
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]


@pytest.mark.parametrize("limits", [ControlLimits(turns_per_session=1), ControlLimits(turns=1)])
def test_turns_are_bounded(limits: ControlLimits) -> None:
    bench = Bench(limits).open()
    bench.command(run(1))
    bench.command(run(2))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    assert [type(action) for action in bench.command(run(3))] == [StartTurn]


def test_a_turn_that_does_not_stop_is_abandoned() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.command(RaiseFloor(FENCE, "default", 2))
    assert bench.after(9_999) == []
    assert bench.after(1) == [AbandonTurn("s", 1)]
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [report.status for report in bench.take() if isinstance(report, TurnEnded)] == [
        TurnStatus.CANCELLED
    ]


def test_what_the_engine_notices_goes_to_the_owner() -> None:
    bench = Bench().open()
    bench.tell(Noticed("s", "speech_started", {"audio_start_ms": 3}))
    assert bench.reports == [("g1", StageEvent("s", "speech_started", {"audio_start_ms": 3}))]


# Closing


def test_closing_waits_for_running_turns_and_frees_once() -> None:
    bench = Bench().open()
    bench.command(run(1))
    assert bench.command(Close(FENCE, "c1", "client")) == [CancelTurn("s", 1)]
    assert bench.command(Close(FENCE, "c2", "client")) == []
    assert bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED)) == [FreeSession("s")]
    ended, *answers = bench.take()
    assert isinstance(ended, TurnEnded)
    assert answers == [Answer("s", "c1"), Answer("s", "c2")]
    assert bench.control.sessions == 0
    bench.command(Close(FENCE, "c1", "client"))
    assert bench.take() == [Answer("s", "c1")]


def test_closing_does_not_wait_for_ever() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.command(Close(FENCE, "c1", "client"))
    assert bench.after(10_000) == [AbandonTurn("s", 1), FreeSession("s")]
    assert bench.take()[-1] == Answer("s", "c1")


def test_an_unknown_session_is_closed_already() -> None:
    bench = Bench()
    bench.command(Close(FENCE, "c", "client"))
    assert bench.take() == [Answer("s", "c")]


def test_an_open_during_closing_starts_afresh_when_all_is_freed() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.command(Close(FENCE, "c1", "client"))
    assert bench.command(Open(FENCE, "again")) == []
    actions = bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [type(action) for action in actions] == [FreeSession, OpenSession]
    assert bench.take()[-1] == Answer("s", "again", None, {"done": "open"})


def test_what_follows_an_open_that_waits_is_for_what_it_opens() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.command(Open(FENCE, "again"))
    for command in (
        Signal(FENCE, "c1", "clear", after_input=0),
        Update(FENCE, 1, DATA, 1),
        Configure(FENCE, "c2", {"language": "de"}, 1),
        Update(FENCE, 2, DATA, 2),
    ):
        assert bench.command(command) == []
    assert bench.take() == []
    actions = bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert [type(action) for action in actions] == [
        FreeSession,
        OpenSession,
        SignalSession,
        ApplyInput,
        ConfigureSession,
        ApplyInput,
    ]
    answered = [report.command for report in bench.take() if isinstance(report, Answer)]
    assert answered == ["again", "c1", "c2"]
    assert bench.discarded == 0


@pytest.mark.parametrize("end", ["close", "another", "gateway"])
def test_what_follows_an_open_that_comes_to_nothing_is_refused_with_it(end: str) -> None:
    bench = Bench(ControlLimits(waiting_commands=2, held_inputs=1)).open()
    bench.command(run(1))
    bench.command(Open(FENCE, "again"))
    bench.command(Update(FENCE, 1, DATA))
    bench.command(Update(FENCE, 2, DATA))
    assert bench.discarded == 1
    for number in range(2):
        bench.command(Signal(FENCE, f"c{number}", "x"))
    if end == "close":
        bench.command(Close(FENCE, "close", "client"))
    elif end == "another":
        bench.command(Signal(FENCE, "c2", "x"))
    else:
        bench.tell(GatewayDown("g1"))
    refused = {r.command for r in bench.take() if isinstance(r, Answer) and r.error is not None}
    waiting = {"again", "c0", "c1"}
    assert refused == {"close": waiting, "another": waiting | {"c2"}, "gateway": set()}[end]
    assert bench.discarded == 2


def test_an_open_that_waits_and_comes_again_is_answered_once() -> None:
    bench = Bench().open()
    bench.command(run(1))
    for _ in range(2):
        assert bench.command(Open(FENCE, "again")) in ([], [CancelTurn("s", 1)])
    assert bench.take() == []
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    answers = [report for report in bench.take() if isinstance(report, Answer)]
    assert answers == [Answer("s", "again", None, {"done": "open"})]


def test_waiting_commands_are_answered_when_the_session_closes() -> None:
    bench = Bench().open()
    bench.command(Signal(FENCE, "c1", "x", after_input=1))
    bench.command(run(1))
    bench.command(Close(FENCE, "c2", "client"))
    answer, ended, closed = bench.take()
    assert code(answer) == "session_state_lost"
    assert ended == TurnEnded("s", 1, TurnStatus.CANCELLED)
    assert closed == Answer("s", "c2")


def test_a_worker_that_is_ending_is_not_ready() -> None:
    bench = Bench()
    assert bench.control.ready
    bench.tell(ShuttingDown())
    assert not bench.control.ready


def test_a_worker_says_that_it_is_ending_before_it_refuses_anything() -> None:
    bench = Bench().open()
    bench.command(Configure(FENCE, "c1", after_input=1))
    first, refused, *_ = bench.control.handle(ShuttingDown(), bench.now_ms)
    assert isinstance(first, Announce)
    assert isinstance(refused, SendReport)
    assert code(refused.report) == "session_state_lost"


def test_shutting_down_frees_everything() -> None:
    bench = Bench().open().open(Fence("t", 1, "g1"))
    actions = bench.tell(ShuttingDown())
    assert sorted(a.session for a in actions if isinstance(a, FreeSession)) == ["s", "t"]
    bench.command(Open(FENCE, "late"))
    assert [code(report) for report in bench.take()] == ["capacity_exceeded"]


# Gateways


def test_sessions_outlive_their_gateway_for_the_stated_time_only() -> None:
    bench = Bench().open().open(Fence("t", 1, "g2"))
    bench.command(run(1))
    assert bench.tell(GatewayDown("g1")) == [CancelTurn("s", 1)]
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert bench.take() == []
    assert bench.after(29_999) == []
    assert bench.after(1) == [FreeSession("s")]
    assert bench.control.sessions == 1


def test_another_gateway_may_take_an_orphan_over_in_time() -> None:
    bench = Bench().open()
    bench.tell(GatewayDown("g1"))
    bench.command(Signal(Fence("s", 2, "g2"), "c", "x"), "g2")
    assert bench.after(30_000) == []
    assert bench.control.sessions == 1


def test_a_gateway_that_comes_back_finds_nothing_of_what_it_gave_up() -> None:
    bench = Bench().open()
    bench.tell(GatewayDown("g1"))
    assert bench.tell(GatewayUp("g1")) == [FreeSession("s")]
    assert bench.command(Open(FENCE, "again")) == [OpenSession("s", 1, {}, "g1")]


# Any order of events

fences = st.builds(Fence, st.sampled_from("st"), st.integers(1, 3), st.sampled_from(["g1", "g2"]))
turns = st.integers(1, 6)
ids = st.sampled_from("abc")
lanes = st.sampled_from(["default", "aside"])
after = st.none() | st.integers(0, 4)
controls = st.integers(0, 3)
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Open, fences, ids),
    st.builds(Configure, fences, ids, after_input=after),
    st.builds(Update, fences, st.integers(1, 6), st.just(DATA), controls),
    st.builds(Signal, fences, ids, st.just("x"), after_input=after),
    st.builds(Run, fences, turns, lanes, last=st.booleans(), after_input=after),
    st.builds(Run, fences, turns, lanes, last=st.booleans(), step=st.integers(1, 3)),
    st.builds(Feed, fences, turns, st.just(DATA), st.booleans()),
    st.builds(RaiseFloor, fences, lanes, turns),
    st.builds(Stop, fences, turns),
    st.builds(Park, fences, ids, st.just(0)),
    st.builds(Open, fences, ids, restore=st.just(True), priority=st.none() | st.integers(0, 1)),
    st.builds(Close, fences, ids, st.just("client")),
)
steps: st.SearchStrategy[Any] = st.one_of(
    commands,
    commands,
    st.builds(Emitted, st.sampled_from("st"), turns, st.just(PIECE)),
    st.builds(TurnFinished, st.sampled_from("st"), turns, st.sampled_from(TurnOutcome)),
    st.builds(GatewayUp, st.sampled_from(["g1", "g2"])),
    st.builds(GatewayDown, st.sampled_from(["g1", "g2"])),
    st.builds(Settle),
    st.sampled_from([10.0, 1000.0, 10_000.0, 30_000.0]),
)


class Watch:
    """Checks what must hold of every sequence of events."""

    def __init__(self) -> None:
        self.bench = Bench(
            ControlLimits(waiting_commands=3, held_inputs=3, turns_per_session=2),
            # For one session: the others make room for it, or it is refused.
            ledger=Ledger({HOST: Budget(10)}),
            declare=lambda settings: {HOST: 9},
            parks=True,
        )
        self.accepted: dict[str, tuple[int, str]] = {}
        self.running: set[tuple[str, int]] = set()
        self.engine: set[str] = set()
        self.inputs: dict[str, int] = {}
        self.brought = 0
        self.passed_on = 0

    def step(self, step: Any) -> None:
        if isinstance(step, float):
            self.observe(self.bench.after(step))
        elif isinstance(step, TurnFinished | Emitted):
            # An engine speaks only of turns that it runs.
            if (step.session, step.turn) in self.running:
                if isinstance(step, TurnFinished):
                    self.running.discard((step.session, step.turn))
                self.observe(self.bench.tell(step))
        elif isinstance(step, GatewayUp | GatewayDown | Settle):
            self.observe(self.bench.tell(step))
        else:
            before = len(self.bench.actions)
            self.brought += isinstance(step, Update | Feed)
            self.observe(self.bench.command(step, step.fence.owner))
            self.check_fence(step.fence, len(self.bench.actions) > before)

    def check_fence(self, fence: Fence, acted: bool) -> None:
        known = self.accepted.get(fence.session)
        if acted:
            if known is not None:
                assert fence.epoch >= known[0]
                assert fence.epoch > known[0] or fence.owner == known[1]
            self.accepted[fence.session] = (fence.epoch, fence.owner)

    def observe(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenSession():
                    assert action.session not in self.engine
                    self.engine.add(action.session)
                    self.inputs[action.session] = 0
                case FreeSession():
                    self.engine.remove(action.session)
                    assert not any(session == action.session for session, _ in self.running)
                case StartTurn():
                    assert (action.session, action.turn) not in self.running
                    self.running.add((action.session, action.turn))
                case AbandonTurn():
                    self.running.remove((action.session, action.turn))
                case ApplyInput():
                    self.passed_on += 1
                    assert action.sequence > self.inputs[action.session]
                    self.inputs[action.session] = action.sequence
                case FeedTurn():
                    self.passed_on += 1
            if not isinstance(action, FreeSession | AbandonTurn | ForgetParked | Announce):
                assert getattr(action, "session", None) in self.engine
        held = self.bench.ledger.devices()[HOST]
        assert held.reserved <= 10
        assert held.sessions == 9 * len(self.engine)
        assert self.bench.control.sessions in (len(self.engine), len(self.engine) + 1)

    def finish(self) -> None:
        """Stop: everything ends within the stated times, and nothing is left."""
        self.observe(self.bench.tell(ShuttingDown()))
        self.observe(self.bench.after(10_000))
        assert self.engine == set()
        assert self.running == set()
        assert self.bench.control.waiting == 0
        # Every payload that came in was passed on or given back: none is held for ever.
        assert self.passed_on + self.bench.discarded == self.brought


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=60))
def test_nothing_that_must_hold_is_broken_by_any_order_of_events(plan: list[Any]) -> None:
    watch = Watch()
    for step in plan:
        watch.step(step)
    watch.finish()


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=60))
def test_every_run_ends_exactly_once(plan: list[Any]) -> None:
    """With one gateway that stays, each turn number of a session has one end."""
    watch = Watch()
    fence = Fence("s", 1, "g1")
    watch.bench.command(Open(fence, "open"))
    watch.engine.add("s")
    watch.inputs["s"] = 0
    sent: set[int] = set()
    for step in plan:
        if isinstance(step, Open | Park | Close | GatewayUp | GatewayDown):
            continue
        if hasattr(step, "fence"):
            step = type(step)(fence, *[getattr(step, f) for f in step.__struct_fields__[1:]])
        if isinstance(step, Run):
            sent.add(step.turn)
        watch.step(step)
    watch.finish()
    ended = [report.turn for _, report in watch.bench.reports if isinstance(report, TurnEnded)]
    assert sorted(ended) == sorted(sent)


def with_output(pieces: int, limits: ControlLimits | None = None) -> Bench:
    """A running turn that has made `pieces` of one byte."""
    bench = Bench(limits or ControlLimits()).open()
    bench.command(run(1))
    for _ in range(pieces):
        bench.tell(Emitted("s", 1, PIECE))
    bench.take()
    return bench


def sequences(reports: list[Report]) -> list[int]:
    return [report.sequence for report in reports if isinstance(report, Output)]


def test_output_is_kept_until_it_is_acknowledged_and_sent_again_when_asked() -> None:
    bench = with_output(4)
    bench.command(Acknowledge(FENCE, 1, 2))
    assert bench.control.kept_bytes == 2
    bench.command(Replay(FENCE, "again", 1, 2))
    answer, *outputs = bench.take()
    assert isinstance(answer, Answer)
    assert answer.result == {"lost": 0}
    assert sequences(outputs) == [3, 4]


def test_a_replay_of_what_was_acknowledged_states_the_gap() -> None:
    bench = with_output(4)
    bench.command(Acknowledge(FENCE, 1, 3))
    bench.command(Replay(FENCE, "again", 1, 1))
    answer, *outputs = bench.take()
    assert isinstance(answer, Answer)
    assert answer.result == {"lost": 2}
    assert sequences(outputs) == [4]


def test_a_replay_of_an_ended_turn_ends_it_again() -> None:
    bench = with_output(2)
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    bench.take()
    bench.command(Replay(FENCE, "again", 1, 0))
    reports = bench.take()
    assert sequences(reports) == [1, 2]
    assert isinstance(reports[-1], TurnEnded)


def test_a_turn_with_too_much_output_kept_is_paced() -> None:
    bench = with_output(0, ControlLimits(retention=RetentionLimits(pieces=2)))
    assert bench.tell(Emitted("s", 1, PIECE)) == []
    assert bench.tell(Emitted("s", 1, PIECE)) == [PaceTurn("s", 1, True)]
    assert bench.command(Acknowledge(FENCE, 1, 1)) == [PaceTurn("s", 1, False)]


def test_kept_output_grows_old_and_goes() -> None:
    bench = with_output(3, ControlLimits(retention=RetentionLimits(age_ms=500)))
    bench.after(500)
    assert bench.control.kept_bytes == 0


def test_a_raised_floor_frees_what_was_kept() -> None:
    bench = with_output(3)
    bench.command(RaiseFloor(FENCE, "default", 2))
    assert bench.control.kept_bytes == 0


def test_a_raised_floor_frees_what_a_turn_kept_that_has_ended_unread() -> None:
    bench = with_output(3)
    bench.command(run(2, "aside"))
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    bench.tell(TurnFinished("s", 2, TurnOutcome.COMPLETED))
    assert bench.command(RaiseFloor(FENCE, "default", 3)) == [VoidTurn("s", 1)]
    assert bench.control.kept_bytes == 0
    assert bench.command(RaiseFloor(FENCE, "default", 4)) == []


def test_a_closed_session_keeps_nothing() -> None:
    bench = with_output(3)
    bench.command(Close(FENCE, "close", "client"))
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert bench.control.kept_bytes == 0


# A link that all sessions of a gateway share


def test_a_crowded_link_paces_the_turns_of_its_gateway_and_no_others() -> None:
    bench = Bench().open()
    other = Fence("other", 1, "g2")
    bench.command(Open(other, "open", {}), "g2")
    bench.command(run(1))
    bench.command(Run(other, 1, "default"), "g2")
    assert bench.tell(LinkCrowded("g1", True)) == [PaceTurn("s", 1, True)]
    assert bench.tell(LinkCrowded("g1", True)) == []
    assert bench.tell(LinkCrowded("g1", False)) == [PaceTurn("s", 1, False)]


def test_a_turn_that_starts_while_the_link_is_crowded_waits() -> None:
    bench = Bench().open()
    bench.tell(LinkCrowded("g1", True))
    assert bench.command(run(1))[1:] == [PaceTurn("s", 1, True)]
    late = Fence("late", 1, "g1")
    bench.command(Open(late, "open", {}))
    assert bench.command(Run(late, 1, "default"))[1:] == [PaceTurn("late", 1, True)]


def test_room_on_the_link_does_not_free_a_turn_whose_session_is_full() -> None:
    bench = with_output(2, ControlLimits(retention=RetentionLimits(pieces=2)))
    bench.tell(LinkCrowded("g1", True))
    assert bench.tell(LinkCrowded("g1", False)) == []
    bench.tell(LinkCrowded("g1", True))
    assert bench.command(Acknowledge(FENCE, 1, 2)) == []
    assert bench.tell(LinkCrowded("g1", False)) == [PaceTurn("s", 1, False)]


def test_control_does_not_wait_for_a_crowded_link() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.tell(LinkCrowded("g1", True))
    bench.tell(TurnFinished("s", 1, TurnOutcome.COMPLETED))
    bench.command(Signal(FENCE, "c2", "note", {}))
    ended, answer = bench.take()
    assert isinstance(ended, TurnEnded)
    assert isinstance(answer, Answer)


def test_a_session_that_another_gateway_takes_over_is_paced_by_its_new_link() -> None:
    bench = Bench().open()
    bench.command(run(1))
    bench.tell(LinkCrowded("g1", True))
    adopted = Fence("s", 2, "g2")
    assert bench.command(Acknowledge(adopted, 1, 0), "g2") == [PaceTurn("s", 1, False)]
    bench.tell(LinkCrowded("g1", False))
    assert bench.tell(LinkCrowded("g2", True)) == [PaceTurn("s", 1, True)]


def test_a_link_that_was_crowded_when_it_was_lost_paces_nobody() -> None:
    bench = Bench().open()
    bench.tell(LinkCrowded("g1", True))
    bench.tell(GatewayDown("g1"))
    bench.tell(GatewayUp("g1"))
    bench.open(Fence("again", 1, "g1"))
    turn = Run(Fence("again", 1, "g1"), 1, "default")
    assert not any(isinstance(action, PaceTurn) for action in bench.command(turn))


def test_who_has_waited_longest_goes_on_first() -> None:
    bench = Bench()
    for name in "abc":
        bench.open(Fence(name, 1, "g1"))
        bench.command(Run(Fence(name, 1, "g1"), 1, "default"))
    for name in "bac":
        bench.tell(Emitted(name, 1, PIECE))
    bench.tell(LinkCrowded("g1", True))
    resumed = bench.tell(LinkCrowded("g1", False))
    assert resumed == [PaceTurn(name, 1, False) for name in "bac"]


@pytest.mark.parametrize("limits", [RetentionLimits(hard_pieces=3), RetentionLimits(hard_bytes=3)])
def test_a_turn_whose_engine_never_waits_fails_in_the_end(limits: RetentionLimits) -> None:
    bench = with_output(3, ControlLimits(retention=limits))
    assert bench.tell(Emitted("s", 1, PIECE)) == [CancelTurn("s", 1)]
    bench.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    (ended,) = bench.take()
    assert isinstance(ended, TurnEnded)
    assert ended.status is TurnStatus.FAILED
    assert ended.error is not None
    assert ended.error.code == "capacity_exceeded"
    assert bench.control.kept_bytes == 0


def test_an_open_for_which_the_cores_have_no_room_is_refused_and_a_restore_is_not() -> None:
    bench = Bench().open(Fence("a", 1, "g1"))
    for second in range(1, 11):
        bench.now_ms = second * 1_000.0
        bench.tell(ComputeMeasured(ComputeSample(own_s=0.6 * second, others_s=0.0, cores=1.0)))
    use = bench.control.status("think", 0).compute
    assert use is not None
    assert (use.cores, round(use.session, 2)) == (1.0, 0.6)
    bench.command(Open(Fence("b", 1, "g1"), "open-b"))
    (refused,) = bench.take()
    assert isinstance(refused, Answer)
    assert refused.error is not None
    assert refused.error.code == "capacity_exceeded"
    assert "a session takes 0.6 of a core" in refused.error.message
    # What was let in before comes back, and what has gone leaves its place.
    bench.command(Open(Fence("c", 1, "g1"), "open-c", restore=SnapshotOrder(1, 1)))
    (restored,) = bench.take()
    assert code(restored) is None
    for session in ("a", "c"):
        bench.command(Close(Fence(session, 1, "g1"), f"close-{session}", "client"))
    bench.take()
    bench.command(Open(Fence("b", 1, "g1"), "open-b2"))
    assert code(bench.take()[0]) is None
