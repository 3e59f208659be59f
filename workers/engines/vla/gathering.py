"""Which observations wait, and which go to the policy together.

A plain state machine: no clock, no thread. Times are monotonic ms.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from workers.engines.vla.policy import State

UNHURRIED_MS = 1000.0
"""The deadline of who names none: in time it comes before those who always hurry."""


@dataclass(eq=False)
class Waiting:
    """One session's observation. `kind` is what it shares with those it can be stacked with."""

    observation: dict[Any, Any]
    state: State
    kind: Hashable
    arrived_ms: float
    deadline_ms: float


class Gathering:
    """At most `batch` observations go together, once the first has waited `window_ms`.

    None waits for company that cannot come: when as many wait as there are sessions, or as a
    batch can have, they go at once.
    """

    def __init__(self, window_ms: float, batch: int) -> None:
        self._window_ms = window_ms
        self._batch = batch
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Waiting) -> None:
        """It waits. A session has at most one here, so there are as many as sessions."""
        self._waiting.append(one)

    def remove(self, one: Waiting) -> None:
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
        return first_ms + self._window_ms

    def take(self) -> list[Waiting]:
        """The next batch: the one with the earliest deadline and those that go with it, in the
        order of their deadlines."""
        ordered = sorted(self._waiting, key=lambda one: (one.deadline_ms, one.arrived_ms))
        taken = [one for one in ordered if one.kind == ordered[0].kind][: self._batch]
        self._waiting = [one for one in self._waiting if one not in taken]
        return taken
