"""A connection that is cancelled at any of its suspensions leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.types import Message

from gateway.access import Access
from gateway.metrics import GatewayMetrics
from gateway.surfaces.openpi import OpenPiSocket
from protocol.config import GatewayConfig
from protocol.openpi import pack, to_parts, unpack
from protocol.payloads import Payload, PayloadType
from tests.cancel_at import Cut, at_every_suspension, comes_to, process
from tests.gateway.openpi.test_port import ARM
from tests.gateway.serving import WAIT_S, served
from workers.engine import Turn
from workers.engines.vla import VlaEngine, VlaOptions
from workers.engines.vla.engine import RobotSession

COUNTING = "tests.workers.vla.policies:Counting"
SCOPE = {
    "type": "websocket",
    "path": "/v1/openpi/arm",
    "path_params": {"pipeline": "arm"},
    "query_string": b"",
    "subprotocols": [],
    "headers": [],
}


class Wire:
    """An official client's end: it sends as soon as it was told, and goes after two answers."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._messages.put_nowait({"type": "websocket.connect"})

    async def receive(self) -> Message:
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        if message["type"] != "websocket.send":
            return
        self.frames.append(unpack(message["bytes"]))
        if len(self.frames) < 3:
            observation = pack({"state": np.zeros(2)})
            self._messages.put_nowait({"type": "websocket.receive", "bytes": observation})
        else:
            self._messages.put_nowait({"type": "websocket.disconnect", "code": 1000})


def held(engine: VlaEngine) -> tuple[int, int, int]:
    """Sessions, observations that wait, and those whose answer somebody awaits."""
    return engine._sessions, engine.waiting, len(engine._answers)


async def test_a_connection() -> None:
    engine = VlaEngine.create(VlaOptions(policy=COUNTING))
    async with served({"arm": ARM}, lambda _: engine) as it:
        socket = OpenPiSocket(it.host, Access(GatewayConfig()), GatewayMetrics())

        async def attempt(cut: Cut) -> None:
            wire = Wire()
            async with asyncio.timeout(WAIT_S):
                await cut.run(socket(dict(SCOPE), wire.receive, wire.send))
                await it.emptied()
            if not cut.made:
                assert [frame["actions"][0, 0] for frame in wire.frames[1:]] == [1, 2]
            await comes_to((0, 0, 0), lambda: held(engine))
            await comes_to(before, process)

        # Once, so that the policy's thread and all links are there.
        wire = Wire()
        await socket(dict(SCOPE), wire.receive, wire.send)
        await it.emptied()
        before = process()
        assert await at_every_suspension(attempt) > 5


async def test_a_step_of_the_engine() -> None:
    engine = VlaEngine.create(VlaOptions(policy=COUNTING))
    await engine.load()
    session = engine.open("s", {}, lambda event, arguments: None)
    assert isinstance(session, RobotSession)

    async def inputs() -> AsyncIterator[Payload]:
        for part in to_parts(PayloadType.OBSERVATION, {"state": np.zeros(2), "prompt": "go"}):
            await asyncio.sleep(0)
            yield part

    async def attempt(cut: Cut) -> None:
        turn = Turn(1, "default", {}, inputs(), lambda piece: None, step=1)
        result = await cut.run(session.run(turn))
        assert (result is None) is cut.made
        await comes_to((1, 0, 0), lambda: held(engine))
        # Nothing was committed.
        assert session._state["count"] == 0

    assert await at_every_suspension(attempt) > 3
    session.close()
    await engine.shutdown()
