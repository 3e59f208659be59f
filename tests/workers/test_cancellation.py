"""A worker's turns, and the worker itself, cancelled at each of their suspensions."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

from protocol import shm_connector
from protocol.arena import attaching
from protocol.edges import ConnectorKind, OutputEdge, gateway_arena, worker_arena
from protocol.messages import (
    Acknowledge,
    Attach,
    Close,
    Feed,
    Open,
    Output,
    RaiseFloor,
    Report,
    Run,
    TurnEnded,
    TurnStatus,
)
from protocol.payloads import PayloadType, text_payload
from protocol.shm_connector import ShmConnector
from tests.cancel_at import Cut, Moment, at_every_suspension, comes_to, process
from tests.workers.process import GATEWAY, Gateway
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult
from workers.spec import WorkerSpec
from workers.worker import Worker

WAIT_S = 20
PIECE = text_payload("x" * 3000)
WINDOW_BYTES = 4096
"""One piece at a time: the engine waits for room after each."""


class CutEngine(Engine, EngineSession):
    """Synthetic: answers each input by two pieces, and is cancelled where `cut` says.

    `cancel` is how: by its task, or with what a gateway sends.
    """

    Options = pydantic.BaseModel
    inputs = frozenset({PayloadType.TEXT})
    outputs = frozenset({PayloadType.TEXT})

    def __init__(self) -> None:
        self.cut: Cut | None = None
        self.cancel: Callable[[], object] | None = None
        self.sessions = 0
        self.shut_down = False

    @classmethod
    def create(cls, options: Any) -> CutEngine:
        return cls()

    async def load(self) -> None:
        await asyncio.sleep(0)

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        self.sessions += 1
        return self

    async def run(self, turn: Turn) -> TurnResult:
        if self.cut is None:
            return await self._answer(turn)
        return await self.cut.watch(self._answer(turn), self.cancel)

    async def _answer(self, turn: Turn) -> TurnResult:
        async for _ in turn.inputs:
            for _piece in range(2):
                turn.emit(PIECE)
                await turn.room()
        return TurnResult()

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.sessions -= 1

    async def shutdown(self) -> None:
        self.shut_down = True
        await asyncio.sleep(0)


@dataclass
class Bench:
    """One worker, and a gateway with an arena at it."""

    worker: Worker
    engine: CutEngine
    gateway: Gateway
    arena: ShmConnector
    turns: int = 0

    async def turn(self) -> TurnStatus:
        """Run a turn of three inputs, the last of which comes later, and take its output."""
        self.turns += 1
        turn = self.turns
        fence = self.gateway.fence()
        edge = {"client->cut": self.worker.incarnation}
        flow = self.arena.open("s", turn, edge, 1 << 16)
        inputs = [self.arena.put(PIECE, flow) for _ in range(3)]
        self.gateway.send(Run(fence, turn, "default", {}, list(inputs[:2]), last=False))
        status = await self.taken(turn, Feed(fence, turn, inputs[2], last=True))
        await self.arena.drained(flow)
        self.arena.close_flow(flow)
        return status

    async def taken(self, turn: int, feed: Feed | None = None) -> TurnStatus:
        """Take the output of a turn to its end; `feed` goes to it once some has come."""
        while True:
            report = await self.gateway.wanted(lambda report: _of_turn(report, turn))
            if feed is not None:
                self.gateway.send(feed)
                feed = None
            if isinstance(report, TurnEnded):
                return report.status
            assert isinstance(report, Output)
            self.arena.discard(report.payload)
            self.gateway.send(Acknowledge(self.gateway.fence(), turn, report.sequence))

    def held(self) -> dict[str, int]:
        """All that is held of turns on either side, where nothing may be."""
        worker, transfers = self.worker, self.worker._transfers
        assert transfers._shm is not None
        ours, theirs = self.arena.health(), transfers._shm.health()
        counts = {
            "turns": len(worker._turns._running),
            "waiting": worker._control.waiting,
            "kept bytes": worker._control.kept_bytes,
            "streams": len(transfers._streams) + len(transfers._readers),
            "input held": theirs.held + theirs.lingering + ours.reserved_bytes,
            "output held": ours.held + ours.lingering + theirs.reserved_bytes,
            "tasks": len(worker._turns._tasks._tasks),
        }
        return {name: count for name, count in counts.items() if count}


def _of_turn(report: Report, turn: int) -> bool:
    return isinstance(report, Output | TurnEnded) and report.turn == turn


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """A worker that serves, with one session open."""
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        endpoint = f"ipc://{directory}/cut.sock"
        engine = CutEngine()
        worker = Worker(WorkerSpec("cut-0", "cut", "tests", endpoint, "test"), engine)
        arena = ShmConnector(gateway_arena(endpoint, GATEWAY) or "", GATEWAY)
        serving = asyncio.create_task(worker.serve(lambda: None))
        gateway = await Gateway(endpoint).linked()
        await arena.attach(worker_arena(endpoint) or "")
        await arena.consumer(worker.incarnation)
        edge = OutputEdge("cut->client", ConnectorKind.SHM, WINDOW_BYTES)
        gateway.send(Open(gateway.fence(), "open-1", {}, edge))
        assert (await gateway.answer("open-1")).error is None
        yield Bench(worker, engine, gateway, arena)
        worker.stop()
        await serving
        gateway.link.close()
        arena.close()


@pytest.mark.parametrize("way", ["by its task", "by a raised floor"])
async def test_a_turn(way: str) -> None:
    async with asyncio.timeout(WAIT_S), bench() as it:
        assert await it.turn() is TurnStatus.COMPLETED

        async def attempt(cut: Cut) -> None:
            floor = RaiseFloor(it.gateway.fence(), "default", it.turns + 2)
            if way == "by a raised floor":
                it.engine.cancel = lambda: it.worker._on_command(GATEWAY, floor)
            it.engine.cut = cut
            status = await it.turn()
            it.engine.cut = None
            gave_up = TurnStatus.CANCELLED if it.engine.cancel else TurnStatus.FAILED
            assert status is (gave_up if cut.made else TurnStatus.COMPLETED)
            await comes_to({}, it.held)
            assert await it.turn() is TurnStatus.COMPLETED
            assert (await it.gateway.signal("any")).error is None
            await comes_to({}, it.held)

        points = await at_every_suspension(attempt)
        print(f"turn, {way}: cancelled at {points} points")
        assert points >= 8
        it.gateway.send(Close(it.gateway.fence(), "close-1", "client"))
        await it.gateway.answer("close-1")
        assert it.engine.sessions == 0


async def test_a_turn_that_waits_for_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = attaching.attach
    gate = asyncio.Event()

    async def held(path: str, *arguments: Any, **options: Any) -> Any:
        """The producer has its consumer already, which is about to learn of that."""
        attachment = await attach(path, *arguments, **options)
        await gate.wait()
        return attachment

    async with asyncio.timeout(WAIT_S), bench() as it:
        fence = it.gateway.fence()
        directory = os.path.dirname(it.arena.path)
        monkeypatch.setattr(shm_connector, "attach", held)

        async def attempt(cut: Cut) -> None:
            it.turns += 1
            gate.clear()
            late = ShmConnector(f"{directory}/late-{it.turns}.arena", f"late-{it.turns}")
            it.gateway.send(Attach(fence, late.path))
            await late.consumer(it.worker.incarnation)
            flow = late.open("s", it.turns, {"late->cut": it.worker.incarnation}, 1 << 16)
            it.engine.cut = cut
            piece = late.put(PIECE, flow)
            it.gateway.send(Run(fence, it.turns, "default", {}, [piece]))
            assert (await it.gateway.signal("started")).error is None
            gate.set()
            await it.taken(it.turns)
            it.engine.cut = None
            if cut.made and cut.moment is Moment.WAITING:
                # It could not be given back by who had not attached: its producer takes it back.
                late.void("s", it.turns)
            await late.drained(flow)
            late.close()
            await comes_to({}, it.held)

        points = await at_every_suspension(attempt)
    print(f"turn, waiting for an arena: cancelled at {points} points")
    assert points >= 2


async def test_the_worker_itself() -> None:
    async def attempt(cut: Cut) -> None:
        with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
            endpoint = f"ipc://{directory}/cut.sock"
            engine = CutEngine()
            worker = Worker(WorkerSpec("cut-0", "cut", "tests", endpoint, "test"), engine)
            gateway = Gateway(endpoint)

            async def used() -> None:
                await gateway.linked()
                await gateway.open()
                gateway.send(Run(gateway.fence(), 1, "default", {}, [], last=False))
                await gateway.signal("any")
                worker.stop()

            using = asyncio.create_task(used())
            await cut.run(worker.serve(lambda: None))
            using.cancel()
            await asyncio.wait([using])
            gateway.link.close()
            assert engine.sessions == 0
            assert engine.shut_down
            assert os.listdir(directory) == []

    async def checked(cut: Cut) -> None:
        await attempt(cut)
        await comes_to(before, process)

    async with asyncio.timeout(WAIT_S):
        # The first makes the files that the process then keeps; sockets close a moment later.
        await attempt(Cut(0, Moment.WAITING))
        await asyncio.sleep(0.2)
        before = process()
        points = await at_every_suspension(checked)
    print(f"worker: cancelled at {points} points")
    assert points >= 6
