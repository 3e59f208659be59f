"""The least that a server can do: read each observation, look at nothing, send one packed answer.

    python loadtest/openpi_bound.py PORT [MS ROBOTS]

One thread a connection, blocking sockets, one buffer. What a robot takes against it is what the
official client and the kernel take. With MS and ROBOTS it has a policy that takes so many
milliseconds for all of so many robots at once: observations wait until it has one of each.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import struct
import sys
import threading
import time

import numpy as np

from protocol.openpi import pack

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame(payload: bytes) -> bytes:
    """A binary WebSocket message."""
    size = len(payload)
    head = struct.pack(">BB", 0x82, size) if size < 126 else struct.pack(">BBH", 0x82, 126, size)
    return head + payload


METADATA = frame(pack({}))
ANSWER = frame(
    pack({"actions": np.zeros((50, 32), np.float32), "server_timing": {"infer_ms": 0.0}})
)


def serve(client: socket.socket) -> None:
    """Answer until the client goes."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = b""
    while b"\r\n\r\n" not in request:
        request += client.recv(4096)
    found = re.search(rb"(?i)sec-websocket-key: *(\S+)", request)
    assert found is not None
    accept = base64.b64encode(hashlib.sha1(found[1] + _MAGIC).digest())
    client.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n" + METADATA
    )
    buffer = memoryview(bytearray(4 * 1024 * 1024))
    while True:
        have, needed = 0, 14
        while have < needed:
            received = client.recv_into(buffer[have:])
            if not received:
                return
            have += received
            if have >= 14 and needed == 14:
                if buffer[0] & 0x0F != 2:
                    return
                needed = 14 + int.from_bytes(buffer[2:10], "big")
                assert buffer[1] & 0x7F == 127, "observations have more than 64 KiB here"
        together.wait()
        client.sendall(ANSWER)


def infer() -> None:
    """Once all robots have been heard, before any is answered."""
    if TAKES_S:
        time.sleep(TAKES_S)


TAKES_S = float(sys.argv[2]) / 1000.0 if len(sys.argv) > 2 else 0.0
together = threading.Barrier(int(sys.argv[3]) if len(sys.argv) > 3 else 1, infer)

with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
