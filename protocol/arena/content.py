"""How one payload lies in memory: a header, what it is, and its bytes.

The header repeats what its descriptor says (key, generation, length), so that a
descriptor can be checked against the bytes that it names. It is wiped when its slot is
free. Layout: key u64, generation u64, slot u32, length of the description u32, length of
the data u64; the description in msgpack; the data at the next multiple of 64.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import msgspec

from protocol.arena.producer import ALIGNMENT_BYTES
from protocol.connector_errors import DescriptorRefused
from protocol.payloads import Payload, PayloadType

_HEADER = struct.Struct("<QQIIQ")
_HEADER_BYTES = _HEADER.size
_KEY = struct.Struct("<Q")


class Belonging(msgspec.Struct, frozen=True, array_like=True):
    """Where the payloads of a flow belong; `edges` has the edge to each consumer."""

    edges: dict[str, str]
    session: str
    turn: int


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a payload is; `flow` is its encoded `Belonging`, `note` its sender's word."""

    flow: msgspec.Raw
    type: PayloadType
    dtype: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]
    note: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)
_belongings = msgspec.msgpack.Decoder(Belonging)


def describe_flow(edges: dict[str, str], session: str, turn: int) -> msgspec.Raw:
    """The part of a description that all payloads of a flow share."""
    return msgspec.Raw(_encoder.encode(Belonging(edges, session, turn)))


def describe(payload: Payload, flow: msgspec.Raw, note: bytes) -> bytes:
    """The description of a payload as it lies in the arena."""
    return _encoder.encode(
        Description(flow, payload.type, payload.dtype, payload.shape, payload.attributes, note)
    )


def belonging(flow: bytes) -> Belonging:
    """The shared part of a description. Raises DescriptorRefused when it cannot be read."""
    try:
        return _belongings.decode(flow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DescriptorRefused("the payload's description cannot be read") from error


def data_start(description_bytes: int) -> int:
    """Where the data begins, from the start of the header."""
    return (_HEADER_BYTES + description_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES


def head(slot: int, generation: int, key: int, description: bytes, data_bytes: int) -> bytes:
    """Header and description, padded to where the data begins."""
    header = _HEADER.pack(key, generation, slot, len(description), data_bytes)
    return (header + description).ljust(data_start(len(description)), b"\0")


def write(
    memory: memoryview,
    offset: int,
    slot: int,
    generation: int,
    key: int,
    description: bytes,
    payload: Payload,
) -> None:
    """Write a payload at `offset` of a writable map."""
    size_bytes = len(payload.data)
    _HEADER.pack_into(memory, offset, key, generation, slot, len(description), size_bytes)
    start = offset + _HEADER_BYTES
    memory[start : start + len(description)] = description
    if size_bytes:
        start = offset + data_start(len(description))
        memory[start : start + size_bytes] = payload.data


def wipe(memory: memoryview, offset: int) -> None:
    """Make descriptors of what lies at `offset` name nothing."""
    _KEY.pack_into(memory, offset, 0)


def find(
    memory: mmap.mmap, offset: int, slot: int, generation: int, key: int
) -> tuple[Description, int, int]:
    """What lies at `offset`: its description, where its data begins, and its length.

    Raises DescriptorRefused when it is not what slot, generation and key name.
    """
    limit = len(memory)
    if offset % ALIGNMENT_BYTES or not 0 <= offset <= limit - _HEADER_BYTES:
        raise DescriptorRefused("the descriptor points outside the arena")
    its_key, its_generation, its_slot, description_bytes, size_bytes = _HEADER.unpack_from(
        memory, offset
    )
    if its_key != key or its_generation != generation or its_slot != slot or not key:
        raise DescriptorRefused("the descriptor names no payload of this arena")
    start = offset + data_start(description_bytes)
    if start + size_bytes > limit:
        raise DescriptorRefused("the payload reaches beyond the arena")
    begin = offset + _HEADER_BYTES
    try:
        description = _decoder.decode(memory[begin : begin + description_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DescriptorRefused("the payload's description cannot be read") from error
    return description, start, size_bytes
