"""The client against whoever answers as no gateway does: it says so, in time, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from antiphon_client import (
    AntiphonError,
    AsyncRobotLoop,
    ConnectionLost,
    ControlOptions,
    Gateway,
    NoAnswer,
    NotReachable,
    ProtocolError,
    SteppedWorld,
    World,
)
from antiphon_client.arrays import to_payloads
from antiphon_client.stream import SUBPROTOCOL
from tests.gateway.serving import WAIT_S

DIMENSIONS = 4
OPTIONS = ControlOptions(
    safe_action=[-1.0] * DIMENSIONS, rate_hz=100, deadline_ms=10, max_age_ms=600_000
)
OPENED = {"id": "sess_1", "secret": "secret_1"}
STANDS = {"committed_step": 0, "lost": False, "in_flight": None, "stopped": False}
ATTACHED = {
    "sequence": 1,
    "cursor": "at.1",
    "secret": "secret_2",
    "limits": {"grace_s": 2.0},
    "snapshot": STANDS,
}

Speak = Callable[[ServerConnection], Awaitable[None]]


class Liar:
    """A server that opens whatever it is asked for, and then says what a test says."""

    def __init__(self) -> None:
        self.opened: Any = OPENED
        self.speak: Speak = silent
        self.upgrade: Response | None = None
        self.port = 0

    @property
    def gateway(self) -> Gateway:
        return Gateway(f"http://127.0.0.1:{self.port}")

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: an upgrade is carried on, each request gets the same answer."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"upgrade: websocket" in head.lower():
                there, back = await asyncio.open_connection("127.0.0.1", self.to_port)
                back.write(head)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pipe(reader, back))
                    both.create_task(_pipe(there, writer))
                return
            body = self.opened if isinstance(self.opened, bytes) else json.dumps(self.opened)
            body = body if isinstance(body, bytes) else body.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    to_port = 0


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def liar() -> AsyncIterator[Liar]:
    it = Liar()

    async def speak(socket: ServerConnection) -> None:
        await socket.recv()
        await it.speak(socket)

    def answer(socket: ServerConnection, request: Request) -> Response | None:
        return it.upgrade

    async with (
        asyncio.timeout(WAIT_S),
        serve(
            speak, "127.0.0.1", 0, process_request=answer, subprotocols=[Subprotocol(SUBPROTOCOL)]
        ) as a,
        await asyncio.start_server(it.carry, "127.0.0.1", 0) as b,
    ):
        it.to_port = next(iter(a.sockets)).getsockname()[1]
        it.port = b.sockets[0].getsockname()[1]
        yield it


async def silent(socket: ServerConnection) -> None:
    await socket.wait_closed()


def saying(*frames: Mapping[str, Any] | bytes, then: Speak = silent) -> Speak:
    async def speak(socket: ServerConnection) -> None:
        for frame in frames:
            await socket.send(frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame))
        await then(socket)

    return speak


def attached(**fields: Any) -> dict[str, Any]:
    return {"type": "attached", **ATTACHED, **fields}


@pytest.mark.parametrize("opened", [[], {}, {"id": 5, "secret": "s"}, {"id": "../x", "secret": "s"},
                                    b"[" * 100_000, b"\xff"])  # fmt: skip
async def test_an_open_that_is_answered_by_no_session_is_a_protocol_error(opened: Any) -> None:
    async with liar() as it:
        it.opened = opened
        with pytest.raises(ProtocolError):
            await it.gateway.open()
        with pytest.raises(ProtocolError):
            await World.open(it.gateway)
        with pytest.raises(ProtocolError):
            await SteppedWorld.open(it.gateway)


@pytest.mark.parametrize("location", ["foo://bar", "http://[", None])
async def test_an_upgrade_that_is_sent_elsewhere_ends_the_open(location: str | None) -> None:
    async with liar() as it:
        headers = Headers() if location is None else Headers(Location=location)
        it.upgrade = Response(302, "Found", headers, b"")
        wrong: type[AntiphonError] = ProtocolError if location else NoAnswer
        with pytest.raises(wrong):
            await it.gateway.open(timeout_s=1)
        with pytest.raises(wrong):
            await World.open(it.gateway, timeout_s=1)


async def test_an_open_ends_in_time_whatever_is_said() -> None:
    async with liar() as it:
        with pytest.raises(NoAnswer):
            await it.gateway.open(timeout_s=0.3)
        with pytest.raises(NoAnswer):
            await World.open(it.gateway, timeout_s=0.3)


async def test_an_answer_that_comes_byte_by_byte_is_none_in_time() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            writer.close()

    async with asyncio.timeout(WAIT_S), await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        gateway = Gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(NotReachable):
            await gateway.open(timeout_s=0.3)
        with pytest.raises(NotReachable):
            await asyncio.to_thread(gateway.requests.ask_now, "POST", "/", {}, 0.3)


NONE_ATTACHED: list[dict[str, Any]] = [
    attached(limits={"grace_s": "abc"}),
    attached(limits={"grace_s": float("nan")}),
    attached(limits=[]),
    attached(secret=5),
    attached(sequence="x"),
    attached(cursor=[]),
    attached(lost=[1]),
    attached(lost=["a", "b"]),
    {"type": "attached"},
    {"type": "error", "error": "x"},
    {"type": 5},
]


@pytest.mark.parametrize("frame", NONE_ATTACHED)
async def test_what_is_no_beginning_ends_the_open(frame: dict[str, Any]) -> None:
    async with liar() as it:
        it.speak = saying(frame)
        with pytest.raises(ProtocolError):
            await it.gateway.open()
        with pytest.raises(ProtocolError):
            await World.open(it.gateway)


NONE_OUTPUTS: list[dict[str, Any] | bytes] = [
    b"\xc1",
    {"type": "step_done", "sequence": "x", "cursor": "at.2"},
    {"type": "step_done", "sequence": -1, "cursor": "at.2"},
    {"type": "step_done", "sequence": 2, "cursor": 5},
    {"type": "answer", "sequence": 2, "cursor": "at.2", "id": []},
    {"type": "session_ended", "sequence": 2, "cursor": "at.2", "reason": "x", "error": "y"},
]


@pytest.mark.parametrize("frame", NONE_OUTPUTS)
async def test_a_session_that_is_told_garbage_says_what_it_was(frame: dict[str, Any]) -> None:
    async with liar() as it:
        it.speak = saying(attached(), frame)
        session = await it.gateway.open()
        await session.next_event()
        with pytest.raises(ProtocolError) as wrong:
            await session.next()
        assert session.error is wrong.value
        await session.detach()


def done(**fields: Any) -> dict[str, Any]:
    outputs = {"actions": received(np.zeros((5, DIMENSIONS), np.float32))}
    place = {"sequence": 3, "cursor": "at.3", "step": 1, "committed_step": 1}
    return {"type": "step_done", **place, "outputs": outputs, **fields}


def received(actions: Any) -> list[dict[str, Any]]:
    payloads = to_payloads("actions", {"actions": actions})
    return [{"dtype": "", "shape": [], "attributes": {}, **payload} for payload in payloads]


def after_a_step(frame: dict[str, Any], **beginning: Any) -> Speak:
    """Attached, and as soon as a step is asked for it is answered by `frame`."""

    async def answer(socket: ServerConnection) -> None:
        asked = msgspec.msgpack.decode(await socket.recv(decode=False))
        taken = {"type": "answer", "sequence": 2, "cursor": "at.2", "id": asked["id"], "result": {}}
        await saying(taken, frame)(socket)

    return saying(attached(**beginning), then=answer)


UNUSABLE: list[Speak] = [
    after_a_step(done(committed_step="abc")),
    after_a_step(done(committed_step=-5)),
    after_a_step(done(step=[])),
    after_a_step(done(type="step_failed")),
    after_a_step(done(type="step_failed", error="x")),
    after_a_step(done(type="safe_action", in_flight=False)),
    after_a_step(done(type="safe_action", in_flight="no", reason="late")),
    after_a_step(done(), snapshot=None),
    after_a_step(done(), snapshot={**STANDS, "committed_step": "x"}),
    after_a_step(done(), snapshot={**STANDS, "lost": 0}),
    after_a_step(done(), snapshot={**STANDS, "in_flight": "1"}),
    after_a_step(done(), snapshot={**STANDS, "stopped": "no"}),
]


@pytest.mark.parametrize("speak", UNUSABLE)
async def test_a_robot_that_is_told_garbage_is_safe_and_says_what_it_was(speak: Speak) -> None:
    async with liar() as it:
        it.speak = speak
        robot = await AsyncRobotLoop.open(it.gateway, None, OPTIONS)
        while robot.error is None:
            assert not (await robot.act({})).fresh
        sent = robot.counts.sent
        action = await robot.act({})
        assert (action.values.tolist(), action.reason) == ([-1.0] * DIMENSIONS, "protocol_error")
        assert isinstance(robot.error, ProtocolError)
        assert robot.counts.sent == sent, "nothing more is asked of it"
        await robot.close()


async def test_a_connection_that_dies_of_what_nobody_foresees_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with liar() as it:
        it.speak = saying(attached(), then=lambda socket: socket.close(1011))
        session = await it.gateway.open()

        def broken(code: int | None, reason: str) -> None:
            raise LookupError("nobody foresees this")

        monkeypatch.setattr(session._machine, "dropped", broken)
        await session.next_event()
        with pytest.raises(AntiphonError):
            await session.next_event()
        assert "nobody foresees this" in str(session.error)
        assert not isinstance(session.error, ConnectionLost)
        await session.detach()


WORLD = {
    "sequence": 1,
    "secret": "secret_2",
    "grace_s": 2.0,
    "committed_step": 0,
    "lost": False,
    "world": {"keys": ["up"], "axes": {}},
}
FRAME = {
    "frame": 1,
    "step": 1,
    "action_sequence": 0,
    "width": 1,
    "height": 1,
    "format": "raw",
    "data": b"abc",
}


@pytest.mark.parametrize(
    "told", [{"step": "x"}, {"data": b"a"}, {"data": "abc"}, {"width": -1}, {"format": 5}]
)
async def test_a_world_that_is_told_garbage_says_what_it_was(told: dict[str, Any]) -> None:
    async with liar() as it:
        it.speak = saying({"type": "attached", **WORLD}, {"type": "frame", **FRAME, **told})
        world = await World.open(it.gateway, format="raw")
        with pytest.raises(ProtocolError):
            await world.next_picture()
        assert isinstance(world.error, ProtocolError)
        await world.detach()
