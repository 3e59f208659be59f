"""What a link's machine is told, what it asks its shell to do, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from protocol.link_frames import WorkerInfo
from protocol.stream import StreamLimits

ORDERED_LIMITS = StreamLimits()

URGENT_LIMITS = StreamLimits(
    window_messages=256,
    window_bytes=1024 * 1024,
    queue_messages=1024,
    queue_bytes=1024 * 1024,
    message_bytes=64 * 1024,
)


@dataclass(frozen=True)
class LinkSettings:
    """Times and bounds of a link, the same at both ends or not.

    A peer that says nothing for `silence_ms` is lost. An acknowledgement waits
    `acknowledge_ms` for data to ride on, or for `acknowledge_messages` messages.
    """

    heartbeat_ms: float = 1000.0
    silence_ms: float = 5000.0
    introduce_ms: float = 500.0
    refused_ms: float = 5000.0
    acknowledge_ms: float = 25.0
    acknowledge_messages: int = 64
    gateways: int = 64
    ordered: StreamLimits = ORDERED_LIMITS
    urgent: StreamLimits = URGENT_LIMITS


# Events


class Received(msgspec.Struct, frozen=True):
    """The transport brought a frame; `peer` is its routing id (ignored by a gateway)."""

    data: bytes
    peer: str = ""


class Flush(msgspec.Struct, frozen=True):
    """The loop turn ends: let go what `send` has collected."""


class Tick(msgspec.Struct, frozen=True):
    """`deadline_ms` has come."""


class Connected(msgspec.Struct, frozen=True):
    """The transport reaches the endpoint (gateway only)."""


class Disconnected(msgspec.Struct, frozen=True):
    """The transport has lost the peer for certain; it is declared lost at once."""

    peer: str = ""


class StatusChanged(msgspec.Struct, frozen=True):
    """What the worker says of itself from now on; with `announce` it says so at once."""

    status: bytes
    ready: bool
    announce: bool = False


Event = Received | Flush | Tick | Connected | Disconnected | StatusChanged

# Actions


class Transmit(msgspec.Struct, frozen=True):
    """Hand `data` to the transport, without waiting; it may be lost."""

    peer: str
    data: bytes


class Deliver(msgspec.Struct, frozen=True):
    """The next message of the peer."""

    peer: str
    message: bytes


class Up(msgspec.Struct, frozen=True):
    """A link is open.

    For a gateway `peer` is the worker's incarnation, never seen before, and `info`
    what the worker said of itself.
    """

    peer: str
    info: WorkerInfo | None = None


class Down(msgspec.Struct, frozen=True):
    """The link to `peer` is lost for good, with all that was not acknowledged."""

    peer: str
    reason: str


class PeerStatus(msgspec.Struct, frozen=True):
    """The latest status that came with a heartbeat."""

    peer: str
    status: bytes


class Crowded(msgspec.Struct, frozen=True):
    """Much waits for `peer` (or little again): who makes payloads for it is to wait."""

    peer: str
    crowded: bool


class Refused(msgspec.Struct, frozen=True):
    """The worker will not talk to this gateway, for now."""

    code: str
    reason: str


Action = Transmit | Deliver | Up | Down | PeerStatus | Crowded | Refused
