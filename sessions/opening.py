"""Somebody who wants a session, and where that stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol.errors import AntiphonError
from sessions.lack import Lack, of_all, of_stages
from sessions.pipeline import Pipeline
from sessions.promises import PATIENCE_MS
from sessions.shortages import Attempt


@dataclass(frozen=True)
class Position:
    """Where an open stands: 1 is the next. `estimate_ms` is None where nothing is known yet."""

    position: int
    estimate_ms: int | None


@dataclass(eq=False)
class Opening:
    """Somebody who wants a session. Times are monotonic ms.

    `begin` hosts one and opens it, and raises AntiphonError where that is no use; what becomes of
    it is told to `Openings`. `on_position` is told whenever the position has changed, and
    `on_refused` once.
    """

    pipeline: Pipeline
    tenant: str
    priority: int
    begin: Callable[[], None]
    on_position: Callable[[Position], None]
    on_refused: Callable[[AntiphonError], None]
    fork: str | None = None
    """The session that it begins as, which must not end to make room for it."""
    since_ms: float = 0.0
    number: int = 0
    attempt: Attempt | None = None
    """Its session, while that is being opened."""
    returning: bool = False
    """Whether it was promised that it would be let in now: it stands where it stood then."""
    evicting: bool = False
    """Whether a session ends to make room for it."""
    told: Position | None = None
    reason: AntiphonError | None = None
    """Why its session could not be opened the last time."""
    lack: Lack | None = None
    """What stood in its way when it was last looked at."""

    @property
    def trying(self) -> bool:
        """Whether its session is being opened."""
        return self.attempt is not None

    @property
    def queued(self) -> bool:
        """Whether opens of its pipeline wait for a place."""
        return self.pipeline.limits.waiting > 0

    @property
    def until_ms(self) -> float:
        """When it is refused, if it still waits then; without a queue an eviction is waited for,
        and, by who was promised a place, that place."""
        limits = self.pipeline.limits
        wait_ms = float(limits.wait_ms if self.queued else 0)
        if self.evicting and not self.queued:
            wait_ms = 2.0 * limits.close_ms
        return self.since_ms + max(wait_ms, PATIENCE_MS if self.returning else 0.0)

    def stages(self) -> Iterator[Lack]:
        """All that it may lack on its stages, in the order in which they are asked."""
        return of_stages(self.pipeline, self.tenant)

    def needs(self) -> Iterator[Lack]:
        """All that it may lack."""
        return of_all(self.pipeline, self.tenant)
