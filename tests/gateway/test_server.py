"""The listening socket."""

from __future__ import annotations

import contextlib
import socket

from gateway.server import UNSENT_BYTES, listen


def test_what_a_client_does_not_read_is_not_hidden_in_the_kernel() -> None:
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            accepted.setblocking(False)
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while taken < 64 * UNSENT_BYTES:
                    taken += accepted.send(bytes(16 * 1024))
            # Without the option it is megabytes.
            assert taken <= 4 * UNSENT_BYTES
