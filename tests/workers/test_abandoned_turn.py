"""A turn that does not stop when it is told to: given up, and yet nothing of it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from typing import Any

import pydantic

from protocol.connectors import Descriptor
from protocol.edges import gateway_arena
from protocol.messages import RaiseFloor, Run, TurnStatus
from protocol.payloads import PayloadType, text_payload
from protocol.shm_connector import ShmConnector
from tests.workers.process import GATEWAY, Gateway
from workers.control_events import ControlLimits
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult
from workers.spec import WorkerSpec
from workers.worker import Worker


class HoldingEngine(Engine, EngineSession):
    """Synthetic: its turn reads one payload and holds it until `gate`, whatever happens."""

    Options = pydantic.BaseModel
    inputs = frozenset({PayloadType.TEXT})
    outputs = frozenset({PayloadType.TEXT})

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @classmethod
    def create(cls, options: Any) -> HoldingEngine:
        return cls()

    async def load(self) -> None: ...

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        return self

    async def run(self, turn: Turn) -> TurnResult:
        turn.emit(await anext(turn.inputs))
        while not self.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.gate.wait()
        return TurnResult()

    def close(self) -> None: ...

    async def shutdown(self) -> None: ...


async def test_an_abandoned_turn_gives_its_input_back_when_it_ends_at_last() -> None:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        endpoint = f"ipc://{directory}/hold.sock"
        engine = HoldingEngine()
        spec = WorkerSpec("hold-0", "hold", "tests", endpoint, "test")
        arena = ShmConnector(gateway_arena(endpoint, GATEWAY) or "", GATEWAY)
        worker = Worker(spec, engine, limits=ControlLimits(cancel_ms=1.0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.serve(lambda: None))
            gateway = await Gateway(endpoint).linked()
            await gateway.open()
            await arena.consumer(worker.incarnation)
            flow = arena.open("s", 1, {"client->hold": worker.incarnation}, 4096)
            inputs: list[Descriptor] = [
                arena.put(text_payload(text), flow) for text in ("read", "not read")
            ]
            gateway.send(Run(gateway.fence(), 1, "default", {}, inputs))
            assert await gateway.output() == "read"
            gateway.send(RaiseFloor(gateway.fence(), "default", 2))
            assert (await gateway.ended(1)).status is TurnStatus.CANCELLED
            assert flow.arena.slots
            engine.gate.set()
            await arena.drained(flow)
            worker.stop()
        gateway.link.close()
        arena.close()
