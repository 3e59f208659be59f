"""The consumer's end of one producer's arena: what is held, and what names nothing any more."""

from __future__ import annotations

from protocol.connector_errors import DescriptorRefused


class ConsumerEnd:
    """Answers each payload with one release, whatever happens to it on the way.

    A payload may be named twice, by a record of the arena and by a control message, and
    taken back by its producer before, between and after. A slot has no new payload before
    the old one's release, so one generation for each slot tells old from new. Bounded by
    the number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._capacity = slots
        self._taken: dict[int, int] = {}
        self._releasing: dict[int, int] = {}
        self._released: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._taken) + len(self._releasing)

    @property
    def lingering(self) -> int:
        """Payloads that were released while views of them were, and are, alive."""
        return len(self._releasing)

    def may_arrive(self, slot: int, generation: int) -> bool:
        """Whether a payload may still be on its way or here."""
        return generation > self._released.get(slot, 0)

    def take(self, slot: int, generation: int) -> None:
        """The payload is about to be read; taking it again changes nothing.

        Raises DescriptorRefused when it has been released or taken back.
        """
        if not 0 <= slot < self._capacity:
            raise DescriptorRefused(f"the arena has {self._capacity} slots")
        if (
            generation <= self._released.get(slot, 0)
            or slot in self._releasing
            or self._taken.setdefault(slot, generation) != generation
        ):
            raise DescriptorRefused("the payload has been released")

    def release(self, slot: int, generation: int) -> None:
        """The payload is needed no longer; `views_gone` follows when nothing can read it.

        Saying it again changes nothing. Raises DescriptorRefused for a payload that was
        never taken here.
        """
        if not self.may_arrive(slot, generation):
            return
        if self._releasing.get(slot) == generation:
            return
        if self._taken.get(slot) != generation:
            raise DescriptorRefused("the payload is not held here")
        del self._taken[slot]
        self._releasing[slot] = generation

    def views_gone(self, slot: int, generation: int) -> bool:
        """Nothing can read the payload; whether its release is to be sent now."""
        if self._releasing.get(slot) != generation:
            return False
        del self._releasing[slot]
        self._released[slot] = generation
        return True

    def release_copy(self, slot: int, generation: int) -> bool:
        """`release` and `views_gone` at once, for a payload that was copied when it was taken."""
        if self._taken.get(slot) != generation:
            return False
        del self._taken[slot]
        self._released[slot] = generation
        return True

    def abandoned(self, slot: int, generation: int) -> bool:
        """The producer takes a payload back; whether its release is to be sent now.

        Also when it has not arrived: what arrives later names nothing. One that is being
        read is released by its reader as ever.
        """
        if not self.may_arrive(slot, generation) or slot in self._taken or slot in self._releasing:
            return False
        self._released[slot] = generation
        return True

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple(sorted(self._taken.items())),
            tuple(sorted(self._releasing.items())),
            tuple(sorted(self._released.items())),
        )
