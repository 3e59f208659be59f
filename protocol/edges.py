"""Edges between processes: their names, which connector they use, where arenas listen."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol.payloads import PayloadType

CLIENT = "client"
"""The end of an edge that is the gateway, for its client."""

INPUT_WINDOW_BYTES = 256 * 1024
"""Arena bytes of a session's stream input to one stage: 5 s of audio."""
OUTPUT_WINDOW_BYTES = 256 * 1024
"""Arena bytes of one turn's output on one edge."""
COPIED_BYTES = 4096
"""Payloads up to this size are copied out of the arena: that costs less than a view."""


class ConnectorKind(StrEnum):
    """How payloads cross an edge: inside messages, or through shared memory."""

    INLINE = "inline"
    SHM = "shm"


class OutputEdge(msgspec.Struct, frozen=True, array_like=True):
    """How a stage's output leaves its worker, said when the session is opened there."""

    name: str
    connector: ConnectorKind = ConnectorKind.INLINE
    window_bytes: int = OUTPUT_WINDOW_BYTES


class InputNote(msgspec.Struct, frozen=True, array_like=True):
    """What comes with stream input through an arena, beside its session."""

    epoch: int
    owner: str
    sequence: int
    after_controls: int = 0


def edge_name(source: str, target: str) -> str:
    """The name of an edge in config, metrics and logs."""
    return f"{source}->{target}"


def default_connector(payload: PayloadType) -> ConnectorKind:
    """What an edge uses when its config does not say: what is small is cheapest in messages."""
    return ConnectorKind.INLINE if payload in _SMALL else ConnectorKind.SHM


_SMALL = frozenset({PayloadType.TEXT, PayloadType.ACTIONS})


def worker_arena(endpoint: str) -> str | None:
    """Where the worker at `endpoint` has its arena; None when it is not on this host."""
    if not endpoint.startswith("ipc://"):
        return None
    return endpoint.removeprefix("ipc://").removesuffix(".sock") + ".arena"


def gateway_arena(endpoint: str, gateway: str) -> str | None:
    """Where `gateway` has its arena, beside the worker at `endpoint`; None as above."""
    if not endpoint.startswith("ipc://"):
        return None
    directory = endpoint.removeprefix("ipc://").rpartition("/")[0]
    return f"{directory}/{gateway}.arena"


_notes = msgspec.msgpack.Decoder(InputNote)
_encoder = msgspec.msgpack.Encoder()


def encode_note(note: InputNote) -> bytes:
    """The msgpack form of a note."""
    return _encoder.encode(note)


def decode_note(data: bytes) -> InputNote:
    """A note from its msgpack form. Raises msgspec.DecodeError when it is not one."""
    return _notes.decode(data)
