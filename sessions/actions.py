"""What the session core asks its shell to do, and what it tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.connectors import Descriptor
from protocol.errors import ErrorInfo
from protocol.messages import Close, Command, Report
from protocol.payloads import Payload
from sessions import directory
from sessions.client import Role, Verb
from sessions.lifecycle import CloseReason

# Events


class OpenRequested(msgspec.Struct, frozen=True):
    """Admission has been granted: open the session."""


class DirectoryAnswered(msgspec.Struct, frozen=True):
    """The answer to the last `AskDirectory`."""

    reply: directory.Reply


class StageBound(msgspec.Struct, frozen=True):
    """A replica was chosen for the stage; commands go to it from now on.

    `crowded` says that much waits on the link to it already.
    """

    stage: str
    worker: str
    crowded: bool = False


class StageUnavailable(msgspec.Struct, frozen=True):
    """No replica of the stage can take the session now; one may come later."""

    stage: str
    error: ErrorInfo


class StageLost(msgspec.Struct, frozen=True):
    """The worker that the stage was bound to is gone, with all that it held."""

    stage: str


class Reported(msgspec.Struct, frozen=True):
    """A worker's report about this session, other than a turn's output."""

    stage: str
    report: Report


class StageCrowded(msgspec.Struct, frozen=True):
    """Much waits on the link to the stage's worker, or little does again."""

    stage: str
    crowded: bool


class StageProduced(msgspec.Struct, frozen=True):
    """Piece number `sequence` of the turn's output on `stage`.

    The bytes of `payload` stay readable until the piece is acknowledged or the turn's
    floor is raised. It is None where this gateway does not read them: `descriptor` is
    for the stages that do.
    """

    stage: str
    turn: int
    sequence: int
    payload: Payload | None
    descriptor: Descriptor


@dataclass(frozen=True)
class AttachRequested:
    """A client wants to see, or to control, the session.

    `attachment` is its name here. An observer needs no `secret`. Who wants control presents
    the one it was given, and gets `new_secret`; without one it takes over, which the shell
    has allowed it. Outputs after number `cursor` are told again; None: none are.
    """

    attachment: str
    role: Role
    cursor: int | None = None
    secret: str | None = field(default=None, repr=False)
    new_secret: str = field(default="", repr=False)


class Detached(msgspec.Struct, frozen=True):
    """The transport of this attachment is gone."""

    attachment: str


class ClientSaid(msgspec.Struct, frozen=True):
    """A verb of the client at `attachment`; None: of who is allowed without one.

    With a `command` id it is answered by `Answered`, otherwise only refused.
    """

    verb: Verb
    attachment: str | None = None
    command: str | None = None


class ClientMisspoke(msgspec.Struct, frozen=True):
    """What the client at `attachment` said with this command id was no verb, for `error`."""

    attachment: str
    command: str
    error: ErrorInfo


class ClientHas(msgspec.Struct, frozen=True):
    """The client at `attachment` has all outputs up to number `through`."""

    attachment: str
    through: int


class ClientBlocked(msgspec.Struct, frozen=True):
    """The egress queue of this attachment is full (or has room again): pace the output."""

    blocked: bool
    attachment: str


class CloseRequested(msgspec.Struct, frozen=True):
    """Close the session; idempotent.

    With an `attachment` only if that has control: who was replaced, or looks on, ends
    nothing.
    """

    reason: CloseReason
    attachment: str | None = None


class ParkRequested(msgspec.Struct, frozen=True):
    """Put the state of every stage away that has nothing to do and can be parked."""


class RestoreRequested(msgspec.Struct, frozen=True):
    """Bring back what is parked, before anybody needs it."""


class Tick(msgspec.Struct, frozen=True):
    """A deadline has come."""


Event = (
    OpenRequested
    | DirectoryAnswered
    | StageBound
    | StageUnavailable
    | StageCrowded
    | StageLost
    | Reported
    | StageProduced
    | AttachRequested
    | Detached
    | ClientSaid
    | ClientMisspoke
    | ClientHas
    | ClientBlocked
    | CloseRequested
    | ParkRequested
    | RestoreRequested
    | Tick
)

# Actions


class AskDirectory(msgspec.Struct, frozen=True):
    """Call the directory and feed `DirectoryAnswered` back."""

    request: directory.Request


class Unbind(msgspec.Struct, frozen=True):
    """The stage's worker has put the session's state away: it is bound to it no more."""

    stage: str


class NotRestored(msgspec.Struct, frozen=True):
    """What was stored of the stage did not come back, and is lost, for `error`."""

    stage: str
    error: ErrorInfo


class ForgetParked(msgspec.Struct, frozen=True):
    """What is parked of the stage is of no use any more: any of its workers removes it."""

    stage: str
    command: Close


class BindStage(msgspec.Struct, frozen=True):
    """Choose a replica: answered by `StageBound` or `StageUnavailable`.

    A session that has been told `StageUnavailable` is told `StageBound` once a
    replica has become ready.
    """

    stage: str


class ToStage(msgspec.Struct, frozen=True):
    """Send a command to the stage's replica."""

    stage: str
    command: Command


class ToClient(msgspec.Struct, frozen=True):
    """Output number `sequence` of the session, counted from 1, for every attachment.

    With `to` it is for one alone: an output told again, or an `Attached` or `LetGo`, which
    take the number of the output before them.
    """

    sequence: int
    output: Any
    to: str | None = None


class AttachRefused(msgspec.Struct, frozen=True):
    """The attachment that was asked for is not had."""

    attachment: str
    error: ErrorInfo


class HoldClient(msgspec.Struct, frozen=True):
    """A worker has much of this session, or of all, to work off: hand no verb over (or go on
    again)."""

    hold: bool


class TurnMeasured(msgspec.Struct, frozen=True):
    """A turn has ended: what it took, for metrics and logs.

    `ttft_ms` and `ttfp_ms` count from the end of the user's turn as the server
    learned of it; `rtf` is synthesis time over audio time; None where it had none.
    """

    turn: int
    lane: str
    status: str
    reason: str | None
    error: str | None
    ttft_ms: float | None
    ttfp_ms: float | None
    rtf: float | None
    audio_ms: int
    prefill_tokens: int | None
    timelines: dict[str, dict[str, float]]


class NotFresh(msgspec.Struct, frozen=True):
    """An observation was answered without anything fresh, for this reason: with the safe
    action, or, if it is not `safe`, with an error."""

    reason: str
    safe: bool
    late: bool = False
    """Whether its deadline has passed."""


class Released(msgspec.Struct, frozen=True):
    """Nothing of the session is left here; its place can be given away.

    `unanswered` are the stages whose workers have not answered their close in time, with the
    ids of those commands: until then they hold what they have of it.
    """

    reason: CloseReason
    unanswered: Mapping[str, str] = msgspec.field(default_factory=dict)


Action = (
    AskDirectory
    | BindStage
    | Unbind
    | NotRestored
    | ForgetParked
    | ToStage
    | ToClient
    | AttachRefused
    | HoldClient
    | TurnMeasured
    | NotFresh
    | Released
)
