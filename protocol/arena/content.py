"""How one payload lies in memory: a header, what it is, its sender's note, and its bytes.

The header repeats what its descriptor says (key, generation, length), so that a
descriptor can be checked against the bytes that it names. It is wiped when its slot is
free. Layout: key u64, generation u64, slot u32, length of the description u32, length of
the note u32, 4 bytes of nothing, length of the data u64; the description in msgpack; the
note; the data at the next multiple of 64.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import msgspec

from protocol.arena.producer import ALIGNMENT_BYTES, Place
from protocol.arena.slots import Slot
from protocol.connector_errors import DescriptorRefused
from protocol.payloads import Payload, PayloadType

_HEADER = struct.Struct("<QQIII4xQ")
_HEADER_BYTES = _HEADER.size
_pack_into = _HEADER.pack_into
_PADDING = ALIGNMENT_BYTES - 1


class Belonging(msgspec.Struct, frozen=True, array_like=True):
    """Where the payloads of a flow belong; `edges` has the edge to each consumer."""

    edges: dict[str, str]
    session: str
    turn: int


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a payload is; `flow` is its encoded `Belonging`."""

    flow: msgspec.Raw
    type: PayloadType
    dtype: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)
_belongings = msgspec.msgpack.Decoder(Belonging)


def describe_flow(edges: dict[str, str], session: str, turn: int) -> msgspec.Raw:
    """The part of a description that all payloads of a flow share."""
    return msgspec.Raw(_encoder.encode(Belonging(edges, session, turn)))


def describe(payload: Payload, flow: msgspec.Raw) -> bytes:
    """The description of a payload as it lies in the arena."""
    return _encoder.encode(
        Description(flow, payload.type, payload.dtype, payload.shape, payload.attributes)
    )


def read_description(encoded: bytes) -> tuple[Description, Belonging]:
    """What `describe` and `describe_flow` encoded. Raises DescriptorRefused."""
    try:
        description = _decoder.decode(encoded)
        return description, _belongings.decode(description.flow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DescriptorRefused("the payload's description cannot be read") from error


def data_start(text_bytes: int) -> int:
    """Where the data begins, from the start of the header, after description and note."""
    return (_HEADER_BYTES + text_bytes + _PADDING) & -ALIGNMENT_BYTES


def head(slot: Slot[Place], description: bytes, note: bytes, data_bytes: int) -> bytes:
    """Header, description and note, padded to where the data begins."""
    text = description + note
    header = _HEADER.pack(
        slot.key, slot.generation, slot.index, len(description), len(note), data_bytes
    )
    return (header + text).ljust(data_start(len(text)), b"\0")


def write(
    memory: mmap.mmap, slot: Slot[Place], description: bytes, note: bytes, data: bytes
) -> None:
    """Write a payload to its slot's place in a writable map."""
    offset, size_bytes = slot.offset, len(data)
    _pack_into(
        memory,
        offset,
        slot.key,
        slot.generation,
        slot.index,
        len(description),
        len(note),
        size_bytes,
    )
    text = description + note if note else description
    start = offset + _HEADER_BYTES
    end = start + len(text)
    memory[start:end] = text
    if size_bytes:
        start = (end + _PADDING) & -ALIGNMENT_BYTES
        memory[start : start + size_bytes] = data


def find(
    memory: mmap.mmap, offset: int, slot: int, generation: int, key: int
) -> tuple[bytes, bytes, int, int]:
    """What lies at `offset`: its encoded description, note, where its data begins, its length.

    Raises DescriptorRefused when it is not what slot, generation and key name.
    """
    limit = len(memory)
    if offset % ALIGNMENT_BYTES or not 0 <= offset <= limit - _HEADER_BYTES:
        raise DescriptorRefused("the descriptor points outside the arena")
    its_key, its_generation, its_slot, description_bytes, note_bytes, size_bytes = (
        _HEADER.unpack_from(memory, offset)
    )
    if its_key != key or its_generation != generation or its_slot != slot or not key:
        raise DescriptorRefused("the descriptor names no payload of this arena")
    begin = offset + _HEADER_BYTES
    middle = begin + description_bytes
    end = middle + note_bytes
    start = (end + _PADDING) & -ALIGNMENT_BYTES
    if start + size_bytes > limit:
        raise DescriptorRefused("the payload reaches beyond the arena")
    note = memory[middle:end] if note_bytes else b""
    return memory[begin:middle], note, start, size_bytes
