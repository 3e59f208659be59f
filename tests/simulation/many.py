"""Many worlds, in as many processes as there are cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice

from tests.simulation.report import Tally
from tests.simulation.schedule import Outcome, run

BATCH = 16
EVENTS = 300_000
FIRST_SEED = 10_000
"""The worlds from here on put every invariant to the test within EVENTS; what is rare moves to
others when worlds draw other numbers."""


def outcomes(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """The runs of `seeds`, in their order."""
    if jobs <= 1:
        yield from map(run, seeds)
        return
    rest = iter(seeds)
    with ProcessPoolExecutor(jobs) as pool:
        while batch := list(islice(rest, BATCH * jobs)):
            yield from pool.map(run, batch, chunksize=4)


def tally(seeds: Iterable[int], *, events: int | None = None, jobs: int | None = None) -> Tally:
    """Run `seeds` until one fails, or until there were as many `events`."""
    result = Tally()
    for outcome in outcomes(seeds, jobs or os.cpu_count() or 1):
        result.add(outcome)
        if outcome.failure is not None or (events is not None and result.events >= events):
            break
    return result


def seeds_from(first: int) -> Iterator[int]:
    """All seeds from `first` on."""
    return count(first)
