"""States that are stored after each turn, on the worker's control side."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import CapacityExceeded
from protocol.messages import (
    CHECKPOINT,
    RELEASE,
    RESET,
    REWIND,
    Answer,
    Close,
    Open,
    Park,
    Run,
    Signal,
    SnapshotOrder,
    SnapshotTaken,
)
from tests.workers.test_control import Bench
from tests.workers.test_control_parking import fence
from workers.control_events import (
    Action,
    CommandReceived,
    ControlLimits,
    ForgetParked,
    FreeSession,
    GatewayDown,
    OpenSession,
    OperationDone,
    ParkSession,
    Restore,
    StartTurn,
    TurnFinished,
    TurnOutcome,
)


def bench(**fields: Any) -> Bench:
    """A control side with a session whose state is stored after each turn."""
    it = Bench(ControlLimits(owner_gone_ms=0.0), parks=True)
    it.command(Open(fence("a"), "open", opening=2, durable_until_s=100, **fields))
    it.take()
    return it


def stored(number: int, step: int) -> ParkSession:
    return ParkSession("a", "g1", SnapshotOrder(1, 2, number), step, 100, stays=True)


def step(it: Bench, number: int, outcome: TurnOutcome = TurnOutcome.COMPLETED) -> list[Action]:
    turn = 100 * len(it.actions) + number
    it.command(Run(fence("a"), turn, "default", step=number))
    return it.tell(TurnFinished("a", turn, outcome))


def test_each_committed_step_is_stored_and_told() -> None:
    it = bench()
    assert step(it, 1) == [stored(1, 1)]
    assert it.take()[-1] == SnapshotTaken("a", SnapshotOrder(1, 2, 1), 1)
    assert step(it, 2, TurnOutcome.FAILED) == []
    assert step(it, 2) == [stored(2, 2)]


def test_a_turn_begins_when_the_state_before_it_is_written() -> None:
    it = Bench(parks=True)
    it.command(Open(fence("a"), "open", durable_until_s=100))
    it.command(Run(fence("a"), 1, "default", step=1))
    control = it.control
    control.handle(TurnFinished("a", 1, TurnOutcome.COMPLETED), 0.0)
    assert control.handle(CommandReceived("g1", Run(fence("a"), 2, "default", step=2)), 0.0) == []
    actions = it.tell(OperationDone("a"))
    assert isinstance(actions[0], StartTurn)


def test_a_store_that_is_full_is_told_once_and_again_after_it_was_not() -> None:
    it = bench()
    it.refusals["park"] = CapacityExceeded("full")
    told = []
    for number in range(1, 6):
        if number == 3:
            del it.refusals["park"]
        if number == 4:
            it.refusals["park"] = CapacityExceeded("full")
        step(it, number)
        told += [r.error is None for r in it.take() if isinstance(r, SnapshotTaken)]
    assert told == [False, True, False]


def test_a_reset_is_stored_and_counts_on() -> None:
    it = bench()
    step(it, 1)
    it.take()
    assert it.command(Signal(fence("a"), "reset", RESET))[-1] == stored(2, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "at"), [(CHECKPOINT, {}, 2), (REWIND, {"step": 1}, 1), (RELEASE, {}, 2)]
)
def test_what_changes_the_state_between_two_steps_is_stored(
    name: str, arguments: dict[str, Any], at: int
) -> None:
    it = bench()
    step(it, 1)
    step(it, 2)
    it.take()
    # It takes the place of the one before, whichever step that was after.
    assert it.command(Signal(fence("a"), "change", name, arguments))[-1] == stored(3, at)
    assert it.take()[-1] == SnapshotTaken("a", SnapshotOrder(1, 2, 3), at)


def test_what_was_stored_outlives_the_link_to_its_owner_but_not_for_long() -> None:
    it = bench()
    step(it, 1)
    it.tell(GatewayDown("g1"))
    assert it.after(0.0) == [FreeSession("a")]
    assert it.control.sessions == 0
    assert it.after(30_000.0) == [ForgetParked("a", 1, 2)]


def test_a_close_takes_what_was_stored_along() -> None:
    it = bench()
    step(it, 1)
    actions = it.command(Close(fence("a"), "close", "client", 2))
    assert actions == [FreeSession("a"), ForgetParked("a", 1, 2)]


def test_a_close_that_is_about_an_earlier_opening_ends_nothing() -> None:
    it = bench()
    assert it.command(Close(fence("a"), "old", "lost", 1)) == [ForgetParked("a", 1, 1)]
    assert it.take() == [Answer("a", "old")]
    assert it.control.sessions == 1


def test_what_is_restored_stays_in_the_store() -> None:
    wanted = SnapshotOrder(1, 1, 7)
    it = bench(restore=wanted)
    (opened,) = [action for action in it.actions if isinstance(action, OpenSession)]
    assert opened.restore == Restore(wanted, SnapshotOrder(1, 2), stays=True)


def test_it_is_parked_after_what_was_stored() -> None:
    it = bench()
    step(it, 1)
    actions = it.command(Park(fence("a"), "park", 100))
    assert actions == [ParkSession("a", "g1", SnapshotOrder(1, 2, 2), 1, 100), FreeSession("a")]
