"""The WebSocket of the gateway's server: uvicorn's, with a short way for whole data frames.

Nearly all that clients send are unfragmented data frames, and all that they are sent. Such a
frame is taken from what the socket gives and unmasked, once, without a parser's buffer in
between; an answer is a head and its bytes. Everything else (the handshake, fragments, control
frames, what breaks the rules) is uvicorn's and websockets' as ever.

One client's frames never hold up the others for long: after so many of them it is somebody else's
turn, and as long as it has more it is not read from.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import CONNECTING, OPEN
from websockets.streams import StreamReader

if TYPE_CHECKING:
    from websockets.utils import apply_mask
else:
    try:
        from websockets.speedups import apply_mask
    except ImportError:
        from websockets.utils import apply_mask

# RFC 6455, section 5.2.
_TEXT, _BINARY = 0x81, 0x82
_WHOLE = (_TEXT, _BINARY)
_MASKED = 0x80
_REQUEST_END = b"\r\n\r\n"
_MASK_BYTES = 4
_SHORT = 126
_pack_medium = struct.Struct(">BBH").pack
_pack_long = struct.Struct(">BBQ").pack
_FRAMES_A_TURN = 64
MAX_FRAGMENTS = 16 * 1024
"""Of one message, whose bytes are bounded anyway: with 15 MiB, such as have 1 KB each."""
_ENDING_S = 10.0
"""How long a client that broke the rules may go on with the frame that it was saying."""
_GOODBYE_S = 1.0
"""How long it may take to hang up behind that."""
_JOINED_BYTES = 16 * 1024
"""Frames up to this size are joined with their heads: copying costs less than two writes."""


class GatewayWebSocket(WebSocketsSansIOProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiving = False
        """Whether the application waits for a message."""
        self._greeted = False
        """Whether the request has come."""
        self._rest = b""
        """What has come, and waits for the next turn, or for the client to be let in."""
        self._turn: asyncio.Handle | None = None
        self._pong = b""
        """The answer to the last ping, while the client does not read what it is sent."""
        self._head = b""
        """The head of a frame that has not come whole."""
        self._passed_on = 0
        """How many bytes are missing of a frame that goes the long way."""
        self._missing = 0
        """How many bytes are missing of one that goes the short way, and what has come."""
        self._pieces: list[bytes] = []
        self._mask = b""
        self._deaf = False
        """Whether what still comes is read, and dropped."""

    def data_received(self, data: bytes) -> None:
        """The socket gives some bytes."""
        if self._deaf:
            self._drop(len(data))
            return
        if not self._greeted:
            # The request comes whole, and nothing behind it from who keeps the rules.
            self._greeted = True
            request, end, data = data.partition(_REQUEST_END)
            super().data_received(request + end)
        if self._rest or self.conn.state is CONNECTING:
            self._rest += data
            self._read_later()
        else:
            self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        """Read frames, as many as there may be in a turn."""
        if self._head:
            data, self._head = self._head + data, b""
        at, size, left = 0, len(data), _FRAMES_A_TURN
        while at < size and not self._deaf:
            if self._missing:
                at = self._take(data, at, min(at + self._missing, size))
            elif self._passed_on:
                end = min(at + self._passed_on, size)
                self._passed_on -= end - at
                super().data_received(data[at:end])
                at = end
            elif left:
                at = self._begin(data, at, size)
                left -= 1
            else:
                self._rest = data[at:]
                self._read_later()
                return

    def _read_later(self) -> None:
        """What is left is read in another turn: when the client has been let in, and what it
        said before has been heard."""
        if not self._rest:
            return
        if not self.read_paused:
            self.transport.pause_reading()
        if not self.read_paused and self._turn is None and self.conn.state is not CONNECTING:
            self._turn = self.loop.call_soon(self._read_rest)

    def _read_rest(self) -> None:
        self._turn = None
        rest, self._rest = self._rest, b""
        if self.transport.is_closing() or self._deaf:
            return
        self._take_in(rest)
        if not self._rest and not self.read_paused:
            self.transport.resume_reading()

    def handle_cont(self, event: Frame) -> None:
        """Another fragment of a message."""
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAGMENTS:
            reason = f"a message has at most {MAX_FRAGMENTS} fragments"
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, reason)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """The client is told what rule it broke. What it was saying is read to its end: a socket
        that is closed with something unread is reset, and the close is lost with it."""
        assert self.conn.close_sent is not None
        if not self.transport.can_write_eof():  # Such as one with TLS.
            super().handle_parser_exception()
            return
        told = self.conn.close_sent
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": told.code, "reason": told.reason}
        )
        self.close_sent = self._deaf = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.resume_reading()
        self._close_within(_ENDING_S)
        self._drop(0)

    def _drop(self, size: int) -> None:
        """So much has come of a client that is not heard any more."""
        if self.transport.is_closing():
            return
        before, self._passed_on = self._passed_on, max(self._passed_on - size, 0)
        if not self._passed_on and (before or not size):
            self.transport.write_eof()
            self._close_within(_GOODBYE_S)

    def _close_within(self, seconds: float) -> None:
        """While uvicorn sees this timer the end of the application does not close the socket."""
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(seconds, self.transport.close)

    def handle_ping(self) -> None:
        """Who does not read is owed the answer to its last ping only (RFC 6455, 5.5.3)."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._pong and not self.transport.is_closing():
            self.transport.write(self._pong)
        self._pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nothing of what it said is held any more.

        The parser holds the last message and, as a generator of its own, itself: the collector
        would find it, but as it counts objects and not bytes, after gigabytes.
        """
        super().connection_lost(exc)
        if self._turn is not None:
            self._turn.cancel()
        self.conn.parser.close()
        self.conn.parser_exc = None
        self.conn.reader = StreamReader()
        self.frames = []
        self._pieces = []
        self._head = self._rest = b""

    def _begin(self, data: bytes, at: int, size: int) -> int:
        """Look at the head of a frame; where its payload begins, or all of it, if it goes the
        long way."""
        if self.transport.is_closing():
            return size  # What came before it has ended the connection.
        head = at + 2
        length = 0
        if head <= size:
            length = data[at + 1] & ~_MASKED
            if length >= _SHORT:
                head += 2 if length == _SHORT else 8
                length = int.from_bytes(data[at + 2 : head], "big")
            head += _MASK_BYTES if data[at + 1] & _MASKED else 0
        if head > size:
            self._head = data[at:]
            return size
        if (
            (kind := data[at]) in _WHOLE
            and data[at + 1] & _MASKED
            and 0 < length <= self.config.ws_max_size
            and self.conn.state is OPEN
            and self.conn.current_size is None
        ):
            self.curr_msg_data_type = "text" if kind == _TEXT else "bytes"
            self._mask = data[head - _MASK_BYTES : head]
            self._missing = length
            return head
        self._passed_on = head - at + length
        return at

    def _take(self, data: bytes, at: int, end: int) -> int:
        """Unmask what has come of a frame; where it ends."""
        piece = data if end - at == len(data) else memoryview(data)[at:end]
        self._pieces.append(apply_mask(piece, self._mask))
        turned = (end - at) % _MASK_BYTES
        self._mask = self._mask[turned:] + self._mask[:turned]
        self._missing -= end - at
        if not self._missing:
            self.frames, self._pieces = self._pieces, []
            self.send_receive_event_to_app()
        return end

    def send_receive_event_to_app(self) -> None:
        """A message is complete. Where the application waits for it, what follows is read on."""
        if self._receiving and not self.read_paused:
            self._receiving = False
            self.read_paused = True
            super().send_receive_event_to_app()
            self.read_paused = False
        else:
            super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """The next message for the application."""
        self._receiving = self.queue.empty()
        try:
            message = await self.queue.get()
        finally:
            self._receiving = False
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._rest:
                self._read_later()
            else:
                self.transport.resume_reading()
        return message

    async def send(self, message: Any) -> None:
        """What the application sends."""
        if (
            message["type"] != "websocket.send"
            or self.conn.state is not OPEN
            or self.close_sent
            or self.disconnected
            or not self.handshake_complete
            or not self.writable.is_set()
        ):
            await super().send(message)
            if message["type"] == "websocket.accept":
                self._read_later()
            return
        data, kind = message.get("bytes"), _BINARY
        if data is None:
            data, kind = message["text"].encode(), _TEXT
        length = len(data)
        if length < _SHORT:
            head = bytes((kind, length))
        elif length < 1 << 16:
            head = _pack_medium(kind, _SHORT, length)
        else:
            head = _pack_long(kind, _SHORT + 1, length)
        if length <= _JOINED_BYTES:
            self.transport.write(head + data)
        else:
            self.transport.writelines((head, data))
