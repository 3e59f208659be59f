"""Control messages between a gateway and a worker.

Every command carries a fence; every report names the session and, where it
belongs to one, the turn. The link below (`protocol.link`) orders, acknowledges
and retransmits them; it does not look inside. Whether two processes speak the same
messages is settled when the link begins: a change of them is a new `LINK_VERSION`.

A worker applies a session's commands in the order of their arrival, each after the
stream input that arrived before it. Where input comes by another path than commands,
`after_input` names the `Update.sequence` that must have been applied first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from protocol.compute_use import ComputeUse
from protocol.connectors import Descriptor
from protocol.device_bytes import DeviceBytes
from protocol.edges import OutputEdge
from protocol.errors import ErrorInfo

RESET = "reset"
"""The signal that begins a session's state anew. When it has succeeded the committed step
is 0, which its result says as `committed_step`; when it fails all is as it was before."""
CHECKPOINT = "checkpoint"
"""The signal that keeps the state of a step loop as it is after the committed step. Its result
says under `kept` after which steps states are kept: the oldest go where there are too many."""
REWIND = "rewind"
"""The signal that goes back to the state kept after step `step`, which stays kept, as if what
came later never was: neither steps nor checkpoints. Its result says `committed_step`; where
that state is not kept it fails as `no_checkpoint`, and all is as it was before."""
RELEASE = "release"
"""The signal that lets go of the actions which a step loop holds until others come."""


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """Who may command a session: its epoch and the gateway incarnation that owns it."""

    session: str
    epoch: int
    owner: str


class SnapshotOrder(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Which of a session's snapshots of one stage is the newer one.

    Its owner counts the openings of the stage under each epoch, and the worker the snapshots
    that it makes in an opening, from 1. Number 0 is the snapshot that it was opened with.
    """

    epoch: int
    opening: int
    number: int = 0


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Whose state a session begins with, and the `settings` that take the place of that one's."""

    session: str
    settings: dict[str, Any] = {}


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Create the session's state on this stage. Answered by `Answer`.

    `output` says how its output leaves the worker; None: inside messages. `tenant` is whom
    its bytes count for. With `restore` the state is that of this snapshot, or of a newer one,
    or the answer is `session_state_lost`. Where it makes room for others a session of lower
    `priority` is parked first; None: it is not. `opening` counts the openings of this stage
    under the fence's epoch: no earlier one stores anything any more. Where others would have to
    make room for it it `waits` for that, or is refused at once.

    With `durable_until_s` (Unix time) the state is in the store as it is after each turn, or
    each committed step, for as long as that, which `SnapshotTaken` says.

    With `fork` the state is that of another session of the same owner and tenant on this worker,
    as it is between two of its steps, with nothing held; it is not touched. Where it is not here
    any more, or is lost, the answer is `fork_source_lost`. `settings` are then all settings of
    the new session.

    The answer's `result` says under `bytes` what is reserved, by device, under `parks` whether
    the state can be parked, and after a restore or a fork under `committed_step` the step it is
    at.
    """

    fence: Fence
    command: str
    settings: dict[str, Any] = {}
    output: OutputEdge | None = None
    tenant: str = ""
    restore: SnapshotOrder | None = None
    priority: int | None = 0
    opening: int = 1
    durable_until_s: int | None = None
    waits: bool = True
    fork: Fork | None = None


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Replace the session's settings of this stage, after all earlier input. Answered."""

    fence: Fence
    command: str
    settings: dict[str, Any] = {}
    after_input: int | None = None


class Update(msgspec.Struct, frozen=True, tag="update"):
    """One piece of stream input. Not answered; covered by `ReceivedThrough`.

    `sequence` counts the session's inputs to this stage from 1 without gaps. It may come
    by another way than commands: `after_controls` says how many `Configure` and `Signal`
    commands of the session must have been carried out first.
    """

    fence: Fence
    sequence: int
    payload: Descriptor
    after_controls: int = 0


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Out-of-turn control of the session's state on this stage. Answered.

    It waits for a running step, whose state it would otherwise change in its middle.
    """

    fence: Fence
    command: str
    name: str
    arguments: dict[str, Any] = {}
    after_input: int | None = None


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Start a turn. Ended by exactly one `TurnEnded`.

    With `last` false more input follows in `Feed`. `readers` are the workers that read
    this turn's output through the arena: edge -> name of the consumer. With `to_client`
    false the gateway only passes its descriptors on.

    `step` is set for a turn that moves the session's state on: step n runs when n - 1 is
    committed, after whatever step still runs. A step that is committed already is answered
    again under this turn, where all its output is still kept, and otherwise fails with
    `step_committed`; one that is ahead fails with `step_out_of_order`.
    """

    fence: Fence
    turn: int
    lane: str
    parameters: dict[str, Any] = {}
    inputs: list[Descriptor] = []
    last: bool = True
    after_input: int | None = None
    readers: dict[str, str] = {}
    to_client: bool = True
    step: int | None = None


class Feed(msgspec.Struct, frozen=True, tag="feed"):
    """More input for a running turn; `last` ends it. Ignored below the floor."""

    fence: Fence
    turn: int
    payload: Descriptor | None
    last: bool = False


