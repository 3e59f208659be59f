"""What is written beside a parked state: whose it is and what it fits."""

from __future__ import annotations

import hashlib
import zlib

import msgspec

from protocol.errors import SessionStateLost

MAX_META_BYTES = 4096
"""Longer meta data are neither written nor read."""


class SnapshotKey(msgspec.Struct, frozen=True):
    """Whose snapshot it is; `engine` is the name of the engine that made it."""

    deployment: str
    session: str
    stage: str
    engine: str


class SnapshotMeta(msgspec.Struct, frozen=True):
    """A snapshot's meta data; `owner` is the gateway that had the session then, `weights` as the
    engine tells them, `crc32` of the state."""

    key: SnapshotKey
    owner: str
    weights: str
    step: int | None
    size_bytes: int
    crc32: int

    def encode(self) -> bytes:
        """As it is written, with a checksum of its own. Raises ValueError when too long."""
        body = msgspec.json.encode(self)
        data = _checksum(body) + body
        if len(data) > MAX_META_BYTES:
            raise ValueError(f"a snapshot's meta data take {len(data)} of {MAX_META_BYTES} bytes")
        return data

    def check(self, key: SnapshotKey, weights: str) -> None:
        """Raise SessionStateLost unless it fits whoever asks for it."""
        if msgspec.structs.replace(self.key, engine=key.engine) != key:
            raise SessionStateLost("the session's snapshot is damaged: it names another session")
        if self.key.engine != key.engine:
            raise SessionStateLost(
                f"the session's snapshot was made by the engine {self.key.engine}, "
                f"not by {key.engine}"
            )
        if self.weights != weights:
            raise SessionStateLost("the session's snapshot was made with other weights")


def decode_meta(data: bytes) -> SnapshotMeta:
    """What `SnapshotMeta.encode` wrote. Raises SessionStateLost when it is damaged."""
    body = data[8:]
    if data[:8] == _checksum(body):
        try:
            return msgspec.json.decode(body, type=SnapshotMeta)
        except msgspec.DecodeError:
            pass
    raise SessionStateLost("the session's snapshot is damaged: its meta data cannot be read")


def key_digest(session: str, stage: str) -> str:
    """What names a session and stage in the file system: their own names come from outside."""
    return _digest(msgspec.json.encode((session, stage)), 16)


def deployment_digest(deployment: str) -> str:
    """What names a deployment there."""
    return _digest(deployment.encode(), 8)


def _checksum(data: bytes) -> bytes:
    return b"%08x" % zlib.crc32(data)


def _digest(data: bytes, size_bytes: int) -> str:
    return hashlib.blake2b(data, digest_size=size_bytes).hexdigest()
