"""A consumer's end: another process's arena, attached for reading."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from protocol.arena import content, handshake, memory
from protocol.arena.consumer import ConsumerEnd
from protocol.arena.descriptions import Descriptions
from protocol.arena.handshake import OwnMemory, Welcome
from protocol.arena.records import (
    ABANDON,
    ABANDON_SEEN,
    GIANT,
    OFFER,
    RELEASE,
    Inbox,
    Outbox,
    Record,
)
from protocol.arena.views import Views
from protocol.arena.waiters import Waiters
from protocol.connector_errors import (
    DescriptorRefused,
    NotAttached,
    PeerLost,
    TransferTimeout,
    TurnVoid,
)
from protocol.connectors import ShmDescriptor, Traffic
from protocol.payloads import Payload, PayloadType

_log = structlog.get_logger(__name__)

# An attribute of an Enum class costs five times a name of the module.
_TEXT = PayloadType.TEXT

_VOID_TURNS = 4096
"""Turns that are remembered as void. What arrives later of an older one is delivered, and
the layer above, which knows the floors, drops it."""


class Arrival(msgspec.Struct, frozen=True):
    """A payload that its producer told of through the arena.

    It is taken already: release `descriptor` when it is needed no longer.
    """

    producer: str
    descriptor: ShmDescriptor
    payload: Payload
    edge: str
    session: str
    turn: int
    note: bytes


class Attachment:
    """One producer's arena, mapped read-only, with the wake-ups between both ends.

    Made by `attach`. All callbacks are called on the loop: `on_arrival(arrival)` in the
    order in which the producer put the payloads, `on_lost(attachment)` once, when the
    producer is gone. Payloads that were taken before stay readable until released.
    """

    def __init__(
        self,
        peer: socket.socket,
        name: str,
        welcome: Welcome,
        arena: mmap.mmap,
        outbox: Outbox,
        inbox: Inbox,
        fds: tuple[int, int],
        on_arrival: Callable[[Arrival], None],
        on_lost: Callable[[Attachment], None],
        traffic: dict[str, Traffic],
        copied_bytes: int,
    ) -> None:
        self.producer = welcome.name
        self.arena = welcome.arena
        self.refused = 0
        self.lost = False
        self._socket = peer
        self._arena_bytes = welcome.arena_bytes
        self._map = arena
        self._outbox = outbox
        self._inbox = inbox
        self._wake_fd, self._woken_fd = fds
        self._on_arrival = on_arrival
        self._on_lost = on_lost
        self._machine = ConsumerEnd(welcome.slots)
        self._slots = welcome.slots
        self._copied_bytes = copied_bytes
        self._taken: dict[int, Arrival] = {}
        self._views = Views(self._views_gone)
        self._descriptions = Descriptions(name, traffic)
        # None: it was lost on its way here.
        self._giants: dict[tuple[int, int], mmap.mmap | None] = {}
        self._unwanted: dict[tuple[int, int], ShmDescriptor] = {}
        self._arriving: deque[Record] = deque()
        self._waiting: Waiters[tuple[int, int]] = Waiters()
        self._void: dict[tuple[str, int], None] = {}
        self._closing = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.fileno(), self._at_socket)
        self._loop.add_reader(self._woken_fd, self._woken)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole arena, read-only."""
        return memory.view(self._map, 0, self._arena_bytes)

    @property
    def held(self) -> int:
        """Payloads taken and not released."""
        return len(self._taken)

    @property
    def lingering(self) -> int:
        """Payloads released while views of them are alive; their slots stay claimed."""
        return self._machine.lingering

    def get(self, descriptor: ShmDescriptor) -> Payload:
        """The payload that `descriptor` names; its data is a read-only view that dies at release.

        Text is copied. Getting it again gives the same payload. Raises DescriptorRefused
        for one that names nothing here, TurnVoid when its turn is void (it is released
        then), NotAttached when it has memory of its own that is still on its way,
        PeerLost when the producer is gone.
        """
        taken = self._taken.get(descriptor.slot)
        if taken is not None and taken.descriptor == descriptor:
            return taken.payload
        return self._take(descriptor)

    async def receive(self, descriptor: ShmDescriptor, timeout_s: float | None = None) -> Payload:
        """`get`, waiting for memory that is on its way. Raises TransferTimeout."""
        try:
            return self.get(descriptor)
        except NotAttached:
            pass
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiting.wait((descriptor.slot, descriptor.generation))
        except TimeoutError:
            raise TransferTimeout("the payload did not arrive in time") from None
        return self.get(descriptor)

    def release(self, descriptor: ShmDescriptor) -> None:
        """The payload is needed no longer; views of it raise from now on.

        Where an array made from one is still alive, the producer is told when the last is
        gone: nothing is written over while it can be read. Releasing twice changes nothing.
        Raises DescriptorRefused for a payload that was never taken here.
        """
        slot, generation = descriptor.slot, descriptor.generation
        taken = self._taken.get(slot)
        if taken is None or (taken.descriptor is not descriptor and taken.descriptor != descriptor):
            if taken is not None and taken.descriptor.generation == generation:
                raise DescriptorRefused("the descriptor names no payload of this arena")
            if not self._closed and not self.lost:
                self._machine.release(slot, generation)
            return
        del self._taken[slot]
        if slot in self._views:
            self._machine.release(slot, generation)
            self._views.drop(descriptor, cast(memoryview, taken.payload.data))
        elif self._machine.release_copy(slot, generation):
            self._gave_back(descriptor)

    def discard(self, descriptor: ShmDescriptor) -> None:
        """Give a payload back without reading it. What names nothing is let be."""
        if self._closed or self.lost:
            return
        taken = self._taken.get(descriptor.slot)
        if taken is None or taken.descriptor != descriptor:
            try:
                self._take(descriptor)
            except NotAttached:
                if len(self._unwanted) < self._slots:
                    self._unwanted[descriptor.slot, descriptor.generation] = descriptor
                return
            except (DescriptorRefused, TurnVoid):
                return
        self.release(descriptor)

    def void(self, session: str, turn: int) -> None:
        """The turn's content is not wanted: what arrives of it is released at once."""
        self._void.pop((session, turn), None)
        self._void[(session, turn)] = None
        if len(self._void) > _VOID_TURNS:
            del self._void[next(iter(self._void))]

    def close(self) -> None:
        """Detach as soon as nothing is held: what was not released is now.

        While views are alive the producer keeps their slots, as ever. Idempotent.
        """
        if self._closing:
            return
        self._closing = True
        for taken in list(self._taken.values()):
            self.release(taken.descriptor)
        self._waiting.fail_all(PeerLost(f"the arena of {self.producer} is gone"))
        self._outbox.flush()
        self._close_if_done()

    # Reading

    def _take(self, descriptor: ShmDescriptor) -> Payload:
        if self.lost or self._closing:
            raise PeerLost(f"the arena of {self.producer} is gone")
        try:
            found = self._find(
                descriptor.slot,
                descriptor.generation,
                descriptor.offset,
                descriptor.key,
                descriptor.size_bytes,
            )
        except DescriptorRefused:
            self.refused += 1
            raise
        if found is None:
            raise TurnVoid("the payload's turn is void")
        return found.payload

    def _find(
        self, slot: int, generation: int, offset: int, key: int, size_bytes: int | None
    ) -> Arrival | None:
        """Take what these name; None, and its release, when its turn is void."""
        source, start = (self._map, offset) if offset != GIANT else self._own(slot, generation, key)
        encoded, note, start, found_bytes = content.find(source, start, slot, generation, key)
        if size_bytes is not None and size_bytes != found_bytes:
            raise DescriptorRefused("the descriptor has another length than its payload")
        known = self._descriptions[encoded]
        self._machine.take(slot, generation)
        descriptor = ShmDescriptor(self.arena, slot, generation, offset, key, found_bytes)
        if self._void and (known.session, known.turn) in self._void:
            if self._machine.release_copy(slot, generation):
                self._gave_back(descriptor)
            return None
        traffic = known.traffic
        traffic.payloads += 1
        traffic.bytes += found_bytes
        data: Any
        if found_bytes <= self._copied_bytes or known.type is _TEXT:
            data = source[start : start + found_bytes]
        else:
            data = self._views.make(slot, source, start, found_bytes)
        payload = Payload(known.type, data, known.dtype, known.shape, known.attributes.copy())
        taken = self._taken[slot] = Arrival(
            self.producer, descriptor, payload, known.edge, known.session, known.turn, note
        )
        return taken

    def _own(self, slot: int, generation: int, key: int) -> tuple[mmap.mmap, int]:
        """The memory of its own that a payload lies in, and where in it."""
        if not self._machine.may_arrive(slot, generation):
            raise DescriptorRefused("the payload has been released")
        if (slot, generation) not in self._giants:
            raise NotAttached("the payload's memory has not arrived yet")
        giant = self._giants[slot, generation]
        if giant is None:
            self._give_back_unread(slot, generation, key)
            raise DescriptorRefused("the payload's memory was lost on its way here")
        return giant, 0

    def _give_back_unread(self, slot: int, generation: int, key: int) -> None:
        if self._machine.abandoned(slot, generation):
            self._giants.pop((slot, generation), None)
            self._unwanted.pop((slot, generation), None)
            self._outbox.tell(RELEASE, slot, generation, 0, key)

    def _views_gone(self, descriptor: ShmDescriptor) -> None:
        if self._machine.views_gone(descriptor.slot, descriptor.generation):
            self._gave_back(descriptor)
        if self._closed:
            self._unmap()

    def _gave_back(self, descriptor: ShmDescriptor) -> None:
        slot, generation = descriptor.slot, descriptor.generation
        if descriptor.offset == GIANT:
            self._giants.pop((slot, generation), None)
        self._outbox.tell(RELEASE, slot, generation, 0, descriptor.key)
        if self._closing:
            self._close_if_done()

    # Between the ends

    def _woken(self) -> None:
        try:
            records = self._inbox.read()
        except DescriptorRefused as error:
            self._refuse(error)
            return
        for record in records:
            kind, slot, generation, _, key = record
            if kind == OFFER:
                self._arriving.append(record)
            elif kind == ABANDON:
                self._give_back_unread(slot, generation, key)
                self._outbox.tell(ABANDON_SEEN, slot, generation, 0, key)
            else:
                self._refuse(DescriptorRefused(f"records of kind {kind} do not come here"))
        if len(self._arriving) > self._slots:
            # Behind memory that is on its way; of each slot only the latest is still offered.
            may_arrive = self._machine.may_arrive
            self._arriving = deque(r for r in self._arriving if may_arrive(r[1], r[2]))
        if self._arriving:
            self._arrive()

    def _arrive(self) -> None:
        while self._arriving and not self._closing:
            record = self._arriving.popleft()
            _, slot, generation, offset, key = record
            arrival = self._taken.get(slot)
            try:
                if (
                    arrival is None
                    or arrival.descriptor.generation != generation
                    or arrival.descriptor.key != key
                ):
                    arrival = self._find(slot, generation, offset, key, None)
            except NotAttached:
                self._arriving.appendleft(record)
                return
            except DescriptorRefused as error:
                # What its producer has taken back meanwhile was released then.
                if self._machine.may_arrive(slot, generation):
                    self._refuse(error)
                continue
            if arrival is None:
                continue
            try:
                self._on_arrival(arrival)
            except Exception:
                _log.exception("arrival_callback_failed", producer=self.producer)

    def _at_socket(self) -> None:
        fds: list[int] = []
        try:
            message, fds = handshake.receive(self._socket)
            if message is None:
                self._lose()
            elif isinstance(message, OwnMemory):
                self._own_memory(message, fds)
            else:
                raise DescriptorRefused("an arena passes memory and nothing else")
        except BlockingIOError:
            pass
        except DescriptorRefused as error:
            self._refuse(error)
        except OSError:
            self._lose()
        finally:
            handshake.close_all(fds)

    def _own_memory(self, message: OwnMemory, fds: list[int]) -> None:
        key = (message.slot, message.generation)
        if not self._machine.may_arrive(*key) or len(self._giants) >= self._slots:
            return
        try:
            if len(fds) != 1:
                raise DescriptorRefused("a payload's memory was lost on its way here")
            self._giants[key] = memory.attach(fds[0], message.size_bytes)
        except DescriptorRefused as error:
            # Whoever waits for it is told, and what comes after it is not held up.
            self._giants[key] = None
            self._refuse(error)
        if (unwanted := self._unwanted.pop(key, None)) is not None:
            self.discard(unwanted)
            return
        self._waiting.wake(key)
        self._arrive()

    def _refuse(self, error: DescriptorRefused) -> None:
        self.refused += 1
        _log.error("arena_record_refused", producer=self.producer, reason=error.message)

    def _lose(self) -> None:
        if self.lost or self._closed:
            return
        # What the producer wrote before its end has its records in the ring already.
        self._woken()
        self.lost = True
        self._arriving.clear()
        self._waiting.fail_all(PeerLost(f"the arena of {self.producer} is gone"))
        self._close()
        if not self._closing:
            self._on_lost(self)

    def _close_if_done(self) -> None:
        if self._closing and not self.lost and not len(self._machine):
            self._outbox.flush()
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._woken_fd)
        self._socket.close()
        handshake.close_all([self._wake_fd, self._woken_fd])
        self._giants.clear()
        self._unwanted.clear()
        self._inbox.close()
        self._outbox.close()
        self._unmap()

    def _unmap(self) -> None:
        # Views that are still alive keep the map until they are gone.
        with contextlib.suppress(BufferError):
            self._map.close()
