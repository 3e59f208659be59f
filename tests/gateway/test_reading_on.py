"""A client is read on where its session has no room: what for, how far, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message

from gateway.egress import Egress
from gateway.surfaces import reading_on
from gateway.surfaces.reading_on import READ_ON_BYTES, READ_ON_MESSAGES, ReadingOn
from sessions.client import SessionEnded
from sessions.steps import events as steps
from tests.gateway.conftest import Gateway, Serve
from tests.gateway.native_client import Stream, opened, requests, stream
from tests.gateway.scripted_host import ScriptedAttachment
from tests.gateway.serving import WAIT_S

GONE: Message = {"type": "websocket.disconnect", "code": 1006}
STOP = {"type": "stop"}


class Socket:
    """What a client has sent, as the server hands it out."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[Message] = asyncio.Queue()
        self.taken = asyncio.Event()
        """Set once all that has come is taken."""

    def says(self, *messages: str | bytes | Message) -> None:
        self.taken.clear()
        for said in messages:
            name = "bytes" if isinstance(said, bytes) else "text"
            message = said if isinstance(said, dict) else {"type": "websocket.receive", name: said}
            self.coming.put_nowait(message)

    async def receive(self) -> Message:
        message = await self.coming.get()
        if self.coming.empty():
            self.taken.set()
        return message


def text(message: Message, said_ms: float) -> str | None:
    """What the tests' clients mean; "!" cannot wait."""
    said: str = message["text"]
    return None if said == "!" else said


async def never() -> None:
    await asyncio.Event().wait()


async def test_what_was_read_on_comes_in_its_order() -> None:
    socket, room = Socket(), asyncio.Event()
    reading = ReadingOn(socket.receive, text)
    socket.says("a", "b", "!", "c")
    assert await reading.next() == "a"
    waiting = asyncio.create_task(reading.wait_for(room.wait()))
    await socket.taken.wait()
    room.set()
    assert await waiting
    socket.says("d", GONE)
    assert [await reading.next() for _ in range(5)] == ["b", "c", "d", None, None]


