"""The WebSocket of the gateway's server: uvicorn's, with a short way for whole data frames.

Nearly all that clients send are unfragmented data frames, and all that they are sent. Such a
frame is taken from what the socket gives and unmasked, once, without a parser's buffer in
between; an answer is a head and its bytes. Everything else (the handshake, fragments, control
frames, what breaks the rules) is uvicorn's and websockets' as ever.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
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
_MASK_BYTES = 4
_SHORT = 126
_pack_medium = struct.Struct(">BBH").pack
_pack_long = struct.Struct(">BBQ").pack
_JOINED_BYTES = 16 * 1024
"""Frames up to this size are joined with their heads: copying costs less than two writes."""


class GatewayWebSocket(WebSocketsSansIOProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiving = False
        """Whether the application waits for a message."""
        self._long_way = False
        """Whether it is not known where a frame begins: the client spoke before it was let in."""
        self._greeted = False
        self._head = b""
        """The head of a frame that has not come whole."""
        self._passed_on = 0
        """How many bytes are missing of a frame that goes the long way."""
        self._missing = 0
        """How many bytes are missing of one that goes the short way, and what has come."""
        self._pieces: list[bytes] = []
        self._mask = b""

    def data_received(self, data: bytes) -> None:
        """The socket gives some bytes."""
        if self.conn.state is CONNECTING:
            # Who keeps the rules says nothing behind its request until that is answered.
            self._long_way = self._greeted or not data.endswith(b"\r\n\r\n")
            self._greeted = True
        if self._long_way or self.conn.state is CONNECTING:
            super().data_received(data)
            return
        if self._head:
            data, self._head = self._head + data, b""
        at, size = 0, len(data)
        while at < size:
            if self._missing:
                at = self._take(data, at, min(at + self._missing, size))
            elif self._passed_on:
                end = min(at + self._passed_on, size)
                self._passed_on -= end - at
                super().data_received(data[at:end])
                at = end
            else:
                at = self._begin(data, at, size)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nothing of what it said is held any more.

        The parser holds the last message and, as a generator of its own, itself: the collector
        would find it, but as it counts objects and not bytes, after gigabytes.
        """
        super().connection_lost(exc)
        self.conn.parser.close()
        self.conn.parser_exc = None
        self.conn.reader = StreamReader()
        self.frames = []
        self._pieces = []
        self._head = b""

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
            return await super().receive()
        finally:
            self._receiving = False

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
