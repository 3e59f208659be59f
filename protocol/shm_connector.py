"""The shared-memory connector: this process's arena, and those of others that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from protocol.arena import Arena, ArenaLimits, Arrival, Attachment, Flow, attach, unavailable
from protocol.arena.waiters import Waiters
from protocol.connector_errors import (
    DescriptorRefused,
    NotAttached,
    PayloadClaimed,
    TransferTimeout,
)
from protocol.connectors import (
    ConnectorHealth,
    Descriptor,
    InlineDescriptor,
    ShmDescriptor,
    Traffic,
)
from protocol.payloads import Payload

_log = structlog.get_logger(__name__)

_REMEMBERED_ARENAS = 256
"""Lost arenas whose late descriptors are known to be lost, not early."""


def usable_kind(kind: str, edge: str = "") -> str:
    """`kind`, or `inline` where this system has no shared memory; the log says so."""
    if kind == "shm" and (reason := unavailable()) is not None:
        _log.warning("connector_falls_back", edge=edge, wanted=kind, used="inline", reason=reason)
        return "inline"
    return kind


@dataclass(slots=True, eq=False)
class ShmFlow:
    """A turn's output through the arena, and what has gone over its edges."""

    arena: Flow
    traffic: tuple[Traffic, ...]

    def count(self, size_bytes: int) -> None:
        """One more payload on each of its edges."""
        for traffic in self.traffic:
            traffic.payloads += 1
            traffic.bytes += size_bytes


