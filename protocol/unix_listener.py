"""A listening Unix socket, in the place of one that a dead process left behind."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from protocol.endpoints import check_endpoint
from protocol.errors import ConfigError


def listen_at(path: str, kind: socket.SocketKind, backlog: int) -> socket.socket:
    """A listening socket at `path`, which only this user can reach.

    Raises ConfigError when the path is not in a directory of this user with mode 0700, or
    is in use.
    """
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
