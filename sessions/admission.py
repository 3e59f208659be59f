"""Admission: how many sessions a pipeline takes, opening and closing ones included."""

from __future__ import annotations

from collections import Counter

from protocol.errors import CapacityExceeded
from sessions.pipeline import Pipeline


class Admission:
    """Counts places. A place is held from before `open` until everything is freed."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def take(self, pipeline: Pipeline) -> None:
        """Take a place. Raises CapacityExceeded when the pipeline is full."""
        limit = pipeline.limits.sessions
        if self._held[pipeline.name] >= limit:
            raise CapacityExceeded(
                f"pipeline {pipeline.name} serves {limit} sessions and all are taken",
                field="model",
            )
        self._held[pipeline.name] += 1

    def give_back(self, pipeline: Pipeline) -> None:
        """Give a place back."""
        self._held[pipeline.name] -= 1

    def held(self, pipeline: str) -> int:
        """Places taken."""
        return self._held[pipeline]

    def full(self, pipeline: Pipeline) -> bool:
        """Whether the next `take` would be refused."""
        return self._held[pipeline.name] >= pipeline.limits.sessions
