"""Which of the sessions that wait for a model go to it together.

A plain state machine: no clock, no thread. Times are monotonic ms.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")

LONGEST = 10
"""Windows that a batch may take to gather."""
UNHURRIED_MS = 1000.0
"""The deadline of who names none: in time it comes before those who always hurry."""


@dataclass(eq=False)
class Waiting(Generic[Work]):
    """One session's work. `kind` is what it shares with those it can be stacked with."""

    work: Work
    kind: Hashable
    arrived_ms: float
    deadline_ms: float


class Gathering(Generic[Work]):
    """At most `batch` observations go together, once none has come for `window_ms`.

    None waits for company that cannot come: when as many wait as there are sessions, or as a
    batch can have, they go at once. And none waits for long beside what it waits for: the next
    one is given a quarter of the time that the model's last call took, and all that come one
    upon the other that time together, and LONGEST windows at most.

    The time counts from the end of the last call, too: those that were answered then come
    again. Without that two groups of sessions would wait for each other's calls for ever.
    """

    def __init__(self, window_ms: float, batch: int) -> None:
        self._window_ms = window_ms
        self._batch = batch
        self._waiting: list[Waiting[Work]] = []
        self._gap_ms = self._longest_ms = window_ms
        self._answered_ms = 0.0

    def answered(self, infer_ms: float, now_ms: float) -> None:
        """The model's last call has ended, and took that long."""
        self._answered_ms = now_ms
        self._gap_ms = min(self._window_ms, infer_ms / 4)
        self._longest_ms = min(LONGEST * self._window_ms, infer_ms)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Waiting[Work]) -> None:
        """It waits. A session has at most one here, so there are as many as sessions."""
        self._waiting.append(one)

    def remove(self, one: Waiting[Work]) -> None:
        """It is not wanted any more; it may have been taken already."""
        if one in self._waiting:
            self._waiting.remove(one)

    def due_ms(self, sessions: int) -> float | None:
        """When the next batch is complete, if `sessions` are open; None: nothing waits."""
        if not self._waiting:
            return None
        first_ms = min(one.arrived_ms for one in self._waiting)
        if len(self._waiting) >= min(self._batch, sessions):
            return first_ms
        last_ms = max(self._answered_ms, *(one.arrived_ms for one in self._waiting))
        since_ms = max(self._answered_ms, first_ms)
        return min(last_ms + self._gap_ms, since_ms + self._longest_ms)

    def take(self) -> list[Waiting[Work]]:
        """The next batch: the one with the earliest deadline and those that go with it, in the
        order of their deadlines."""
        ordered = sorted(self._waiting, key=lambda one: (one.deadline_ms, one.arrived_ms))
        taken = [one for one in ordered if one.kind == ordered[0].kind][: self._batch]
        self._waiting = [one for one in self._waiting if one not in taken]
        return taken
