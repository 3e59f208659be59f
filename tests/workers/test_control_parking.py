"""Parking on the worker's control side: who makes room for whom, and that nobody loses by it."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded, InvalidRequest, SessionStateLost
from protocol.messages import (
    Acknowledge,
    Answer,
    Close,
    Fence,
    Open,
    Park,
    Report,
    RoomWanted,
    Run,
    Signal,
    SnapshotOrder,
    TurnEnded,
    Update,
)
from sessions.ledger import Budget, Ledger
from tests.workers.test_control import DATA, PIECE, Bench, code
from workers.control_events import (
    Action,
    CommandReceived,
    ControlLimits,
    Emitted,
    Event,
    ForgetParked,
    FreeSession,
    GatewayDown,
    GatewayUp,
    OpenSession,
    OperationDone,
    ParkSession,
    ShuttingDown,
    StartTurn,
    StoredFound,
    Tick,
    TurnFinished,
    TurnOutcome,
)

FIRST = SnapshotOrder(1, 1, 1)


def fence(session: str, owner: str = "g1") -> Fence:
    return Fence(session, 1, owner)


class Worker:
    """A control side with bytes for three sessions; what is parked is done when it is told."""

    def __init__(self, total: int = 30, tenant_share: float = 1.0, **limits: Any) -> None:
        self.bench = Bench(
            ControlLimits(**limits),
            ledger=Ledger({HOST: Budget(total, tenant_share=tenant_share)}),
            declare=lambda settings: {HOST: settings.get("bytes", 10)},
            parks=True,
        )
        self.commands = 0

    def open(self, session: str, owner: str = "g1", **fields: Any) -> list[Report]:
        self.bench.command(Open(fence(session, owner), f"open-{session}", **fields), owner)
        self.bench.now_ms += 1
        return self.bench.take()

    def three(self) -> Worker:
        for session in "abc":
            assert code(self.open(session)[0]) is None
        return self

    def park(self, session: str) -> list[Report]:
        self.commands += 1
        self.bench.command(Park(fence(session), f"park-{self.commands}", 100))
        return self.bench.take()

    def work(self, session: str) -> None:
        """A turn, from its begin to its end."""
        self.commands += 1
        self.bench.command(Run(fence(session), self.commands, "default"))
        self.bench.tell(TurnFinished(session, self.commands, TurnOutcome.COMPLETED))
        self.bench.now_ms += 1
        self.bench.take()

    @property
    def reserved(self) -> int:
        return self.bench.ledger.devices()[HOST].reserved


def wanted(reports: list[Report]) -> list[str]:
    return [report.session for report in reports if isinstance(report, RoomWanted)]


def opened(actions: list[Action]) -> list[str]:
    return [action.session for action in actions if isinstance(action, OpenSession)]


def test_a_parked_session_holds_nothing_here() -> None:
    worker = Worker().three()
    (answer,) = worker.park("a")
    assert isinstance(answer, Answer)
    assert answer.result == {"parked": 1}
    assert worker.bench.actions[-2:] == [ParkSession("a", "g1", FIRST, 0, 100), FreeSession("a")]
    assert (worker.reserved, worker.bench.control.sessions) == (20, 2)


def test_a_restored_session_goes_on_at_its_step() -> None:
    worker = Worker()
    control, ledger = worker.bench.control, worker.bench.ledger
    (action,) = control.handle(CommandReceived("g1", Open(fence("a"), "o", restore=FIRST)), 0.0)
    assert isinstance(action, OpenSession)
    control.handle(OperationDone("a", None, {"parks": True, "committed_step": 7}), 0.0)
    assert ledger.of("a") == {HOST: 10}
    assert worker.bench.command(Run(fence("a"), 1, "default", step=9)) == []
    assert [code(r) for r in worker.bench.take()] == ["step_out_of_order"]
    (started,) = worker.bench.command(Run(fence("a"), 2, "default", step=8))
    assert isinstance(started, StartTurn)
    worker.bench.tell(TurnFinished("a", 2, TurnOutcome.FAILED))
    worker.park("a")
    assert ParkSession("a", "g1", FIRST, 7, 100) in worker.bench.actions


def test_what_is_parked_and_does_not_come_back_is_told_as_lost() -> None:
    worker = Worker()
    worker.bench.refusals["open"] = SessionStateLost("nothing is parked")
    assert [code(r) for r in worker.open("a", restore=FIRST)] == ["session_state_lost"]
    assert (worker.reserved, worker.bench.control.sessions) == (0, 0)


@pytest.mark.parametrize("when", ["turn", "output", "engine"])
def test_who_cannot_be_parked_now_stays_as_it_is(when: str) -> None:
    worker = Worker()
    worker.bench.parks = when != "engine"
    worker.open("a")
    if when != "engine":
        worker.bench.command(Run(fence("a"), 1, "default"))
        worker.bench.tell(Emitted("a", 1, PIECE))
    if when == "output":
        worker.bench.tell(TurnFinished("a", 1, TurnOutcome.COMPLETED))
    worker.bench.take()
    expected = "unsupported" if when == "engine" else "session_busy"
    assert [code(r) for r in worker.park("a")] == [expected]
    assert worker.bench.ledger.of("a") == {HOST: 10}
    if when == "output":
        worker.bench.command(Acknowledge(fence("a"), 1, 1))
        assert [code(r) for r in worker.park("a")] == [None]
        assert worker.reserved == 0


def test_a_park_that_fails_leaves_the_session_at_work() -> None:
    worker = Worker().three()
    worker.bench.refusals["park"] = InvalidRequest("the store is full")
    assert [code(r) for r in worker.park("a")] == ["invalid_value"]
    assert worker.reserved == 30
    worker.work("a")


def test_a_park_waits_for_what_came_before_it_and_holds_up_what_comes_after() -> None:
    worker = Worker()
    worker.open("a")
    worker.bench.refusals.clear()
    before = len(worker.bench.actions)
    worker.bench.command(Signal(fence("a"), "s", "x", after_input=1))
    worker.bench.command(Park(fence("a"), "p", 100))
    assert worker.bench.actions[before:] == []
    worker.bench.command(Update(fence("a"), 1, DATA))
    kinds = [type(action).__name__ for action in worker.bench.actions[before:]]
    assert kinds == ["ApplyInput", "SignalSession", "ParkSession", "FreeSession"]


def test_room_is_made_by_who_has_had_nothing_done_for_the_longest() -> None:
    worker = Worker().three()
    worker.work("a")
    assert wanted(worker.open("d")) == ["b"]
    assert opened(worker.bench.actions) == ["a", "b", "c"]
    reports = worker.park("b")
    assert opened(worker.bench.actions) == ["a", "b", "c", "d"]
    assert [r.command for r in reports if isinstance(r, Answer)] == ["park-2", "open-d"]
    assert worker.reserved == 30
    assert wanted(worker.open("e")) == ["c"]


def test_a_lower_priority_makes_room_first_and_none_makes_none() -> None:
    worker = Worker()
    worker.open("a", priority=None)
    worker.open("b", priority=1)
    worker.open("c", priority=0)
    assert wanted(worker.open("d")) == ["c"]
    worker.park("c")
    assert wanted(worker.open("e", settings={"bytes": 20})) == ["d", "b"]


def test_who_has_work_is_waited_for() -> None:
    worker = Worker().three()
    for session in "abc":
        worker.bench.command(Run(fence(session), 1, "default"))
    worker.bench.take()
    assert worker.open("d") == []
    worker.bench.tell(TurnFinished("b", 1, TurnOutcome.COMPLETED))
    assert wanted(worker.bench.take()) == ["b"]
    worker.park("b")
    assert opened(worker.bench.actions)[-1] == "d"


def test_who_has_work_for_too_long_makes_no_room() -> None:
    worker = Worker(room_ms=5_000.0).three()
    for session in "abc":
        worker.bench.command(Run(fence(session), 1, "default"))
    worker.bench.take()
    assert worker.open("d") == []
    worker.bench.after(5_000.0)
    assert [code(r) for r in worker.bench.take()] == ["capacity_exceeded"]
    assert worker.bench.control.sessions == 3


@pytest.mark.parametrize("how", ["closing", "parking"])
def test_who_makes_room_already_is_waited_for_and_nobody_else_asked(how: str) -> None:
    worker = Worker().three()
    control = worker.bench.control
    if how == "parking":
        control.handle(CommandReceived("g1", Park(fence("c"), "p", 100)), worker.bench.now_ms)
        done: Event = OperationDone("c", None, {"parked": 1})
    else:
        worker.bench.command(Run(fence("c"), 1, "default"))
        worker.bench.command(Close(fence("c"), "close", "client"))
        done = TurnFinished("c", 1, TurnOutcome.CANCELLED)
    worker.bench.take()
    assert worker.open("d") == []
    worker.bench.tell(done)
    assert opened(worker.bench.actions)[-1] == "d"


@pytest.mark.parametrize("parks", [True, False])
def test_who_is_being_opened_is_waited_for_and_may_be_asked_then(parks: bool) -> None:
    worker = Worker(10)
    control = worker.bench.control
    control.handle(CommandReceived("g1", Open(fence("a"), "open-a")), 0.0)
    assert worker.open("b") == []
    worker.bench.tell(OperationDone("a", None, {"parks": parks}))
    reports = worker.bench.take()
    assert wanted(reports) == (["a"] if parks else [])
    assert [code(r) for r in reports if isinstance(r, Answer)][1:] == (
        [] if parks else ["capacity_exceeded"]
    )


def test_nobody_is_asked_where_all_together_would_not_do() -> None:
    worker = Worker()
    worker.open("a", priority=None)
    worker.open("b")
    worker.open("c")
    reports = worker.open("d", settings={"bytes": 21})
    assert (wanted(reports), code(reports[0])) == ([], "capacity_exceeded")
    assert [code(r) for r in worker.open("e", settings={"bytes": 31})] == ["session_too_large"]


def test_who_gets_work_after_it_was_asked_is_replaced_by_another() -> None:
    worker = Worker().three()
    assert wanted(worker.open("d")) == ["a"]
    worker.bench.command(Run(fence("a"), 1, "default"))
    assert wanted(worker.bench.take()) == ["b"]
    worker.park("b")
    assert opened(worker.bench.actions)[-1] == "d"


def test_who_was_asked_and_gets_work_is_asked_again_after_it() -> None:
    worker = Worker().three()
    for session in "bc":
        worker.bench.command(Run(fence(session), 1, "default"))
    assert wanted(worker.open("d")) == ["a"]
    worker.bench.command(Run(fence("a"), 1, "default"))
    assert worker.bench.take() == []
    worker.bench.tell(TurnFinished("a", 1, TurnOutcome.COMPLETED))
    assert wanted(worker.bench.take()) == ["a"]


def test_opens_are_served_in_their_order() -> None:
    worker = Worker().three()
    assert wanted(worker.open("d", settings={"bytes": 20})) == ["a", "b"]
    assert worker.open("e") == []
    worker.park("c")
    # There is room for the second now, and it waits for the first.
    assert opened(worker.bench.actions) == ["a", "b", "c"]
    worker.park("a")
    assert opened(worker.bench.actions)[3:] == ["d"]
    worker.park("b")
    assert opened(worker.bench.actions)[3:] == ["d", "e"]


def test_a_close_makes_room_too() -> None:
    worker = Worker().three()
    assert wanted(worker.open("d")) == ["a"]
    worker.bench.command(Close(fence("c"), "close", "client"))
    assert opened(worker.bench.actions)[3:] == ["d"]


def test_an_open_that_waits_is_refused_in_time() -> None:
    worker = Worker(room_ms=5_000.0, room_answer_ms=9_000.0).three()
    worker.open("d")
    deadline = worker.bench.control.deadline_ms
    assert deadline is not None
    worker.bench.after(deadline - worker.bench.now_ms)
    assert [code(r) for r in worker.bench.take()] == ["capacity_exceeded"]
    assert (worker.bench.control.sessions, worker.bench.control.deadline_ms) == (3, None)


def test_who_does_not_answer_is_passed_over_and_asked_again_when_there_is_no_other() -> None:
    worker = Worker(room_answer_ms=1_000.0).three()
    asked = wanted(worker.open("d"))
    for _ in range(3):
        deadline = worker.bench.control.deadline_ms
        assert deadline is not None
        worker.bench.after(deadline - worker.bench.now_ms)
        asked += wanted(worker.bench.take())
    assert asked == ["a", "b", "c", "a"]
    worker.park("b")
    assert opened(worker.bench.actions)[3:] == ["d"]


def test_who_hangs_while_it_is_put_away_is_passed_over() -> None:
    worker = Worker(room_answer_ms=1_000.0, room_done_ms=2_500.0).three()
    worker.bench.hangs.add("park")
    asked_ms = worker.bench.now_ms
    assert wanted(worker.open("d")) == ["a"]
    assert worker.park("a") == []
    asked: list[str] = []
    while not asked:
        deadline = worker.bench.control.deadline_ms
        assert deadline is not None
        worker.bench.after(deadline - worker.bench.now_ms)
        asked = wanted(worker.bench.take())
    assert (asked, worker.bench.now_ms - asked_ms) == (["b"], 2_501.0)
    worker.bench.hangs.clear()
    worker.park("b")
    assert opened(worker.bench.actions)[3:] == ["d"]


def test_who_has_nobody_to_park_it_is_not_asked() -> None:
    worker = Worker()
    worker.bench.tell(GatewayUp("g2"))
    worker.open("a", "g2")
    worker.open("b")
    worker.open("c")
    worker.bench.tell(GatewayDown("g2"))
    assert wanted(worker.open("d")) == ["b"]
    worker.bench.tell(GatewayDown("g1"))
    worker.bench.tell(GatewayUp("g3"))
    assert [code(r) for r in worker.open("e", "g3")] == ["capacity_exceeded"]


def test_who_could_not_be_put_away_is_not_asked_over_and_over() -> None:
    worker = Worker(room_ms=5_000.0).three()
    worker.bench.refusals["park"] = CapacityExceeded("no space left")
    assert wanted(worker.open("d")) == ["a"]
    assert wanted(worker.park("a")) == ["b"]
    assert wanted(worker.park("b")) == ["c"]
    assert [code(r) for r in worker.park("c")] == ["capacity_exceeded", "capacity_exceeded"]
    assert [code(r) for r in worker.open("e")] == ["capacity_exceeded"]
    worker.bench.after(5_000.0)
    assert wanted(worker.open("f")) == ["a"]


def test_an_open_that_waits_and_is_closed_was_never_there() -> None:
    worker = Worker().three()
    worker.open("d")
    worker.bench.command(Close(fence("d"), "close", "client"))
    assert [code(r) for r in worker.bench.take()] == ["capacity_exceeded", None]
    assert opened(worker.bench.actions) == ["a", "b", "c"]
    assert worker.bench.control.sessions == 3


def test_a_session_that_is_closed_while_it_waits_to_come_back_leaves_nothing_in_the_store() -> None:
    worker = Worker().three()
    worker.open("d", restore=FIRST)
    assert worker.bench.command(Close(fence("d"), "close", "client")) == [ForgetParked("d", 1, 1)]


def test_what_waits_to_come_back_when_its_worker_stops_stays_parked() -> None:
    worker = Worker().three()
    worker.open("d", restore=FIRST)
    worker.bench.tell(ShuttingDown())
    assert ForgetParked("d", 1, 1) not in worker.bench.actions
    assert [code(r) for r in worker.bench.take() if isinstance(r, Answer)] == ["capacity_exceeded"]


@pytest.mark.parametrize("how", ["gateway", "shutdown"])
def test_an_open_that_waits_when_all_ends_was_never_there(how: str) -> None:
    worker = Worker(owner_gone_ms=0.0).three()
    worker.open("d")
    worker.bench.tell(ShuttingDown() if how == "shutdown" else GatewayDown("g1"))
    worker.bench.after(0.0)
    assert (worker.reserved, worker.bench.control.sessions) == (0, 0)
    assert "d" not in opened(worker.bench.actions)


def test_a_session_that_is_closed_while_it_is_parked_leaves_nothing_in_the_store() -> None:
    worker = Worker()
    control = worker.bench.control
    worker.open("a")
    control.handle(CommandReceived("g1", Park(fence("a"), "p", 100)), 0.0)
    assert worker.bench.command(Close(fence("a"), "close", "client")) == []
    actions = worker.bench.tell(OperationDone("a", None, {"parked": 1}))
    assert actions == [FreeSession("a"), ForgetParked("a", 1, 1)]
    assert worker.reserved == 0


def test_what_is_parked_of_a_session_that_is_not_here_is_forgotten_with_it() -> None:
    worker = Worker()
    assert worker.bench.command(Close(fence("a"), "close", "client")) == [ForgetParked("a", 1, 1)]


def test_a_turn_that_comes_too_late_is_told_that_the_session_has_gone() -> None:
    worker = Worker().three()
    worker.park("a")
    worker.bench.command(Run(fence("a"), 1, "default"))
    (ended,) = worker.bench.take()
    assert isinstance(ended, TurnEnded)
    assert code(ended) == "session_state_lost"


def test_an_error_of_the_store_is_no_error_of_the_session() -> None:
    worker = Worker().three()
    worker.bench.refusals["park"] = CapacityExceeded("no space left")
    worker.open("d")
    worker.park("a")
    assert worker.reserved == 30
    worker.work("a")


def test_an_open_that_comes_again_after_its_session_has_gone_is_answered_as_it_was() -> None:
    worker = Worker()
    worker.open("a")
    worker.park("a")
    worker.bench.command(Open(fence("a"), "back", restore=FIRST))
    (first,) = worker.bench.take()
    before = len(worker.bench.actions)
    # It was answered long ago, and must not end what has been opened since.
    worker.bench.command(Open(fence("a"), "open-a"))
    (again,) = worker.bench.take()
    assert isinstance(again, Answer)
    assert (again.command, again.error) == ("open-a", None)
    assert worker.bench.actions[before:] == []
    worker.bench.command(Close(fence("a"), "close", "client"))
    worker.bench.take()
    worker.bench.command(Open(fence("a"), "back", restore=FIRST))
    assert worker.bench.take() == [first]
    assert worker.bench.control.sessions == 0


def test_a_tenant_that_has_its_share_makes_room_for_itself() -> None:
    worker = Worker(40, tenant_share=0.5)
    worker.open("x", tenant="other")
    worker.open("a", tenant="one")
    worker.open("b", tenant="one")
    assert wanted(worker.open("c", tenant="one")) == ["a"]
    worker.park("a")
    assert opened(worker.bench.actions)[-1] == "c"


def test_what_is_parked_of_a_gateway_that_does_not_come_back_is_forgotten() -> None:
    worker = Worker(parked_alone_ms=30_000.0).three()
    for session in "ab":
        worker.park(session)
    worker.bench.command(Open(fence("b"), "back", restore=FIRST))
    worker.bench.tell(GatewayDown("g1"))
    assert ForgetParked("a", 1, 1) not in worker.bench.after(29_999)
    assert ForgetParked("a", 1, 1) in worker.bench.after(1)
    assert ForgetParked("b", 1, 1) not in worker.bench.actions


def test_what_an_earlier_worker_stored_goes_with_its_gateway_too() -> None:
    worker = Worker(parked_alone_ms=30_000.0)
    worker.bench.tell(StoredFound("x", "gone", SnapshotOrder(2, 3, 1)))
    worker.bench.tell(StoredFound("y", "g1", SnapshotOrder(2, 4, 1)))
    worker.bench.tell(StoredFound("z", "late", SnapshotOrder(2, 5, 1)))
    worker.bench.tell(GatewayUp("late"))
    assert ForgetParked("x", 2, 3) not in worker.bench.after(29_999)
    assert ForgetParked("x", 2, 3) in worker.bench.after(1)
    worker.bench.after(60_000)
    assert not {"y", "z"} & {a.session for a in worker.bench.actions if isinstance(a, ForgetParked)}
    worker.bench.tell(GatewayDown("g1"))
    assert ForgetParked("y", 2, 4) in worker.bench.after(30_000)


def test_what_is_parked_outlives_a_link() -> None:
    worker = Worker(parked_alone_ms=30_000.0).three()
    worker.park("a")
    worker.bench.tell(GatewayDown("g1"))
    worker.bench.after(10_000)
    worker.bench.tell(GatewayUp("g1"))
    worker.bench.after(60_000)
    assert ForgetParked("a", 1, 1) not in worker.bench.actions
    worker.bench.command(Open(fence("a"), "back", restore=FIRST))
    assert opened(worker.bench.actions)[-1] == "a"


def test_a_session_that_is_closed_while_it_comes_back_in_vain_leaves_nothing_in_the_store() -> None:
    worker = Worker()
    control = worker.bench.control
    control.handle(CommandReceived("g1", Open(fence("a"), "back", restore=FIRST)), 0.0)
    worker.bench.command(Close(fence("a"), "close", "client"))
    full = CapacityExceeded("every slot is in use").info()
    actions = worker.bench.tell(OperationDone("a", full))
    assert actions == [FreeSession("a"), ForgetParked("a", 1, 1)]


def test_nobody_is_asked_to_make_room_for_who_is_gone() -> None:
    worker = Worker().three()
    worker.bench.tell(GatewayUp("g2"))
    assert wanted(worker.open("d", owner="g2")) == ["a"]
    worker.bench.tell(GatewayDown("g2"))
    assert worker.bench.control.sessions == 3
    # Who was asked does not answer, and nobody else is asked in its place.
    worker.bench.now_ms += 1_500
    worker.bench.tell(Tick())
    assert wanted(worker.bench.take()) == []
