"""Admission: the places of a pipeline, who holds them, and since when.

Sessions that are opening or closing hold one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import CapacityExceeded
from sessions.forecast import Forecast, Holder
from sessions.pipeline import Pipeline


@dataclass(frozen=True)
class _Place:
    pipeline: Pipeline
    tenant: str
    since_ms: float


class Admission:
    """Counts places. A place is held from before `open` until everything is freed.

    `forecast` learns how long they are held. Times are monotonic ms.
    """

    def __init__(self, forecast: Forecast | None = None) -> None:
        self.forecast = forecast or Forecast()
        self._held: dict[str, dict[str, _Place]] = {}
        self._held_by: Counter[tuple[str, str]] = Counter()

    def take(self, pipeline: Pipeline, tenant: str, session: str, now_ms: float) -> None:
        """Take a place for `session`. Raises CapacityExceeded when the pipeline is full, or the
        tenant has all that it may have."""
        if (reason := self.lacking(pipeline, tenant)) is not None:
            raise CapacityExceeded(reason, field="model")
        self._held.setdefault(pipeline.name, {})[session] = _Place(pipeline, tenant, now_ms)
        self._held_by[pipeline.name, tenant] += 1

    def give_back(self, pipeline: str, session: str, now_ms: float, *, opened: bool) -> None:
        """Give the place back that `session` holds; `opened`: it was a session for a while."""
        place = self._held[pipeline].pop(session)
        self._held_by[pipeline, place.tenant] -= 1
        if not self._held_by[pipeline, place.tenant]:
            del self._held_by[pipeline, place.tenant]
        if opened:
            self.forecast.ended(pipeline, now_ms - place.since_ms)

    def held(self, pipeline: str) -> int:
        """Places taken."""
        return len(self._held.get(pipeline, ()))

    def lacking(self, pipeline: Pipeline, tenant: str) -> str | None:
        """Why the next `take` of this tenant would be refused."""
        limits = pipeline.limits
        if self.tenant_full(pipeline, tenant):
            return (
                f"pipeline {pipeline.name} serves {limits.sessions_per_tenant} sessions of one"
                " tenant (sessions_per_tenant) and all of yours are taken"
            )
        if self.held(pipeline.name) >= limits.sessions:
            return f"pipeline {pipeline.name} serves {limits.sessions} sessions and all are taken"
        return None

    def tenant_full(self, pipeline: Pipeline, tenant: str) -> bool:
        """Whether the tenant has all places of the pipeline that it may have."""
        limit = pipeline.limits.sessions_per_tenant
        return limit is not None and self.held_by(pipeline.name, tenant) >= limit

    def held_by(self, pipeline: str, tenant: str) -> int:
        """Places that one tenant has taken."""
        return self._held_by[pipeline, tenant]

    def holders(
        self,
        now_ms: float,
        *,
        pipeline: str | None = None,
        tenant: str | None = None,
        stage: str | None = None,
    ) -> list[Holder]:
        """Who holds a place: of one pipeline, one tenant, or of all that have the stage."""
        return [
            Holder(name, now_ms - place.since_ms)
            for name, places in self._held.items()
            if pipeline is None or name == pipeline
            for place in _with_stage(places.values(), stage)
            if tenant is None or place.tenant == tenant
        ]


def _with_stage(places: Iterable[_Place], stage: str | None) -> Iterable[_Place]:
    return (place for place in places if stage is None or stage in place.pipeline.stages)
