"""Which replica can take sessions, and when who waits for one is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.placement import WEDGED_MS, Placement, Replica
from gateway.pools import Pools
from protocol.errors import CapacityExceeded
from protocol.link_frames import WorkerInfo
from protocol.messages import Report, WorkerStatus

WAIT_S = 10


class SyntheticLink:
    """A link whose worker is played by the test."""

    def __init__(
        self,
        endpoint: str,
        incarnation: str,
        *,
        on_report: Callable[[Report], None],
        on_up: Callable[[str, WorkerInfo], None],
        on_down: Callable[[str], None],
        on_crowded: Callable[[bool], None],
    ) -> None:
        self.endpoint = endpoint
        self.ready = False
        self.worker: str | None = None
        self.crowded = False
        self._on_report, self._on_up, self._on_down = on_report, on_up, on_down
        self._on_crowded = on_crowded

    def come(self) -> None:
        self.ready, self.worker = True, "worker.1"
        self._on_up(self.worker, WorkerInfo("think", "synthetic", True))

    def go(self) -> None:
        self.ready, self.worker = False, None
        self._on_down("synthetic end")

    def crowd(self, crowded: bool) -> None:
        self.crowded = crowded
        self._on_crowded(crowded)

    def beat(self, waiting: int, progress: int) -> None:
        self._on_report(WorkerStatus("think", 1, waiting, progress))

    def close(self) -> None:
        self.ready = False


@dataclass
class Told:
    """What the pools have told of."""

    now_ms: float = 0.0
    ready: list[str] = field(default_factory=list)
    lost: list[Replica] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    crowded: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)


async def no_arena(endpoint: str) -> str | None:
    return None


def one_worker(
    monkeypatch: pytest.MonkeyPatch, attach: Callable[[str], Awaitable[str | None]] = no_arena
) -> tuple[Placement, SyntheticLink, Told]:
    monkeypatch.setattr("gateway.pools.WorkerLink", SyntheticLink)
    told = Told()
    placement = Placement()
    pools = Pools(
        "gateway-1",
        placement,
        lambda: told.now_ms,
        on_report=lambda replica, report: None,
        on_ready=told.ready.append,
        on_lost=told.lost.append,
        on_change=lambda replica: told.changed.set(),
        on_crowded=lambda replica: told.crowded.put_nowait(replica.crowded),
        attach=attach,
    )
    link: Any = pools.add("think-0", "think", "ipc:///nowhere/think").link
    return placement, link, told


async def attached(placement: Placement, told: Told) -> None:
    """Wait until the only worker's arena is attached, or known not to be."""
    async with asyncio.timeout(WAIT_S):
        while placement.all()[0].attaching:
            told.changed.clear()
            await told.changed.wait()


async def test_a_worker_takes_sessions_once_its_arena_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement, link, told = one_worker(monkeypatch)
    link.come()
    with pytest.raises(CapacityExceeded):
        placement.pick("think", told.now_ms)
    await attached(placement, told)
    assert placement.pick("think", told.now_ms) is placement.all()[0]
    assert told.ready == ["think"]


async def test_an_arena_that_fails_to_attach_leaves_the_worker_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def failing(endpoint: str) -> str | None:
        raise RuntimeError("synthetic fault")

    placement, link, told = one_worker(monkeypatch, failing)
    link.come()
    await attached(placement, told)
    assert placement.pick("think", told.now_ms).consumer is None
    assert told.ready == ["think"]


async def test_a_worker_lost_while_its_arena_attaches_is_attached_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    begun: asyncio.Queue[int] = asyncio.Queue()
    numbers = iter(range(2))

    async def gated(endpoint: str) -> str | None:
        number = next(numbers)
        begun.put_nowait(number)
        await gates[number].wait()
        return f"worker-{number}"

    placement, link, told = one_worker(monkeypatch, gated)
    (replica,) = placement.all()
    link.come()
    assert await begun.get() == 0
    gates[0].set()
    link.go()
    link.come()
    gates[1].set()
    await attached(placement, told)
    assert await begun.get() == 1
    assert replica.consumer == "worker-1"
    assert told.lost == [replica]


async def test_a_wedged_worker_that_gets_on_again_is_ready_for_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement, link, told = one_worker(monkeypatch)
    link.come()
    await attached(placement, told)
    link.beat(1, progress=1)
    link.beat(1, progress=1)
    told.now_ms += WEDGED_MS
    with pytest.raises(CapacityExceeded):
        placement.pick("think", told.now_ms)
    told.ready.clear()
    link.beat(1, progress=1)
    assert told.ready == []
    link.beat(1, progress=2)
    assert told.ready == ["think"]
    assert placement.pick("think", told.now_ms) is placement.all()[0]


async def test_a_crowded_link_is_told_of_after_the_send_that_filled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, link, told = one_worker(monkeypatch)
    link.crowd(True)
    assert told.crowded.empty()
    async with asyncio.timeout(WAIT_S):
        assert await told.crowded.get()
        link.crowd(False)
        assert not await told.crowded.get()
