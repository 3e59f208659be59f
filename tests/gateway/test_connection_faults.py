"""What nobody foresaw is told a client as its surface tells faults, and logged once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message
from structlog.testing import capture_logs
from websockets.asyncio.client import connect

from gateway.egress import Egress
from gateway.metrics import FrameCounts
from gateway.surfaces.native.cursors import Cursors
from gateway.surfaces.openpi import socket as openpi_socket
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.worlds import stream as worlds_stream
from protocol.errors import AntiphonError
from protocol.openpi import pack
from tests.gateway.native_client import opened, requests, stream
from tests.gateway.openpi.robot import Robot, robot
from tests.gateway.openpi.test_socket import serving
from tests.gateway.real_host import real_gateway
from tests.gateway.worlds import player as worlds

MESSAGE = "The gateway failed at this; its log says more."


class Carried:
    """A connection that fails at once, while something waits to be sent."""

    def __init__(self, on_failed: Callable[[AntiphonError], None] | None = None) -> None:
        self.sent: list[Any] = []
        self.outlet = Outlet(self.send, FrameCounts())
        self.on_failed = on_failed or self.tell

    async def send(self, message: Message) -> None:
        told = message["type"] == "websocket.send"
        self.sent.append(message["text"] if told else message["code"])

    def tell(self, error: AntiphonError) -> None:
        self.outlet.egress.put(error.code)
        self.outlet.finish(1011, error.code)

    async def carry(self) -> list[Any]:
        async def reading() -> None:
            fail()

        self.outlet.egress.put("an answer")
        await self.outlet.carry(
            reading(), "sess_1", lambda: None, self.on_failed, lambda blocked: None
        )
        return self.sent


async def test_what_was_answered_before_comes_before_it() -> None:
    assert await Carried().carry() == ["an answer", "internal_error", 1011]


async def test_a_connection_that_cannot_even_be_told_is_closed() -> None:
    assert (await Carried(fail).carry())[-1] == 1011


def fail(*args: object, **more: object) -> None:
    raise LookupError("nobody foresaw this")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection fails as soon as it begins to read."""
    monkeypatch.setattr(Egress, "room", fail)
    monkeypatch.setattr(Egress, "blocked", property(fail))


async def test_a_robot_is_told_so_in_its_one_text_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, url, _), robot(url) as arm:
        monkeypatch.setattr(openpi_socket, "read_request", fail)
        with capture_logs() as log:
            await arm.socket.send(pack({}))
            assert await arm.failure() == (f"internal_error: {MESSAGE}", 1011)
        assert [entry["event"] for entry in log if entry["log_level"] == "error"] == [
            "connection_failed"
        ]


async def test_a_robot_whose_open_fails_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (it, url, _):
        monkeypatch.setattr(openpi_socket, "unpack", fail)
        async with connect(url) as socket:
            assert await Robot(socket).failure() == (f"internal_error: {MESSAGE}", 1011)
        assert it.host.sessions() == []


@pytest.mark.usefixtures("faulty")
async def test_a_conversation_is_told_so_by_an_error_event() -> None:
    async with (
        real_gateway() as it,
        connect(f"ws://127.0.0.1:{it.port}/v1/realtime") as socket,
    ):
        event: dict[str, Any] = {"type": ""}
        while event["type"] != "error":
            event = json.loads(await socket.recv())
        assert event["error"]["code"] == "internal_error"
        await socket.wait_closed()
        assert socket.close_code == 1011


@pytest.mark.usefixtures("faulty")
async def test_a_native_session_is_told_so_by_an_error() -> None:
    async with real_gateway() as it, requests(it.http) as http:
        session = await opened(http)
        attach = {"role": "controller", "secret": session["secret"]}
        async with stream(it.stream(session["id"]), **attach) as client:
            error = (await client.until("error"))["error"]
            assert (error["code"], error["kind"]) == ("internal_error", "server")
            assert await client.closed() == (1011, "internal_error")


async def test_a_native_session_whose_attach_fails_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cursors, "read", fail)
    async with real_gateway() as it, requests(it.http) as http:
        session = await opened(http)
        attach = {"role": "controller", "secret": session["secret"], "cursor": "x"}
        async with stream(it.stream(session["id"]), **attach) as client:
            assert (await client.until("error"))["error"]["code"] == "internal_error"
            assert await client.closed() == (1011, "internal_error")


@pytest.mark.usefixtures("faulty")
async def test_a_world_is_told_so_by_an_error() -> None:
    async with worlds.serving_worlds() as (gateway, http):
        world = await worlds.opened(http)
        attach = {"role": "controller", "secret": world["secret"], "format": "raw"}
        async with worlds.player(gateway.http, world, **attach) as client:
            assert (await client.until("error"))["error"]["code"] == "internal_error"
            assert await client.closed() == (1011, "internal_error")


async def test_a_world_whose_attach_fails_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worlds.serving_worlds() as (gateway, http):
        world = await worlds.opened(http)
        monkeypatch.setattr(worlds_stream, "form_of", fail)
        attach = {"role": "controller", "secret": world["secret"], "format": "raw"}
        async with worlds.player(gateway.http, world, **attach) as client:
            assert (await client.until("error"))["error"]["code"] == "internal_error"
            assert await client.closed() == (1011, "internal_error")
