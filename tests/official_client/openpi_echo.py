"""Reads messages with openpi-client's own coder and writes them again, until end of input.

Each is preceded by its length (4 bytes, big-endian). Runs in the environment of that client.
"""

from __future__ import annotations

import struct
import sys

from openpi_client import msgpack_numpy

LENGTH = struct.Struct(">I")

while head := sys.stdin.buffer.read(LENGTH.size):
    message = sys.stdin.buffer.read(LENGTH.unpack(head)[0])
    again = msgpack_numpy.packb(msgpack_numpy.unpackb(message))
    sys.stdout.buffer.write(LENGTH.pack(len(again)) + again)
    sys.stdout.buffer.flush()
