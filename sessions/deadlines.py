"""One heap of deadlines for all sessions, so that a gateway arms a single timer."""

from __future__ import annotations

import heapq
from collections.abc import Callable


def earliest(one_ms: float | None, other_ms: float | None) -> float | None:
    """The earlier of two deadlines; None is none."""
    if one_ms is None or (other_ms is not None and other_ms < one_ms):
        return other_ms
    return one_ms


class Deadlines:
    """The next deadline of each key. Setting and cancelling are O(log n), lazily cleaned."""

    def __init__(self) -> None:
        self._asked: dict[str, Callable[[], float | None]] = {}
        """What says when these are due, as they have changed."""
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, at_ms: float | None) -> None:
        """`key` is due at `at_ms` and at no other time; None cancels it."""
        self._asked.pop(key, None)
        self._set(key, at_ms)

    def ask(self, key: str, at_ms: Callable[[], float | None]) -> None:
        """`set`, to what `at_ms` says when a deadline is wanted next: once for many changes."""
        self._asked[key] = at_ms

    def _set(self, key: str, at_ms: float | None) -> None:
        if at_ms is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at_ms:
            self._at[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))
            if len(self._heap) > 64 + 4 * len(self._at):
                self._heap = [(at, key) for key, at in self._at.items()]
                heapq.heapify(self._heap)

    def next_ms(self) -> float | None:
        """The earliest deadline."""
        self._settle()
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: float) -> list[str]:
        """The keys whose deadline has come, earliest first; they have none afterwards."""
        keys = []
        while (at_ms := self.next_ms()) is not None and at_ms <= now_ms:
            _, key = heapq.heappop(self._heap)
            del self._at[key]
            keys.append(key)
        return keys

    def __len__(self) -> int:
        self._settle()
        return len(self._at)

    def _settle(self) -> None:
        while self._asked:
            key, at_ms = self._asked.popitem()
            self._set(key, at_ms())
