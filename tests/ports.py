"""Ports for servers that have to be told one before they are started."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _OF_A_WORKER = 20_000, 1_000
"""Below those that Linux gives to whoever asks for any, so that none of them is taken meanwhile;
and each of pytest-xdist's workers has its own."""

_numbers = itertools.count()


def free_port() -> int:
    """A port that nobody has, and that is told to nobody else."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = _FIRST + worker * _OF_A_WORKER + next(_numbers) % _OF_A_WORKER
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # Somebody else's.
