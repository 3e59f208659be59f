"""What a long run has put to the test, and what it has not."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.invariants import ALL
from tests.simulation.schedule import Outcome

FAULTS = tuple(
    f"fault: {kind}"
    for kind in (
        "clock jumped",
        "closed by the operator",
        "command of a stranger",
        "command repeated",
        "configure refused",
        "commit failed",
        "connection cut",
        "engine does not wait",
        "engine hangs",
        "engine ignores cancel",
        "frame lost",
        "frame lost in a cut connection",
        "frame overtaken",
        "frame repeated",
        "frame spoilt",
        "gateway crashed",
        "gateway drained",
        "input buffer overflow",
        "input failed",
        "input lost",
        "link given up",
        "open refused",
        "parked by the operator",
        "paused between a decision and its send",
        "process paused",
        "record taken over",
        "record was there",
        "restored by the operator",
        "session adopted",
        "session of another gateway",
        "session taken over",
        "slow commit",
        "slow operation",
        "slow park",
        "snapshot damaged",
        "step stalls",
        "store full",
        "turn failed",
        "turn given up by its engine",
        "worker crashed",
        "worker stopped in order",
    )
)
CLIENTS = (
    "bad input",
    "bad limits chosen",
    "barge-ins",
    "clients blocked",
    "clients gone",
    "clients gone silent",
    "conversations reset",
    "inputs beside the link",
    "limits chosen",
    "links lost",
    "opens cancelled",
    "opens refused",
    "responses cancelled by their client",
    "sessions opened apart",
    "storms",
    "turns paced",
    "verbs apart",
    "verbs held back",
)
REQUIRED = (
    *(f"{invariant.name}: {what}" for invariant in ALL for what in invariant.preconditions),
    *FAULTS,
    *CLIENTS,
)
"""What must have occurred in a run that shall prove anything."""


@dataclass
class Tally:
    """The outcomes of many runs, taken together."""

    events: int = 0
    sizes: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.events += outcome.events
        self.sizes.append(outcome.events)
        self.counts.update(outcome.counts)
        if outcome.failure is not None:
            self.failures.append(outcome)

    @property
    def median(self) -> float:
        """The events of the run in the middle."""
        return statistics.median(self.sizes) if self.sizes else 0.0

    @property
    def missing(self) -> list[str]:
        """What never occurred and should have."""
        return [what for what in REQUIRED if not self.counts[what]]

    def lines(self) -> Iterable[str]:
        """A table for people."""
        yield f"{self.events} events in {len(self.sizes)} worlds, {self.median:.0f} in the median"
        for what in sorted({*REQUIRED, *self.counts}):
            yield f"{self.counts[what]:9}  {what}"
