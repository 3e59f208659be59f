"""The link's frames over Unix sockets, between processes of one host.

A connection carries frames, each behind its length; the first one that a client sends is its
name. The end of a connection is the end of the peer's process, or of its interest.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

import structlog

from protocol.link_frames import MAX_FRAME_BYTES
from protocol.unix_listener import UnixListener

_log = structlog.get_logger(__name__)

_HEAD_BYTES = 4
_READ_BYTES = 64 * 1024
_READS_PER_TURN = 64
_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
"""What waits for a peer that does not read, at most; the link bounds it before, by its credit."""
_NAME_BYTES = 64
_NAME_S = 5.0
_BACKLOG = 64
_CONNECTIONS = 256
_RECONNECT_S = 0.05
_RECONNECT_CEILING_S = 1.0


class _Connection:
    """Frames both ways. `on_frame(frame)` is called for each that comes, and `on_end()` once, after
    all of them, when the peer is gone or breaks the rules; not after `close`."""

    def __init__(
        self,
        peer: socket.socket,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        peer.setblocking(False)
        self._socket = peer
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._rest = bytearray()
        """What has come of a frame that is not whole yet."""
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._closed = False
        self._loop.add_reader(peer.fileno(), self.read)

    def send(self, frame: bytes) -> None:
        """Send a frame, or keep it until the peer reads; it is dropped where too much waits."""
        if self._closed:
            return
        whole = len(frame).to_bytes(_HEAD_BYTES, "big") + frame
        sent = 0
        if self._unsent:
            if self._unsent_bytes + len(whole) > _UNSENT_BYTES:
                return
        else:
            try:
                sent = self._socket.send(whole)
            except BlockingIOError:
                pass
            except OSError:
                return  # Its end is about to be read, behind what it has said before.
            if sent == len(whole):
                return
            self._loop.add_writer(self._socket.fileno(), self._write)
        self._unsent.append(memoryview(whole)[sent:])
        self._unsent_bytes += len(whole) - sent

    def read(self) -> None:
        """Take in what has come, up to a bound a loop turn."""
        for _ in range(_READS_PER_TURN):
            if self._closed:
                return
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data or not self._take(data):
                if not self._closed:
                    self.close()
                    self._on_end()
                return
            if len(data) < _READ_BYTES:
                return

    def close(self) -> None:
        """End the connection; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._unsent.clear()

    def _take(self, data: bytes | bytearray) -> bool:
        """Give out the frames that are whole; False for one that is too long."""
        if self._rest:
            self._rest += data
            data = self._rest
        at, size, length = 0, len(data), 0
        frames: list[bytes] = []
        while size - at >= _HEAD_BYTES:
            begin = at + _HEAD_BYTES
            length = int.from_bytes(data[at:begin], "big")
            if begin + length > size or length > MAX_FRAME_BYTES:
                break
            at = begin + length
            frames.append(bytes(data[begin:at]))
        if data is self._rest:
            del self._rest[:at]
        elif at < size:
            self._rest += data[at:]
        for frame in frames:
            if not self._closed:
                self._on_frame(frame)
        return length <= MAX_FRAME_BYTES

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            # Its end is about to be read.
            self._unsent.clear()
            self._unsent_bytes = 0
        self._loop.remove_writer(self._socket.fileno())


class UnixClient:
    """A connection to whoever listens at `path`, made again whenever it is lost.

    `on_connected()` is called when it is there, before any frame, `on_lost()` when it is there
    no more. Make it on a running loop.
    """

    def __init__(
        self,
        path: str,
        name: str,
        *,
        on_frame: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._path = path
        self._name = name.encode()
        self._on_frame = on_frame
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._wait_s = _RECONNECT_S
        self._closed = False
        self._attempt: asyncio.Handle = self._loop.call_soon(self._connect)

    def send(self, frame: bytes) -> None:
        """Hand over a frame without waiting; without a connection it goes nowhere."""
        if self._connection is not None:
            self._connection.send(frame)

    def drain(self) -> None:
        """Read what is there."""
        if self._connection is not None:
            self._connection.read()

    def close(self) -> None:
        """End the connection for good; idempotent."""
        self._closed = True
        self._attempt.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.setblocking(False)
            peer.connect(self._path)
        except OSError:
            # Nobody listens there yet, or too many knock.
            peer.close()
            self._attempt = self._loop.call_later(self._wait_s, self._connect)
            self._wait_s = min(2 * self._wait_s, _RECONNECT_CEILING_S)
            return
        self._wait_s = _RECONNECT_S
        self._connection = _Connection(peer, self._on_frame, self._ended)
        self._connection.send(self._name)
        self._on_connected()

    def _ended(self) -> None:
        self._connection = None
        self._attempt = self._loop.call_later(self._wait_s, self._connect)
        self._on_lost()


class UnixServer:
    """Listens at `path` for clients that say their names.

    `on_frame(name, frame)` is called for what comes of each, `on_lost(name)` when its last
    connection has ended; one that comes again takes the place of the one before. Make it on a
    running loop. Raises ConfigError where nobody can listen there.
    """

    def __init__(
        self,
        path: str,
        *,
        on_frame: Callable[[str, bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._named: dict[str, _Connection] = {}
        self._closed = False
        self._listener = UnixListener(path, socket.SOCK_STREAM, _BACKLOG, self._serve)

    def send(self, name: str, frame: bytes) -> None:
        """Hand over a frame without waiting; where nobody has that name it goes nowhere."""
        if (connection := self._named.get(name)) is not None:
            connection.send(frame)

    def drain(self) -> None:
        """Read what is there."""
        for connection in list(self._connections):
            connection.read()

    def close(self) -> None:
        """Listen no longer, and end all connections; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._named.clear()

    def _serve(self, peer: socket.socket) -> None:
        if len(self._connections) >= _CONNECTIONS:
            peer.close()
            return
        name: str | None = None

        def came(frame: bytes) -> None:
            nonlocal name
            if name is not None:
                self._on_frame(name, frame)
                return
            deadline.cancel()
            if not 0 < len(frame) <= _NAME_BYTES:
                drop()
                return
            name = frame.decode(errors="replace")
            before = self._named.get(name)
            if before is not None:
                self._connections.discard(before)
                before.close()
            self._named[name] = connection

        def drop() -> None:
            self._connections.discard(connection)
            connection.close()

        def ended() -> None:
            deadline.cancel()
            self._connections.discard(connection)
            if name is not None and self._named.get(name) is connection:
                del self._named[name]
                self._on_lost(name)

        connection = _Connection(peer, came, ended)
        self._connections.add(connection)
        # Who says no name takes nobody's place for long.
        deadline = self._loop.call_later(_NAME_S, drop)
