"""A listening Unix socket that only this user reaches, where a dead process may have left one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import structlog

from protocol.endpoints import check_endpoint
from protocol.errors import ConfigError

_log = structlog.get_logger(__name__)

_CREDENTIALS = struct.Struct("3i")
_ACCEPT_AGAIN_S = 1.0
"""How long nobody is let in when this process has no room for one more file."""


class UnixListener:
    """Listens at `path` for processes of this user.

    `on_peer(socket)` gets each that connects, non-blocking; the others are closed. Make it on a
    running loop. Raises ConfigError when the path is not in a directory of this user with mode
    0700, or is in use.
    """

    def __init__(
        self,
        path: str,
        kind: socket.SocketKind,
        backlog: int,
        on_peer: Callable[[socket.socket], None],
    ) -> None:
        self._path = path
        self._on_peer = on_peer
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._listener = _listen(path, kind, backlog)
        self._open()

    def close(self) -> None:
        """Listen no longer; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Whoever knocks keeps knocking: the loop would do nothing but come here.
                _log.error("accept_failed", path=self._path, reason=str(error))
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(_ACCEPT_AGAIN_S, self._open)
                return
            peer.setblocking(False)
            if is_same_user(peer):
                self._on_peer(peer)
            else:
                peer.close()


def is_same_user(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as this process's user."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())


def _listen(path: str, kind: socket.SocketKind, backlog: int) -> socket.socket:
    """A listening socket at `path`, which only this user can reach. Raises ConfigError."""
    check_endpoint(f"ipc://{path}")
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.setblocking(False)
        _sweep(path, kind)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _sweep(path: str, kind: socket.SocketKind) -> None:
    """Remove a socket that its process left behind. Raises ConfigError for one in use."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigError(f"{path} is in the way: it is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise ConfigError(f"{path} is in use by another process")
