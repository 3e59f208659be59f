"""The times that were told to who was refused, and that they come true.

A promise is a ticket: who comes when it is due stands where it stood when it was refused, before
all who came since, and may wait a moment. How long a time is told, and how much has to be left for
the promises when somebody else is let in, is learned from how many of them were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from sessions.forecast import Forecast, Holder
from sessions.lack import Lack

MOST = 64
"""Promises that are kept in mind, for each thing that is lacking."""
KEPT_MS = 2_000.0
"""How long a promised place is kept for who is late: `Retry-After` is in whole seconds."""
PATIENCE_MS = 2_000.0
"""How long who comes when a promise is due waits for a place, where it would be refused."""
_TWICE_MS = 500.0
"""So long after it was due a promise holds for one more: who took it up may have been another."""
_LOOKED_AT = 16
"""Promises that stand for all, where there are more."""

_FAITH = 0.5
_FAITH_STEP = 1 / 8
"""Promises bind while more than this share of those to whom one was made came back for it, the
last ones counting for more: nothing is kept free for who does not come."""

_FIRST, _MOST_CAUTION = 1.5, 4.0
_BROKEN_STEP, _KEPT_STEP = 0.4, 0.02
"""One broken promise weighs as much as 20 kept ones: about one of 20 is broken in the long run,
however wrong the forecasts are."""


@dataclass(frozen=True)
class _Promise:
    due_ms: float
    number: int
    """It binds who comes after it."""
    pipeline: str
    tenant: str
    lacks: frozenset[Lack]


@dataclass
class _Experience:
    """With the promises of one pipeline."""

    faith: float = 0.0
    """The share of promises that were taken up."""
    caution: float = _FIRST
    """Standard deviations by which a place has to be expected before it is due."""


@dataclass(frozen=True)
class Supply:
    """Of something that may be lacking: who has it, how much nobody has, and how many wait for
    it (`ahead`), those included who come for a promise (`returning`: their pipelines)."""

    lack: Lack
    holders: Sequence[Holder]
    free: int
    ahead: int = 0
    returning: Sequence[str] = ()


class Promises:
    """All promises of a gateway. Times are monotonic ms; `number` counts opens and promises."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._made: list[_Promise] = []
        """In the order of their times."""
        self._taken: list[_Promise] = []
        self._experiences: dict[str, _Experience] = {}

    @property
    def deadline_ms(self) -> float | None:
        """When the first promise is forgotten."""
        return self._made[0].due_ms + KEPT_MS if self._made else None

    def expire(self, now_ms: float) -> None:
        """Forget those that nobody came for in time."""
        while self._made and now_ms >= self._made[0].due_ms + KEPT_MS:
            experience = self._experience(self._made.pop(0).pipeline)
            experience.faith -= experience.faith * _FAITH_STEP
        self._taken = [known for known in self._taken if now_ms <= known.due_ms + _TWICE_MS]

    def claim(self, pipeline: str, tenant: str, now_ms: float) -> int | None:
        """The number of the promise that was made to who comes now; None where it was none."""
        self.expire(now_ms)
        for promises in (self._made, self._taken):
            for promise in promises:
                if promise.due_ms > now_ms:
                    break
                if (promise.pipeline, promise.tenant) == (pipeline, tenant):
                    promises.remove(promise)
                    if promises is self._made:
                        self._taken.append(promise)
                        experience = self._experience(pipeline)
                        experience.faith += (1 - experience.faith) * _FAITH_STEP
                    return promise.number
        return None

    def came_true(self, pipeline: str, kept: bool) -> None:
        """Who came for a promise was let in, or refused for want of room."""
        if kept:
            self._more_daring(pipeline)
            return
        experience = self._experience(pipeline)
        experience.caution = min(experience.caution + _BROKEN_STEP, _MOST_CAUTION)

    def binding(self, lack: Lack, number: int) -> bool:
        """Whether there is a promise that binds open number `number`."""
        return any(self._earlier(lack, number))

    def broken(self, supply: Supply, number: int, newcomer: str, now_ms: float) -> bool:
        """Whether a promise that binds could not be kept if open number `number` were let in, of
        pipeline `newcomer`."""
        holders = [*supply.holders, Holder(newcomer, 0.0)]
        earlier = list(self._earlier(supply.lack, number))
        each = max(1, len(earlier) // _LOOKED_AT)
        for needed, promise in enumerate(earlier, 1):
            places = needed - (supply.free - 1)
            if (needed - 1) % each == 0 and not self._forecast.free_within(
                holders,
                max(0.0, promise.due_ms - now_ms),
                places,
                self._experience(promise.pipeline).caution,
            ):
                return True
            holders.append(_to_come(promise, now_ms))
        return False

    def make(
        self, supplies: Iterable[Supply], number: int, pipeline: str, tenant: str, now_ms: float
    ) -> int | None:
        """In how many ms there will be room, behind all that wait and all promises; None where that
        is not known, and nothing is promised then."""
        self.expire(now_ms)
        caution = self._experience(pipeline).caution
        due_ms, lacks = now_ms, []
        for supply in supplies:
            promises = [known for known in self._made if supply.lack in known.lacks]
            if len(promises) >= MOST:
                return None
            holders = [
                *supply.holders,
                *(_to_come(promise, now_ms) for promise in promises),
                *(Holder(name, 0.0) for name in supply.returning),
            ]
            places = len(promises) + supply.ahead + 1 - supply.free
            wait_ms = self._forecast.wait_ms(holders, places, caution)
            if wait_ms is None:
                self._more_daring(pipeline)
                return None
            due_ms = max(due_ms, now_ms + ceil(wait_ms))
            lacks.append(supply.lack)
        mine = (p.due_ms for p in self._made if (p.pipeline, p.tenant) == (pipeline, tenant))
        # Who comes first is told apart from who comes next by nothing but its time.
        due_ms = max(due_ms, now_ms + 1, *mine)
        self._made.append(_Promise(due_ms, number, pipeline, tenant, frozenset(lacks)))
        self._made.sort(key=lambda known: known.due_ms)
        return ceil(due_ms - now_ms)

    def _earlier(self, lack: Lack, number: int) -> Iterable[_Promise]:
        return (
            known
            for known in self._made
            if known.number < number
            and lack in known.lacks
            and self._experience(known.pipeline).faith >= _FAITH
        )

    def _more_daring(self, pipeline: str) -> None:
        """Also where nothing was promised: who never promises anything learns nothing."""
        experience = self._experience(pipeline)
        experience.caution = max(0.0, experience.caution - _KEPT_STEP)

    def _experience(self, pipeline: str) -> _Experience:
        return self._experiences.setdefault(pipeline, _Experience())

    def freeze(self, now_ms: float) -> tuple[object, ...]:
        """The canonical state, with times as seen from now."""
        return tuple(
            (known.pipeline, known.tenant, tuple(sorted(known.lacks)), known.due_ms - now_ms)
            for known in self._made
        )


def _to_come(promise: _Promise, now_ms: float) -> Holder:
    return Holder(promise.pipeline, min(0.0, now_ms - promise.due_ms))
