"""What the worker's control side is told, and what it asks the runtime to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from protocol.connectors import Descriptor
from protocol.edges import OutputEdge
from protocol.errors import ErrorInfo
from protocol.messages import Command, Fork, Report, SnapshotOrder
from protocol.payloads import Payload
from sessions.compute import ComputeSample
from workers.retention import RetentionLimits


@dataclass(frozen=True)
class ControlLimits:
    """Bounds of a worker's control side. What exceeds one is refused with its reason.

    `gap_ms`: how long later input waits for what is missing before it; then the missing
    stretch is stated as lost. `room_ms`: how long who finds no room waits for others to be parked.
    `room_answer_ms`: how long one of them may take to begin with it before another is asked, and
    `room_done_ms` from then on until it is done.
    `cancel_ms`: how long an engine may take to stop a turn. `close_again_ms`: when an engine
    that could not close a session is asked again; after each failure it is twice as long, up to
    `close_again_most_ms`. Output of more than
    `twice_over_bytes` is in memory twice: kept, and in memory of its own for its readers.
    `owner_gone_ms`: how long sessions outlive the link to their gateway, and
    `parked_alone_ms` what is parked of them.
    """

    sessions: int = 256
    turns_per_session: int = 16
    turns: int = 512
    waiting_commands: int = 256
    held_inputs: int = 512
    held_bytes: int = 4 * 1024 * 1024
    gap_ms: float = 1000.0
    fed_payloads: int = 256
    fed_bytes: int = 8 * 1024 * 1024
    lanes: int = 256
    twice_over_bytes: int = 32 * 1024 * 1024
    cancel_ms: float = 10_000.0
    close_again_ms: float = 500.0
    close_again_most_ms: float = 60_000.0
    room_ms: float = 5_000.0
    room_answer_ms: float = 1_000.0
    room_done_ms: float = 2_500.0
    owner_gone_ms: float = 30_000.0
    parked_alone_ms: float = 30_000.0
    remembered_answers: int = 256
    remembered_turns: int = 256
    remembered_fences: int = 4096
    retention: RetentionLimits = field(default_factory=RetentionLimits)

    @classmethod
    def serving(cls, sessions: int, *, owner_gone_ms: float) -> ControlLimits:
        """Bounds under which `sessions` work at once.

        There is room for a quarter more, and 16, because a gateway gives up waiting for a
        session to be freed before its worker does, and for four turns a session: those that
        were cancelled and those out of band run beside the one that is heard.
        """
        places = sessions + sessions // 4 + 16
        return cls(
            sessions=places,
            turns=4 * places,
            remembered_fences=max(4096, 4 * places),
            owner_gone_ms=owner_gone_ms,
        )


# Events


class CommandReceived(msgspec.Struct, frozen=True):
    """The link delivered a command of this gateway incarnation."""

    gateway: str
    command: Command


class GatewayUp(msgspec.Struct, frozen=True):
    """A link with this gateway is open; all that it had here before is to be freed."""

    gateway: str


class GatewayDown(msgspec.Struct, frozen=True):
    """The link to this gateway is lost; nothing reaches it."""

    gateway: str


class LinkCrowded(msgspec.Struct, frozen=True):
    """Much waits for this gateway on its link, or little does again; until said: little."""

    gateway: str
    crowded: bool


class StoredFound(msgspec.Struct, frozen=True):
    """There was a snapshot of this session in the store before this worker began; `owner` is the
    gateway that had it then."""

    session: str
    owner: str
    order: SnapshotOrder


class EngineReady(msgspec.Struct, frozen=True):
    """The model is loaded, and the ledger knows what it holds: sessions may be opened."""


class OperationDone(msgspec.Struct, frozen=True):
    """The session's open, configure or signal is done, or failed with `error`."""

    session: str
    error: ErrorInfo | None = None
    result: dict[str, Any] = {}


class SessionFreed(msgspec.Struct, frozen=True):
    """The engine's session is closed, or with `error` it could not be: it still holds what it
    has, and is to be closed again."""

    session: str
    error: ErrorInfo | None = None


