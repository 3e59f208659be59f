"""Sessions that begin as another one is, on the worker's control side."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest
from protocol.messages import (
    Answer,
    Close,
    Fork,
    Open,
    Park,
    RoomWanted,
    Run,
    SnapshotOrder,
    Stop,
)
from sessions.ledger import Budget, Ledger
from tests.workers.test_control import Bench, code
from tests.workers.test_control_parking import fence
from workers.control_events import (
    AbandonTurn,
    Action,
    CommitTurn,
    ControlLimits,
    FreeSession,
    OpenSession,
    ParkSession,
    StartTurn,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
)


def nothing() -> None:
    """A commit: the control side hands it on and never calls it."""


def bench(**fields: Any) -> Bench:
    """A control side with a session `a` that has made two steps."""
    it = Bench(parks=True, **fields)
    it.command(Open(fence("a"), "open"))
    for number in (1, 2):
        begin(it, number)
        finish(it, number)
    it.take()
    return it


def begin(it: Bench, number: int, session: str = "a") -> list[Action]:
    return it.command(Run(fence(session), number, "default", step=number))


def finish(it: Bench, number: int, session: str = "a") -> list[Action]:
    """The step is done, and committed."""
    done = TurnFinished(session, number, TurnOutcome.COMPLETED, None, {}, nothing)
    assert it.tell(done) == [CommitTurn(session, number, nothing)]
    return it.tell(TurnCommitted(session, number))


def fork(it: Bench, name: str = "b", source: str = "a", **fields: Any) -> list[Action]:
    return it.command(Open(fence(name), "fork", {"seed": 1}, fork=Fork(source), **fields))


def made(name: str = "b", source: str = "a") -> OpenSession:
    return OpenSession(name, 1, {"seed": 1}, "g1", fork=Fork(source))


def test_a_fork_begins_after_the_step_that_the_other_has_committed() -> None:
    it = bench()
    assert fork(it) == [made()]
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert (answer.error, answer.result["committed_step"]) == (None, 2)
    # Both go on from there, each by itself.
    assert isinstance(begin(it, 3, "b")[0], StartTurn)
    assert isinstance(begin(it, 3)[0], StartTurn)


def test_a_fork_waits_for_the_step_that_runs() -> None:
    it = bench()
    begin(it, 3)
    assert fork(it) == []
    assert it.take() == []
    assert finish(it, 3) == [made()]
    assert isinstance(answer := it.take()[-1], Answer)
    assert answer.result["committed_step"] == 3


@pytest.mark.parametrize("ends", ["cancelled", "never"])
def test_a_fork_begins_before_a_step_that_comes_to_nothing(ends: str) -> None:
    it = bench()
    begin(it, 3)
    fork(it)
    it.command(Stop(fence("a"), 3))
    if ends == "cancelled":
        assert it.tell(TurnFinished("a", 3, TurnOutcome.CANCELLED)) == [made()]
    else:
        assert it.after(ControlLimits().cancel_ms) == [AbandonTurn("a", 3), made()]
    assert isinstance(answer := it.take()[-1], Answer)
    assert answer.result["committed_step"] == 2


def test_a_fork_of_what_is_not_here_is_refused() -> None:
    it = bench()
    assert fork(it, source="nobody") == []
    (answer,) = it.take()
    assert code(answer) == "fork_source_lost"
    assert it.control.sessions == 1


def test_a_fork_of_anothers_session_is_refused() -> None:
    it = bench()
    for command in (
        Open(fence("b", "g2"), "fork", fork=Fork("a")),
        Open(fence("c"), "fork", tenant="another", fork=Fork("a")),
    ):
        assert it.command(command, command.fence.owner) == []
        (answer,) = it.take()
        assert code(answer) == "fork_source_lost"


def test_a_fork_of_a_state_that_is_lost_is_refused() -> None:
    it = bench()
    begin(it, 3)
    fork(it)
    it.tell(TurnFinished("a", 3, TurnOutcome.COMPLETED, None, {}, nothing))
    it.tell(TurnCommitted("a", 3, EngineFailed("no memory").info()))
    assert code(it.take()[-1]) == "fork_source_lost"
    assert it.control.sessions == 1


def test_a_fork_whose_source_is_closed_is_refused_once_its_step_has_ended() -> None:
    it = bench()
    begin(it, 3)
    fork(it)
    it.command(Close(fence("a"), "close", "client"))
    it.tell(TurnFinished("a", 3, TurnOutcome.CANCELLED))
    answers = [report for report in it.take() if isinstance(report, Answer)]
    assert {a.session: a.error and a.error.code for a in answers} == {
        "a": None,
        "b": "fork_source_lost",
    }
    assert it.control.sessions == 0


def test_a_fork_that_is_closed_before_it_has_begun_leaves_nothing() -> None:
    ledger = Ledger({HOST: Budget(100)})
    it = bench(ledger=ledger, declare=lambda settings: {HOST: 10})
    begin(it, 3)
    fork(it)
    assert ledger.of("b") == {HOST: 10}
    assert it.command(Close(fence("b"), "close", "client")) == []
    opened, closed = it.take()
    assert (code(opened), closed) == ("session_state_lost", Answer("b", "close"))
    assert (ledger.of("b"), it.control.sessions) == ({}, 1)
    # The other is as it was.
    assert finish(it, 3) == []
    it.command(Park(fence("a"), "park", 100))
    assert isinstance(it.actions[-2], ParkSession)


def test_a_fork_that_its_engine_refuses_leaves_nothing() -> None:
    ledger = Ledger({HOST: Budget(100)})
    it = bench(ledger=ledger, declare=lambda settings: {HOST: 10})
    it.refusals["open"] = InvalidRequest("no such seed", field="seed")
    fork(it)
    (answer,) = it.take()
    assert code(answer) == "invalid_value"
    assert (ledger.of("b"), it.control.sessions) == ({}, 1)


def test_what_is_forked_is_not_put_away_meanwhile() -> None:
    it = bench()
    begin(it, 3)
    fork(it)
    # Its step, the fork and the park all wait, in this order.
    it.command(Park(fence("a"), "park", 100))
    assert finish(it, 3) == [made()]
    it.take()
    assert isinstance(it.command(Park(fence("a"), "again", 100))[0], ParkSession)


def test_what_is_to_be_forked_makes_no_room_for_its_fork() -> None:
    ledger = Ledger({HOST: Budget(20)})
    it = bench(ledger=ledger, declare=lambda settings: {HOST: 10})
    it.command(Open(fence("c"), "open"))
    it.take()
    fork(it)
    assert [report for report in it.take() if isinstance(report, RoomWanted)] == [RoomWanted("c")]
    assert it.command(Park(fence("a"), "park", 100)) == []
    (kept,) = it.take()
    assert code(kept) == "session_busy"
    it.command(Park(fence("c"), "park", 100))
    assert made() in it.actions
    assert FreeSession("c") in it.actions


def test_a_fork_for_which_there_is_never_room_is_refused() -> None:
    ledger = Ledger({HOST: Budget(10)})
    it = bench(ledger=ledger, declare=lambda settings: {HOST: 10})
    fork(it, waits=False)
    (answer,) = it.take()
    assert code(answer) == CapacityExceeded.code
    assert it.control.sessions == 1


def test_the_state_of_a_fork_is_stored_from_the_beginning_where_states_are() -> None:
    it = bench()
    actions = fork(it, durable_until_s=100)
    assert actions == [
        made(),
        ParkSession("b", "g1", SnapshotOrder(1, 1, 1), 2, 100, stays=True),
    ]
