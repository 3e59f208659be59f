"""Admission: how many sessions a pipeline takes, opening and closing ones included."""

from __future__ import annotations

from collections import Counter

from protocol.errors import CapacityExceeded
from sessions.pipeline import Pipeline


class Admission:
    """Counts places. A place is held from before `open` until everything is freed."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._held_by: Counter[tuple[str, str]] = Counter()

    def take(self, pipeline: Pipeline, tenant: str) -> None:
        """Take a place. Raises CapacityExceeded when the pipeline is full, or the tenant has
        all that it may have."""
        limits = pipeline.limits
        if self._held[pipeline.name] >= limits.sessions:
            raise CapacityExceeded(
                f"pipeline {pipeline.name} serves {limits.sessions} sessions and all are taken",
                field="model",
            )
        if self.tenant_full(pipeline, tenant):
            raise CapacityExceeded(
                f"pipeline {pipeline.name} serves {limits.sessions_per_tenant} sessions of one"
                " tenant (sessions_per_tenant) and all of yours are taken",
                field="model",
            )
        self._held[pipeline.name] += 1
        self._held_by[pipeline.name, tenant] += 1

    def give_back(self, pipeline: Pipeline, tenant: str) -> None:
        """Give a place back."""
        self._held[pipeline.name] -= 1
        self._held_by[pipeline.name, tenant] -= 1
        if not self._held_by[pipeline.name, tenant]:
            del self._held_by[pipeline.name, tenant]

    def held(self, pipeline: str) -> int:
        """Places taken."""
        return self._held[pipeline]

    def full(self, pipeline: Pipeline, tenant: str) -> bool:
        """Whether the next `take` of this tenant would be refused."""
        return self._held[pipeline.name] >= pipeline.limits.sessions or self.tenant_full(
            pipeline, tenant
        )

    def tenant_full(self, pipeline: Pipeline, tenant: str) -> bool:
        """Whether the tenant has all places of the pipeline that it may have."""
        limit = pipeline.limits.sessions_per_tenant
        return limit is not None and self._held_by[pipeline.name, tenant] >= limit
