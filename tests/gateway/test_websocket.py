"""The server's WebSocket says and hears what uvicorn's does, however its bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from gateway import websocket
from gateway.server import server_config
from gateway.websocket import GatewayWebSocket

LIMIT_BYTES = 70_000
REQUEST = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Transport(asyncio.Transport):
    """What was written, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.half_closes = False
        """Whether it can say that nothing more is written."""
        self.half_closed = False
        self.reads = asyncio.Event()
        """Set while it reads, and once it is closed."""
        self.reads.set()

    @property
    def reading(self) -> bool:
        return self.reads.is_set()

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(list_of_data)

    def close(self) -> None:
        self.closed = True
        self.reads.set()

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()


class Conversation:
    """One connection to an application that keeps what it hears, and says what it is told."""

    def __init__(self, kind: type[WebSocketsSansIOProtocol]) -> None:
        self.heard: list[dict[str, Any]] = []
        self.transport = Transport()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._app(receive, send)

        config = server_config(app, LIMIT_BYTES)
        config.load()
        self._accepted = asyncio.Event()
        self.let_in = asyncio.Event()
        self.state = ServerState()
        self.protocol = kind(config=config, server_state=self.state, app_state={})
        self.protocol.connection_made(self.transport)

    async def _app(self, receive: Any, send: Any) -> None:
        await receive()
        await self.let_in.wait()
        self.say = send
        await send({"type": "websocket.accept"})
        self._accepted.set()
        while True:
            self.heard.append(await receive())
            if self.heard[-1]["type"] == "websocket.disconnect":
                return

    async def begin(self) -> None:
        """Up to the end of the handshake."""
        self.let_in.set()
        self.protocol.data_received(REQUEST)
        await self._accepted.wait()
        self.transport.written = b""

    async def hear(self, pieces: list[bytes]) -> None:
        """The socket gives these, one after the other, as it does: not while it is paused."""
        for piece in pieces:
            if self.transport.closed:
                return
            self.protocol.data_received(piece)
            await settled()
            await self.transport.reads.wait()

    async def end(self) -> None:
        """The client has gone."""
        if self.protocol in self.state.connections:
            self.protocol.connection_lost(None)
        await asyncio.gather(*self.state.tasks)


async def settled() -> None:
    """Everything has run that is not waiting for the client."""
    for _ in range(10):
        await asyncio.sleep(0)


def masked(frame: Frame) -> bytes:
    """As a client sends it."""
    return frame.serialize(mask=True)


data = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([0, 1, 125, 126, 127, 65_535, 65_536, LIMIT_BYTES, LIMIT_BYTES + 1]).map(bytes),
)
frames = st.one_of(
    data.map(lambda it: Frame(Opcode.BINARY, it)),
    st.text(max_size=80).map(lambda it: Frame(Opcode.TEXT, it.encode())),
    st.just(Frame(Opcode.TEXT, b"\xff")),
    st.binary(max_size=125).map(lambda it: Frame(Opcode.PING, it)),
    st.binary(max_size=9).map(lambda it: Frame(Opcode.BINARY, it, fin=False)),
    st.binary(max_size=9).map(lambda it: Frame(Opcode.CONT, it)),
    st.just(Frame(Opcode.CLOSE, b"\x03\xe8bye")),
)
sent = st.one_of(
    frames.map(masked),
    frames.map(masked),
    frames.map(masked),
    st.sampled_from([Frame(Opcode.BINARY, b"unmasked").serialize(mask=False), b"\x83\x80abcd"]),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(sent, max_size=8), st.data())
async def test_it_hears_what_uvicorns_does(said: list[bytes], draw: st.DataObject) -> None:
    await compared(said, draw)


@settings(deadline=None, max_examples=100)
@given(st.lists(sent, max_size=8), st.data())
async def test_it_hears_the_same_in_several_turns(said: list[bytes], draw: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(websocket, "_FRAMES_A_TURN", 1)
        await compared(said, draw)


async def compared(said: list[bytes], draw: st.DataObject) -> None:
    stream = b"".join(said)
    cuts = draw.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    outcomes = []
    # uvicorn's forgets what comes in one piece with a frame that breaks the rules.
    for kind, given_ in ((WebSocketsSansIOProtocol, said), (GatewayWebSocket, pieces)):
        conversation = Conversation(kind)
        await conversation.begin()
        await conversation.hear(given_)
        await conversation.end()
        outcomes.append(
            (conversation.heard, conversation.transport.written, conversation.transport.closed)
        )
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Opcode.PING, b""),
        Frame(Opcode.PONG, b""),
        Frame(Opcode.CONT, b"", fin=False),
        Frame(Opcode.BINARY, b"x"),
    ],
)
async def test_many_frames_at_once_are_read_in_turns(frame: Frame) -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    turns = 0

    def another() -> None:
        nonlocal turns
        turns += not conversation.transport.reading
        if not conversation.transport.reading:
            asyncio.get_running_loop().call_soon(another)

    first = masked(Frame(Opcode.TEXT, b"a", fin=False)) if frame.opcode is Opcode.CONT else b""
    conversation.protocol.data_received(first + masked(frame) * 10_000)
    assert len(conversation.protocol.frames) <= 64
    assert conversation.protocol.queue.qsize() <= 64
    another()
    await conversation.transport.reads.wait()
    assert turns >= 10_000 // 64
    last = Frame(Opcode.CONT if first else Opcode.TEXT, b"z")
    await conversation.hear([masked(last)])
    await conversation.end()
    messages = [message["text"] for message in conversation.heard if message.get("text")]
    assert messages == ["az" if first else "z"]
    assert sum("bytes" in message for message in conversation.heard) == (
        10_000 if frame.opcode is Opcode.BINARY else 0
    )


