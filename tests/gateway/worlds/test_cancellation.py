"""A player's connection, or a request, that is cancelled anywhere leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message

from gateway.access import Access
from gateway.metrics import GatewayMetrics
from gateway.surfaces.worlds import Worlds, WorldStream
from gateway.surfaces.worlds.pictures import Studio
from protocol.config import GatewayConfig
from sessions.lifecycle import State
from tests.cancel_at import Cut, Moment, at_every_suspension, comes_to, process
from tests.gateway.serving import WAIT_S, Served, served
from tests.gateway.worlds.player import WORLD
from workers.engines.world import WorldEngine, WorldOptions

TENANT, SECRET = "local", "secret_of_the_world"
STREAM: dict[str, Any] = {
    "type": "websocket",
    "query_string": b"",
    "subprotocols": ["antiphon.json"],
    "headers": [],
}


@asynccontextmanager
async def a_world() -> AsyncIterator[tuple[Served, WorldEngine]]:
    engine = WorldEngine.create(WorldOptions(random=1, window_ms=0))
    async with served({"world": WORLD}, lambda _: engine) as it:
        yield it, engine


def held(engine: WorldEngine) -> tuple[int, int, int]:
    """Blocks in use, steps whose answer somebody awaits, and worlds that are waited for."""
    in_use = engine.options.blocks - engine.pool.free
    return in_use, len(engine._answers), len(engine._playing)


class Wire:
    """A player's end: it asks for two frames, and ends the world when it has them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._messages.put_nowait({"type": "websocket.connect"})

    async def receive(self) -> Message:
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        match message["type"]:
            case "websocket.accept":
                self._say(type="attach", role="controller", secret=SECRET, format="raw")
            case "websocket.close":
                self._messages.put_nowait({"type": "websocket.disconnect", "code": 1000})
            case "websocket.send" if message.get("text"):
                self._heard(msgspec.json.decode(message["text"])["type"])

    def _heard(self, kind: str) -> None:
        self.told.append(kind)
        if kind == "attached":
            self._say(type="step", frames=2)
        elif kind == "frame" and self.told.count("frame") == 2:
            self._say(type="close")

    def _say(self, **frame: Any) -> None:
        text = msgspec.json.encode(frame).decode()
        self._messages.put_nowait({"type": "websocket.receive", "text": text})


async def test_a_connection() -> None:
    async with a_world() as (it, engine):
        metrics = GatewayMetrics()
        stream = WorldStream(it.host, Access(GatewayConfig()), metrics, Studio(metrics))

        async def attempt(cut: Cut) -> None:
            wire, session = Wire(), await new_world(it)
            scope = {
                **STREAM,
                "path": f"/v1/worlds/{session}/stream",
                "path_params": {"session": session},
            }
            async with asyncio.timeout(WAIT_S):
                await cut.run(stream(scope, wire.receive, wire.send))
                await comes_to(False, lambda: attended(it, session))
                it.host.close_session(session, TENANT)
                await it.emptied()
            if not cut.made:
                assert wire.told == ["attached", "frame", "frame", "session_ended"]
            await left_as(before, engine)

        # Once, so that all threads and links are there.
        before: dict[str, int] | None = None
        await attempt(Cut(0, Moment.WAITING))
        before = process()
        assert await at_every_suspension(attempt) > 5


async def test_a_request_for_a_step() -> None:
    async with a_world() as (it, engine):
        metrics = GatewayMetrics()
        worlds = Worlds(it.host, Access(GatewayConfig()), metrics, Studio(metrics))

        async def attempt(cut: Cut) -> None:
            session = await new_world(it)
            async with asyncio.timeout(WAIT_S):
                answer = await cut.run(worlds.step(request(session, step=1, frames=2)))
                if cut.made:
                    # Whether it was done or not: asked for again, it is answered.
                    answer = await worlds.step(request(session, step=1, frames=2))
                assert answer is not None
                assert msgspec.json.decode(answer.body)["committed_step"] == 1
                it.host.close_session(session, TENANT)
                await it.emptied()
            await left_as(before, engine)
            assert not worlds._steppers._steppers
            assert not worlds._steppers._taking

        # Once, so that all threads and links are there.
        before: dict[str, int] | None = None
        await attempt(Cut(0, Moment.WAITING))
        before = process()
        assert await at_every_suspension(attempt) > 3


def attended(it: Served, session: str) -> bool:
    """Whether somebody has control of a world."""
    if it.host.ended(session, TENANT):
        return False
    return it.host.summary(session, TENANT).state == State.ACTIVE


async def new_world(it: Served) -> str:
    """A world that waits for its player."""
    attachment = await it.host.open(pipeline="world", tenant=TENANT, secret=SECRET)
    attachment.detach()
    return attachment.session


def request(session: str, **body: Any) -> Request:
    """A request for a step, whose body comes later."""

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}

    scope = {"type": "http", "headers": [], "path_params": {"session": session}}
    return Request(scope, receive)


async def left_as(before: dict[str, int] | None, engine: WorldEngine) -> None:
    """Nothing is left of a world that has ended."""
    await comes_to((0, 0, 0), lambda: held(engine))
    if before is not None:
        await comes_to(before, process)
