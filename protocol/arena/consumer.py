"""The consumer's end of one producer's arena: what is held, and what names nothing any more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.connector_errors import DescriptorRefused


class HoldState(StrEnum):
    """How far a payload has come at its consumer."""

    OFFERED = "offered"
    TAKEN = "taken"
    RELEASING = "releasing"


@dataclass(slots=True)
class Hold:
    """One payload of the producer.

    While RELEASING its consumer has let go of it, and views of it are still alive.
    """

    index: int
    generation: int
    state: HoldState = HoldState.OFFERED


class ConsumerEnd:
    """Answers each payload with one release, whatever happens to it on the way.

    A payload may be named twice, by a record of the arena and by a control message, and
    taken back by its producer before, between and after. Bounded by the number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._capacity = slots
        self._holds: dict[int, Hold] = {}
        self._released: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def lingering(self) -> int:
        """Payloads that were released while views of them were, and are, alive."""
        return sum(hold.state is HoldState.RELEASING for hold in self._holds.values())

    def may_arrive(self, index: int, generation: int) -> bool:
        """Whether a payload may still be on its way or here."""
        return not self._is_stale(index, generation)

    def take(self, index: int, generation: int) -> bool:
        """The payload is about to be read; whether this is the first time.

        Raises DescriptorRefused when it has been released or taken back.
        """
        if self._is_stale(index, generation):
            raise DescriptorRefused("the payload has been released")
        hold = self._holds.get(index)
        if hold is None:
            hold = self._hold(index, generation)
        elif hold.generation != generation or hold.state is HoldState.RELEASING:
            raise DescriptorRefused("the payload has been released")
        first = hold.state is HoldState.OFFERED
        hold.state = HoldState.TAKEN
        return first

    def release(self, index: int, generation: int) -> bool:
        """The payload is needed no longer; whether its release may be sent at once.

        False: views may be alive, `views_gone` comes when they are not, or this was said
        before. Raises DescriptorRefused for a payload that was never held here.
        """
        if self._is_stale(index, generation):
            return False
        hold = self._holds.get(index)
        if hold is None or hold.generation != generation:
            raise DescriptorRefused("the payload is not held here")
        if hold.state is HoldState.OFFERED:
            self._end(hold)
            return True
        hold.state = HoldState.RELEASING
        return False

    def abandoned(self, index: int, generation: int) -> bool:
        """The producer takes a payload back; whether its release is to be sent at once.

        Also when it has not arrived yet: what arrives later names nothing. A payload that
        is being read is released by its reader as ever.
        """
        if self._is_stale(index, generation):
            return False
        hold = self._holds.get(index)
        if hold is None:
            hold = self._hold(index, generation)
        if hold.generation != generation or hold.state is not HoldState.OFFERED:
            return False
        self._end(hold)
        return True

    def views_gone(self, index: int, generation: int) -> bool:
        """The last view is gone; whether the release is to be sent now."""
        hold = self._holds.get(index)
        if hold is None or hold.generation != generation:
            return False
        self._end(hold)
        return True

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple((h.index, h.generation, h.state.value) for _, h in sorted(self._holds.items())),
            tuple(sorted(self._released.items())),
        )

    def _hold(self, index: int, generation: int) -> Hold:
        if not 0 <= index < self._capacity:
            raise DescriptorRefused(f"the arena has {self._capacity} slots")
        hold = self._holds[index] = Hold(index, generation)
        return hold

    def _end(self, hold: Hold) -> None:
        del self._holds[hold.index]
        self._released[hold.index] = hold.generation

    def _is_stale(self, index: int, generation: int) -> bool:
        return generation <= self._released.get(index, 0)
