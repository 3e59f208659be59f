"""A producer's arena: its memory, what lies in it, and the consumers that read it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import structlog

from protocol.arena import content, memory
from protocol.arena.connection import Connection, SharedFile
from protocol.arena.door import Door
from protocol.arena.handshake import Hello, OwnMemory, Welcome
from protocol.arena.producer import ArenaLimits, Changes, Flow, Place, ProducerEnd
from protocol.arena.records import (
    ABANDON,
    ABANDON_SEEN,
    GIANT,
    OFFER,
    RELEASE,
    Record,
    outbox_bytes,
)
from protocol.arena.slots import Slot
from protocol.arena.waiters import Waiters
from protocol.connector_errors import (
    DescriptorRefused,
    NoCredit,
    PayloadClaimed,
    PeerLost,
    TransferTimeout,
)
from protocol.connectors import ShmDescriptor
from protocol.errors import ConfigError
from protocol.payloads import Payload

_log = structlog.get_logger(__name__)

_KEYS = struct.Struct("<512Q")


@dataclass(slots=True)
class ArenaUse:
    """How full an arena is. Bytes include headers and rounding."""

    reserved_bytes: int
    used_bytes: int
    giant_bytes: int
    slots: int
    consumers: int
    waiting: int
    refused: int


class Arena:
    """One producer's arena, listening at the Unix socket `path`.

    `on_attached(consumer)` and `on_lost(consumer)` are called on the loop; an exception in
    one is logged and goes no further. Make it on a running loop. Raises ConfigError when
    the system has no sealed memory, or when the path is not in a directory of this user
    with mode 0700, or is in use.
    """

    def __init__(
        self,
        path: str,
        name: str,
        limits: ArenaLimits | None = None,
        *,
        on_attached: Callable[[str], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        if (reason := memory.unavailable()) is not None:
            raise ConfigError(reason)
        self.path = path
        self.name = name
        self.limits = limits or ArenaLimits()
        self.refused = 0
        self.id = secrets.randbits(63)
        self._machine = ProducerEnd(self.limits, _random_keys().__next__)
        self._loop = asyncio.get_running_loop()
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._consumers: dict[str, Connection] = {}
        # For room in one's own window, or (None) for what others may give back.
        self._waiting: Waiters[Flow | None] = Waiters()
        self._giants: dict[Slot[Place], SharedFile] = {}
        self._closed = False
        self._fd, self._map = memory.create("antiphon-arena", self.limits.size_bytes)
        self._words = memoryview(self._map).cast("Q")
        try:
            self._door = Door(path, outbox_bytes(self.limits.claims_per_consumer), self._attach)
        except BaseException:
            self._release_memory()
            raise

    # Turns and payloads

    @property
    def consumers(self) -> list[str]:
        """Who is attached."""
        return list(self._consumers)

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> Flow:
        """Reserve a window for a turn; `consumers` maps each of its edges to a consumer.

        Raises NotAttached, NoCredit or PayloadTooLarge; then nothing is reserved.
        """
        flow = self._machine.open(session, turn, consumers, window_bytes)
        flow.description = content.describe_flow(flow.consumers, session, turn)
        return flow

    def put(
        self, flow: Flow, payload: Payload, note: bytes = b"", *, tell: bool = False
    ) -> ShmDescriptor:
        """Copy `payload` into the arena and give the flow's consumers their claims.

        With `tell` they are woken and get it as an arrival; otherwise the descriptor has
        to reach them in a message. Raises NoCredit when there is no room now,
        CapacityExceeded when the system has no memory for a payload of its own,
        PayloadTooLarge, TurnVoid, PeerLost; then nothing has changed.
        """
        slot = self._fill(flow, payload, note)
        try:
            self._offer(slot, tell)
        except NoCredit:
            self._apply(self._machine.discard(slot))
            raise
        return self._descriptor(slot, payload)

    async def put_when_ready(
        self,
        flow: Flow,
        payload: Payload,
        note: bytes = b"",
        *,
        tell: bool = False,
        timeout_s: float | None = None,
    ) -> ShmDescriptor:
        """`put`, waiting for room. Raises TransferTimeout when there is none in time."""
        try:
            return self.put(flow, payload, note, tell=tell)
        except NoCredit as error:
            shared = error.shared
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._waiting.wait(flow, *([None] if shared else []))
                    try:
                        return self.put(flow, payload, note, tell=tell)
                    except NoCredit as error:
                        shared = error.shared
        except TimeoutError:
            raise TransferTimeout("the consumer made no room in time") from None

    async def drained(self, flow: Flow) -> None:
        """Wait until the consumers have released everything that the flow has put."""
        while flow.slots and not self._closed:
            await self._waiting.wait(flow)

    def hold(self, flow: Flow, payload: Payload, note: bytes = b"") -> ShmDescriptor:
        """`put` without offering: until `offer` the payload may be replaced."""
        return self._descriptor(self._fill(flow, payload, note), payload)

    def replace(self, descriptor: ShmDescriptor, payload: Payload) -> ShmDescriptor:
        """Write `payload` over one that is held, and return what names it now.

        Raises PayloadClaimed once it has been offered, PayloadTooLarge when it does not fit,
        DescriptorRefused for what is no payload here. If it raises, nothing has changed.
        """
        slot = self._find(descriptor)
        place = slot.owner
        description = content.describe(payload, place.flow.description)
        if place.giant:
            raise PayloadClaimed("a payload with memory of its own is not replaced")
        size_bytes = content.data_start(len(description)) + len(payload.data)
        self._machine.renew(slot, size_bytes)
        content.write(self._map, slot, description, b"", payload.data)
        return self._descriptor(slot, payload)

    def offer(self, descriptor: ShmDescriptor, *, tell: bool = False) -> None:
        """Give the consumers of a held payload their claims. Raises NoCredit as `put`."""
        self._offer(self._find(descriptor), tell)

    def abandon(self, descriptor: ShmDescriptor) -> None:
        """Take a payload back. Consumers that have not read it release it at once.

        One that has been released everywhere is let be.
        """
        with contextlib.suppress(DescriptorRefused):
            self._abandon(self._find(descriptor))

    def close_flow(self, flow: Flow) -> None:
        """The turn puts nothing more; what it put may still be read."""
        self._apply(self._machine.close(flow))

    def void(self, session: str, turn: int | None = None) -> None:
        """The content of a turn (of all turns) of a session is no longer wanted.

        Its credits are gone at once, whoever waits for them gets TurnVoid, and consumers
        release what they have not read.
        """
        offered, changes = self._machine.void(session, turn)
        self._apply(changes)
        for slot in offered:
            self._abandon(slot)

    def use(self) -> ArenaUse:
        """How full the arena is."""
        grants = self._machine.credits.grants
        return ArenaUse(
            self._machine.credits.reserved_bytes,
            sum(grant.used_bytes for grant in grants),
            self._machine.giant_bytes,
            len(self._machine.slots),
            len(self._consumers),
            len(self._waiting),
            self.refused,
        )

    def close(self) -> None:
        """End the arena: consumers see the end of their sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._door.close()
        for consumer in list(self._consumers.values()):
            consumer.outbox.flush()
            consumer.close()
            self._lose(consumer)
        self._waiting.fail_all(PeerLost("the arena has ended"))
        self._release_memory()

    def _release_memory(self) -> None:
        os.close(self._fd)
        self._words.release()
        self._map.close()

    # Putting

    def _fill(self, flow: Flow, payload: Payload, note: bytes) -> Slot[Place]:
        data = payload.data
        description = content.describe(payload, flow.description)
        size_bytes = content.data_start(len(description) + len(note)) + len(data)
        slot = self._machine.fill(flow, size_bytes)
        try:
            if slot.offset == GIANT:
                head = content.head(slot, description, note, len(data))
                fd = memory.create_filled("antiphon-payload", [head, data])
                self._giants[slot] = SharedFile(fd)
            else:
                content.write(self._map, slot, description, note, data)
        except BaseException:
            self._apply(self._machine.discard(slot))
            raise
        return slot

    def _descriptor(self, slot: Slot[Place], payload: Payload) -> ShmDescriptor:
        return ShmDescriptor(
            self.id, slot.index, slot.generation, slot.offset, slot.key, len(payload.data)
        )

    def _find(self, descriptor: ShmDescriptor) -> Slot[Place]:
        if descriptor.arena != self.id:
            raise DescriptorRefused("the descriptor belongs to another arena")
        return self._machine.slots.find(descriptor.slot, descriptor.generation, descriptor.key)

    def _offer(self, slot: Slot[Place], tell: bool) -> None:
        self._machine.offer(slot)
        if slot.offset == GIANT:
            giant = self._giants.pop(slot)
            about = OwnMemory(slot.index, slot.generation, os.fstat(giant.fd).st_size)
            for name in slot.claims:
                self._consumers[name].lend(about, giant)
            giant.drop()
        if tell:
            for name in slot.claims:
                self._consumers[name].outbox.tell(
                    OFFER, slot.index, slot.generation, slot.offset, slot.key
                )

    def _abandon(self, slot: Slot[Place]) -> None:
        for name in self._machine.slots.abandon(slot):
            self._consumers[name].outbox.tell(ABANDON, slot.index, slot.generation, 0, slot.key)
        if not slot.claims:
            self._apply(self._machine.discard(slot))

    # What comes back

    def _apply_records(self, consumer: Connection, records: list[Record]) -> None:
        machine, name = self._machine, consumer.name
        changes = Changes()
        for kind, slot, generation, _, key in records:
            try:
                if kind == RELEASE:
                    machine.release(name, slot, generation, key, changes)
                elif kind == ABANDON_SEEN:
                    machine.slots.abandon_answered(name)
                    changes.room_for_others = True
                else:
                    raise DescriptorRefused(f"a consumer does not send records of kind {kind}")
            except DescriptorRefused as error:
                self._refuse(consumer, error)
        self._apply(changes)

    def _refuse(self, consumer: Connection, error: DescriptorRefused) -> None:
        # Its other claims stay: it may still be reading, and only its end ends them.
        self.refused += 1
        _log.error("arena_record_refused", consumer=consumer.name, reason=error.message)

    def _apply(self, changes: Changes) -> None:
        words = self._words
        for slot in changes.freed:
            if slot.offset != GIANT:
                # The header's key: what names these bytes names nothing from now on.
                words[slot.offset >> 3] = 0
                continue
            if (giant := self._giants.pop(slot, None)) is not None:
                giant.drop()
            for consumer in self._consumers.values():
                consumer.take_back(slot.index)
        if self._waiting.any:
            for flow in changes.flows:
                self._waiting.wake(flow)
            if changes.freed or changes.room_for_others:
                self._waiting.wake(None)

    # Consumers come and go

    def _attach(self, peer: socket.socket, hello: Hello, outbox_fd: int) -> None:
        self._machine.attach(hello.name)
        try:
            self._consumers[hello.name] = Connection(
                peer,
                hello.name,
                outbox_fd,
                self._fd,
                Welcome(
                    self.name,
                    self.id,
                    self.limits.size_bytes,
                    outbox_bytes(self.limits.claims_per_consumer),
                    self.limits.slots,
                ),
                on_records=self._apply_records,
                on_refused=self._refuse,
                on_end=self._lose,
            )
        except BaseException:
            self._machine.lose(hello.name)
            raise
        self._tell(self._on_attached, hello.name)

    def _lose(self, consumer: Connection) -> None:
        del self._consumers[consumer.name]
        self._apply(self._machine.lose(consumer.name))
        self._tell(self._on_lost, consumer.name)

    def _tell(self, callback: Callable[[str], None] | None, consumer: str) -> None:
        if callback is None:
            return
        try:
            callback(consumer)
        except Exception:
            _log.exception("arena_callback_failed", arena=self.name, consumer=consumer)


def _random_keys() -> Iterator[int]:
    """Random numbers of 64 bits, never 0, from the system in batches."""
    while True:
        for key in _KEYS.unpack(secrets.token_bytes(_KEYS.size)):
            if key:
                yield key
