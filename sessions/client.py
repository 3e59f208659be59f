"""What a session of any kind says to its clients, beside what its kind has to say."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from protocol.errors import ErrorInfo
from sessions.pipeline import Limits


class Verb(Protocol):
    """What a client asks of its session; `ref` is echoed in the refusal, and has no other
    meaning."""

    @property
    def ref(self) -> str | None:
        """The client's own name for this verb."""


class Role(StrEnum):
    """What an attachment may do: one controls the session, others only see its output."""

    CONTROLLER = "controller"
    OBSERVER = "observer"


@dataclass(frozen=True)
class SessionCreated:
    """The session is open; always the first output. `expires_at_s` is Unix time."""

    session: str
    model: str
    settings: Any
    expires_at_s: int
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class SettingsUpdated:
    """A patch was applied: the whole effective settings."""

    session: str
    model: str
    settings: Any
    expires_at_s: int


@dataclass(frozen=True)
class Refused:
    """A verb was not carried out and changed nothing."""

    error: ErrorInfo
    ref: str | None


@dataclass(frozen=True)
class Answered:
    """The one answer to a command with an id: carried out, or refused with `error`.

    `result` is what the session's kind has to say with it, such as `committed_step`, and the
    id of what was made by it.
    """

    command: str
    error: ErrorInfo | None = None
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parking:
    """The state of `stage` is put away: to make room for others, or because it was asked for."""

    stage: str
    reason: str


@dataclass(frozen=True)
class Parked:
    """The state of `stage` is in the host's store, and comes back when it is needed."""

    stage: str
    error: ErrorInfo | None = None
    """Why it has just not come back, where it was wanted."""


@dataclass(frozen=True)
class Restoring:
    """`stage` has no worker just now: it was lost, or the state comes back from the store."""

    stage: str


class Origin(StrEnum):
    """Where the state of a stage is from that goes on."""

    KEPT = "kept"
    """It has not been away: it could not be parked."""
    SNAPSHOT = "snapshot"
    REBUILT = "rebuilt"
    """Made anew from what the session's kind knows of it."""
    NOTHING = "nothing"
    """It is lost, and the session's kind cannot make it anew."""


@dataclass(frozen=True)
class Restored:
    """`stage` has a worker that knows the session; `origin` says what of it."""

    stage: str
    origin: Origin = Origin.REBUILT
    error: ErrorInfo | None = None
    """Why it was kept, or why what was stored did not come back."""


@dataclass(frozen=True)
class SnapshotFailed:
    """The state of `stage` could not be stored, for `error`. Told once, until it can be again;
    the session goes on without."""

    stage: str
    error: ErrorInfo


@dataclass(frozen=True)
class SessionEnded:
    """The session is closed; nothing follows. `reason` is the lifecycle's close reason."""

    reason: str
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Attached:
    """This attachment sees the session from here on; told to it alone, before all else.

    `sequence` is the number of the session's last output. The outputs after the cursor
    that it came with follow, and were made before the state in `snapshot`; of them those
    from `lost[0]` to `lost[1]` are gone. A controller gets the `secret` to resume with
    next time, of which nobody else is told.
    """

    session: str
    model: str
    settings: Any
    expires_at_s: int
    limits: Limits
    sequence: int
    snapshot: Any
    role: Role = Role.CONTROLLER
    lost: tuple[int, int] | None = None
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class LetGo:
    """The last word to an attachment whose session goes on without it, and why.

    `replaced`: another took over. `stalled`: it left its output unread for too long.
    `failed`: it observes, and cannot be told what the session put out.
    """

    reason: str


SessionOutput = (
    SessionCreated
    | SettingsUpdated
    | Refused
    | Answered
    | Parking
    | Parked
    | Restoring
    | Restored
    | SnapshotFailed
    | SessionEnded
    | Attached
    | LetGo
)
