"""What operators see of a session that moves by steps: how long they take, and what went wrong."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from sessions.actions import NotFresh, TurnMeasured

STEPS = 256
"""The last so many steps are those of the figures."""
SHOWN = 48
"""The last so many are told one by one."""


class StepFigures:
    """Figures of one session."""

    def __init__(self) -> None:
        self._took_ms: deque[float] = deque(maxlen=STEPS)
        self._done = 0
        self._failed = 0
        self._missed = 0
        self._superseded = 0
        self._safe: Counter[str] = Counter()

    def ended(self, turn: TurnMeasured) -> None:
        """A step has ended; what it took is the time at its workers, waiting included."""
        if turn.status != "completed":
            self._failed += 1
            return
        self._done += 1
        spent_ms = [
            times.get("done", 0.0) - times.get("received", 0.0) for times in turn.timelines.values()
        ]
        self._took_ms.append(round(sum(spent_ms), 1))

    def not_fresh(self, answered: NotFresh) -> None:
        """An observation was answered without anything fresh."""
        self._safe[answered.reason] += 1
        if answered.late:
            self._missed += 1

    def superseded(self, count: int) -> None:
        """So many observations were answered with the actions of a newer one."""
        self._superseded += count

    def described(self) -> dict[str, Any]:
        """As operators get them. `p50_ms` and `p99_ms` are null before the first step; `safe`
        is by reason; `recent_ms` begins with the oldest."""
        ordered = sorted(self._took_ms)
        return {
            "done": self._done,
            "failed": self._failed,
            "deadlines_missed": self._missed,
            "superseded": self._superseded,
            "safe": dict(self._safe),
            "p50_ms": _percentile(ordered, 0.5),
            "p99_ms": _percentile(ordered, 0.99),
            "recent_ms": list(self._took_ms)[-SHOWN:],
        }


def _percentile(ordered: list[float], share: float) -> float | None:
    """The value that is not exceeded by this share of them."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
