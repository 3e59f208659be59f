"""The life of a session: its states, and what ends it.

Every state has a bounded way out: `opening` and `closing` by a deadline of their
own, `detached` by its grace, `active` by idleness and maximum age.
"""

from __future__ import annotations

from enum import StrEnum

from sessions.pipeline import Limits


class State(StrEnum):
    """Where a session stands."""

    OPENING = "opening"
    ACTIVE = "active"
    DETACHED = "detached"
    """Open, without a client that controls it; one may come back."""
    CLOSING = "closing"
    CLOSED = "closed"


class Trigger(StrEnum):
    """What moves a session from one state to the next."""

    OPENED = "opened"
    DETACHED = "detached"
    ATTACHED = "attached"
    CLOSE = "close"
    RELEASED = "released"


class CloseReason(StrEnum):
    """Why a session ended."""

    CLIENT = "client"
    COMPLETED = "completed"
    IDLE = "idle"
    MAX_AGE = "max_age"
    DETACHED = "detached"
    EVICTED = "evicted"
    DRAINED = "drained"
    STALLED = "stalled"
    ENGINE_LOST = "engine_lost"
    ADMISSION = "admission"
    FENCED = "fenced"
    ADMIN = "admin"
    ERROR = "error"


TRANSITIONS: dict[tuple[State, Trigger], tuple[State, str]] = {
    (State.OPENING, Trigger.OPENED): (State.ACTIVE, "every stage holds the session"),
    (State.OPENING, Trigger.CLOSE): (State.CLOSING, "it cannot open, or is not wanted"),
    (State.ACTIVE, Trigger.DETACHED): (State.DETACHED, "its controlling client has gone"),
    (State.ACTIVE, Trigger.CLOSE): (State.CLOSING, "for a CloseReason"),
    (State.DETACHED, Trigger.ATTACHED): (State.ACTIVE, "a client controls it again"),
    (State.DETACHED, Trigger.CLOSE): (State.CLOSING, "for a CloseReason"),
    (State.CLOSING, Trigger.RELEASED): (State.CLOSED, "nothing of it is held anywhere"),
}
"""The state that follows, and why; a trigger that is not here is a fault of the caller."""


# Asked for with every event, and an attribute of an Enum class costs five times a name.
_ACTIVE, _DETACHED = State.ACTIVE, State.DETACHED
_IDLE, _MAX_AGE = CloseReason.IDLE, CloseReason.MAX_AGE


class IllegalTransition(Exception):
    """A trigger that the current state does not know: a fault of the caller."""


class Lifecycle:
    """State, clocks and close reason of one session. Times are monotonic ms."""

    def __init__(self, limits: Limits, now_ms: float) -> None:
        self.state = State.OPENING
        self.reason: CloseReason | None = None
        self._limits = limits
        self._opened_at_ms = now_ms
        self._entered_at_ms = now_ms
        self._progress_at_ms = now_ms

    def move(self, trigger: Trigger, now_ms: float) -> None:
        """Take the transition of `trigger`. Raises IllegalTransition when there is none."""
        following = TRANSITIONS.get((self.state, trigger))
        if following is None:
            raise IllegalTransition(f"{trigger} in state {self.state}")
        self.state = following[0]
        self._entered_at_ms = now_ms
        if trigger is Trigger.OPENED:
            self._progress_at_ms = now_ms

    @property
    def live(self) -> bool:
        """Whether the session is open: its turns run and its stages are heard."""
        return self.state is _ACTIVE or self.state is _DETACHED

    def progress(self, now_ms: float) -> None:
        """Something real happened: the idle clock starts again."""
        self._progress_at_ms = now_ms

    @property
    def idle_since_ms(self) -> float:
        """When the session last got anything done."""
        return self._progress_at_ms

    def deadline(self) -> tuple[float, CloseReason] | None:
        """When the current state must be left at the latest, and for what reason."""
        limits, state = self._limits, self.state
        if state is _ACTIVE or state is _DETACHED:
            return min(self.ends)
        if state is State.OPENING:
            return self._opened_at_ms + limits.open_ms, CloseReason.ADMISSION
        if state is State.CLOSING:
            assert self.reason is not None
            return self._entered_at_ms + limits.close_ms, self.reason
        return None

    @property
    def ends(self) -> list[tuple[float, CloseReason]]:
        """When its clocks end a session that is open, and for what reason; none for another."""
        if not self.live:
            return []
        limits = self._limits
        ends = [
            (self._progress_at_ms + limits.idle_ms, _IDLE),
            (self._opened_at_ms + limits.max_age_ms, _MAX_AGE),
        ]
        if self.state is _DETACHED:
            ends.append((self._entered_at_ms + limits.grace_ms, CloseReason.DETACHED))
        return ends

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.state.value,
            self.reason,
            self._opened_at_ms,
            self._entered_at_ms,
            self._progress_at_ms,
        )