async def test_a_message_has_a_bounded_number_of_fragments() -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    await conversation.hear([masked(Frame(Opcode.BINARY, b"", fin=False))])
    empty = masked(Frame(Opcode.CONT, b"", fin=False))
    await conversation.hear([empty * 1_000] * (websocket.MAX_FRAGMENTS // 1_000 + 1))
    assert conversation.transport.closed
    await conversation.end()
    assert [message.get("code") for message in conversation.heard] == [1009]


async def test_what_is_far_too_long_is_read_to_its_end_so_that_the_close_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    transport = conversation.transport
    transport.half_closes = True
    long = masked(Frame(Opcode.BINARY, bytes(3 * LIMIT_BYTES)))
    await conversation.hear([long[:1_000]])
    close = transport.written
    assert close[0] == 0x88
    assert int.from_bytes(close[2:4], "big") == 1009
    assert transport.reading
    await conversation.hear([long[1_000:2_000]])
    assert not transport.half_closed
    await conversation.hear([long[2_000:], masked(Frame(Opcode.TEXT, b"more"))])
    assert transport.half_closed
    assert not transport.closed
    await conversation.end()
    assert [message.get("code") for message in conversation.heard] == [1009]

    monkeypatch.setattr(websocket, "_ENDING_S", 0.0)
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    conversation.transport.half_closes = True
    await conversation.hear([long[:1_000]])
    await asyncio.sleep(0.01)
    assert conversation.transport.closed, "it may not go on for ever"
    await conversation.end()


async def test_who_does_not_read_is_owed_one_pong() -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    conversation.protocol.pause_writing()
    await conversation.hear([masked(Frame(Opcode.PING, bytes((n,)))) for n in range(100)])
    assert not conversation.transport.written
    conversation.protocol.resume_writing()
    assert conversation.transport.written == Frame(Opcode.PONG, b"\x63").serialize(mask=False)
    await conversation.end()


@pytest.mark.parametrize("behind", [0, 2, 9])
async def test_who_speaks_before_it_is_let_in_is_heard(behind: int) -> None:
    frame = masked(Frame(Opcode.BINARY, b"early"))
    conversation = Conversation(GatewayWebSocket)
    conversation.protocol.data_received(REQUEST + frame[:behind])
    conversation.protocol.data_received(frame[behind:10])
    conversation.let_in.set()
    await settled()
    await conversation.hear([frame[10:], masked(Frame(Opcode.BINARY, b"later"))])
    await conversation.end()
    assert [message.get("bytes") for message in conversation.heard] == [b"early", b"later", None]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 300_000])
@pytest.mark.parametrize("kind", ["bytes", "text"])
async def test_it_says_what_uvicorns_does(size: int, kind: str) -> None:
    message = {"type": "websocket.send", kind: bytes(size) if kind == "bytes" else "x" * size}
    written = []
    for protocol in (WebSocketsSansIOProtocol, GatewayWebSocket):
        conversation = Conversation(protocol)
        await conversation.begin()
        await conversation.say(message)
        written.append(conversation.transport.written)
        await conversation.end()
    assert written[0] == written[1]


async def test_who_does_not_listen_is_not_read_from() -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    two = masked(Frame(Opcode.BINARY, b"one")) + masked(Frame(Opcode.BINARY, b"two"))
    await settled()
    conversation.protocol.data_received(masked(Frame(Opcode.BINARY, b"none")))
    assert conversation.transport.reading
    conversation.protocol.data_received(two)
    assert not conversation.transport.reading
    await settled()
    assert conversation.transport.reading
    await conversation.end()
    assert [m.get("bytes") for m in conversation.heard] == [b"none", b"one", b"two", None]


async def test_nothing_is_said_while_the_client_does_not_read() -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    conversation.protocol.pause_writing()
    saying = asyncio.ensure_future(conversation.say({"type": "websocket.send", "bytes": b"x"}))
    await settled()
    assert not saying.done()
    conversation.protocol.resume_writing()
    await saying
    assert conversation.transport.written == b"\x82\x01x"
    await conversation.end()


async def test_nobody_is_told_anything_after_the_end() -> None:
    conversation = Conversation(GatewayWebSocket)
    await conversation.begin()
    await conversation.end()
    with pytest.raises(ClientDisconnected):
        await conversation.say({"type": "websocket.send", "bytes": b"x"})
