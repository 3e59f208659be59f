"""The file in which a parked session of llama.cpp lies.

llama.cpp writes a slot's keys and values to the front of it and reads them from there,
without a copy in between. Behind them follows what only the session knew, then a footer of
fixed length: it says how long the two are, and has a checksum over all that lies before it.
llama.cpp itself has none, and would take damaged numbers for what somebody said.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from protocol.errors import SessionStateLost
from protocol.payloads import Message

_MAGIC = b"antiphon-ar-slot"
_LENGTHS = struct.Struct(f"<{len(_MAGIC)}sQQ")
_CHECKSUM = struct.Struct("<I")
_FOOTER_BYTES = _LENGTHS.size + _CHECKSUM.size
_BLOCK_BYTES = 1 << 20


class Parked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session knew beside its slot's state."""

    weights: str
    """What the state fits: `Engine.weights` of the engine that wrote it."""

    tokens: list[tuple[int, bytes]]
    """Of the slot's text, first to last: a token's id and its UTF-8 bytes."""

    dropped: list[Message]
    """The conversation's oldest messages, which no longer fitted."""

    resident: list[int]
    """The ids of the tokens whose state lies in the file; -1 for one that is not known."""

    complete: bool
    """Whether the state is all of what llama.cpp needs to go on from any place in it."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Parked)


def create(path: Path) -> None:
    """An empty file at `path` for this user alone. Raises OSError, also when there is one."""
    path.touch(mode=0o600, exist_ok=False)


def seal(path: Path, parked: Parked) -> None:
    """Complete the file at `path`, which holds a slot's state or is empty. Blocks."""
    known = _encoder.encode(parked)
    with path.open("r+b") as file:
        state_bytes = os.fstat(file.fileno()).st_size
        rest = known + _LENGTHS.pack(_MAGIC, state_bytes, len(known))
        checksum = zlib.crc32(rest, _checksum(file, state_bytes))
        file.write(rest + _CHECKSUM.pack(checksum))


def unseal(path: Path, weights: str) -> tuple[Parked, int]:
    """What `seal` wrote, and the bytes of the slot's state in front of it. Blocks.

    Raises SessionStateLost for a file that is damaged, or that was written under other
    weights.
    """
    try:
        with path.open("rb") as file:
            parked, state_bytes = _read(file)
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        raise SessionStateLost(f"the parked session cannot be read: {error}") from error
    if parked.weights != weights:
        raise SessionStateLost("the session was parked under another model, or other options")
    return parked, state_bytes


def _read(file: BinaryIO) -> tuple[Parked, int]:
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER_BYTES:
        raise ValueError(f"it has {size} bytes")
    before = size - _CHECKSUM.size
    checksum = _checksum(file, before)
    if _CHECKSUM.unpack(file.read()) != (checksum,):
        raise ValueError("its checksum is wrong")
    file.seek(before - _LENGTHS.size)
    magic, state_bytes, known_bytes = _LENGTHS.unpack(file.read(_LENGTHS.size))
    if magic != _MAGIC or state_bytes + known_bytes + _FOOTER_BYTES != size:
        raise ValueError("it is of another kind")
    file.seek(state_bytes)
    return _decoder.decode(file.read(known_bytes)), state_bytes


def _checksum(file: BinaryIO, length_bytes: int) -> int:
    """Of the first `length_bytes` of `file`, which is left standing behind them."""
    file.seek(0)
    checksum = 0
    for start in range(0, length_bytes, _BLOCK_BYTES):
        checksum = zlib.crc32(file.read(min(_BLOCK_BYTES, length_bytes - start)), checksum)
    return checksum
