"""Lanes and floors: which turns' content is still wanted.

A turn belongs to a lane. `floor(lane)` is the lowest turn of the lane whose
content is still wanted: interrupt and reset raise it, starting a turn does not.
"""

from __future__ import annotations

DEFAULT_LANE = "default"
INPUT_LANE = "input"
"""Turns that turn the user's input into items: an interruption of replies spares them."""


class Lanes:
    """Turn numbers of one session, growing over all lanes, and a floor for each lane."""

    def __init__(self) -> None:
        self._last_turn = 0
        self._floors: dict[str, int] = {}

    def start(self) -> int:
        """The number of a new turn."""
        self._last_turn += 1
        return self._last_turn

    def raise_floor(self, lane: str) -> int:
        """No content of any turn started in `lane` until now is wanted; the new floor."""
        self._floors[lane] = self._last_turn + 1
        return self._floors[lane]

    def wanted(self, lane: str, turn: int) -> bool:
        """Whether content of `turn` may still reach anybody."""
        return turn >= self._floors.get(lane, 0)

    def forget(self, lane: str) -> None:
        """Drop a lane that will see no further turn."""
        self._floors.pop(lane, None)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (self._last_turn, tuple(sorted(self._floors.items())))
