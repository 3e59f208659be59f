"""Virtual time, one source of chance, what is to happen next, and what has happened."""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter, deque
from collections.abc import Callable

KEPT_EVENTS = 100
"""What a failure shows of what led to it."""


class SimulationFailure(Exception):
    """An invariant does not hold, or a machine raised on legal input."""


class World:
    """Everything happens in `run`, one thing at a time, in an order that the seed decides.

    `counts` says how often the precondition of an invariant occurred, and each fault.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = 10_000.0
        self.events = 0
        self.counts: Counter[str] = Counter()
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._trace: deque[tuple[float, str, object]] = deque(maxlen=KEPT_EVENTS)
        self._numbers: Counter[str] = Counter()

    def at(self, when_ms: float, action: Callable[[], None]) -> None:
        """Do `action` at `when_ms`, or now when that has passed."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self._order, action))

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay_ms`."""
        self.at(self.now_ms + delay_ms, action)

    def step(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._heap:
            return False
        self.now_ms, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True

    def run(self, events: int) -> None:
        """Let up to `events` more things happen."""
        end = self.events + events
        while self.events < end and self.step():
            pass

    def run_for(self, duration_ms: float) -> None:
        """Let virtual time pass."""
        end_ms = self.now_ms + duration_ms
        while self._heap and self._heap[0][0] <= end_ms:
            self.step()
        self.now_ms = end_ms

    def number(self, of: str) -> int:
        """The next number of a series that this world has alone."""
        self._numbers[of] += 1
        return self._numbers[of]

    def chance(self, probability: float) -> bool:
        """Whether something happens that does so with `probability`."""
        return probability > 0 and self.random.random() < probability

    def count(self, what: str) -> None:
        """A precondition, or a fault, has occurred."""
        self.counts[what] += 1

    def note(self, who: str, what: object) -> None:
        """Keep what has happened, for the story of a failure."""
        self._trace.append((self.now_ms, who, what))

    def story(self, last: int = KEPT_EVENTS) -> str:
        """What has happened last, a line each."""
        lines = [f"{at_ms:12.1f}  {who:<14}  {_short(what)}" for at_ms, who, what in self._trace]
        return "\n".join(lines[-last:])

    def fail(self, invariant: str, message: str) -> None:
        """An invariant does not hold."""
        raise SimulationFailure(f"{invariant}: {message}")


_LONG_BYTES = re.compile(r"(b'[^']{24})[^']*'")


def _short(what: object) -> str:
    text = what if isinstance(what, str) else _LONG_BYTES.sub(r"\1...'", repr(what))
    return text if len(text) <= 300 else text[:297] + "..."