class SessionMeasured(msgspec.Struct, frozen=True):
    """The engine has measured what the session holds, in bytes by device."""

    session: str
    measured: dict[str, int]


class ComputeMeasured(msgspec.Struct, frozen=True):
    """So much processor time has been used."""

    sample: ComputeSample


class InputFailed(msgspec.Struct, frozen=True):
    """The engine could not apply this piece of stream input."""

    session: str
    sequence: int
    error: ErrorInfo


class InputTaken(msgspec.Struct, frozen=True):
    """A running turn has taken a fed payload of `size` bytes out of its queue."""

    session: str
    turn: int
    size: int


class Emitted(msgspec.Struct, frozen=True):
    """A running turn made a piece of output."""

    session: str
    turn: int
    payload: Payload


class OutputRefused(msgspec.Struct, frozen=True):
    """The last output of this turn could not be sent: the turn cannot be completed."""

    session: str
    turn: int
    error: ErrorInfo


class Noticed(msgspec.Struct, frozen=True):
    """The engine noticed something outside any turn."""

    session: str
    name: str
    arguments: dict[str, Any] = {}


class TurnOutcome(Enum):
    """How the engine's run of a turn ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TurnFinished(msgspec.Struct, frozen=True):
    """The engine's run of a turn has ended; nothing of it comes any more.

    `commit` is what the engine wants done when the turn counts as completed.
    """

    session: str
    turn: int
    outcome: TurnOutcome
    error: ErrorInfo | None = None
    usage: dict[str, Any] = {}
    commit: Callable[[], None] | None = None


class RoomAsked(msgspec.Struct, frozen=True):
    """The engine is about to take more for a session than was reserved: it `needs` so much in all,
    by device, for this running turn, or None: for the restore. Answered by `RoomGiven`."""

    session: str
    turn: int | None
    needs: dict[str, int]


class TurnCommitted(msgspec.Struct, frozen=True):
    """The turn's commit was called; with `error` it failed, and the state is lost."""

    session: str
    turn: int
    error: ErrorInfo | None = None


class Settle(msgspec.Struct, frozen=True):
    """The loop turn ends that brought commands: say how far stream input has been applied."""


class Tick(msgspec.Struct, frozen=True):
    """`deadline_ms` has come."""


class ShuttingDown(msgspec.Struct, frozen=True):
    """The process is about to end: cancel all turns and free all sessions."""


Event = (
    CommandReceived
    | GatewayUp
    | GatewayDown
    | LinkCrowded
    | StoredFound
    | EngineReady
    | OperationDone
    | SessionFreed
    | SessionMeasured
    | ComputeMeasured
    | InputFailed
    | InputTaken
    | Emitted
    | OutputRefused
    | Noticed
    | TurnFinished
    | RoomAsked
    | TurnCommitted
    | Settle
    | Tick
    | ShuttingDown
)

# Actions


class Restore(msgspec.Struct, frozen=True):
    """The snapshot to begin with: `wanted`, or a newer one. From now on it is `taken`.

    With `stays` it remains in the store; otherwise it goes once it has been restored.
    """

    wanted: SnapshotOrder
    taken: SnapshotOrder
    stays: bool = False


class OpenSession(msgspec.Struct, frozen=True):
    """Make the engine's session, from its parked state if so; answer with `OperationDone`.

    Its result says under `parks` whether the state can be parked, and of one that was parked
    under `committed_step` the step it is at. With a `fork` it is made at once, of the state that
    the other session has now.
    """

    session: str
    epoch: int
    settings: dict[str, Any]
    owner: str
    output: OutputEdge | None = None
    restore: Restore | None = None
    fork: Fork | None = None


class ParkSession(msgspec.Struct, frozen=True):
    """Write the session's state into the store, where it stays until `expires_at_s`.

    Answer with `OperationDone`, whose result says under `parked` how many bytes it takes. It
    takes the place of what is older than `order`, and of nothing that is newer. With `stays`
    the session goes on afterwards, and no turn begins before that.
    """

    session: str
    owner: str
    order: SnapshotOrder
    step: int
    expires_at_s: int
    stays: bool = False


