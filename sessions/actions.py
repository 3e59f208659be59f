"""What the session core asks its shell to do, and what it tells it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.connectors import Descriptor
from protocol.errors import ErrorInfo
from protocol.messages import Command, Report
from protocol.payloads import Payload
from sessions import directory
from sessions.duplex.events import ClientOutput, ClientVerb
from sessions.lifecycle import CloseReason

# Events


@dataclass(frozen=True)
class OpenRequested:
    """Admission has been granted: open the session."""


@dataclass(frozen=True)
class DirectoryAnswered:
    """The answer to the last `AskDirectory`."""

    outcome: directory.Outcome


@dataclass(frozen=True)
class StageBound:
    """A replica was chosen for the stage; commands go to it from now on.

    `crowded` says that much waits on the link to it already.
    """

    stage: str
    worker: str
    crowded: bool = False


@dataclass(frozen=True)
class StageUnavailable:
    """No replica of the stage can take the session now; one may come later."""

    stage: str
    error: ErrorInfo


@dataclass(frozen=True)
class StageLost:
    """The worker that the stage was bound to is gone, with all that it held."""

    stage: str


@dataclass(frozen=True)
class Reported:
    """A worker's report about this session, other than a turn's output."""

    stage: str
    report: Report


@dataclass(frozen=True)
class StageCrowded:
    """Much waits on the link to the stage's worker, or little does again."""

    stage: str
    crowded: bool


@dataclass(frozen=True)
class StageProduced:
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
class ClientSaid:
    """A verb of the client."""

    verb: ClientVerb


@dataclass(frozen=True)
class ClientBlocked:
    """The client's egress queue is full (or has room again): pace the output."""

    blocked: bool


@dataclass(frozen=True)
class CloseRequested:
    """Close the session; idempotent."""

    reason: CloseReason


@dataclass(frozen=True)
class Tick:
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
    | ClientSaid
    | ClientBlocked
    | CloseRequested
    | Tick
)

# Actions


@dataclass(frozen=True)
class AskDirectory:
    """Call the directory and feed `DirectoryAnswered` back."""

    request: directory.Request


@dataclass(frozen=True)
class BindStage:
    """Choose a replica: answered by `StageBound` or `StageUnavailable`.

    A session that has been told `StageUnavailable` is told `StageBound` once a
    replica has become ready.
    """

    stage: str


@dataclass(frozen=True)
class ToStage:
    """Send a command to the stage's replica."""

    stage: str
    command: Command


@dataclass(frozen=True)
class ToClient:
    """An output, numbered within the session from 1."""

    sequence: int
    output: ClientOutput


@dataclass(frozen=True)
class HoldClient:
    """A worker has much of this session, or of all, to work off: hand no verb over (or go on
    again)."""

    hold: bool


@dataclass(frozen=True)
class TurnMeasured:
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


@dataclass(frozen=True)
class Released:
    """Nothing of the session is left anywhere; its place can be given away."""

    reason: CloseReason


Action = AskDirectory | BindStage | ToStage | ToClient | HoldClient | TurnMeasured | Released
