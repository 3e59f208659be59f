"""Whom a worker asks to make room, and who waits for it.

Who finds no room waits in order: opens, and steps that need more than was reserved for their
session. For the first of them the sessions that have
gone without progress the longest are asked, through their owners, to be parked. Who has not
begun with it in time is passed over: its owner may have reasons that nobody knows here. So is
who does not get it done: an engine may hang at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from sessions.ledger import Ledger
from workers.control_events import ControlLimits
from workers.session_control import SessionControl


class Rooms:
    """The sessions that wait for bytes.

    `ask(session)` tells its owner that room is wanted; `reaches(owner)` is whether that can
    be told at all.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: ControlLimits,
        ask: Callable[[SessionControl], None],
        reaches: Callable[[str], bool],
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._ask = ask
        self._reaches = reaches
        self._waiting: dict[str, tuple[SessionControl, float]] = {}
        self._asked: dict[str, float] = {}
        """Until when those that were asked are waited for."""
        self._begun: set[str] = set()
        """Those of them that were found to have begun, and have more time."""
        self._passed_over: set[str] = set()

    @property
    def deadline_ms(self) -> float | None:
        """When the first of those that wait is refused, or of those that were asked passed
        over."""
        if not self._waiting:
            return None
        refused = (until_ms for _, until_ms in self._waiting.values())
        return min((*refused, *self._asked.values()))

    def wait(self, session: SessionControl, now_ms: float) -> None:
        """`session` cannot be opened now, or go on; it waits behind those that do already."""
        if session.session not in self._waiting:
            self._waiting[session.session] = (session, now_ms + self._limits.room_ms)

    def forget(self, session: str) -> None:
        """It waits no more, and makes no room any more."""
        self.waits_no_more(session)
        self.declined(session)

    def waits_no_more(self, session: str) -> None:
        """It needs no room that it has not."""
        self._waiting.pop(session, None)

    def knows(self, session: str) -> bool:
        """Whether it was asked to make room, or has been passed over at that."""
        return session in self._asked or session in self._begun or session in self._passed_over

    def declined(self, session: str) -> None:
        """It has work again: another is to make the room that it was asked for."""
        self._asked.pop(session, None)
        self._begun.discard(session)
        self._passed_over.discard(session)

    def serve(self, sessions: Iterable[SessionControl], now_ms: float) -> list[SessionControl]:
        """Have go on whom there is room for now, in order, and have room made for the next.

        Those that go on, or were refused because nobody can make room for them.
        """
        served: list[SessionControl] = []
        if not self._waiting:
            return served
        late = {name for name, until_ms in self._asked.items() if now_ms >= until_ms}
        begun = {s.session for s in sessions if s.session in late and s.leaving} if late else set()
        for name in sorted(late):
            if name in begun and name not in self._begun:
                self._begun.add(name)
                self._asked[name] = now_ms + self._limits.room_done_ms
            else:
                del self._asked[name]
                self._begun.discard(name)
                self._passed_over.add(name)
        while self._waiting:
            name, (session, until_ms) = next(iter(self._waiting.items()))
            if not session.go_on_if_room(now_ms):
                if now_ms < until_ms and self._have_room_made(session, sessions, now_ms):
                    break
                session.refuse_room(now_ms)
            self._waiting.pop(name, None)
            served.append(session)
        return served

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        waiting = tuple((name, until_ms) for name, (_, until_ms) in self._waiting.items())
        asked = tuple(sorted(self._asked.items()))
        return (waiting, asked, tuple(sorted(self._begun)), tuple(sorted(self._passed_over)))

    def _have_room_made(
        self, lacks: SessionControl, sessions: Iterable[SessionControl], now_ms: float
    ) -> bool:
        """Ask as many as it takes, the least recently used first.

        Some may have to be opened, or to finish a turn, before they can be asked. False when
        all together, once they have nothing to do, would not be enough.
        """
        if lacks.room_of is not None:
            sessions = [session for session in sessions if session.tenant == lacks.room_of]
        leaving = [session for session in sessions if session.leaving]
        able = [
            session
            for session in sessions
            if (session.parkable or session.opening)
            # Where all wait for each other somebody has to give up.
            and not session.asking
            and self._reaches(session.owner)
            # What the store has just had no room for is not tried over and over.
            and not session.kept_lately(now_ms)
        ]
        lacking = Counter(lacks.shortage)
        for session in leaving:
            if session.session not in self._asked and session.session not in self._passed_over:
                self._asked[session.session] = now_ms + self._limits.room_done_ms
                self._begun.add(session.session)
            lacking.subtract(self._ledger.of(session.session))
        most: Counter[str] = Counter()
        for session in able:
            most.update(self._ledger.of(session.session))
        if any(size > most[device] for device, size in lacking.items() if size > 0):
            return False
        for session in leaving:
            if session.session in self._passed_over:
                # It may yet get done, but others are asked in its place.
                lacking.update(self._ledger.of(session.session))
        # First who was asked and has not answered yet, last who did not answer.
        able.sort(
            key=lambda s: (
                s.session not in self._asked,
                s.session in self._passed_over,
                s.priority,
                s.progress_ms,
            )
        )
        for session in able:
            held = self._ledger.of(session.session)
            if not session.evictable or not any(lacking[device] > 0 for device in held):
                continue
            lacking.subtract(held)
            if session.session not in self._asked:
                self._passed_over.discard(session.session)
                self._asked[session.session] = now_ms + self._limits.room_answer_ms
                self._ask(session)
        return True
