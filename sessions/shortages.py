"""Stages that had no room when somebody last tried: what was said, and who may try again.

Such a stage is shut. When something has changed there, and after a pause, one open finds out
whether there is room; who comes behind it waits for what that one finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.errors import AntiphonError
from sessions.lack import Lack

_PAUSE_MS, _LONGEST_PAUSE_MS = 250.0, 5_000.0
"""Between two tries on a stage that had no room; each failure doubles it."""


@dataclass(eq=False)
class Attempt:
    """A session that is being opened; `failures_before` is how many had failed when it began."""

    failures_before: int
    stirred: set[str] = field(default_factory=set)
    """Stages that have been heard of since, which may have changed."""
    changed: set[str] = field(default_factory=set)
    """Those that have changed for certain."""


@dataclass
class _Shut:
    since_ms: float
    pause_ms: float
    failure: int
    news: bool = False
    probe: Attempt | None = None

    @property
    def ready(self) -> bool:
        """Whether one open may find out if there is room again."""
        return self.news and self.probe is None

    def until_ms(self, promised: bool) -> float:
        return self.since_ms + (_PAUSE_MS if promised else self.pause_ms)


class Shortages:
    """All of a gateway. Times are monotonic ms; `promised` says that somebody was told to come
    now, and does not wait for long."""

    def __init__(self) -> None:
        self._shut: dict[Lack, _Shut] = {}
        self._said: dict[Lack, AntiphonError] = {}
        """What was said last to who found no room there."""
        self._without: dict[Lack, int] = {}
        """By which failure somebody found no room, where nothing is known to have changed since."""
        self._failures = 0
        """How many sessions could not be opened so far."""
        self._capacity: dict[Lack, int] = {}
        """How many sessions a stage held when it last had no room."""

    # What is told to it

    def begin(self, stages: Iterable[Lack]) -> Attempt:
        """A session is being opened on `stages`."""
        attempt = Attempt(self._failures)
        for lack in stages:
            if (shut := self._shut.get(lack)) is not None:
                shut.probe, shut.news = attempt, False
        return attempt

    def give_up(self, attempt: Attempt) -> None:
        """Nobody wants the session any more: another may find out what it would have."""
        self._forget_probe(attempt, None)

    def fail(self, attempt: Attempt, lack: Lack | None) -> None:
        """The session could not be opened, for want of this or for another reason."""
        self._failures += 1
        self._forget_probe(attempt, lack)

    def found_none(self, attempt: Attempt, lack: Lack, error: AntiphonError) -> None:
        """What failed it is what is lacking until something changes."""
        self._said[lack] = error
        if lack.name not in attempt.changed:
            self._without[lack] = self._failures

    def shut(self, attempt: Attempt, lack: Lack, now_ms: float) -> None:
        """Let nobody else try it before something has changed there."""
        known = self._shut.get(lack)
        pause_ms = _PAUSE_MS if known is None else min(2 * known.pause_ms, _LONGEST_PAUSE_MS)
        news = lack.name in attempt.stirred if known is None else known.news
        self._shut[lack] = _Shut(now_ms, pause_ms, self._failures, news)

    def found_some(self, attempt: Attempt, lack: Lack) -> None:
        """A stage has taken it: who found no room there before it began may try again. Who did
        since may well have done so because it was taken."""
        shut = self._shut.get(lack)
        if shut is not None and shut.failure <= attempt.failures_before:
            del self._shut[lack]
        if lack not in self._shut:
            self._said.pop(lack, None)
        if self._without.get(lack, 0) <= attempt.failures_before:
            self._without.pop(lack, None)

    def heard_of(self, stage: str, changed: bool, attempts: Iterable[Attempt]) -> None:
        """There may be room on `stage` again: something has `changed` there, or nothing is known
        that has. `attempts` are all that are under way."""
        for lack, shut in self._shut.items():
            shut.news = shut.news or lack.name == stage
        if changed:
            self._without = {lack: n for lack, n in self._without.items() if lack.name != stage}
        for attempt in attempts:
            attempt.stirred.add(stage)
            if changed:
                attempt.changed.add(stage)

    def full_with(self, lack: Lack, sessions: int) -> None:
        """It had no room with so many sessions."""
        self._capacity[lack] = sessions

    def holds(self, lack: Lack, sessions: int) -> None:
        """It has room for so many at least."""
        if lack in self._capacity:
            self._capacity[lack] = max(self._capacity[lack], sessions)

    # What it tells

    def __contains__(self, lack: Lack) -> bool:
        """Whether it is shut."""
        return lack in self._shut

    def keeps_out(self, lack: Lack, promised: bool, now_ms: float) -> bool:
        """Whether it is shut, and nobody may find out about it now."""
        shut = self._shut.get(lack)
        return shut is not None and not (shut.ready and now_ms >= shut.until_ms(promised))

    def pauses_ms(self, promised: bool) -> Iterator[float]:
        """When somebody may find out about what is shut."""
        return (shut.until_ms(promised) for shut in self._shut.values() if shut.ready)

    def unchanged(self) -> Iterable[Lack]:
        """Where somebody found no room, and nothing is known to have changed since."""
        return self._without

    def said(self, lack: Lack) -> AntiphonError | None:
        """What was said last of what is shut."""
        return self._said.get(lack) if lack in self._shut else None

    def capacity(self, lack: Lack) -> int | None:
        """How many sessions it has room for, as far as is known."""
        return self._capacity.get(lack)

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple((lack, shut.news) for lack, shut in sorted(self._shut.items()))

    def _forget_probe(self, attempt: Attempt, failed_on: Lack | None) -> None:
        for lack, shut in self._shut.items():
            if shut.probe is attempt:
                shut.probe, shut.news = None, shut.news or lack != failed_on