async def test_what_comes_while_the_wait_ends_is_not_lost() -> None:
    for first in ("room", "message"):
        socket, room = Socket(), asyncio.Event()
        reading = ReadingOn(socket.receive, text)
        waiting = asyncio.create_task(reading.wait_for(room.wait()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if first == "room":
            room.set()
        socket.says("a", "b")
        room.set()
        assert await waiting
        assert [await reading.next(), await reading.next()] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [("x", READ_ON_MESSAGES), ("x" * (READ_ON_BYTES // 2), 2), ("x" * (READ_ON_BYTES + 1), 1)],
)
async def test_it_reads_on_within_bounds(said: str, kept: int) -> None:
    socket, room = Socket(), asyncio.Event()
    full, more = asyncio.Event(), asyncio.Event()
    read = 0

    def note(message: Message, said_ms: float) -> str:
        nonlocal read
        read += 1
        if read >= kept:
            (full if read == kept else more).set()
        return said

    reading = ReadingOn(socket.receive, note)
    socket.says(*[said] * (kept + 1))
    waiting = asyncio.create_task(reading.wait_for(room.wait()))
    await full.wait()
    room.set()
    assert await waiting
    assert (read, socket.coming.qsize()) == (kept, 1)
    # What was taken makes place for the next.
    await reading.next()
    again = asyncio.create_task(reading.wait_for(never()))
    await more.wait()
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    assert read == kept + 1


async def test_what_was_not_read_counts_as_said_since_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 0.0
    monkeypatch.setattr(reading_on, "_now_ms", lambda: now_ms)
    monkeypatch.setattr(reading_on, "PAUSE_S", 0.0)
    socket, room, full = Socket(), asyncio.Event(), asyncio.Event()
    read: list[float] = []

    def note(message: Message, said_ms: float) -> float:
        read.append(said_ms)
        if len(read) == READ_ON_MESSAGES:
            full.set()
        return said_ms

    reading: ReadingOn[float] = ReadingOn(socket.receive, note)
    socket.says(*["x"] * (READ_ON_MESSAGES + 2))
    waiting = asyncio.create_task(reading.wait_for(room.wait()))
    await full.wait()
    await asyncio.sleep(0)
    now_ms = 500.0
    room.set()
    assert await waiting
    # However late the last two were read, and what comes without a pause.
    assert [await reading.next() for _ in range(READ_ON_MESSAGES + 2)] == [0.0] * len(read)
    socket.says("x")
    assert await reading.next() == 0.0
    # It pauses.
    asking = asyncio.create_task(reading.next())
    for _ in range(50):
        await asyncio.sleep(0)
    now_ms = 600.0
    socket.says("x", "x")
    assert [await asking, await reading.next()] == [now_ms, now_ms]


async def test_of_a_client_that_left_what_it_said_waits_no_longer_than_that() -> None:
    socket = Socket()
    reading = ReadingOn(socket.receive, text, left_s=0.0)
    socket.says("a", GONE)
    assert not await reading.wait_for(never())
    assert reading.gone == GONE
    assert not await reading.wait_for(never())
    assert [await reading.next(), await reading.next()] == ["a", None]


async def test_of_a_client_that_left_what_it_said_is_carried_out_where_room_comes() -> None:
    socket, room = Socket(), asyncio.Event()
    reading = ReadingOn(socket.receive, text, left_s=WAIT_S)
    socket.says("a", GONE)
    waiting = asyncio.create_task(reading.wait_for(room.wait()))
    await socket.taken.wait()
    room.set()
    assert await waiting
    assert [await reading.next(), await reading.next()] == ["a", None]


async def test_an_error_while_it_waits_is_told() -> None:
    async def broken() -> None:
        raise OSError("gone")

    reading = ReadingOn(Socket().receive, text)
    with pytest.raises(OSError, match="gone"):
        await reading.wait_for(broken())


# On the native stream


@asynccontextmanager
async def without_room(
    gateway: Gateway, *said: tuple[str, dict[str, Any]], kind: str = "robot"
) -> AsyncIterator[tuple[Stream, ScriptedAttachment]]:
    """A controller whose session takes nothing, once this was said to it."""
    gateway.host.kind = kind
    async with requests(gateway.http) as http:
        session = await opened(http)
    url = f"ws://127.0.0.1:{gateway.port}/v1/sessions/{session['id']}/stream"
    async with stream(url, role="controller", secret=session["secret"]) as client:
        await client.until("attached")
        attachment = gateway.host.attachments[-1]
        attachment.roomy.clear()
        for name, fields in said:
            await client.say(name, **fields)
        async with asyncio.timeout(WAIT_S):
            await attachment.wanted_room.wait()
        yield client, attachment


def observed(ref: str) -> tuple[str, dict[str, Any]]:
    return "update", {"input": {"type": "step", "inputs": []}, "ref": ref}


def signal(kind: str) -> tuple[str, dict[str, Any]]:
    return "signal", {"signal": {"type": kind}, "ref": kind}


async def stopped(attachment: ScriptedAttachment) -> None:
    """It has got a stop, while it takes nothing else."""
    async with asyncio.timeout(WAIT_S):
        while not any(isinstance(verb, steps.EmergencyStop) for verb in attachment.verbs):
            attachment.got.clear()
            await attachment.got.wait()
    assert not attachment.has_room


async def test_a_stop_waits_for_nothing_and_all_else_keeps_its_order(serve: Serve) -> None:
    gateway = await serve()
    async with without_room(gateway, observed("a"), observed("b")) as (client, attachment):
        await client.say(*signal("stop")[:1], id="s", signal=STOP)
        await stopped(attachment)
        assert attachment.verbs == [steps.EmergencyStop()]
        await client.say("signal", signal={"type": "interrupt"}, ref="c")
        await client.say("close")
        attachment.roomy.set()
        await attachment.gone.wait()
        assert [getattr(verb, "ref", None) for verb in attachment.verbs] == [None, "a", "b", "c"]
        assert attachment.closed == "client"


@pytest.mark.parametrize("kind", ["release", "reset"])
@pytest.mark.parametrize("before", [[], [observed("a")]], ids=["at_once", "behind_another"])
async def test_what_was_said_before_a_stop_does_not_release_it(
    serve: Serve, kind: str, before: list[tuple[str, dict[str, Any]]]
) -> None:
    gateway = await serve()
    async with without_room(gateway, *before, signal(kind)) as (client, attachment):
        await client.say("signal", signal=STOP)
        await stopped(attachment)
        await client.say("signal", signal={"type": kind}, ref="after")
        await client.say("close")
        attachment.roomy.set()
        await attachment.gone.wait()
        stop, *others = attachment.verbs
        assert stop == steps.EmergencyStop()
        assert [verb.ref for verb in others] == [*("a" for _ in before), kind, "after"]
        # The session knows when it was stopped, and by this which were said before.
        first, second = others[-2:]
        assert isinstance(first, steps.ReleaseStop | steps.Reset)
        assert isinstance(second, steps.ReleaseStop | steps.Reset)
        assert first.said_ms is not None
        assert second.said_ms is not None
        assert first.said_ms < second.said_ms


async def test_a_stop_is_heard_of_who_does_not_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await serve()
    gateway.host.kind = "robot"
    async with requests(gateway.http) as http:
        session = await opened(http)
    url = f"ws://127.0.0.1:{gateway.port}/v1/sessions/{session['id']}/stream"
    async with stream(url, role="controller", secret=session["secret"]) as client:
        await client.until("attached")
        reads = asyncio.Event()
        monkeypatch.setattr(Egress, "blocked", property(lambda _: not reads.is_set()))
        monkeypatch.setattr(Egress, "room", lambda _: reads.wait())
        attachment = gateway.host.attachments[-1]
        await client.say(observed("a")[0], **observed("a")[1])
        await client.say(signal("release")[0], **signal("release")[1])
        await client.say("signal", signal=STOP)
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(verb, steps.EmergencyStop) for verb in attachment.verbs):
                attachment.got.clear()
                await attachment.got.wait()
        # It overtakes what was said before it, and waits until answers are read again.
        assert not any(isinstance(verb, steps.ReleaseStop) for verb in attachment.verbs)
        reads.set()
        await client.say("close")
        await attachment.gone.wait()
        assert isinstance(attachment.verbs[-1], steps.ReleaseStop)


async def test_what_is_no_robot_has_no_stop_and_hears_so_in_its_turn(serve: Serve) -> None:
    gateway = await serve()
    async with without_room(gateway, observed("a"), kind="world") as (client, attachment):
        await client.say("signal", signal=STOP, ref="s")
        await client.say("have", cursor=client.cursor)
        attachment.roomy.set()
        refused = await client.until("refused")
        assert (refused["ref"], refused["error"]["code"]) == ("s", "unsupported")
        assert [verb.ref for verb in attachment.verbs] == ["a"]


async def test_a_client_that_leaves_is_seen_to_leave_although_there_is_no_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_on, "LEFT_S", 0.0)
    gateway = await serve()
    async with without_room(gateway, observed("a"), observed("b")) as (client, attachment):
        client.socket.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await attachment.gone.wait()
        assert (attachment.detached, attachment.verbs) == (True, [])


async def test_what_it_said_before_is_carried_out_where_there_is_room_soon(serve: Serve) -> None:
    gateway = await serve()
    async with without_room(gateway, observed("a"), observed("b")) as (client, attachment):
        await client.socket.close()
        attachment.roomy.set()
        async with asyncio.timeout(WAIT_S):
            await attachment.gone.wait()
        assert [verb.ref for verb in attachment.verbs] == ["a", "b"]


async def test_an_ended_session_ends_a_wait(serve: Serve) -> None:
    gateway = await serve()
    async with without_room(gateway, observed("a")) as (client, attachment):
        attachment.put_out(SessionEnded("idle"))
        assert (await client.closed())[0] == 1000
