"""A client of a world's stream, and a gateway that serves random worlds, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from sessions.pipeline import Kind, Limits, Pipeline, Play
from tests.gateway.native_client import requests
from tests.gateway.real_host import RealGateway, serving_kind
from workers.engines.world import WorldEngine, WorldOptions

WAIT_S = 30
WORLD = Pipeline(
    "world",
    ("dream",),
    (),
    {"frames": "dream"},
    kind=Kind.WORLD,
    limits=Limits(sessions=64),
    play=Play(100.0),
)


class Player:
    """One connection. A picture is `data` of its frame in either encoding."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.frames: list[dict[str, Any]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        frame = {"type": kind, **fields}
        if self.socket.subprotocol == "antiphon.msgpack":
            await self.socket.send(msgspec.msgpack.encode(frame))
        else:
            await self.socket.send(msgspec.json.encode(frame).decode())

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            received = await self.socket.recv()
            if isinstance(received, bytes):
                frame: dict[str, Any] = msgspec.msgpack.decode(received)
            else:
                frame = msgspec.json.decode(received)
                if frame["type"] == "frame":
                    frame["data"] = await self.socket.recv()
        self.frames.append(frame)
        return frame

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        while True:
            frame = await self.next()
            if frame["type"] == kind and fields.items() <= frame.items():
                return frame

    async def pictures(self, count: int) -> list[dict[str, Any]]:
        return [await self.until("frame") for _ in range(count)]

    async def closed(self) -> tuple[int, str]:
        try:
            while True:
                await self.next()
        except ConnectionClosed:
            assert self.socket.close_code is not None
            return self.socket.close_code, self.socket.close_reason or ""


@asynccontextmanager
async def player(
    url: str, world: dict[str, Any], subprotocol: str | None = "antiphon.json", **attach: Any
) -> AsyncIterator[Player]:
    """A connection to an open world; it has said `attach` if there is anything to say in it."""
    async with connect(
        "ws" + url.removeprefix("http") + world["stream"],
        subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
        compression=None,
        max_size=None,
    ) as socket:
        it = Player(socket)
        if attach:
            await it.say("attach", **attach)
        yield it


@asynccontextmanager
async def controlled(
    url: str, world: dict[str, Any], subprotocol: str = "antiphon.json", **attach: Any
) -> AsyncIterator[Player]:
    """The same, in control by its secret; the world's next secret is in `world` then."""
    attach = {"format": "raw", **attach}
    async with player(
        url, world, subprotocol, role="controller", secret=world["secret"], **attach
    ) as it:
        attached = await it.until("attached")
        world["secret"] = attached["secret"]
        yield it


async def opened(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A new world, as the answer to the open has it."""
    answer = await http.post("/v1/worlds", json=body)
    assert answer.status_code == 201, answer.text
    world: dict[str, Any] = answer.json()
    return world


@asynccontextmanager
async def serving_worlds(
    rate_hz: float = 100.0,
    limits: Limits | None = None,
    spec: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[RealGateway, httpx.AsyncClient]]:
    """A gateway that serves random worlds, and requests to it."""
    pipeline = replace(WORLD, play=Play(rate_hz), limits=limits or WORLD.limits)
    chosen = WorldOptions(**{"random": 1, "window_ms": 0, **options})
    engine = WorldEngine.create(chosen)
    await engine.load()
    async with (
        serving_kind(pipeline, lambda _: engine, spec=spec) as it,
        requests(it.http) as http,
    ):
        yield it, http
