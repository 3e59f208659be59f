"""The producer's end of an arena: blocks, credits and slots as one machine without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from protocol.arena.blocks import Blocks
from protocol.arena.credits import Credits, Grant, GrantState
from protocol.arena.records import GIANT
from protocol.arena.ring import Piece, Ring
from protocol.arena.slots import Slot, Slots, SlotState
from protocol.connector_errors import (
    NoCredit,
    NotAttached,
    PayloadClaimed,
    PayloadTooLarge,
    PeerLost,
)

# An attribute of an Enum class costs five times a name of the module.
_LIVE, _FILLED = GrantState.LIVE, SlotState.FILLED

ALIGNMENT_BYTES = 64
"""Where payloads begin: a cache line, enough for every dtype."""


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """Bounds of one arena. When one is reached a put raises NoCredit and may be repeated.

    `size_bytes` and `smallest_window_bytes` are powers of two. A payload above half the
    arena gets memory of its own; `giant_bytes` bounds all of those together. At least one
    such payload may exist, however large, up to that bound.
    """

    size_bytes: int = 64 << 20
    smallest_window_bytes: int = 4096
    session_cap_bytes: int = 32 << 20
    giant_bytes: int = 512 << 20
    slots: int = 16384
    claims_per_consumer: int = 16384
    consumers: int = 64


@dataclass(slots=True, eq=False)
class Flow:
    """What one turn puts into the arena: a window, and a consumer on each edge."""

    grant: Grant
    consumers: dict[str, str]
    """The edge of each consumer."""
    start: int
    ring: Ring
    slots: dict[Slot[Place], None] = field(default_factory=dict)
    description: msgspec.Raw = field(default_factory=msgspec.Raw)
    """What all its payloads share, encoded by the shell."""
    lost: str | None = None

    @property
    def session(self) -> str:
        """The session that the turn belongs to."""
        return self.grant.session

    @property
    def turn(self) -> int:
        """The turn's number; 0 is the session's stream input."""
        return self.grant.turn


class Place(msgspec.Struct, eq=False):
    """Where a slot's bytes lie: in its flow's ring, in a block, or in memory of their own."""

    flow: Flow
    piece: Piece | None = None
    block: int | None = None
    extra_bytes: int = 0

    @property
    def giant(self) -> bool:
        """Whether the payload has memory of its own."""
        return self.piece is None and self.block is None


class Changes(msgspec.Struct):
    """What an event changed, for the shell: slots to wipe and flows to look at again.

    With `room_for_others` there is more for whoever waits for what all flows share.
    """

    freed: list[Slot[Place]] = []
    flows: list[Flow] = []
    room_for_others: bool = False


class ProducerEnd:
    """Who may write what where, and when it may be written over."""

    def __init__(self, limits: ArenaLimits, next_key: Callable[[], int]) -> None:
        self.limits = limits
        self.blocks = Blocks(limits.size_bytes, limits.smallest_window_bytes)
        self.credits = Credits(limits.size_bytes, limits.session_cap_bytes)
        self.slots: Slots[Place] = Slots(limits.slots, limits.claims_per_consumer, next_key)
        self.giant_bytes = 0
        self._flows: dict[str, dict[Flow, None]] = {}
        self._by_consumer: dict[str, dict[Flow, None]] = {}

    # Consumers

    def attach(self, consumer: str) -> None:
        """A consumer is there. Raises NoCredit when there are too many."""
        if len(self._by_consumer) >= self.limits.consumers:
            raise NoCredit(f"the arena has {self.limits.consumers} consumers", shared=True)
        if consumer in self._by_consumer:
            raise PayloadClaimed(f"{consumer} is attached already")
        self.slots.add_consumer(consumer)
        self._by_consumer[consumer] = {}

    def lose(self, consumer: str) -> Changes:
        """A consumer is gone: its claims end, and the turns that had no other consumer."""
        # An ended flow leaves the table with its last slot, and is looked at again even so.
        changes = Changes([], list(self._by_consumer.get(consumer, ())))
        for slot, edge in self.slots.lose(consumer):
            self.credits.give_back(slot.owner.flow.grant, edge, slot.length)
            if not slot.claims:
                self._free(slot, changes)
        for flow in self._by_consumer.pop(consumer, {}):
            self.credits.drop_edge(flow.grant, flow.consumers.pop(consumer))
            if not flow.consumers:
                flow.lost = consumer
                self._void(flow, changes)
        return changes

    # Turns

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> Flow:
        """Reserve a window for a turn; `consumers` maps each edge to its consumer.

        Raises NotAttached for a consumer that is not there, NoCredit without room,
        PayloadTooLarge when there never is. If it raises, nothing is reserved.
        """
        if not consumers or len(set(consumers.values())) != len(consumers):
            raise ValueError("a turn's output goes to at least one consumer, to each once")
        for consumer in consumers.values():
            if not self.slots.knows(consumer):
                raise NotAttached(f"{consumer} is not attached to this arena")
        window = self.blocks.size_for(window_bytes)
        grant = self.credits.grant(session, turn, consumers, window)
        start = self.blocks.take(window)
        if start is None:
            self.credits.close(grant)
            raise NoCredit(f"no stretch of {window} bytes is free in the arena", shared=True)
        flow = Flow(grant, {name: edge for edge, name in consumers.items()}, start, Ring(window))
        self._flows.setdefault(session, {})[flow] = None
        for consumer in flow.consumers:
            self._by_consumer[consumer][flow] = None
        return flow

    def close(self, flow: Flow) -> Changes:
        """The turn puts nothing more; what it has offered may still be read."""
        self.credits.close(flow.grant)
        changes = Changes([], [flow])
        self._free_filled(flow, changes)
        self._forget_ended(flow, changes)
        return changes

    def void(self, session: str, turn: int | None = None) -> tuple[list[Slot[Place]], Changes]:
        """The content of a turn, or of all of a session's, is no longer wanted.

        Returns the slots that consumers still have (tell them with `abandon`) and what
        has changed. A late release frees a slot and returns no credit.
        """
        changes = Changes()
        offered: list[Slot[Place]] = []
        for flow in list(self._flows.get(session, ())):
            if turn is None or flow.turn == turn:
                offered.extend(self._void(flow, changes))
                changes.flows.append(flow)
        return offered, changes

    # Payloads

    def fill(self, flow: Flow, size_bytes: int) -> Slot[Place]:
        """Room for a payload of `size_bytes`, header included, that nobody knows yet.

        Raises NoCredit when there is no room now, PayloadTooLarge when there never is,
        TurnVoid or PeerLost when the turn has ended. If it raises, nothing has changed.
        """
        grant = flow.grant
        if flow.lost is not None:
            raise PeerLost(f"{flow.lost} is gone")
        length = (size_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES
        self.credits.spend(grant, length)
        try:
            if not self.slots.unused:
                raise NoCredit("all slots of the arena are in use", shared=True)
            if length <= grant.window_bytes:
                piece = flow.ring.take(length)
                if piece is None:
                    raise NoCredit(f"turn {grant.turn} has no stretch of {length} bytes left")
                offset, place = flow.start + piece.offset, Place(flow, piece)
            elif length <= self.limits.size_bytes // 2:
                offset, place = self._in_block(flow, length)
            else:
                offset, place = self._in_own_memory(flow, length)
        except (NoCredit, PayloadTooLarge):
            self.credits.spend_not(grant, length)
            raise
        slot = self.slots.fill(offset, length, place)
        flow.slots[slot] = None
        return slot

    def offer(self, slot: Slot[Place]) -> None:
        """Give the consumers of the slot's turn their claims. Raises NoCredit as `fill`."""
        self.slots.offer(slot, slot.owner.flow.consumers)

    def renew(self, slot: Slot[Place], size_bytes: int) -> None:
        """Let the content of a slot that is not offered be replaced.

        Raises PayloadClaimed once it is offered, PayloadTooLarge when the new content is
        longer than the slot.
        """
        if slot.state is _FILLED and size_bytes > slot.length:
            raise PayloadTooLarge(f"the payload's place has {slot.length} bytes")
        self.slots.renew(slot)

    def discard(self, slot: Slot[Place]) -> Changes:
        """Free a slot that was never offered. Raises PayloadClaimed when it was."""
        if slot.state is not _FILLED:
            raise PayloadClaimed("a consumer may be reading the payload")
        changes = Changes([], [slot.owner.flow])
        self._free(slot, changes)
        return changes

    def release(
        self, consumer: str, index: int, generation: int, key: int, changes: Changes | None = None
    ) -> Changes:
        """A consumer needs a payload no longer; adds to `changes` what that changed.

        Raises DescriptorRefused when these name no payload that it has a claim on.
        """
        slot, edge = self.slots.release(consumer, index, generation, key)
        if changes is None:
            changes = Changes()
        flow = slot.owner.flow
        changes.flows.append(flow)
        self.credits.give_back(flow.grant, edge, slot.length)
        if not slot.claims:
            self._free(slot, changes)
        return changes

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self.blocks.freeze(),
            self.credits.freeze(),
            self.slots.freeze(),
            self.giant_bytes,
        )

    # Where a payload goes

    def _in_block(self, flow: Flow, length: int) -> tuple[int, Place]:
        block = self.blocks.take(length)
        if block is None:
            raise NoCredit(f"no stretch of {length} bytes is free in the arena", shared=True)
        extra_bytes = self.blocks.size_for(length)
        try:
            self.credits.reserve_more(flow.grant, extra_bytes)
        except (NoCredit, PayloadTooLarge):
            self.blocks.give(block)
            raise
        return block, Place(flow, block=block, extra_bytes=extra_bytes)

    def _in_own_memory(self, flow: Flow, length: int) -> tuple[int, Place]:
        if length > self.limits.giant_bytes:
            raise PayloadTooLarge(
                f"{length} bytes exceed what payloads with memory of their own may take "
                f"({self.limits.giant_bytes} bytes)"
            )
        if self.giant_bytes + length > self.limits.giant_bytes:
            raise NoCredit(f"{self.giant_bytes} bytes lie in memory of their own", shared=True)
        self.giant_bytes += length
        return GIANT, Place(flow)

    # How it goes

    def _free(self, slot: Slot[Place], changes: Changes) -> None:
        place = slot.owner
        flow = place.flow
        if slot.state is _FILLED:
            for edge in flow.grant.outstanding:
                self.credits.give_back(flow.grant, edge, slot.length)
        self.slots.free(slot)
        del flow.slots[slot]
        if place.piece is not None:
            flow.ring.free(place.piece)
        elif place.block is not None:
            self.blocks.give(place.block)
        else:
            self.giant_bytes -= slot.length
        self.credits.free(flow.grant, slot.length, place.extra_bytes)
        changes.freed.append(slot)
        if flow.grant.state is not _LIVE:
            self._forget_ended(flow, changes)

    def _free_filled(self, flow: Flow, changes: Changes) -> None:
        for slot in list(flow.slots):
            if slot.state is _FILLED:
                self._free(slot, changes)

    def _void(self, flow: Flow, changes: Changes) -> list[Slot[Place]]:
        """Void a flow; the slots that consumers have are left to them."""
        self.credits.void(flow.grant)
        self._free_filled(flow, changes)
        offered = list(flow.slots)
        self._forget_ended(flow, changes)
        return offered

    def _forget_ended(self, flow: Flow, changes: Changes) -> None:
        """Give an ended flow's window back once nothing lies in it."""
        if flow.grant.state is _LIVE or flow.slots:
            return
        flows = self._flows.get(flow.session, {})
        if flow not in flows:
            return
        del flows[flow]
        if not flows:
            del self._flows[flow.session]
        for consumer in flow.consumers:
            self._by_consumer[consumer].pop(flow, None)
        self.blocks.give(flow.start)
        changes.room_for_others = True
