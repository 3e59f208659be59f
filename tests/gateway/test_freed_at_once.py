"""What a connection held is free when it has ended, without the collector of cycles.

That one counts objects, and a few of these may hold megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.server import ServerProtocol

from gateway.clients import HostedAttachment
from gateway.egress import Egress
from gateway.surfaces.ahead import AHEAD_BYTES, Ahead
from gateway.surfaces.native.stream import _Connection as NativeConnection
from gateway.surfaces.openpi.socket import _Connection as OpenPiConnection
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.realtime.socket import _Connection as RealtimeConnection
from gateway.surfaces.realtime.upgrade import Upgrade
from protocol.openpi import pack
from tests.cancel_at import comes_to
from tests.gateway.native_client import Stream, opened, requests
from tests.gateway.openpi.test_socket import serving as robots
from tests.gateway.real_host import RealGateway, real_gateway
from tests.gateway.serving import WAIT_S, Client

HOLDERS = (
    Ahead,
    Egress,
    HostedAttachment,
    NativeConnection,
    OpenPiConnection,
    Outlet,
    RealtimeConnection,
    ServerProtocol,
    Upgrade,
)
"""What holds what a client said, or what is said to it."""

LONG = "x" * (AHEAD_BYTES - 1000)


def holders() -> dict[str, int]:
    """How many of them there are."""
    found: dict[str, int] = {}
    for known in gc.get_objects():
        if type(known) in HOLDERS:
            name = f"{type(known).__module__}.{type(known).__name__}"
            found[name] = found.get(name, 0) + 1
    return found


async def freed(before: dict[str, int]) -> None:
    """Wait until there are no more of them than before."""
    try:
        await comes_to(before, holders)
    except AssertionError:
        raise AssertionError(f"{before} became {holders()}") from None


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def said(text: str) -> str:
    return json.dumps(
        {"type": "session.update", "session": {"type": "realtime", "instructions": text}}
    )


async def next_event(socket: ClientConnection) -> str:
    async with asyncio.timeout(WAIT_S):
        return str(json.loads(await socket.recv())["type"])


async def heard(socket: ClientConnection) -> None:
    """Wait until all that was sent has been read at the other end."""
    await (await socket.ping())


async def is_closed(socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()


async def hangs_up(socket: ClientConnection) -> None:
    await heard(socket)
    socket.transport.abort()
    await socket.wait_closed()


async def says_goodbye(socket: ClientConnection) -> None:
    await socket.close()


async def says_too_much(socket: ClientConnection) -> None:
    await socket.send(said(LONG))
    await is_closed(socket)


async def says_one_long_thing(socket: ClientConnection) -> None:
    await socket.send(said("x" * 5 * AHEAD_BYTES))
    await is_closed(socket)


LEAVES = [hangs_up, says_goodbye, says_too_much, says_one_long_thing]


@pytest.mark.parametrize("leaves", LEAVES)
async def test_a_realtime_client_that_waits(
    leaves: Callable[[ClientConnection], Awaitable[None]],
) -> None:
    async with real_gateway(sessions=1, waiting=3) as gateway:
        await gateway.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)
        with without_collector():
            before = holders()
            socket = await connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime")
            assert await next_event(socket) == "antiphon.queued"
            await socket.send(said(LONG))
            await leaves(socket)
            await freed(before)


async def test_a_realtime_client_that_waited_too_long() -> None:
    async with real_gateway(sessions=1, waiting=3, wait_ms=300) as gateway:
        await gateway.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)
        with without_collector():
            before = holders()
            socket = await connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime")
            await socket.send(said(LONG))
            await is_closed(socket)
            await freed(before)


async def test_a_realtime_client_that_is_refused() -> None:
    async with real_gateway(sessions=1) as gateway:
        await gateway.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)
        with without_collector():
            before = holders()
            with pytest.raises(InvalidStatus):
                await connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime")
            await freed(before)


@pytest.mark.parametrize("leaves", [hangs_up, says_goodbye])
@pytest.mark.parametrize("query", ["", "?resume=1"])
async def test_a_realtime_client_that_was_let_in(
    query: str, leaves: Callable[[ClientConnection], Awaitable[None]]
) -> None:
    async with real_gateway() as gateway:
        with without_collector():
            before = holders()
            socket = await connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime{query}")
            assert await next_event(socket) == "session.created"
            await socket.send(said(LONG))
            await next_event(socket)
            await leaves(socket)
            await freed(before)


@pytest.fixture
async def full() -> AsyncIterator[tuple[RealGateway, httpx.AsyncClient]]:
    async with (
        real_gateway(sessions=1, waiting=3) as gateway,
        requests(gateway.http) as http,
    ):
        yield gateway, http


@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream"}])
async def test_a_native_open_that_is_given_up(
    headers: dict[str, str], full: tuple[RealGateway, httpx.AsyncClient]
) -> None:
    gateway, http = full
    await gateway.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)
    with without_collector():
        before = holders()
        waits = asyncio.create_task(http.post("/v1/sessions", json={}, headers=headers))
        await comes_to(1, lambda: len(gateway.host.waiting()))
        waits.cancel()
        await comes_to(0, lambda: len(gateway.host.waiting()))
        await freed(before)


@pytest.mark.parametrize("leaves", [hangs_up, says_goodbye])
async def test_a_native_stream(
    leaves: Callable[[ClientConnection], Awaitable[None]],
    full: tuple[RealGateway, httpx.AsyncClient],
) -> None:
    gateway, http = full
    session = await opened(http)
    with without_collector():
        before = holders()
        socket = await connect(gateway.stream(session["id"]))
        stream = Stream(socket)
        await stream.say("attach", role="controller", secret=session["secret"])
        await stream.until("attached")
        await stream.say("update", id="1", input={"type": "settings", "patch": {"x": LONG}})
        await leaves(socket)
        await freed(before)


@pytest.mark.parametrize("leaves", [hangs_up, says_goodbye])
async def test_a_robot(leaves: Callable[[ClientConnection], Awaitable[None]]) -> None:
    async with robots() as (_, url, _):
        with without_collector():
            before = holders()
            socket = await connect(url, compression=None, max_size=None)
            await socket.recv()
            await socket.send(pack({"prompt": LONG}))
            await socket.recv()
            await leaves(socket)
            await freed(before)


@asynccontextmanager
async def robot_that_waits() -> AsyncIterator[tuple[ClientConnection, dict[str, int]]]:
    async with robots(sessions=1, waiting=3) as (gateway, url, _):
        first = await connect(url, compression=None, max_size=None)
        await first.recv()
        with without_collector():
            before = holders()
            socket = await connect(url, compression=None, max_size=None)
            await comes_to(1, lambda: len(gateway.host.waiting()))
            yield socket, before
        await first.close()


@pytest.mark.parametrize("leaves", [hangs_up, says_goodbye, says_too_much])
async def test_a_robot_that_waits(
    leaves: Callable[[ClientConnection], Awaitable[None]],
) -> None:
    async with robot_that_waits() as (socket, before):
        await socket.send(pack({"prompt": LONG}))
        await leaves(socket)
        await freed(before)
