"""Connectors move payloads between processes; a control message carries the descriptor.

The inline connector puts the payload into the message itself. Shared memory
(`protocol.shm_connector`) names bytes that lie elsewhere with a descriptor of tens of
bytes. All of them behave alike, and one suite of tests shows it.

A turn's producer opens a flow, puts payloads and closes the flow. Each consumer gets a
payload by its descriptor, reads it, and releases it. When the turn's content is no
longer wanted both ends void the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from protocol.connector_errors import DescriptorRefused, PayloadClaimed, TurnVoid
from protocol.payloads import Payload


class InlineDescriptor(msgspec.Struct, frozen=True, tag="inline"):
    """A descriptor that is the payload."""

    payload: Payload

    @property
    def size_bytes(self) -> int:
        """The length of the payload's data."""
        return len(self.payload.data)


class ShmDescriptor(msgspec.Struct, frozen=True, tag="shm"):
    """Names a payload in an arena, in tens of bytes.

    `arena` and `key` are random, `generation` grows with each use of the slot, `offset`
    is 2**64 - 1 for a payload with memory of its own, `size_bytes` the length of its data.
    """

    arena: int
    slot: int
    generation: int
    offset: int
    key: int
    size_bytes: int


Descriptor = InlineDescriptor | ShmDescriptor


@dataclass(slots=True)
class Traffic:
    """What has gone over one edge."""

    payloads: int = 0
    bytes: int = 0

    def count(self, size_bytes: int) -> None:
        """One more payload."""
        self.payloads += 1
        self.bytes += size_bytes


@dataclass(slots=True)
class ConnectorHealth:
    """How a connector is doing. Bytes are those of its arena, headers included.

    `waiting` counts tasks that wait for room, `held` payloads that this process reads,
    `lingering` payloads that were released while arrays made of them are alive,
    `refused` descriptors and records that named nothing; both are 0 in a sound system.
    `put` and `got` are the traffic of each edge.
    """

    kind: str
    consumers: int = 0
    producers: int = 0
    arena_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0
    slots: int = 0
    waiting: int = 0
    held: int = 0
    lingering: int = 0
    refused: int = 0
    put: dict[str, Traffic] = field(default_factory=dict)
    got: dict[str, Traffic] = field(default_factory=dict)


FlowT = TypeVar("FlowT")


class Connector(Protocol[FlowT]):
    """One way for payloads to reach another process."""

    kind: str

    # The producer's end

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> FlowT:
        """Begin a turn's output: credit for `window_bytes` on each edge.

        `consumers` maps the edges to the incarnations of the processes that read them.
        Turn 0 is the session's stream input. Raises NotAttached for a process that is
        not there, NoCredit without room, PayloadTooLarge when there never is.
        """

    def put(self, payload: Payload, flow: FlowT) -> Descriptor:
        """Make `payload` available to the flow's consumers and return what names it.

        Raises NoCredit when there is no room now, PayloadTooLarge when there never is,
        TurnVoid after the end of the turn, PeerLost when its consumers are gone.
        If it raises, nothing has changed.
        """

    async def put_when_ready(
        self, payload: Payload, flow: FlowT, timeout_s: float | None = None
    ) -> Descriptor:
        """`put`, waiting for room. Raises TransferTimeout after `timeout_s`."""

    async def drained(self, flow: FlowT) -> None:
        """Wait until the consumers have released everything that the flow has put."""

    def replace(self, descriptor: Descriptor, payload: Payload) -> Descriptor:
        """Put `payload` in the place of an earlier one that was never offered.

        Raises PayloadClaimed when a consumer may be reading that one.
        """

    def abandon(self, descriptor: Descriptor) -> None:
        """Take a payload back; consumers that have not read it never will."""

    def close_flow(self, flow: FlowT) -> None:
        """The turn puts nothing more; what it put may still be read."""

    # The consumer's end

    def get(self, descriptor: Descriptor) -> Payload:
        """The payload that `descriptor` names, at once.

        Raises NotAttached when its bytes are not within reach yet, DescriptorRefused when
        it names nothing, TurnVoid, PeerLost.
        """

    async def receive(self, descriptor: Descriptor, timeout_s: float | None = None) -> Payload:
        """`get`, waiting for the bytes. Raises TransferTimeout after `timeout_s`."""

    def release(self, descriptor: Descriptor) -> None:
        """The consumer needs the payload no longer; its views die. Twice is as once."""

    def discard(self, descriptor: Descriptor) -> None:
        """Give a payload back that was not read, and will not be."""

    # Both

    def void(self, session: str, turn: int) -> None:
        """The turn's content is no longer wanted: its credits and payloads go."""

    def health(self) -> ConnectorHealth:
        """How the connector is doing."""