class RaiseFloor(msgspec.Struct, frozen=True, tag="raise_floor"):
    """Content of turns below `floor` in `lane` is no longer wanted: cancel them.

    Each cancelled turn still ends with one `TurnEnded`.
    """

    fence: Fence
    lane: str
    floor: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Cancel the turn, unless it has completed: then its output stays wanted.

    Either way the turn's one `TurnEnded` says which; a turn that is over is left alone.
    """

    fence: Fence
    turn: int


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Read from the arena at `path`: another worker's output comes from there. Not answered."""

    fence: Fence
    path: str


class Acknowledge(msgspec.Struct, frozen=True, tag="acknowledge"):
    """The consumer has taken the turn's output up to `through`: it need not be kept.

    Not answered. Until then the worker keeps it, and paces a turn that has too much kept.
    """

    fence: Fence
    turn: int
    through: int


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Send the turn's output after `after` again, and its end if it has ended.

    Answered first, with `result` {"lost": n}: the n pieces after `after` are gone.
    """

    fence: Fence
    command: str
    turn: int
    after: int


class Park(msgspec.Struct, frozen=True, tag="park"):
    """Put the session's state into the host's store, and free everything here. Answered.

    Refused as `session_busy` while a turn runs or output has not been acknowledged, and as
    `unsupported` by an engine that cannot: then all is as it was. `expires_at_s` (Unix time)
    is when the parked state goes if nobody takes it up.
    """

    fence: Fence
    command: str
    expires_at_s: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Free everything of the session on this stage, its parked state too.

    What later openings than `opening` have stored stays. Answered, also when it is unknown.
    """

    fence: Fence
    command: str
    reason: str
    opening: int = 1


Command = (
    Open
    | Configure
    | Update
    | Signal
    | Run
    | Feed
    | RaiseFloor
    | Stop
    | Attach
    | Acknowledge
    | Replay
    | Park
    | Close
)


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The one answer to a command id; a repeated id gets the same answer again."""

    session: str
    command: str
    error: ErrorInfo | None = None
    result: dict[str, Any] = {}


class ReceivedThrough(msgspec.Struct, frozen=True, tag="received_through"):
    """The worker has applied the session's stream input up to `sequence`."""

    session: str
    sequence: int


class StageEvent(msgspec.Struct, frozen=True, tag="stage_event"):
    """Something that an engine noticed by itself, outside any turn."""

    session: str
    name: str
    arguments: dict[str, Any] = {}


class RoomWanted(msgspec.Struct, frozen=True, tag="room_wanted"):
    """The worker has no room for another session, and this one is the next to make some.

    Its owner answers with `Park`, unless the session has work.
    """

    session: str


class SnapshotTaken(msgspec.Struct, frozen=True, tag="snapshot_taken"):
    """The state after `step` is in the store, and stays so although the worker goes on.

    With `error` it could not be stored: an earlier one, if there is any, is what the store
    has. That is said once, until one is stored again.
    """

    session: str
    order: SnapshotOrder
    step: int
    error: ErrorInfo | None = None


class Output(msgspec.Struct, frozen=True, tag="output"):
    """A piece of a turn's output; `sequence` counts from 1 within the turn."""

    session: str
    turn: int
    sequence: int
    payload: Descriptor


class TurnStatus(StrEnum):
    """How a turn ended on one stage."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TurnEnded(msgspec.Struct, frozen=True, tag="turn_ended"):
    """The last word about a turn on this stage.

    `usage` holds counters by name (tokens, samples). `timeline` holds hop times in
    ms since the worker received the turn: queued, started, first_output, done.
    `committed_step` is the session's last committed step on this stage, 0 when there is
    none; None for a turn that is not a step, and where the session is not known.
    """

    session: str
    turn: int
    status: TurnStatus
    error: ErrorInfo | None = None
    usage: dict[str, Any] = {}
    timeline: dict[str, float] = {}
    committed_step: int | None = None


class WorkerStatus(msgspec.Struct, frozen=True, tag="worker_status"):
    """What a worker says of itself with each heartbeat.

    `progress` grows whenever the engine gets anything done; `waiting` is work that has
    been accepted and not finished. Waiting without progress is wedged. `devices` is what is
    reserved of each device. With `ready` false the worker is still loading its model and
    opens no session. `counters` is what its engine has done since it was loaded.
    """

    stage: str
    sessions: int
    waiting: int
    progress: int
    resident_bytes: int = 0
    ready: bool = True
    devices: dict[str, DeviceBytes] = {}
    compute: ComputeUse | None = None
    counters: dict[str, int] = {}


Report = (
    Answer
    | ReceivedThrough
    | StageEvent
    | RoomWanted
    | SnapshotTaken
    | Output
    | TurnEnded
    | WorkerStatus
)

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The msgpack form of a message."""
    return _encoder.encode(message)


def decode_command(data: bytes | memoryview) -> Command:
    """A command from its msgpack form. Raises msgspec.DecodeError when it is not one."""
    return _commands.decode(data)


def decode_report(data: bytes | memoryview) -> Report:
    """A report from its msgpack form. Raises msgspec.DecodeError when it is not one."""
    return _reports.decode(data)
