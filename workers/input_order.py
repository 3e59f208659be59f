"""A session's stream input in the order of its numbers, whichever way it came."""

from __future__ import annotations

from protocol.messages import Update


class InputOrder:
    """Input that came ahead of what is missing is held, within the caller's bounds.

    `received` is the last number that was taken or given up, `controls` how many
    `Configure` and `Signal` commands were carried out, which input may have to follow.
    """

    def __init__(self) -> None:
        self.received = 0
        self.controls = 0
        self.held_bytes = 0
        self._held: dict[int, Update] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def last(self) -> int:
        """The highest number that has come."""
        return max(self.received, max(self._held, default=0))

    def hold(self, update: Update) -> bool:
        """Take a piece in; False when one of its number has come before."""
        if update.sequence <= self.received or update.sequence in self._held:
            return False
        self._held[update.sequence] = update
        self.held_bytes += update.payload.size_bytes
        return True

    def take(self) -> Update | None:
        """The next piece, when it has come and nothing must be carried out before it."""
        following = self._held.get(self.received + 1)
        if following is None or following.after_controls > self.controls:
            return None
        return self._pop()

    def give_up(self, barrier: int) -> tuple[int, int, Update | None]:
        """Give up what is missing before the next held piece, or up to `barrier`.

        Where nothing is missing the next piece itself goes. The first and the last
        number given up, and the piece if there was one.
        """
        first = self.received + 1
        if first in self._held:
            return first, first, self._pop()
        self.received = min(self._held) - 1 if self._held else barrier
        return first, self.received, None

    def clear(self) -> list[Update]:
        """Hold nothing any more; what was held."""
        held, self._held = list(self._held.values()), {}
        self.held_bytes = 0
        return held

    def _pop(self) -> Update:
        self.received += 1
        update = self._held.pop(self.received)
        self.held_bytes -= update.payload.size_bytes
        return update

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (self.received, self.controls, tuple(sorted(self._held)))
