"""Slots: which payload lies where, and which consumers may still be reading it.

A slot is filled, then offered to its consumers; each of them has a claim until it has
released the slot or is gone. No time-out ends a claim: a stopped reader may still hold
views. A slot's generation grows with each use, so an old descriptor names nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from protocol.connector_errors import DescriptorRefused, NoCredit, PayloadClaimed

OwnerT = TypeVar("OwnerT")


class SlotState(StrEnum):
    """The life of a slot; a free one is not in the table."""

    FILLED = "filled"
    OFFERED = "offered"


# An attribute of an Enum class costs five times a name of the module.
_FILLED, _OFFERED = SlotState.FILLED, SlotState.OFFERED


class Slot(msgspec.Struct, Generic[OwnerT], eq=False):
    """One payload in the arena, `length` bytes at `offset`.

    `claims` maps each consumer that may read it to the edge that its payload came by.
    """

    index: int
    generation: int
    key: int
    offset: int
    length: int
    owner: OwnerT
    state: SlotState = _FILLED
    claims: dict[str, str] = {}
    abandoned: bool = False


class Slots(Generic[OwnerT]):
    """The table of at most `capacity` slots.

    A consumer has at most `claims_per_consumer` claims and unanswered abandons together,
    which bounds the records on their way to it and back. `next_key` gives random numbers
    of 64 bits.
    """

    def __init__(
        self, capacity: int, claims_per_consumer: int, next_key: Callable[[], int]
    ) -> None:
        self.capacity = capacity
        self.claims_per_consumer = claims_per_consumer
        self._next_key = next_key
        self._slots: dict[int, Slot[OwnerT]] = {}
        self.unused = list(range(capacity - 1, -1, -1))
        """The indexes of free slots."""
        self._generations = [0] * capacity
        self._loads: dict[str, int] = {}
        self._unanswered: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def add_consumer(self, consumer: str) -> None:
        """`consumer` may have claims from now on."""
        self._loads[consumer] = 0
        self._unanswered[consumer] = 0

    def knows(self, consumer: str) -> bool:
        """Whether `consumer` is there."""
        return consumer in self._loads

    def load(self, consumer: str) -> int:
        """The consumer's claims and unanswered abandons."""
        return self._loads[consumer]

    def fill(self, offset: int, length: int, owner: OwnerT) -> Slot[OwnerT]:
        """A new slot that no consumer knows yet. Raises NoCredit when all are in use."""
        if not self.unused:
            raise NoCredit(f"all {self.capacity} slots of the arena are in use", shared=True)
        index = self.unused.pop()
        generation = self._generations[index] = self._generations[index] + 1
        slot = Slot(index, generation, self._next_key(), offset, length, owner)
        self._slots[index] = slot
        return slot

    def offer(self, slot: Slot[OwnerT], claims: Mapping[str, str]) -> None:
        """Give each consumer its claim; `claims` maps consumers to edges.

        Raises NoCredit, with nothing changed, when one of them has too many.
        """
        if slot.state is not _FILLED:
            raise PayloadClaimed("the payload has been offered already")
        loads = self._loads
        for consumer in claims:
            if loads[consumer] >= self.claims_per_consumer:
                raise NoCredit(f"{consumer} holds {self.claims_per_consumer} payloads", shared=True)
        slot.state = _OFFERED
        slot.claims = dict(claims)
        for consumer in claims:
            loads[consumer] += 1

    def renew(self, slot: Slot[OwnerT]) -> None:
        """Make the slot's place ready for other content: what named it names nothing now.

        Raises PayloadClaimed once it has been offered.
        """
        if slot.state is not _FILLED:
            raise PayloadClaimed("a consumer may be reading the payload")
        slot.generation = self._generations[slot.index] = slot.generation + 1
        slot.key = self._next_key()

    def find(self, index: int, generation: int, key: int) -> Slot[OwnerT]:
        """The slot that these name. Raises DescriptorRefused when they name none."""
        slot = self._slots.get(index)
        if slot is None or slot.generation != generation or slot.key != key:
            raise DescriptorRefused("the descriptor names no payload of this arena")
        return slot

    def release(
        self, consumer: str, index: int, generation: int, key: int
    ) -> tuple[Slot[OwnerT], str]:
        """End the consumer's claim on the slot that these name; the slot and the edge.

        Raises DescriptorRefused when it has none. The caller frees a slot without claims.
        """
        slot = self._slots.get(index)
        if slot is None or slot.generation != generation or slot.key != key:
            raise DescriptorRefused("the record names no payload of this arena")
        edge = slot.claims.pop(consumer, None)
        if edge is None:
            raise DescriptorRefused(f"{consumer} has no claim on the payload")
        self._loads[consumer] -= 1
        return slot, edge

    def abandon(self, slot: Slot[OwnerT]) -> list[str]:
        """The producer takes its offer back: the consumers that must be told, once each."""
        if slot.abandoned:
            return []
        slot.abandoned = True
        for consumer in slot.claims:
            self._unanswered[consumer] += 1
            self._loads[consumer] += 1
        return list(slot.claims)

    def abandon_answered(self, consumer: str) -> None:
        """`consumer` has seen one abandon. Raises DescriptorRefused when none was due."""
        if not self._unanswered[consumer]:
            raise DescriptorRefused(f"{consumer} answers what it was not asked")
        self._unanswered[consumer] -= 1
        self._loads[consumer] -= 1

    def lose(self, consumer: str) -> list[tuple[Slot[OwnerT], str]]:
        """The consumer is gone and its claims with it: each slot and edge that it had."""
        self._unanswered.pop(consumer, None)
        self._loads.pop(consumer, None)
        held = [slot for slot in self._slots.values() if consumer in slot.claims]
        return [(slot, slot.claims.pop(consumer)) for slot in held]

    def free(self, slot: Slot[OwnerT]) -> None:
        """Make the slot's index reusable. Raises PayloadClaimed while a claim is left."""
        if slot.claims:
            raise PayloadClaimed("a consumer may be reading the payload")
        del self._slots[slot.index]
        self.unused.append(slot.index)

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple(
                (slot.index, slot.generation, slot.offset, slot.length, slot.state.value,
                 tuple(sorted(slot.claims.items())), slot.abandoned)
                for _, slot in sorted(self._slots.items())
            ),
            tuple(sorted(self._unanswered.items())),
        )  # fmt: skip
