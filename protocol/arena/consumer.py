"""The consumer's end of one producer's arena: what is held, and what names nothing any more."""

from __future__ import annotations

from enum import StrEnum

from protocol.connector_errors import DescriptorRefused


class HoldState(StrEnum):
    """How a payload is held."""

    TAKEN = "taken"
    RELEASING = "releasing"


class ConsumerEnd:
    """Answers each payload with one release, whatever happens to it on the way.

    A payload may be named twice, by a record of the arena and by a control message, and
    taken back by its producer before, between and after. A slot has no new payload before
    the old one's release, so one generation for each slot tells old from new. Bounded by
    the number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._capacity = slots
        self._holds: dict[int, tuple[int, HoldState]] = {}
        self._released: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def lingering(self) -> int:
        """Payloads that were released while views of them were, and are, alive."""
        return sum(state is HoldState.RELEASING for _, state in self._holds.values())

    def may_arrive(self, slot: int, generation: int) -> bool:
        """Whether a payload may still be on its way or here."""
        return generation > self._released.get(slot, 0)

    def take(self, slot: int, generation: int) -> None:
        """The payload is about to be read; taking it again changes nothing.

        Raises DescriptorRefused when it has been released or taken back.
        """
        if not 0 <= slot < self._capacity:
            raise DescriptorRefused(f"the arena has {self._capacity} slots")
        held = self._holds.get(slot)
        if not self.may_arrive(slot, generation) or held not in (
            None,
            (generation, HoldState.TAKEN),
        ):
            raise DescriptorRefused("the payload has been released")
        self._holds[slot] = (generation, HoldState.TAKEN)

    def release(self, slot: int, generation: int) -> None:
        """The payload is needed no longer; `views_gone` follows when nothing can read it.

        Saying it again changes nothing. Raises DescriptorRefused for a payload that was
        never taken here.
        """
        if not self.may_arrive(slot, generation):
            return
        held = self._holds.get(slot)
        if held is None or held[0] != generation:
            raise DescriptorRefused("the payload is not held here")
        self._holds[slot] = (generation, HoldState.RELEASING)

    def views_gone(self, slot: int, generation: int) -> bool:
        """Nothing can read the payload; whether its release is to be sent now."""
        if self._holds.get(slot) != (generation, HoldState.RELEASING):
            return False
        del self._holds[slot]
        self._released[slot] = generation
        return True

    def abandoned(self, slot: int, generation: int) -> bool:
        """The producer takes a payload back; whether its release is to be sent now.

        Also when it has not arrived: what arrives later names nothing. One that is being
        read is released by its reader as ever.
        """
        if not self.may_arrive(slot, generation) or slot in self._holds:
            return False
        self._released[slot] = generation
        return True

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple((slot, *held) for slot, held in sorted(self._holds.items())),
            tuple(sorted(self._released.items())),
        )
