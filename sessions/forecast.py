"""When places become free, by how long sessions have held theirs so far.

The distribution is the one that was seen: of the last sessions of a pipeline that held their
place longer than this one has, the share that had given it up `t` ms later, as if one more had
been seen that stayed for ever: few say little. Sessions end independently of each other, so the
number that ended by then is nearly normal.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

REMEMBERED = 128
"""Sessions of a pipeline whose length is remembered."""
_SAMPLE = 64
"""Holders that stand for all, where there are more."""
_SLACK = 0.5
"""The normal distribution is continuous; places are counted."""

EXPECTED = 0.0
"""Standard deviations below the mean: half of the time as many have ended."""


@dataclass(frozen=True)
class Holder:
    """Who has a place: of which pipeline, and for how long already, in ms; less than 0: it will
    have one in so long."""

    pipeline: str
    held_ms: float


@dataclass
class _Lengths:
    newest: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def add(self, held_ms: float) -> None:
        if len(self.newest) == REMEMBERED:
            self.ordered.remove(self.newest.popleft())
        self.newest.append(held_ms)
        insort(self.ordered, held_ms)

    def ended_within(self, held_ms: float, more_ms: float) -> float:
        """The probability; who has held longer than anybody before is not expected to end."""
        outlasted = bisect_right(self.ordered, max(0.0, held_ms))
        longer = len(self.ordered) - outlasted
        ended = bisect_right(self.ordered, held_ms + more_ms) - outlasted
        return max(0, ended) / (longer + 1)


class Forecast:
    """The lengths of the sessions that have ended, by pipeline."""

    def __init__(self) -> None:
        self._lengths: dict[str, _Lengths] = {}

    def ended(self, pipeline: str, held_ms: float) -> None:
        """A session has given its place up that it held for so long."""
        self._lengths.setdefault(pipeline, _Lengths()).add(held_ms)

    def wait_ms(self, holders: Sequence[Holder], places: int, deviations: float) -> float | None:
        """In how many ms so many `places` of `holders` are free, if fewer end than expected by so
        many standard `deviations`.

        0 for no places; None where nothing that was seen allows to say it.
        """
        if places <= 0:
            return 0.0
        sample = holders[:: max(1, len(holders) // _SAMPLE)]
        late = max((ordered[-1] for ordered in self._ordered(sample)), default=0.0)
        late += max((-holder.held_ms for holder in sample if holder.held_ms < 0), default=0.0)
        if not sample or not self._free(sample, len(holders), late, places, deviations):
            return None
        early = 0.0
        while late - early > max(1.0, late / 256):
            middle = (early + late) / 2
            if self._free(sample, len(holders), middle, places, deviations):
                late = middle
            else:
                early = middle
        return late

    def free_within(
        self, holders: Sequence[Holder], within_ms: float, places: int, deviations: float
    ) -> bool:
        """Whether so many `places` of `holders` are free by then, as in `wait_ms`."""
        if places <= 0:
            return True
        sample = holders[:: max(1, len(holders) // _SAMPLE)]
        return bool(sample) and self._free(sample, len(holders), within_ms, places, deviations)

    def mean_ms(self, holders: Sequence[Holder]) -> float | None:
        """How long such sessions hold a place on average; None where none has ended yet."""
        lengths = [length for ordered in self._ordered(holders) for length in ordered]
        return sum(lengths) / len(lengths) if lengths else None

    def _ordered(self, sample: Sequence[Holder]) -> list[list[float]]:
        names = {holder.pipeline for holder in sample}
        known = (self._lengths.get(name) for name in names)
        return [lengths.ordered for lengths in known if lengths is not None]

    def _free(
        self,
        sample: Sequence[Holder],
        holders: int,
        within_ms: float,
        places: int,
        deviations: float,
    ) -> bool:
        expected = variance = 0.0
        for holder in sample:
            if (lengths := self._lengths.get(holder.pipeline)) is not None:
                ended = lengths.ended_within(holder.held_ms, within_ms)
                expected += ended
                variance += ended * (1 - ended)
        each = holders / len(sample)
        sure_of = expected * each - deviations * math.sqrt(variance * each)
        return sure_of >= places - _SLACK

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple((name, tuple(known.newest)) for name, known in sorted(self._lengths.items()))
