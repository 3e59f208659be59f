"""A ZeroMQ socket on an asyncio loop, and where such sockets may lie.

The file descriptor of a ZeroMQ socket is edge-triggered: it says that something may have
changed, once. So every wake-up reads until there is nothing left, and a send, which may have
taken the signal away, looks whether there is something to read. Nothing polls.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.utils.monitor

from protocol.addresses import is_loopback
from protocol.errors import ConfigError
from protocol.link_frames import MAX_FRAME_BYTES

_LONGEST_SOCKET_PATH = 107
_MESSAGES_PER_TURN = 256

# Members of its enumerations are slow to look up and to combine.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class SendOutcome(Enum):
    """What became of a frame at the socket."""

    SENT = "sent"
    DROPPED = "dropped"
    UNREACHABLE = "unreachable"


class LoopSocket:
    """A socket whose messages arrive as calls of `on_message(parts)` on the loop.

    `on_monitor(event)` is called for the connection events in `events`, `on_wake()` after
    the socket signalled and was read. Sends never wait: a message that the socket does
    not take now is dropped.
    """

    def __init__(
        self,
        kind: int,
        *,
        on_message: Callable[[list[bytes]], None],
        on_monitor: Callable[[zmq.Event], None],
        on_wake: Callable[[], None] | None = None,
        events: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = (context or zmq.Context.instance()).socket(kind)
        self._on_message = on_message
        self._on_monitor = on_monitor
        self._on_wake = on_wake
        self._drain_due = False
        self._closed = False
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
        self._fd = int(self._socket.get(zmq.FD))
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        self._loop.add_reader(self._fd, self._woken)
        self._loop.add_reader(self._monitor_fd, self._drain_monitor)
        self._loop.call_soon(self._drain_monitor)
        self._drain_soon()

    def set(self, option: int, value: int | bytes) -> None:
        """Set a socket option."""
        self._socket.set(option, value)

    def bind(self, endpoint: str) -> None:
        """Bind. Raises ConfigError where the endpoint is in use or cannot be bound."""
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
        self._drain_soon()

    def connect(self, endpoint: str) -> None:
        """Connect now and whenever the connection is lost."""
        self._socket.connect(endpoint)
        self._drain_soon()

    def send(self, parts: Sequence[bytes]) -> SendOutcome:
        """Hand one message to the socket without waiting."""
        if self._closed:
            return SendOutcome.DROPPED
        outcome = self._try_send(parts)
        if outcome is SendOutcome.DROPPED:
            # A send looks only now and then at what its connections have become; asking
            # for the events makes it look.
            self._readable()
            outcome = self._try_send(parts)
        if self._readable():
            self._drain_soon()
        return outcome

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

    def _try_send(self, parts: Sequence[bytes]) -> SendOutcome:
        try:
            for part in parts[:-1]:
                self._socket.send(part, _NOBLOCK_MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.Again:
            return SendOutcome.DROPPED
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendOutcome.UNREACHABLE
            raise
        return SendOutcome.SENT

    def _woken(self) -> None:
        self.drain()
        if self._on_wake is not None:
            self._on_wake()

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
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = zmq.utils.monitor.parse_monitor_message(parts)["event"]
            self._on_monitor(zmq.Event(event))


def is_local(endpoint: str) -> bool:
    """Whether a lost connection to `endpoint` means that the peer process ended."""
    return endpoint.startswith("ipc://")


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint where others could listen or speak.

    Raises ConfigError for an ipc socket outside a directory of mode 0700 of this user,
    for tcp off loopback, which needs keys, and for other transports.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        _check_socket_path(endpoint.removeprefix("ipc://"))
    elif parts.scheme == "tcp":
        if not is_loopback(parts.hostname or "*"):
            raise ConfigError(f"{endpoint}: tcp off loopback needs keys at both ends")
    else:
        raise ConfigError(f"{endpoint}: an endpoint is ipc:///DIRECTORY/SOCKET or tcp://HOST:PORT")


def _check_socket_path(path: str) -> None:
    if not path.startswith("/"):
        raise ConfigError(f"ipc://{path}: the path of a socket is absolute")
    if len(path.encode()) > _LONGEST_SOCKET_PATH:
        raise ConfigError(f"ipc://{path}: a socket's path has at most {_LONGEST_SOCKET_PATH} bytes")
    directory = Path(path).parent
    try:
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"ipc://{path}: {error}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"ipc://{path}: {directory} must belong to this user with mode 0700")
