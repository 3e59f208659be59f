"""The frames that cross the link, and their checks.

A frame is one msgpack array. Everything that arrives is bounded here: a frame that is
too long, of an unknown kind, or whose fields are out of range is not a frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

LINK_VERSION = 6
"""The newest version of these frames that this code speaks."""

OLDEST_LINK_VERSION = 6

MAX_FRAME_BYTES = 24 * 1024 * 1024
"""No frame is longer; the transport refuses longer ones before they are read."""

Incarnation = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=128)]
Reason = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Version = Annotated[int, Meta(ge=0, le=2**16)]
Messages = Annotated[list[bytes], Meta(min_length=1, max_length=4096)]


class Address(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which link a frame belongs to.

    `attempt` counts the gateway's introductions to this endpoint, so that nothing
    sent on an earlier link between the same two processes is taken for a frame of
    the present one.
    """

    gateway: Incarnation
    worker: Incarnation
    attempt: Number


class Credit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much a receiver holds for its peer beyond what it has acknowledged."""

    messages: Count
    bytes: Count


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a receiver has of one channel: all through `through`.

    `held` is the lowest sequence number that it has beyond a gap, 0 if there is none.
    """

    through: Number
    held: Number = 0


class Marks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a receiver has of both channels."""

    ordered: Mark
    urgent: Mark


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Gateway to worker: introduces itself. Answered by `Welcome` or `Refuse`."""

    gateway: Incarnation
    attempt: Number
    oldest_version: Version
    newest_version: Version
    credit: Credit


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of itself when it is introduced.

    With `ready` false it is still loading its model; it says so again, in its status,
    when it has.
    """

    stage: Name
    engine: Name
    ready: bool


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Worker to gateway: the link is open, in this version."""

    address: Address
    version: Version
    credit: Credit
    info: WorkerInfo


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Worker to gateway: there will be no link; `reason` is for people."""

    gateway: Incarnation
    attempt: Number
    code: Name
    reason: Reason


class Introduce(msgspec.Struct, frozen=True, array_like=True, tag="introduce"):
    """Worker to gateway: your frame belongs to no link of mine, say `Hello`.

    `address` is that of the frame it answers, with the incarnation of the answering
    worker.
    """

    address: Address


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """Messages with the sequence numbers `first`, `first + 1`, ... of one channel."""

    address: Address
    marks: Marks
    urgent: bool
    first: Number
    messages: Messages


class Acknowledge(msgspec.Struct, frozen=True, array_like=True, tag="acknowledge"):
    """What has arrived, when there is no data to say it with."""

    address: Address
    marks: Marks


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """A sign of life. `beat` grows, so that an older status never replaces a newer one."""

    address: Address
    marks: Marks
    beat: Number
    status: Annotated[bytes, Meta(max_length=65536)] = b""


Frame = Hello | Welcome | Refuse | Introduce | Data | Acknowledge | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of `frame`."""
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame | None:
    """The frame in `data`, or None if there is none."""
    if len(data) > MAX_FRAME_BYTES:
        return None
    try:
        return _frames.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
