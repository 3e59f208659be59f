"""Which of the sessions that wait for a model go to it together.

A plain state machine: no clock, no thread. Times are monotonic ms.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
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

    session: Hashable
    work: Work
    kind: Hashable
    arrived_ms: float
    deadline_ms: float
    stale_ms: float = math.inf
    """From when on nobody wants it computed any more."""


class Gathering(Generic[Work]):
    """At most `batch` sessions go together, once none has come for `window_ms`.

    None waits for company that cannot come: when as many wait as there are sessions, or as a
    batch can have, they go at once. And none waits for long beside what it waits for: the next
    one is given a quarter of the time that the model's last call took, and all that come one
    upon the other that time together, and LONGEST windows at most.

    The time counts from the end of the last call, too: those that were answered then come
    again. Who came back within that time when it was answered before is waited for all of it,
    however far apart they come: robots that act at once on what they get. Without that two
    groups of robots would wait for each other's calls for ever, each for two calls a step.

    None waits so long that it would miss a deadline which can be met.
    """

    def __init__(self, window_ms: float, batch: int) -> None:
        self._window_ms = window_ms
        self._batch = batch
        self._waiting: list[Waiting[Work]] = []
        self._gap_ms = self._longest_ms = window_ms
        self._infer_ms = 0.0
        self._answered_ms = 0.0
        self._told_ms: dict[Hashable, float] = {}
        """When those sessions were answered that have not come back since."""
        self._prompt: set[Hashable] = set()
        """Those that came back soon when they were answered last."""
        self._expected: set[Hashable] = set()
        """Those of them that the last call has answered."""

    def answered(self, sessions: Iterable[Hashable], infer_ms: float, now_ms: float) -> None:
        """The model's last call has ended, took that long, and answered these."""
        self._told_ms.update(dict.fromkeys(sessions, now_ms))
        self._expected = self._prompt.intersection(sessions)
        self._infer_ms = infer_ms
        self._answered_ms = now_ms
        self._gap_ms = min(self._window_ms, infer_ms / 4)
        self._longest_ms = min(LONGEST * self._window_ms, infer_ms)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Waiting[Work]) -> None:
        """It waits. A session has at most one here, so there are as many as sessions."""
        self._waiting.append(one)
        self._expected.discard(one.session)
        told_ms = self._told_ms.pop(one.session, None)
        if told_ms is None or one.arrived_ms > told_ms + self._longest_ms:
            self._prompt.discard(one.session)
        else:
            self._prompt.add(one.session)

    def forget(self, session: Hashable) -> None:
        """It comes no more."""
        self._told_ms.pop(session, None)
        self._prompt.discard(session)
        self._expected.discard(session)

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
        due_ms = max(self._answered_ms, first_ms) + self._longest_ms
        if not self._expected or self._answered_ms + self._longest_ms <= first_ms:
            last_ms = max(self._answered_ms, *(one.arrived_ms for one in self._waiting))
            due_ms = min(due_ms, last_ms + self._gap_ms)
        for one in self._waiting:
            latest_ms = one.deadline_ms - self._infer_ms
            if one.arrived_ms <= latest_ms < due_ms:
                due_ms = latest_ms
        return due_ms

    def stale(self, now_ms: float) -> list[Waiting[Work]]:
        """Those that have waited too long to be of use; they wait no more."""
        gone = [one for one in self._waiting if one.stale_ms <= now_ms]
        if gone:
            self._waiting = [one for one in self._waiting if one.stale_ms > now_ms]
        return gone

    def take(self) -> list[Waiting[Work]]:
        """The next batch: the one with the earliest deadline and those that go with it, in the
        order of their deadlines."""
        ordered = sorted(self._waiting, key=lambda one: (one.deadline_ms, one.arrived_ms))
        taken = [one for one in ordered if one.kind == ordered[0].kind][: self._batch]
        self._waiting = [one for one in self._waiting if one not in taken]
        return taken
