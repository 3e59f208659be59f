"""The messages of the native surface, but for those that the kinds of sessions add.

A frame of the stream is one object whose `type` names it. What a session puts out is framed
by the gateway from the session core's own types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.native.duplex import DuplexInput, DuplexSignal
from protocol.native.fields import CommandId, Cursor, Id, Ref, Secret
from protocol.native.steps import (
    Checkpoint,
    EmergencyStop,
    Interrupt,
    ReleaseActions,
    ReleaseStop,
    RequestInput,
    Reset,
    Restore,
    Rewind,
    StepInput,
)

Input = DuplexInput | StepInput | RequestInput
Signals = (
    DuplexSignal
    | Interrupt
    | Reset
    | Restore
    | Checkpoint
    | Rewind
    | ReleaseActions
    | EmergencyStop
    | ReleaseStop
)

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class _Frame(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# Frames of a client


class Attach(_Frame, frozen=True, tag="attach"):
    """The first frame: what this connection is to be.

    Who wants control presents the `secret` it was last given, or takes over without one,
    which a holder of the tenant's key may. An observer needs neither. What the session
    put out after `cursor` is told again; without one nothing is.
    """

    role: Literal["controller", "observer"]
    secret: Secret | None = None
    cursor: Cursor | None = None
    takeover: bool = False


class Update(_Frame, frozen=True, tag="update"):
    """Input, or settings. With an `id` it is answered, with a `ref` that is in the refusal."""

    input: Input
    id: CommandId | None = None
    ref: Ref | None = None


class Signal(_Frame, frozen=True, tag="signal"):
    """Control. With an `id` it is answered, with a `ref` that is in the refusal."""

    signal: Signals
    id: CommandId | None = None
    ref: Ref | None = None


class Have(_Frame, frozen=True, tag="have"):
    """The client has everything up to `cursor` and will not ask for it again."""

    cursor: Cursor


class Close(_Frame, frozen=True, tag="close"):
    """Close the session. Hanging up without it leaves the session waiting for `grace_s`."""


ClientFrame = Attach | Update | Signal | Have | Close
Verb = Update | Signal


# Frames of the gateway itself


class Failed(_Frame, frozen=True, tag="error"):
    """The connection is refused, or ends, for this; a close code follows."""

    error: ErrorInfo


# Bodies of requests


class ChosenLimits(_Body, frozen=True, omit_defaults=True):
    """The limits that a client may choose for its session, within those of the pipeline."""

    idle_s: Seconds | None = None
    max_age_s: Seconds | None = None
    grace_s: Seconds | None = None
    stall_s: Seconds | None = None


class ChosenControl(_Body, frozen=True, omit_defaults=True):
    """The control loop of a robot, where it is to be another than its pipeline's.

    `safe_action` is as in a config.
    """

    deadline_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    rate_hz: Annotated[float, msgspec.Meta(gt=0)] | None = None
    safe_action: str | list[Any] | dict[str, Any] | None = None


class ForkedFrom(_Body, frozen=True):
    """A session of the same tenant, of kind world or robot."""

    session: Id


class OpenBody(_Body, frozen=True):
    """`POST /v1/sessions`. `model` names a pipeline or an alias of one; absent: the first.

    `priority` is at most that of the pipeline, which it has by default. With `fork` its state
    begins as that session's is, and `settings` take the place of that one's; `model` is then its.
    """

    model: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    settings: dict[str, Any] | None = None
    limits: ChosenLimits = ChosenLimits()
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    control: ChosenControl = ChosenControl()
    fork: ForkedFrom | None = None


class QueuedBody(msgspec.Struct, frozen=True):
    """An open that waits for a place: 1 is the next. `estimate_ms` is null while unknown."""

    position: int
    estimate_ms: int | None


class UpdateBody(_Body, frozen=True):
    """`POST /v1/sessions/{id}/update`. Without an `id` one is made."""

    input: Input
    id: CommandId | None = None


class SignalBody(_Body, frozen=True):
    """`POST /v1/sessions/{id}/signal`. Without an `id` one is made."""

    signal: Signals
    id: CommandId | None = None


# Bodies of answers


class SessionLimits(msgspec.Struct, frozen=True):
    """The limits that hold for a session, in seconds; `replay_bytes` of its output are kept."""

    idle_s: float
    max_age_s: float
    grace_s: float
    stall_s: float
    replay_bytes: int


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A session as its tenant sees it.

    `facts` is what its kind has to say, such as `committed_step`; `bytes` is what workers
    have reserved for it, by stage and device.
    """

    id: str
    kind: str
    model: str
    state: str
    turns: int
    age_s: float
    idle_s: float
    facts: dict[str, Any]
    bytes: dict[str, dict[str, int]] = {}


class SessionBody(SessionStatus, frozen=True, kw_only=True, omit_defaults=True):
    """One session: its status, its effective settings and limits. `expires_at_s` is Unix time.

    `about` is what the engine of each stage says of its model, by stage. `secret` is in the
    answer to the open alone: who presents it gets control.
    """

    settings: Any
    limits: SessionLimits
    expires_at_s: int
    about: dict[str, dict[str, Any]] = {}
    secret: str | None = None


class SessionList(msgspec.Struct, frozen=True):
    """`GET /v1/sessions`: the open sessions of the key's tenant."""

    sessions: list[SessionStatus]


class CommandResult(msgspec.Struct, frozen=True):
    """A command was carried out; `result` is what the session's kind says with it."""

    id: str
    result: dict[str, Any]
