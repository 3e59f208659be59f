"""Room that an engine asks for in the midst of a step, or as it restores: others make it."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded
from protocol.messages import Answer, Close, Park, Run, SnapshotOrder, Stop
from tests.workers.test_control import code
from tests.workers.test_control_parking import Worker, fence, wanted
from workers.control_events import (
    Action,
    GatewayDown,
    OpenSession,
    OperationDone,
    RoomAsked,
    RoomGiven,
    SessionMeasured,
    Tick,
    TurnFinished,
    TurnOutcome,
)


class Stepping(Worker):
    """Three sessions with all the bytes, one of them in the midst of a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.three()
        self.run("a")

    def run(self, session: str) -> None:
        self.bench.command(Run(fence(session), 1, "default", step=1))
        self.bench.take()

    def ask(self, session: str = "a", needs: int = 15, turn: int | None = 1) -> list[Action]:
        return self.bench.tell(RoomAsked(session, turn, {HOST: needs}))

    def of(self, session: str = "a") -> int:
        return self.bench.ledger.of(session)[HOST]


def given(actions: list[Action]) -> list[tuple[str, str | None]]:
    """Who has been answered, and with which error."""
    return [
        (action.session, None if action.error is None else action.error.code)
        for action in actions
        if isinstance(action, RoomGiven)
    ]


def test_a_step_that_needs_more_has_who_is_idle_parked() -> None:
    worker = Stepping()
    assert given(worker.ask()) == []
    assert wanted(worker.bench.take()) == ["b"]
    worker.commands += 1
    actions = worker.bench.command(Park(fence("b"), "p", 100))
    assert given(actions) == [("a", None)]
    assert (worker.of(), worker.reserved) == (15, 25)
    # Once the step is over it counts with what it holds.
    worker.bench.tell(SessionMeasured("a", {HOST: 12}))
    worker.bench.tell(TurnFinished("a", 1, TurnOutcome.COMPLETED))
    assert (worker.of(), worker.reserved) == (12, 22)


def test_where_there_is_room_it_is_given_at_once() -> None:
    worker = Stepping(total=40)
    assert given(worker.ask(needs=20)) == [("a", None)]
    assert worker.of() == 20
    # The rest of the step may need more, and what was reserved before is not counted twice.
    assert given(worker.ask(needs=15)) == [("a", None)]
    assert worker.of() == 15
    worker.bench.tell(TurnFinished("a", 1, TurnOutcome.FAILED))
    assert worker.of() == 10


def test_where_nobody_can_make_room_the_step_is_told_at_once() -> None:
    worker = Stepping()
    assert given(worker.ask(needs=50)) == [("a", "session_too_large")]
    assert given(worker.ask(needs=31)) == [("a", "capacity_exceeded")]
    for session in "bc":
        worker.bench.command(Close(fence(session), "close", "client"))
    worker.open("d", priority=None)
    worker.open("e", priority=None)
    worker.bench.take()
    assert given(worker.ask()) == [("a", "capacity_exceeded")]
    assert worker.of() == 10


def test_steps_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    worker = Stepping()
    for session in "bc":
        worker.run(session)
    assert given(worker.ask("a", 20)) == given(worker.ask("b", 20)) == []
    # Nobody is left who could make room: the first gives up, and makes it in the end.
    assert given(worker.ask("c", 20)) == [("a", "capacity_exceeded")]
    worker.bench.tell(TurnFinished("a", 1, TurnOutcome.FAILED))
    assert wanted(worker.bench.take()) == ["a"]
    assert given(worker.bench.command(Park(fence("a"), "p", 100))) == [("b", None)]


def test_nobody_is_waited_for_for_ever() -> None:
    worker = Stepping()
    for session in "bc":
        worker.run(session)
    worker.ask()
    worker.bench.now_ms += 4_999
    assert given(worker.bench.tell(Tick())) == []
    worker.bench.now_ms += 1
    assert given(worker.bench.tell(Tick())) == [("a", "capacity_exceeded")]


@pytest.mark.parametrize("end", ["stopped", "closed", "gateway gone"])
def test_who_is_gone_waits_for_no_room(end: str) -> None:
    worker = Stepping()
    worker.ask()
    match end:
        case "stopped":
            worker.bench.command(Stop(fence("a"), 1))
        case "closed":
            actions = worker.bench.command(Close(fence("a"), "close", "client"))
            assert given(actions) == [("a", "session_state_lost")]
        case "gateway gone":
            worker.bench.tell(GatewayDown("g1"))
    worker.bench.tell(TurnFinished("a", 1, TurnOutcome.CANCELLED))
    worker.bench.take()
    assert worker.bench.control._rooms._waiting == {}
    assert worker.reserved == (20 if end == "closed" else 30)
    # What comes too late is no reason to reserve anything.
    if end != "closed":
        assert given(worker.ask()) == [("a", "session_state_lost")]


def test_a_state_that_comes_back_larger_than_was_declared_has_room_made_for_it() -> None:
    worker = Worker()
    for session in "ab":
        worker.open(session)
    worker.bench.hangs.add("open")
    assert worker.open("c", restore=SnapshotOrder(1, 1, 1)) == []
    assert given(worker.bench.tell(RoomAsked("c", None, {HOST: 20}))) == []
    assert wanted(worker.bench.take()) == ["a"]
    worker.bench.hangs.clear()
    actions = worker.bench.command(Park(fence("a"), "p", 100))
    assert given(actions) == [("c", None)]
    assert not [one for one in actions if isinstance(one, OpenSession)]
    worker.bench.tell(SessionMeasured("c", {HOST: 20}))
    worker.bench.take()
    worker.bench.tell(OperationDone("c", None, {"parks": True, "committed_step": 3}))
    (answer,) = [one for one in worker.bench.take() if isinstance(one, Answer)]
    assert code(answer) is None
    assert worker.bench.ledger.of("c") == {HOST: 20}


def test_a_restore_that_is_not_to_wait_is_refused_at_once() -> None:
    worker = Worker()
    for session in "ab":
        worker.open(session)
    worker.bench.hangs.add("open")
    worker.open("c", restore=SnapshotOrder(1, 1, 1), waits=False)
    assert given(worker.bench.tell(RoomAsked("c", None, {HOST: 20}))) == [
        ("c", CapacityExceeded.code)
    ]
    error = CapacityExceeded("no room").info()
    worker.bench.tell(OperationDone("c", error))
    assert [code(one) for one in worker.bench.take()] == ["capacity_exceeded"]
    assert worker.reserved == 20
