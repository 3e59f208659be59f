"""ZeroMQ's sockets on an asyncio loop: the link's frames over tcp.

The file descriptor of a ZeroMQ socket is edge-triggered: it says that something may have
changed, once. So every wake-up reads until there is nothing left, and a send, which may have
taken the signal away, looks whether there is something to read. Nothing polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from protocol.errors import ConfigError
from protocol.link_frames import MAX_FRAME_BYTES

_MESSAGES_PER_TURN = 256

# Members of its enumerations are slow to look up and to combine.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class _LoopSocket:
    """A socket whose messages arrive as calls of `on_message(parts)` on the loop.

    `on_connected()` is called when a connection is there. Its end is not told: it may come
    back. Sends never wait: a message that the socket does not take now is dropped.
    """

    def __init__(
        self,
        kind: int,
        on_message: Callable[[list[bytes]], None],
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._on_message = on_message
        self._on_connected = on_connected
        self._drain_due = False
        self._closed = False
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._fd = int(self._socket.get(zmq.FD))
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)
        self._loop.add_reader(self._monitor_fd, self._drain_monitor)
        self._loop.call_soon(self._drain_monitor)
        self._drain_soon()

    def drain(self) -> None:
        """Read what is there, up to a bound a loop turn."""
        for _ in range(_MESSAGES_PER_TURN):
            # Asking costs a third of an attempt that fails.
            if self._closed or not self._readable():
                return
            try:
                parts = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._on_message(parts)
        self._drain_soon()

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _send(self, parts: Sequence[bytes]) -> None:
        """Hand one message to the socket without waiting."""
        if self._closed:
            return
        if not self._try_send(parts):
            # A send looks only now and then at what its connections have become; asking
            # for the events makes it look.
            self._readable()
            self._try_send(parts)
        if self._readable():
            self._drain_soon()

    def _try_send(self, parts: Sequence[bytes]) -> bool:
        """Whether the message was taken, or nobody is there to take it."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _NOBLOCK_MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def _drain_soon(self) -> None:
        if not self._drain_due:
            self._drain_due = True
            self._loop.call_soon(self._drain_due_now)

    def _drain_due_now(self) -> None:
        self._drain_due = False
        self.drain()

    def _readable(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def _drain_monitor(self) -> None:
        while not self._closed:
            try:
                self._monitor.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._on_connected()


class ZmqDealer(_LoopSocket):
    """A gateway's socket, which leads to the worker at `endpoint`, now and whenever the
    connection was lost.

    `on_frame(frame)` is called for each that comes, `on_malformed()` for a message that is none.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        on_frame: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_malformed: Callable[[], None],
    ) -> None:
        super().__init__(zmq.DEALER, self._came, on_connected)
        self._on_frame = on_frame
        self._on_malformed = on_malformed
        self._socket.set(zmq.ROUTING_ID, name.encode())
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)

    def send(self, frame: bytes) -> None:
        """Hand over a frame without waiting; it may be lost."""
        self._send([frame])

    def _came(self, parts: list[bytes]) -> None:
        if len(parts) == 1:
            self._on_frame(parts[0])
        else:
            self._on_malformed()


class ZmqRouter(_LoopSocket):
    """A worker's socket, which all gateways find at `endpoint`.

    `on_frame(name, frame)` is called for what comes of each, `on_malformed()` for a message that
    is no frame. Raises ConfigError where the endpoint is in use or cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_frame: Callable[[str, bytes], None],
        on_malformed: Callable[[], None],
    ) -> None:
        super().__init__(zmq.ROUTER, self._came)
        self._on_frame = on_frame
        self._on_malformed = on_malformed
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {error}") from error

    def send(self, name: str, frame: bytes) -> None:
        """Hand over a frame without waiting; it may be lost."""
        self._send([name.encode(), frame])

    def _came(self, parts: list[bytes]) -> None:
        try:
            name, frame = parts
            decoded = name.decode()
        except ValueError:
            self._on_malformed()
            return
        self._on_frame(decoded, frame)
