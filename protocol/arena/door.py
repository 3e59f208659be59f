"""Where consumers knock: a Unix socket that only this user can reach."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from protocol.arena import handshake
from protocol.arena.handshake import Hello, Prepare, Refusal
from protocol.connector_errors import DescriptorRefused, NoCredit, PayloadClaimed
from protocol.unix_listener import UnixListener

_log = structlog.get_logger(__name__)

_HANDSHAKE_S = 5.0
_STRANGERS = 64
"""Connections that have not introduced themselves; one more is closed."""


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has yet to introduce itself."""

    socket: socket.socket
    deadline: asyncio.TimerHandle = field(init=False)


class Door:
    """Listens at `path` and lets consumers in that introduce themselves in time.

    `on_hello(socket, hello, outbox_fd)` takes the socket over, or raises DescriptorRefused,
    NoCredit or PayloadClaimed, which the consumer is told, or OSError; `outbox_fd` stays
    the door's. Raises ConfigError when the path is not in a directory of this user with
    mode 0700, or is in use.
    """

    def __init__(
        self,
        path: str,
        outbox_bytes: int,
        on_hello: Callable[[socket.socket, Hello, int], None],
    ) -> None:
        self._path = path
        self._prepare = Prepare(handshake.VERSION, outbox_bytes)
        self._on_hello = on_hello
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[_Stranger, None] = {}
        self._listener = UnixListener(path, socket.SOCK_SEQPACKET, _STRANGERS, self._came)

    def close(self) -> None:
        """Listen no longer; idempotent."""
        self._listener.close()
        for stranger in list(self._strangers):
            self._forget(stranger)

    def _came(self, peer: socket.socket) -> None:
        if len(self._strangers) >= _STRANGERS:
            peer.close()
            return
        stranger = _Stranger(peer)
        stranger.deadline = self._loop.call_later(_HANDSHAKE_S, self._forget, stranger)
        self._strangers[stranger] = None
        self._loop.add_reader(peer.fileno(), self._introduced, stranger)
        with contextlib.suppress(OSError):
            handshake.send(peer, self._prepare, [])

    def _introduced(self, stranger: _Stranger) -> None:
        fds: list[int] = []
        try:
            hello, fds = handshake.receive(stranger.socket)
            if hello is None:
                self._forget(stranger)
                return
            if not isinstance(hello, Hello) or len(fds) != 1:
                raise DescriptorRefused("a consumer begins with a greeting and its outbox")
            if hello.version != handshake.VERSION:
                raise DescriptorRefused(f"this arena speaks version {handshake.VERSION}")
            self._loop.remove_reader(stranger.socket.fileno())
            self._on_hello(stranger.socket, hello, fds[0])
        except BlockingIOError:
            return
        except (DescriptorRefused, NoCredit, PayloadClaimed) as error:
            _log.warning("arena_consumer_refused", path=self._path, reason=error.message)
            with contextlib.suppress(OSError):
                handshake.send(stranger.socket, Refusal(error.message), [])
            self._forget(stranger)
        except OSError:
            self._forget(stranger)
        else:
            stranger.deadline.cancel()
            del self._strangers[stranger]
        finally:
            handshake.close_all(fds)

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        stranger.deadline.cancel()
        self._loop.remove_reader(stranger.socket.fileno())
        stranger.socket.close()