@dataclass(slots=True, eq=False)
class InlineFlow:
    """A turn's output inside messages: the link bounds it, so it needs no window."""

    session: str
    turn: int
    edges: tuple[str, ...]
    ended: bool = False


class InlineConnector:
    """Payload bytes travel inside the control message."""

    kind = "inline"

    def __init__(self) -> None:
        self._flows: dict[tuple[str, int], dict[InlineFlow, None]] = {}
        self._health = ConnectorHealth(self.kind)

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> InlineFlow:
        """Begin a turn's output."""
        flow = InlineFlow(session, turn, tuple(consumers))
        self._flows.setdefault((session, turn), {})[flow] = None
        return flow

    def put(self, payload: Payload, flow: InlineFlow | None = None) -> Descriptor:
        """Wrap `payload`; a view of bytes that may change or die is copied."""
        if flow is not None:
            if flow.ended:
                raise TurnVoid(f"turn {flow.turn} puts nothing more")
            for edge in flow.edges:
                self._health.put.setdefault(edge, Traffic()).count(len(payload.data))
        if not isinstance(payload.data, bytes):
            payload = msgspec.structs.replace(payload, data=bytes(payload.data))
        return InlineDescriptor(payload)

    async def put_when_ready(
        self, payload: Payload, flow: InlineFlow | None = None, timeout_s: float | None = None
    ) -> Descriptor:
        """`put`, which never waits."""
        return self.put(payload, flow)

    async def drained(self, flow: InlineFlow) -> None:
        """Nothing to wait for: the messages own the bytes."""

    def replace(self, descriptor: Descriptor, payload: Payload) -> Descriptor:
        """Refused: a message that was made is as good as sent."""
        raise PayloadClaimed("a payload inside a message is not replaced")

    def abandon(self, descriptor: Descriptor) -> None:
        """Nothing to do: the message owns the bytes."""

    def close_flow(self, flow: InlineFlow) -> None:
        """The turn puts nothing more."""
        flow.ended = True
        flows = self._flows.get((flow.session, flow.turn), {})
        flows.pop(flow, None)
        if not flows:
            self._flows.pop((flow.session, flow.turn), None)

    def get(self, descriptor: Descriptor) -> Payload:
        """Unwrap the payload; nothing is copied. Raises DescriptorRefused for other kinds."""
        if not isinstance(descriptor, InlineDescriptor):
            raise DescriptorRefused("this edge is configured for inline payloads")
        return descriptor.payload

    async def receive(self, descriptor: Descriptor, timeout_s: float | None = None) -> Payload:
        """`get`, which never waits."""
        return self.get(descriptor)

    def release(self, descriptor: Descriptor) -> None:
        """Nothing to do: the message owned the bytes."""

    def discard(self, descriptor: Descriptor) -> None:
        """Nothing to do: the message owned the bytes."""

    def void(self, session: str, turn: int) -> None:
        """The turn's content is no longer wanted."""
        for flow in list(self._flows.get((session, turn), ())):
            self.close_flow(flow)

    def health(self) -> ConnectorHealth:
        """How the connector is doing."""
        return self._health
