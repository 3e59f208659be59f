"""The times that were told to who was refused, and that they come true.

As long as clients come at the time that they were told, who comes before is let in only where
all promises can still be kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from sessions.forecast import SURE, Forecast, Holder
from sessions.lack import Lack

MOST = 64
"""Promises that are kept in mind, for each thing that is lacking."""
KEPT_MS = 2_000.0
"""How long a promised place is kept for who is late: `Retry-After` is in whole seconds."""

_FAITH = 0.5
_FAITH_STEP = 1 / 8
"""Promises bind while more than this share of those to whom one was made came back for it, the
last ones counting for more: nothing is kept free for who does not come."""


@dataclass(frozen=True)
class _Promise:
    due_ms: float
    number: int
    """It binds who comes after it."""


class Promises:
    """All promises of a gateway. Times are monotonic ms; `number` counts opens and promises."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._made: dict[Lack, list[_Promise]] = {}
        self._faith = 0.0
        """The share of promises that were taken up."""

    @property
    def deadline_ms(self) -> float | None:
        """When the first promise is forgotten."""
        times = (promises[0].due_ms + KEPT_MS for promises in self._made.values())
        return min(times, default=None)

    def expire(self, now_ms: float) -> None:
        """Forget those that nobody came for in time."""
        for lack, promises in list(self._made.items()):
            while promises and now_ms >= promises[0].due_ms + KEPT_MS:
                del promises[0]
                self._faith -= self._faith * _FAITH_STEP
            if not promises:
                del self._made[lack]

    def claimed(self, lacks: Iterable[Lack], now_ms: float) -> bool:
        """Whether somebody was promised one of these for about now: nobody else comes just then."""
        self.expire(now_ms)
        claimed = False
        for lack in lacks:
            promises = self._made.get(lack)
            if promises and promises[0].due_ms <= now_ms:
                claimed = True
                del promises[0]
                self._faith += (1 - self._faith) * _FAITH_STEP
                if not promises:
                    del self._made[lack]
        return claimed

    def binding(self, lack: Lack, number: int) -> bool:
        """Whether there is a promise that binds open number `number`."""
        promises = self._made.get(lack)
        if not promises or self._faith < _FAITH:
            return False
        return promises[0].number < number

    def broken(
        self,
        lack: Lack,
        number: int,
        newcomer: str,
        free: int,
        holders: list[Holder],
        now_ms: float,
    ) -> bool:
        """Whether a promise that binds could not be kept if open number `number` were let in, of
        pipeline `newcomer`; `free` is what is there now beside what `holders` have."""
        earlier = [promise for promise in self._made.get(lack, ()) if promise.number < number]
        holders = [*holders, Holder(newcomer, 0.0)]
        return any(
            not self._forecast.free_within(
                holders, max(0.0, promise.due_ms - now_ms), needed - (free - 1), SURE
            )
            for needed, promise in enumerate(earlier, 1)
        )

    def make(
        self, lack: Lack, number: int, ahead: int, free: int, holders: list[Holder], now_ms: float
    ) -> int | None:
        """In how many ms there will be one, behind `ahead` others and all promises; None where that
        is not known, and nothing is promised then."""
        self.expire(now_ms)
        promises = self._made.get(lack, [])
        places = max(1, len(promises) + ahead + 1 - free)
        if places > len(holders) or len(promises) >= MOST:
            return None
        wait_ms = self._forecast.wait_ms(holders, places, SURE)
        if wait_ms is None:
            return None
        due_ms = now_ms + ceil(wait_ms)
        if promises:
            due_ms = max(due_ms, promises[-1].due_ms)
        self._made.setdefault(lack, []).append(_Promise(due_ms, number))
        return ceil(due_ms - now_ms)

    def freeze(self, now_ms: float) -> tuple[object, ...]:
        """The canonical state, with times as seen from now."""
        return tuple(
            (lack, tuple(promise.due_ms - now_ms for promise in promises))
            for lack, promises in sorted(self._made.items())
        )