class ForgetParked(msgspec.Struct, frozen=True):
    """Nobody will restore what is parked of this session, up to `opening` of its epoch."""

    session: str
    epoch: int
    opening: int


class ConfigureSession(msgspec.Struct, frozen=True):
    """Replace the engine session's settings; answer with `OperationDone`."""

    session: str
    settings: dict[str, Any]


class SignalSession(msgspec.Struct, frozen=True):
    """Signal the engine's session; answer with `OperationDone`."""

    session: str
    name: str
    arguments: dict[str, Any]


class ApplyInput(msgspec.Struct, frozen=True):
    """Give stream input to the engine's session; answer with `InputFailed` if it fails."""

    session: str
    sequence: int
    payload: Descriptor


class Announce(msgspec.Struct, frozen=True):
    """Tell every gateway at once that the worker is ready, or is no longer."""


class AttachArena(msgspec.Struct, frozen=True):
    """Read from the arena at `path`."""

    path: str


class DiscardPayload(msgspec.Struct, frozen=True):
    """Nobody will read this payload: give it back."""

    payload: Descriptor


class StartTurn(msgspec.Struct, frozen=True):
    """Run a turn; answer with `TurnFinished`."""

    session: str
    epoch: int
    turn: int
    lane: str
    parameters: dict[str, Any]
    inputs: list[Descriptor]
    last: bool
    readers: dict[str, str] = {}
    to_client: bool = True
    step: int | None = None


class RepeatTurn(msgspec.Struct, frozen=True):
    """The output of an earlier turn follows as this turn's: no engine runs."""

    session: str
    turn: int
    readers: dict[str, str]
    to_client: bool


class CommitTurn(msgspec.Struct, frozen=True):
    """The turn counts as completed: call `commit`; answer with `TurnCommitted` at once."""

    session: str
    turn: int
    commit: Callable[[], None]


class FeedTurn(msgspec.Struct, frozen=True):
    """Put more input into a running turn's queue; `last` ends the queue."""

    session: str
    turn: int
    payload: Descriptor | None
    last: bool


class CancelTurn(msgspec.Struct, frozen=True):
    """Stop a running turn, and void it; `TurnFinished` is still to come."""

    session: str
    turn: int


class VoidTurn(msgspec.Struct, frozen=True):
    """The content of a turn that has ended is not wanted: take back what nobody has read."""

    session: str
    turn: int


class AbandonTurn(msgspec.Struct, frozen=True):
    """The turn did not stop in time: ignore whatever still comes of it."""

    session: str
    turn: int


class FreeSession(msgspec.Struct, frozen=True):
    """Close the engine's session; answer with `SessionFreed`."""

    session: str


class RoomGiven(msgspec.Struct, frozen=True):
    """What the session's engine has asked for is reserved, or with `error` is not to be had."""

    session: str
    error: ErrorInfo | None = None


class PaceTurn(msgspec.Struct, frozen=True):
    """The turn's engine is to wait before it makes more, or may go on."""

    session: str
    turn: int
    wait: bool


class SendOutput(msgspec.Struct, frozen=True):
    """Send a piece of a turn's output to the gateway, the first time or again."""

    gateway: str
    session: str
    turn: int
    sequence: int
    payload: Payload


class SendReport(msgspec.Struct, frozen=True):
    """Send `report` to the gateway."""

    gateway: str
    report: Report


Action = (
    OpenSession
    | ParkSession
    | ForgetParked
    | ConfigureSession
    | SignalSession
    | ApplyInput
    | StartTurn
    | RepeatTurn
    | CommitTurn
    | FeedTurn
    | CancelTurn
    | VoidTurn
    | AbandonTurn
    | FreeSession
    | Announce
    | AttachArena
    | DiscardPayload
    | PaceTurn
    | RoomGiven
    | SendOutput
    | SendReport
)
