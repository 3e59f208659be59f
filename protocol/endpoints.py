"""Where the sockets of a link may lie."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from protocol.addresses import is_loopback
from protocol.errors import ConfigError

_LONGEST_SOCKET_PATH = 107


def local_path(endpoint: str) -> str | None:
    """The path of the Unix socket at `endpoint`; None for one that other hosts may have."""
    return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None


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
