"""A producer's arena: the memory, the socket where consumers attach, and their wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from protocol.arena import content, handshake, memory
from protocol.arena.handshake import Hello, OwnMemory, Prepare, Refusal, Welcome
from protocol.arena.producer import ArenaLimits, Changes, Flow, Place, ProducerEnd
from protocol.arena.records import GIANT, Inbox, Kind, Outbox, Record, outbox_bytes
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
from protocol.zmq_socket import check_endpoint

_log = structlog.get_logger(__name__)

_HANDSHAKE_S = 5.0
_STRANGERS = 16
"""Connections that have not introduced themselves; one more is closed."""


@dataclass(slots=True, eq=False)
class _Consumer:
    """One attached consumer. `unsent` are memories that its full socket did not take."""

    name: str
    socket: socket.socket
    wake_fd: int
    woken_fd: int
    outbox: Outbox
    inbox: Inbox
    unsent: deque[tuple[OwnMemory, int]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has yet to introduce itself."""

    socket: socket.socket
    deadline: asyncio.TimerHandle = field(init=False)


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

    `on_attached(consumer)` and `on_lost(consumer)` are called on the loop. Make it on a
    running loop. Raises ConfigError when the system has no sealed memory, or when the
    path is not in a directory of this user with mode 0700, or is in use.
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
        self._keys = _random_keys()
        self._machine = ProducerEnd(self.limits, lambda: next(self._keys))
        self._loop = asyncio.get_running_loop()
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._consumers: dict[str, _Consumer] = {}
        self._strangers: dict[_Stranger, None] = {}
        self._dirty: dict[_Consumer, None] = {}
        self._flush_due = False
        # For room in one's own window, or (None) for what others may give back.
        self._waiting: Waiters[Flow | None] = Waiters()
        self._giants: dict[Slot[Place], int] = {}
        self._closed = False
        self._listener = _listen(path)
        self._fd, self._map = memory.create(f"antiphon-arena-{name}"[:200], self.limits.size_bytes)
        self._memory = memoryview(self._map)
        self._loop.add_reader(self._listener.fileno(), self._accept)

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
        return self._machine.open(session, turn, consumers, window_bytes)

    def put(
        self, flow: Flow, payload: Payload, note: bytes = b"", *, tell: bool = False
    ) -> ShmDescriptor:
        """Copy `payload` into the arena and give the flow's consumers their claims.

        With `tell` they are woken and get it as an arrival; otherwise the descriptor has
        to reach them in a message. Raises NoCredit when there is no room now,
        PayloadTooLarge, TurnVoid, PeerLost; then nothing has changed.
        """
        slot, descriptor = self._fill(flow, payload, note)
        try:
            self._offer(slot, descriptor, tell)
        except BaseException:
            self._apply(self._machine.discard(slot))
            raise
        return descriptor

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
        return self._fill(flow, payload, note)[1]

    def replace(self, descriptor: ShmDescriptor, payload: Payload) -> ShmDescriptor:
        """Write `payload` over one that is held, and return what names it now.

        Raises PayloadClaimed once it has been offered, PayloadTooLarge when it does not fit,
        DescriptorRefused for what is no payload here. If it raises, nothing has changed.
        """
        slot = self._find(descriptor)
        place = slot.owner
        description = self._describe(place.flow, payload, b"")
        if place.giant:
            raise PayloadClaimed("a payload with memory of its own is not replaced")
        size_bytes = content.data_start(len(description)) + len(payload.data)
        self._machine.renew(slot, size_bytes)
        self._write(slot, description, payload)
        return self._descriptor(slot, payload)

    def offer(self, descriptor: ShmDescriptor, *, tell: bool = False) -> None:
        """Give the consumers of a held payload their claims. Raises NoCredit as `put`."""
        self._offer(self._find(descriptor), descriptor, tell)

    def abandon(self, descriptor: ShmDescriptor) -> None:
        """Take a payload back. Consumers that have not read it release it at once.

        One that has been released everywhere is let be.
        """
        with contextlib.suppress(DescriptorRefused):
            self._abandon(self._find(descriptor))

    def close_flow(self, flow: Flow) -> None:
        """The turn puts nothing more; what it put may still be read."""
        self._machine.close(flow)
        self._apply(Changes([], [flow]))

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

    def populate(self) -> None:
        """Make the arena's pages present now; this takes a moment."""
        memory.populate(self._map)

    def close(self) -> None:
        """End the arena: consumers see the end of their sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for stranger in list(self._strangers):
            self._forget(stranger)
        self._flush()
        for consumer in list(self._consumers.values()):
            self._lose(consumer)
        self._waiting.fail_all(PeerLost("the arena has ended"))
        os.close(self._fd)
        self._memory.release()
        self._map.close()

    # Putting

    def _fill(self, flow: Flow, payload: Payload, note: bytes) -> tuple[Slot[Place], ShmDescriptor]:
        description = self._describe(flow, payload, note)
        size_bytes = content.data_start(len(description)) + len(payload.data)
        slot = self._machine.fill(flow, size_bytes)
        try:
            self._write(slot, description, payload)
        except BaseException:
            self._apply(self._machine.discard(slot))
            raise
        return slot, self._descriptor(slot, payload)

    def _describe(self, flow: Flow, payload: Payload, note: bytes) -> bytes:
        return content.describe(payload, flow.consumers, flow.session, flow.turn, note)

    def _write(self, slot: Slot[Place], description: bytes, payload: Payload) -> None:
        if slot.owner.giant:
            self._write_giant(slot, description, payload)
        else:
            content.write(
                self._memory, slot.offset, slot.key, slot.generation, description, payload
            )

    def _descriptor(self, slot: Slot[Place], payload: Payload) -> ShmDescriptor:
        offset = GIANT if slot.owner.giant else slot.offset
        return ShmDescriptor(
            self.id, slot.index, slot.generation, offset, slot.key, len(payload.data)
        )

    def _write_giant(self, slot: Slot[Place], description: bytes, payload: Payload) -> None:
        head = content.head(slot.key, slot.generation, description, len(payload.data))
        self._giants[slot] = memory.create_filled(
            f"antiphon-payload-{self.name}"[:200], [head, payload.data]
        )

    def _find(self, descriptor: ShmDescriptor) -> Slot[Place]:
        if descriptor.arena != self.id:
            raise DescriptorRefused("the descriptor belongs to another arena")
        return self._machine.slots.find(descriptor.slot, descriptor.generation, descriptor.key)

    def _offer(self, slot: Slot[Place], descriptor: ShmDescriptor, tell: bool) -> None:
        self._machine.offer(slot)
        fd = self._giants.pop(slot, None)
        for name in slot.claims:
            consumer = self._consumers[name]
            if fd is not None:
                size_bytes = os.fstat(fd).st_size
                own = OwnMemory(slot.index, slot.generation, size_bytes)
                consumer.unsent.append((own, os.dup(fd)))
                self._send_unsent(consumer)
            if tell:
                consumer.outbox.write(
                    Kind.OFFER, slot.index, slot.generation, descriptor.offset, slot.key
                )
                self._flush_soon(consumer)
        if fd is not None:
            os.close(fd)

    def _abandon(self, slot: Slot[Place]) -> None:
        for name in self._machine.slots.abandon(slot):
            consumer = self._consumers[name]
            consumer.outbox.write(Kind.ABANDON, slot.index, slot.generation, 0, slot.key)
            self._flush_soon(consumer)
        if not slot.claims:
            self._apply(self._machine.discard(slot))

    def _flush_soon(self, consumer: _Consumer) -> None:
        self._dirty[consumer] = None
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        dirty, self._dirty = self._dirty, {}
        for consumer in dirty:
            consumer.outbox.flush()

    def _send_unsent(self, consumer: _Consumer) -> None:
        try:
            while consumer.unsent:
                own, fd = consumer.unsent[0]
                handshake.send(consumer.socket, own, [fd])
                consumer.unsent.popleft()
                os.close(fd)
        except BlockingIOError:
            self._loop.add_writer(consumer.socket.fileno(), self._send_unsent, consumer)
            return
        except OSError:
            # Its end is about to be read from the socket.
            pass
        self._loop.remove_writer(consumer.socket.fileno())

    # What comes back

    def _woken(self, consumer: _Consumer) -> None:
        try:
            records = consumer.inbox.read()
        except DescriptorRefused as error:
            self._refuse(consumer, error)
            return
        for record in records:
            try:
                self._apply_record(consumer, record)
            except DescriptorRefused as error:
                self._refuse(consumer, error)

    def _apply_record(self, consumer: _Consumer, record: Record) -> None:
        if record.kind == Kind.RELEASE:
            self._apply(
                self._machine.release(consumer.name, record.slot, record.generation, record.key)
            )
        elif record.kind == Kind.ABANDON_SEEN:
            self._machine.slots.abandon_answered(consumer.name)
            self._apply(Changes(room_for_others=True))
        else:
            raise DescriptorRefused(f"a consumer does not send records of kind {record.kind}")

    def _refuse(self, consumer: _Consumer, error: DescriptorRefused) -> None:
        # Its other claims stay: it may still be reading, and only its end ends them.
        self.refused += 1
        _log.error("arena_record_refused", consumer=consumer.name, reason=error.message)

    def _apply(self, changes: Changes) -> None:
        for slot in changes.freed:
            if (fd := self._giants.pop(slot, None)) is not None:
                os.close(fd)
            elif not slot.owner.giant:
                content.wipe(self._memory, slot.offset)
        for flow in changes.flows:
            self._waiting.wake(flow)
        if changes.freed or changes.room_for_others:
            self._waiting.wake(None)

    # Consumers come and go

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.error("arena_accept_failed", reason=str(error))
                return
            peer.setblocking(False)
            if len(self._strangers) >= _STRANGERS or not handshake.is_same_user(peer):
                peer.close()
                continue
            stranger = _Stranger(peer)
            stranger.deadline = self._loop.call_later(_HANDSHAKE_S, self._forget, stranger)
            self._strangers[stranger] = None
            self._loop.add_reader(peer.fileno(), self._introduced, stranger)
            with contextlib.suppress(OSError):
                size_bytes = outbox_bytes(self.limits.claims_per_consumer)
                handshake.send(peer, Prepare(handshake.VERSION, size_bytes), [])

    def _introduced(self, stranger: _Stranger) -> None:
        fds: list[int] = []
        try:
            hello, fds = handshake.receive(stranger.socket)
            if hello is None:
                self._forget(stranger)
                return
            if not isinstance(hello, Hello) or len(fds) != 1:
                raise DescriptorRefused("a consumer begins with a greeting and its outbox")
            self._attach(stranger, hello, fds[0])
        except BlockingIOError:
            return
        except (DescriptorRefused, NoCredit, PayloadClaimed) as error:
            _log.warning("arena_consumer_refused", reason=error.message)
            with contextlib.suppress(OSError):
                handshake.send(stranger.socket, Refusal(error.message), [])
            self._forget(stranger)
        except OSError:
            self._forget(stranger)
        finally:
            handshake.close_all(fds)

    def _attach(self, stranger: _Stranger, hello: Hello, outbox_fd: int) -> None:
        size_bytes = outbox_bytes(self.limits.claims_per_consumer)
        if hello.version != handshake.VERSION:
            raise DescriptorRefused(f"this end speaks version {handshake.VERSION} of the arena")
        inbox = memory.attach(outbox_fd, size_bytes)
        self._machine.attach(hello.name)
        fds: list[int] = []
        try:
            fds.extend(_eventfd() for _ in range(2))
            fd, outbox = memory.create(f"antiphon-outbox-{self.name}"[:200], size_bytes)
            fds.append(fd)
            wake_fd, woken_fd, _ = fds
            welcome = Welcome(
                self.name, self.id, self.limits.size_bytes, size_bytes, self.limits.slots
            )
            handshake.send(stranger.socket, welcome, [self._fd, fd, wake_fd, woken_fd])
        except OSError:
            handshake.close_all(fds)
            self._machine.lose(hello.name)
            raise
        os.close(fd)
        consumer = _Consumer(
            hello.name,
            stranger.socket,
            wake_fd,
            woken_fd,
            Outbox(outbox, wake_fd),
            Inbox(inbox, woken_fd),
        )
        self._consumers[hello.name] = consumer
        self._forget(stranger, close=False)
        self._loop.add_reader(consumer.socket.fileno(), self._at_end, consumer)
        self._loop.add_reader(woken_fd, self._woken, consumer)
        if self._on_attached is not None:
            self._on_attached(consumer.name)

    def _forget(self, stranger: _Stranger, *, close: bool = True) -> None:
        if stranger not in self._strangers:
            return
        del self._strangers[stranger]
        stranger.deadline.cancel()
        self._loop.remove_reader(stranger.socket.fileno())
        if close:
            stranger.socket.close()

    def _at_end(self, consumer: _Consumer) -> None:
        try:
            message, fds = handshake.receive(consumer.socket)
        except BlockingIOError:
            return
        except DescriptorRefused as error:
            self._refuse(consumer, error)
            return
        except OSError:
            message, fds = None, []
        handshake.close_all(fds)
        if message is not None:
            self._refuse(consumer, DescriptorRefused("a consumer says nothing after its greeting"))
            return
        self._woken(consumer)
        self._lose(consumer)

    def _lose(self, consumer: _Consumer) -> None:
        del self._consumers[consumer.name]
        self._dirty.pop(consumer, None)
        self._loop.remove_reader(consumer.socket.fileno())
        self._loop.remove_writer(consumer.socket.fileno())
        self._loop.remove_reader(consumer.woken_fd)
        consumer.socket.close()
        consumer.outbox.close()
        consumer.inbox.close()
        handshake.close_all([consumer.wake_fd, consumer.woken_fd])
        handshake.close_all([fd for _, fd in consumer.unsent])
        consumer.unsent.clear()
        self._apply(self._machine.lose(consumer.name))
        if self._on_lost is not None:
            self._on_lost(consumer.name)


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def _random_keys() -> Iterator[int]:
    """Random numbers of 64 bits, never 0, from the system in batches."""
    while True:
        batch = secrets.token_bytes(4096)
        for start in range(0, len(batch), 8):
            if key := int.from_bytes(batch[start : start + 8], "little"):
                yield key


def _listen(path: str) -> socket.socket:
    """A listening socket at `path`, which only this user can reach."""
    check_endpoint(f"ipc://{path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        _sweep(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_STRANGERS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _sweep(path: str) -> None:
    """Remove a socket that its process left behind. Raises ConfigError for one in use."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigError(f"{path} is in the way: it is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise ConfigError(f"{path} is in use by another process")
