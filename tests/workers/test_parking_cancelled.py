"""Parking and restoring, cancelled at each of their suspensions: the store is as if never asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loadtest.synthetic_step import StepOptions, SyntheticStep
from protocol.errors import SessionStateLost
from protocol.messages import SnapshotOrder
from tests.cancel_at import Cut, Moment, at_every_suspension
from workers.control_events import ForgetParked, ParkSession, Restore
from workers.engine import EngineSession, ParkableSession
from workers.parking import Parking
from workers.snapshots import SnapshotPlace, SnapshotStore

SIZE = 100_000
PARK = ParkSession("s", "g1", SnapshotOrder(1, 1, 1), 3, 4_000_000_000)
RESTORE = Restore(SnapshotOrder(1, 1, 1), SnapshotOrder(1, 2))
FORGET = ForgetParked("s", 1, 2)


class Bench:
    """One engine, its store, and how much is in both."""

    def __init__(self, directory: Path) -> None:
        self.engine = SyntheticStep(StepOptions(state_bytes=SIZE))
        self.store = SnapshotStore([SnapshotPlace(str(directory), 1 << 24)], "deployment")
        self.parking = Parking(self.store, self.engine, "step", "world")

    def session(self) -> ParkableSession:
        session = self.engine.open("s", {"seed": 7}, lambda name, arguments: None)
        assert isinstance(session, ParkableSession)
        return session

    async def park(self) -> None:
        session = self.session()
        await self.parking.park(PARK, session, SIZE)
        session.close()

    async def restore(self) -> tuple[EngineSession, int]:
        return await self.parking.restore("s", {}, lambda name, arguments: None, RESTORE)

    async def settled(self) -> tuple[int, int]:
        """Snapshots and drafts, once what was asked of the store is done."""
        await self.parking.settled()
        (use,) = self.store.usage()
        return use.snapshots, use.drafts


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.parking.close()
    assert bench.engine.open_sessions == 0


async def test_a_park_that_is_cancelled_leaves_nothing(bench: Bench) -> None:
    async def attempt(cut: Cut) -> None:
        session = bench.session()
        size = await cut.run(bench.parking.park(PARK, session, SIZE))
        expected = (0, 0) if size is None else (1, 0)
        assert await bench.settled() == expected
        session.close()
        bench.parking.forget(FORGET)
        assert await bench.settled() == (0, 0)

    points = await at_every_suspension(attempt)
    print(f"park: cancelled at {points} points")
    assert points >= 3 * len(Moment)


async def test_a_restore_that_is_cancelled_leaves_the_state_where_it_was(bench: Bench) -> None:
    async def attempt(cut: Cut) -> None:
        await bench.park()
        restored = await cut.run(bench.restore())
        if restored is not None:
            session, step = restored
            assert step == 3
            session.close()
        assert await bench.settled() == ((1, 0) if restored is None else (0, 0))
        bench.parking.forget(FORGET)

    points = await at_every_suspension(attempt)
    print(f"restore: cancelled at {points} points")
    assert points >= 2 * len(Moment)


async def test_what_cannot_be_restored_is_forgotten(bench: Bench) -> None:
    with pytest.raises(SessionStateLost, match="no snapshot"):
        await bench.restore()
    await bench.park()
    other = Parking(bench.store, SyntheticStep(StepOptions(state_bytes=5)), "step", "world")
    with pytest.raises(SessionStateLost, match="weights"):
        await other.restore("s", {}, lambda name, arguments: None, RESTORE)
    await other.close()
    assert await bench.settled() == (0, 0)


async def test_a_park_that_is_asked_for_again_takes_the_place_of_the_first(bench: Bench) -> None:
    await asyncio.gather(bench.park(), bench.park())
    assert await bench.settled() == (1, 0)


async def test_what_cannot_be_removed_is_in_the_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(session: str, stage: str, through: SnapshotOrder) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(bench.store, "remove", refuse)
    with capture_logs() as logs:
        bench.parking.forget(FORGET)
        await bench.parking.settled()
    assert [entry["event"] for entry in logs] == ["parking_failed"]