class ShmConnector:
    """Payloads by shared memory, both as producer and as consumer.

    `path` is where this process's arena listens, in a directory of mode 0700, `name` this
    process's incarnation. Payloads of up to `copied_bytes` are copied when they are taken,
    which for a few KiB costs less than a view; as ever they are released when they are
    needed no longer.

    Called on the loop: `on_arrival(arrival)` for payloads that were put with `tell`,
    `on_consumer(name)` when a consumer has attached, `on_lost(name)` when a consumer or a
    producer is gone. Make it on a running loop. Raises ConfigError where the system has no
    shared memory or the path cannot be used.
    """

    kind = "shm"

    def __init__(
        self,
        path: str,
        name: str,
        limits: ArenaLimits | None = None,
        *,
        copied_bytes: int = 0,
        on_arrival: Callable[[Arrival], None] | None = None,
        on_consumer: Callable[[str], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self._copied_bytes = copied_bytes
        self.on_arrival = on_arrival
        self._on_consumer = on_consumer
        self._on_lost = on_lost
        self._attachments: dict[int, Attachment] = {}
        self._lost: dict[int, Attachment] = {}
        # For an arena (its number) to be attached, for a consumer (its name) to attach.
        self._waiting: Waiters[int | str] = Waiters()
        self._put: dict[str, Traffic] = {}
        self._got: dict[str, Traffic] = {}
        self._arena = Arena(
            path, name, limits, on_attached=self._consumer_attached, on_lost=self._tell_lost
        )

    @property
    def size_bytes(self) -> int:
        """The size of this process's arena."""
        return self._arena.limits.size_bytes

    # Peers

    async def attach(self, path: str, *, timeout_s: float = 5.0) -> str:
        """Read from the arena that listens at `path`; the incarnation of its producer.

        Raises as `protocol.arena.attach` does.
        """
        attachment = await attach(
            path,
            self.name,
            on_arrival=self._arrived,
            on_lost=self._producer_lost,
            traffic=self._got,
            copied_bytes=self._copied_bytes,
            timeout_s=timeout_s,
        )
        self._attachments[attachment.arena] = attachment
        self._waiting.wake(attachment.arena)
        return attachment.producer

    async def consumer(self, name: str, timeout_s: float | None = None) -> None:
        """Wait until the consumer `name` has attached. Raises TransferTimeout."""
        if name in self._arena.consumers:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiting.wait(name)
        except TimeoutError:
            raise TransferTimeout(f"{name} did not attach in time") from None

    @property
    def consumers(self) -> list[str]:
        """The incarnations that read this process's arena."""
        return self._arena.consumers

    @property
    def attachments(self) -> list[Attachment]:
        """The arenas that this process reads."""
        return list(self._attachments.values())

    @property
    def producers(self) -> list[str]:
        """The incarnations whose arenas this process reads."""
        return [attachment.producer for attachment in self._attachments.values()]

    # The producer's end

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> ShmFlow:
        """Begin a turn's output; see `Connector.open`."""
        flow = self._arena.open(session, turn, consumers, window_bytes)
        traffic = tuple(self._put.setdefault(edge, Traffic()) for edge in consumers)
        return ShmFlow(flow, traffic)

    def put(
        self, payload: Payload, flow: ShmFlow, note: bytes = b"", *, tell: bool = False
    ) -> ShmDescriptor:
        """Copy `payload` into the arena; see `Connector.put`.

        With `tell` the consumers are woken and get it as an arrival with `note`, without
        any message.
        """
        descriptor = self._arena.put(flow.arena, payload, note, tell=tell)
        flow.count(descriptor.size_bytes)
        return descriptor

    async def put_when_ready(
        self,
        payload: Payload,
        flow: ShmFlow,
        timeout_s: float | None = None,
        note: bytes = b"",
        *,
        tell: bool = False,
    ) -> ShmDescriptor:
        """`put`, waiting for room; see `Connector.put_when_ready`."""
        descriptor = await self._arena.put_when_ready(
            flow.arena, payload, note, tell=tell, timeout_s=timeout_s
        )
        flow.count(descriptor.size_bytes)
        return descriptor

    async def drained(self, flow: ShmFlow) -> None:
        """Wait until everything that was put has been released; see `Connector.drained`."""
        await self._arena.drained(flow.arena)

    def hold(self, payload: Payload, flow: ShmFlow) -> ShmDescriptor:
        """Put without offering: until `offer` it may be replaced, so that the latest goes."""
        return self._arena.hold(flow.arena, payload)

    def offer(self, descriptor: ShmDescriptor, flow: ShmFlow, *, tell: bool = False) -> None:
        """Make a held payload available."""
        self._arena.offer(descriptor, tell=tell)
        flow.count(descriptor.size_bytes)

    def replace(self, descriptor: Descriptor, payload: Payload) -> Descriptor:
        """Put `payload` in the place of a held one; see `Connector.replace`."""
        if isinstance(descriptor, InlineDescriptor):
            raise PayloadClaimed("a payload inside a message is not replaced")
        return self._arena.replace(descriptor, payload)

    def abandon(self, descriptor: Descriptor) -> None:
        """Take a payload back; see `Connector.abandon`."""
        if isinstance(descriptor, ShmDescriptor):
            self._arena.abandon(descriptor)

    def close_flow(self, flow: ShmFlow) -> None:
        """The turn puts nothing more; what it put may still be read."""
        self._arena.close_flow(flow.arena)

    # The consumer's end

    def get(self, descriptor: Descriptor) -> Payload:
        """The payload that `descriptor` names; see `Connector.get`.

        Its data is a read-only view of the producer's memory and dies at `release`; text
        is copied.
        """
        if isinstance(descriptor, InlineDescriptor):
            return descriptor.payload
        return self._attachment(descriptor).get(descriptor)

    async def receive(self, descriptor: Descriptor, timeout_s: float | None = None) -> Payload:
        """`get`, waiting for the arena and the bytes; see `Connector.receive`."""
        try:
            return self.get(descriptor)
        except NotAttached:
            assert isinstance(descriptor, ShmDescriptor)
        try:
            async with asyncio.timeout(timeout_s):
                if descriptor.arena not in self._attachments:
                    await self._waiting.wait(descriptor.arena)
                return await self._attachment(descriptor).receive(descriptor)
        except TimeoutError:
            raise TransferTimeout("the payload did not arrive in time") from None

    def release(self, descriptor: Descriptor) -> None:
        """The payload is needed no longer; see `Connector.release`."""
        if isinstance(descriptor, ShmDescriptor):
            attachment = self._attachments.get(descriptor.arena) or self._lost.get(descriptor.arena)
            if attachment is None:
                raise DescriptorRefused("the descriptor belongs to no arena that is read here")
            attachment.release(descriptor)

    def discard(self, descriptor: Descriptor) -> None:
        """Give a payload back unread; see `Connector.discard`."""
        if isinstance(descriptor, ShmDescriptor):
            attachment = self._attachments.get(descriptor.arena)
            if attachment is not None:
                attachment.discard(descriptor)

    # Both

    def void(self, session: str, turn: int | None = None) -> None:
        """The turn's content is no longer wanted; see `Connector.void`.

        Without a turn: what this process has put for any turn of the session.
        """
        self._arena.void(session, turn)
        if turn is not None:
            for attachment in self._attachments.values():
                attachment.void(session, turn)

    def health(self) -> ConnectorHealth:
        """How the connector is doing."""
        use = self._arena.use()
        attachments = list(self._attachments.values())
        return ConnectorHealth(
            self.kind,
            use.consumers,
            len(attachments),
            self._arena.limits.size_bytes,
            use.reserved_bytes,
            use.used_bytes,
            use.slots,
            use.waiting,
            sum(attachment.held for attachment in attachments),
            sum(attachment.lingering for attachment in attachments),
            use.refused + sum(attachment.refused for attachment in attachments),
            self._put,
            self._got,
        )

    def close(self) -> None:
        """End the arena and detach from the others. Idempotent."""
        for attachment in [*self._attachments.values(), *self._lost.values()]:
            attachment.close()
        self._arena.close()

    def _attachment(self, descriptor: ShmDescriptor) -> Attachment:
        # What was taken of an arena that is gone stays readable until its release.
        attachment = self._attachments.get(descriptor.arena) or self._lost.get(descriptor.arena)
        if attachment is None:
            raise NotAttached("the descriptor's arena is not attached yet")
        return attachment

    def _arrived(self, arrival: Arrival) -> None:
        if self.on_arrival is None:
            self._attachments[arrival.descriptor.arena].release(arrival.descriptor)
        else:
            self.on_arrival(arrival)

    def _consumer_attached(self, name: str) -> None:
        self._waiting.wake(name)
        if self._on_consumer is not None:
            self._on_consumer(name)

    def _producer_lost(self, attachment: Attachment) -> None:
        self._attachments.pop(attachment.arena, None)
        self._lost[attachment.arena] = attachment
        if len(self._lost) > _REMEMBERED_ARENAS:
            del self._lost[next(iter(self._lost))]
        self._tell_lost(attachment.producer)

    def _tell_lost(self, name: str) -> None:
        if self._on_lost is not None:
            self._on_lost(name)
