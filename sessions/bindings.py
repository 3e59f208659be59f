"""A session's stages: which are bound, and the commands that go to each in order.

A binding never changes silently: when its worker is lost the stage is unbound,
turns that ran on it fail, and a new binding opens the session's state anew. A stage whose
state is parked has no worker; the next command for it has the state brought back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from protocol.connectors import Descriptor, InlineDescriptor
from protocol.edges import OutputEdge
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorInfo,
    InvalidRequest,
    SessionBusy,
)
from protocol.messages import (
    Acknowledge,
    Answer,
    Close,
    Command,
    Configure,
    Feed,
    Fence,
    Fork,
    Open,
    Park,
    RaiseFloor,
    ReceivedThrough,
    Report,
    Run,
    Signal,
    SnapshotOrder,
    SnapshotTaken,
    Stop,
    TurnEnded,
    Update,
)
from protocol.payloads import Payload
from sessions.actions import Action, BindStage, ForgetParked, ToStage
from sessions.backlog import Backlog

HELD = 64
"""Pieces of stream input and signals that wait for a parked state; more are not taken."""

ROOM_WANTED_MS = 5_000.0
"""How long a worker's wish for room is remembered by a stage that has work."""

WAITING_COMMANDS = 64
"""Turn commands that a stage holds while workers are missing; one more is refused."""


class BindingState(StrEnum):
    """Where one stage of a session stands."""

    UNBOUND = "unbound"
    BINDING = "binding"
    OPENING = "opening"
    READY = "ready"
    PARKING = "parking"
    PARKED = "parked"
    CLOSING = "closing"


_Held = Payload | Signal


class Binding:
    """One stage of one session.

    `peer(stage)` is that of another stage of the session.
    """

    def __init__(
        self,
        stage: str,
        fence: Callable[[], Fence],
        settings: Callable[[], dict[str, Any]],
        act: Callable[[Action], None],
        output: OutputEdge | None = None,
        *,
        tenant: str,
        priority: int | None,
        durable_until_s: int | None,
        peer: Callable[[str], Binding],
    ) -> None:
        self.stage = stage
        self.fork: Fork | None = None
        """Whose state it begins with, until it is open."""
        self.parks = False
        """Whether its state can be parked."""
        self.unparkable: str | None = None
        """Why it can never be parked, as its worker has said."""
        self.doubtful = False
        """Whether its worker was lost before it said that the state is stored."""
        self.unrestored: ErrorInfo | None = None
        """Why what was stored did not come back, until that is told."""
        self.refused: ErrorInfo | None = None
        """Why a worker did not bring back what is parked, until it is asked for again."""
        self.restoring = False
        """Whether its state is in the store, so that a worker has to bring it back."""
        self.restorable_step: int | None = None
        """The step after which the state is in the store; None: it is not, or nobody knows."""
        self._durable_until_s = durable_until_s
        self._waits = True
        self._openings = 0
        self._stored = SnapshotOrder(0, 0)
        """No older state in the store is one of this session any more."""
        self._in_store = False
        """Whether something of it may be in the store."""
        self.room_wanted_until_ms = 0.0
        """Until when the state is to be put away as soon as there is nothing to do."""
        self._priority = priority
        self._held: deque[_Held] = deque()
        self._reconfigure = False
        """Whether settings have changed since the worker was asked to park."""
        self._wanted = False
        """Whether somebody waits for a state that is still being put away."""
        self._read: dict[int, set[str]] = {}
        """The stages to whose workers the output of a turn that is under way goes by itself."""
        self.reserved: dict[str, int] = {}
        """What the worker has reserved for the session, in bytes by device."""
        self.about: dict[str, Any] = {}
        """What the engine says of its model to the session's clients."""
        self.kept_steps: list[int] = []
        """After which steps its worker keeps the state, beside the one that it is at."""
        self._tenant = tenant
        self._output = output
        self.state = BindingState.UNBOUND
        self.worker: str | None = None
        self._fence = fence
        self._settings = settings
        self._act = act
        self._peer = peer
        self._sequence = 0
        self._controls = 0
        self._commands = 0
        self._awaited: str | None = None
        self._configuring: deque[str] = deque()
        self._waiting: deque[Run | Feed] = deque()
        self._backlog = Backlog()
        self._crowded = False

    def bind(self, waits: bool = True) -> None:
        """Ask for a replica, whose worker may wait for others to make room or not."""
        self._waits = waits
        self.refused = None
        self.state = BindingState.BINDING
        self._act(BindStage(self.stage))

    @property
    def idle(self) -> bool:
        """Whether its worker has nothing of the session to do."""
        return self.ready and self._backlog.empty and not self._waiting

    def park(self, expires_at_s: int) -> None:
        """Have the worker put the state away until `expires_at_s` (Unix time)."""
        self.state = BindingState.PARKING
        self.room_wanted_until_ms = 0.0
        self._wanted = False
        self.restoring = True
        self._reconfigure = False
        self._in_store = True
        self._awaited = self._command_id()
        self._send(Park(self._fence(), self._awaited, expires_at_s))

    def want_room(self, now_ms: float) -> None:
        """The worker wants room for others, for a while from now on."""
        self.room_wanted_until_ms = now_ms + ROOM_WANTED_MS

    def feeds(self, stage: str) -> bool:
        """Whether a turn is under way whose output the worker of `stage` reads."""
        return any(stage in readers for readers in self._read.values())

    def wake(self) -> None:
        """Have the state brought back if it is parked, or is on its way into the store."""
        if self.state is BindingState.PARKED:
            self.bind()
        elif self.state is BindingState.PARKING:
            self._wanted = True

    def wake_if_wanted(self) -> None:
        """Have it brought back if something came for it while it was put away."""
        if self._wanted:
            self.wake()

    def forget_parked(self) -> None:
        """What is stored is of no use: the next worker begins anew."""
        self.restoring = self.doubtful = False
        self.restorable_step = None
        if self._in_store:
            self._in_store = False
            close = Close(self._fence(), self._command_id(), "lost", self._openings)
            self._act(ForgetParked(self.stage, close))

    def snapshot_taken(self, taken: SnapshotTaken) -> bool:
        """The worker has stored the state, and goes on with it; False for one of an earlier
        opening, or where it could not."""
        current = (self._fence().epoch, self._openings)
        if taken.error is not None or (taken.order.epoch, taken.order.opening) != current:
            return False
        self._stored = taken.order
        self.restorable_step = taken.step
        return True

    def outdate_snapshot(self) -> None:
        """The state has begun anew: what was stored before is none of it."""
        if self.restorable:
            self.restorable_step = None
            self._stored = msgspec.structs.replace(self._stored, number=self._stored.number + 1)

    @property
    def restorable(self) -> bool:
        """Whether what its worker has stored last can take the place of what it loses."""
        return self.restorable_step is not None

    def bound(self, worker: str, crowded: bool = False) -> None:
        """A replica was chosen: open the session's state there. `crowded` is its link."""
        self.worker = worker
        self._crowded = crowded
        self.state = BindingState.OPENING
        self._awaited = self._command_id()
        self._openings += 1
        self._send(
            Open(
                self._fence(),
                self._awaited,
                self._settings(),
                self._output,
                self._tenant,
                self._stored if self.restoring else None,
                self._priority,
                self._openings,
                self._durable_until_s,
                self._waits,
                self.fork,
            )
        )
        self._send_held()

    def lost(self) -> int:
        """The worker is gone, and so are the bytes of stream input that are returned: it had
        not applied them. What waited for workers goes on waiting."""
        unapplied_bytes = self._backlog.input_bytes
        self.worker = None
        self._sequence = 0
        self._controls = 0
        self._awaited = None
        self.reserved = {}
        self._configuring.clear()
        self._read.clear()
        self._backlog.clear()
        self._crowded = False
        # The next worker counts stream input from 1 again.
        self._waiting = deque(_after_input(command, 0) for command in self._waiting)
        self.state = BindingState.UNBOUND
        return unapplied_bytes

    def reported(self, report: Report) -> bool:
        """Take account of what the worker has worked off.

        False for what it says of an earlier binding, which may have been to the same worker.
        """
        match report:
            case ReceivedThrough():
                if not self.ready:
                    return False
                self._backlog.received_through(report.sequence)
            case Answer():
                return self.awaits(report) or self._backlog.answered(report.command)
            case TurnEnded():
                self._backlog.ended(report.turn)
                self._read.pop(report.turn, None)
        return True

    def refused_settings(self, answer: Answer) -> ErrorInfo | None:
        """The worker answered `Configure`; the error, when it kept its old settings."""
        if not self._configuring or answer.command != self._configuring[0]:
            return None
        self._configuring.popleft()
        self._note_reserved(answer)
        return answer.error

    def _note_reserved(self, answer: Answer) -> None:
        if answer.error is None:
            self.reserved = answer.result.get("bytes", {})

    def awaits(self, answer: Answer) -> bool:
        """Whether this is the answer to `Open`, `Park` or `Close`."""
        return answer.command == self._awaited

    def answered(self, answer: Answer) -> ErrorInfo | None:
        """The worker answered `Open`, `Park` or `Close`; the error, when it refused."""
        if answer.command != self._awaited:
            return None
        self._awaited = None
        if self.state is BindingState.CLOSING:
            self.lost()
            return None
        if self.state is BindingState.PARKING:
            self._parked(answer)
            return answer.error
        if answer.error is not None:
            self.lost()
            return answer.error
        self._opened(answer)
        self.parks = self._priority is not None and answer.result.get("parks", False)
        self.unparkable = answer.result.get("unparkable")
        self.state = BindingState.READY
        self.about = answer.result.get("about", {})
        self.kept_steps = answer.result.get("kept", [])
        self._note_reserved(answer)
        self.send_waiting()
        return None

    def _opened(self, answer: Answer) -> None:
        durable = self._durable_until_s is not None
        self.restorable_step = None
        if self.restoring and durable:
            # What it was opened with is its own now, and stays where it is.
            self.restorable_step = answer.result.get("committed_step", 0)
        self._in_store = durable
        self._stored = SnapshotOrder(self._fence().epoch, self._openings)
        self.restoring = self.doubtful = False

    def _parked(self, answer: Answer) -> None:
        if answer.error is not None:
            self.state = BindingState.READY
            self.restoring = False
            self._in_store = self._durable_until_s is not None
            self._send_held()
            self.send_waiting()
            if self._reconfigure:
                self.configure()
            return
        self.lost()
        self.state = BindingState.PARKED

    @property
    def kept(self) -> AntiphonError | None:
        """Why its state is not, and is not being, parked; None: it is."""
        if self.state in (BindingState.PARKED, BindingState.PARKING):
            return None
        if self._priority is None:
            why = "its pipeline has 'durability: none'"
        elif self.ready and not self.parks:
            why = self.unparkable or "its engine parks no sessions"
        else:
            return SessionBusy(f"stage {self.stage} cannot be parked now: it has work")
        return InvalidRequest(f"stage {self.stage} cannot be parked: {why}", code="unsupported")

    def stays_parked(self, error: ErrorInfo) -> None:
        """The state is in the store, and no worker is asked for it now: the last one had an
        `error`."""
        self.state = BindingState.PARKED
        self.refused = error

    def give_up_waiting(self) -> None:
        """What waits for the state to come back is not done."""
        self._held.clear()
        self._waiting.clear()

    def _send_held(self) -> None:
        """Send what came while the state was put away, or had to be brought back."""
        held, self._held = self._held, deque()
        for item in held:
            if isinstance(item, Payload):
                self.update(item)
            else:
                self._signal(item)
        # What has waited beside it may have come after it.
        self._waiting = deque(_after_input(command, self._sequence) for command in self._waiting)

    @property
    def configuring(self) -> bool:
        """Whether a change of settings has not been answered yet."""
        return bool(self._configuring)

    @property
    def ready(self) -> bool:
        """Whether commands reach a worker that knows the session."""
        return self.state is BindingState.READY

    @property
    def full(self) -> bool:
        """Whether so much waits for the worker, of this session or of all, that more should."""
        return self._backlog.full or self._crowded

    def link_crowded(self, crowded: bool) -> None:
        """The link to the worker is crowded, or has room again."""
        self._crowded = crowded and self.worker is not None

    @property
    def reachable(self) -> bool:
        """Whether a worker takes input: one that still opens the session takes it after that."""
        return self.state in (BindingState.OPENING, BindingState.READY)

    def configure(self) -> None:
        """Send the settings as they are now; a stage that is bound later gets them then.

        Raises CapacityExceeded when too many changes have not been answered yet.
        """
        self._reconfigure = True
        if self.reachable:
            if len(self._configuring) >= WAITING_COMMANDS:
                raise CapacityExceeded("settings change faster than they can be applied")
            self._configuring.append(self._command_id())
            self._send(
                Configure(self._fence(), self._configuring[-1], self._settings(), self._sequence)
            )

    def update(self, payload: Payload) -> bool:
        """Send stream input; False when there is no worker to take it."""
        if self.away:
            return self._hold(payload)
        if not self.reachable:
            return False
        self._sequence += 1
        descriptor = InlineDescriptor(payload)
        self._send(Update(self._fence(), self._sequence, descriptor, self._controls))
        return True

    def signal(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Send a signal; the id that its answer will name.

        None without a worker: there is no state for it to act on.
        """
        if not self.reachable and not self.away:
            return None
        signal = Signal(self._fence(), self._command_id(), name, arguments)
        if not self.away:
            self._signal(signal)
        elif not self._hold(signal):
            return None
        return signal.command

    def _signal(self, signal: Signal) -> None:
        self._send(msgspec.structs.replace(signal, after_input=self._sequence))

    @property
    def away(self) -> bool:
        """Whether the state is being put away, or has to be brought back first."""
        return self.state in (BindingState.PARKING, BindingState.PARKED) or (
            self.restoring and self.state is BindingState.BINDING
        )

    def _hold(self, item: Payload | Signal) -> bool:
        """Keep it for the worker that brings the state back; False when that is too much."""
        if len(self._held) >= HELD:
            return False
        self._held.append(item)
        self.wake()
        return True

    def run(
        self,
        turn: int,
        lane: str,
        parameters: dict[str, Any],
        inputs: list[Descriptor],
        last: bool = True,
        *,
        readers: dict[str, str] | None = None,
        to_client: bool = True,
        step: int | None = None,
    ) -> None:
        """Start a turn, at once or when its worker and those of its readers are ready.

        `readers` maps the edges on which its output goes to other workers to their
        stages; `step` is the number of a turn that moves the stage's state on.

        Raises CapacityExceeded when too many commands wait.
        """
        self._turn_command(
            Run(
                self._fence(),
                turn,
                lane,
                parameters,
                inputs,
                last,
                self._sequence,
                readers or {},
                to_client,
                step,
            )
        )

    def feed(self, turn: int, descriptor: Descriptor | None, last: bool = False) -> None:
        """Give more input to a running turn. Raises CapacityExceeded as `run` does."""
        self._turn_command(Feed(self._fence(), turn, descriptor, last))

    def waits(self, turn: int) -> bool:
        """Whether the turn's start still waits for workers."""
        return any(isinstance(c, Run) and c.turn == turn for c in self._waiting)

    def missing(self, turn: int) -> set[str]:
        """The stages whose workers the turn's start waits for: this one, or its readers."""
        return {
            stage
            for command in self._waiting
            if isinstance(command, Run) and command.turn == turn
            for stage in self._missing(command)
        }

    def send_waiting(self) -> None:
        """Send what waits for nothing any more: a worker, of this stage or a reader, is ready.

        The commands of one turn go in their order; no turn waits for another.
        """
        waiting, self._waiting = self._waiting, deque()
        for command in waiting:
            self._turn_command(command)

    def acknowledge(self, turn: int, through: int) -> None:
        """The turn's output up to `through` was taken; a worker that is gone keeps nothing."""
        if self.ready:
            self._send(Acknowledge(self._fence(), turn, through))

    def raise_floor(self, lane: str, floor: int, turns: set[int]) -> None:
        """Cancel `turns`, which are all of the lane's turns below `floor`."""
        self._waiting = deque(command for command in self._waiting if command.turn not in turns)
        self._backlog.stop(turns)
        if self.ready:
            self._send(RaiseFloor(self._fence(), lane, floor))

    def stop(self, turn: int) -> bool:
        """Cancel the turn unless it completes; its last word is still to come.

        False when it waited for a worker: it will not run, and has no last word.
        """
        if self.waits(turn):
            self._waiting = deque(command for command in self._waiting if command.turn != turn)
            return False
        if self.ready:
            self._send(Stop(self._fence(), turn))
        return True

    def close(self, reason: str) -> None:
        """Free the session's state on the worker, if there is one."""
        self._waiting.clear()
        self._held.clear()
        if self.state in (BindingState.OPENING, BindingState.READY, BindingState.PARKING):
            self.state = BindingState.CLOSING
            self._awaited = self._command_id()
            self._send(Close(self._fence(), self._awaited, reason, self._openings))
        elif self.state is not BindingState.CLOSING:
            self.lost()
            self.forget_parked()

    @property
    def closing(self) -> str | None:
        """The id of the close that the worker has not answered."""
        return self._awaited if self.state is BindingState.CLOSING else None

    @property
    def freed(self) -> bool:
        """Whether no worker holds anything of the session any more."""
        return self.state is BindingState.UNBOUND

    def _turn_command(self, command: Run | Feed) -> None:
        missing = self._missing(command)
        if not missing:
            self._send(command)
            return
        if len(self._waiting) >= WAITING_COMMANDS:
            stages = ", ".join(sorted(missing))
            raise CapacityExceeded(f"too much work waits for a worker of stage {stages}")
        self._waiting.append(command)
        for stage in missing:
            self._peer(stage).wake()

    def _missing(self, command: Run | Feed) -> set[str]:
        """The stages without which the command is of no use yet."""
        if isinstance(command, Feed):
            missing = self.missing(command.turn)
        else:
            missing = {s for s in command.readers.values() if not self._peer(s).ready}
        return missing if self.ready else missing | {self.stage}

    def _send(self, command: Command) -> None:
        match command:
            case Update():
                self._backlog.input(command.sequence, _size(command.payload))
            case Signal() | Configure():
                self._controls += 1
                self._backlog.command(command.command)
            case Run():
                self._backlog.turn(command.turn, sum(map(_size, command.inputs)))
                if command.readers:
                    self._read[command.turn] = set(command.readers.values())
        self._act(ToStage(self.stage, command))

    def _command_id(self) -> str:
        self._commands += 1
        return f"{self.stage}-{self._fence().epoch}-{self._commands}"

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.stage,
            self.state.value,
            self.worker,
            self._sequence,
            self._controls,
            self._commands,
            self._awaited,
            tuple(self._configuring),
            tuple(msgspec.msgpack.encode(command) for command in self._waiting),
            self._backlog.freeze(),
            self._crowded,
            (
                self.restoring,
                self.refused,
                self._wanted,
                (self.restorable_step, self._openings, self._stored, self._in_store),
                self._reconfigure and self.state is BindingState.PARKING,
            ),
            tuple(self.kept_steps),
            tuple((turn, tuple(sorted(stages))) for turn, stages in sorted(self._read.items())),
            tuple(msgspec.msgpack.encode(item) for item in self._held),
        )


def _after_input(command: Run | Feed, sequence: int) -> Run | Feed:
    """The command for a worker that applies stream input up to `sequence` before it."""
    if isinstance(command, Run):
        return msgspec.structs.replace(command, after_input=sequence)
    return command


def _size(descriptor: Descriptor) -> int:
    """The bytes that `descriptor` puts on the link."""
    return len(descriptor.payload.data) if isinstance(descriptor, InlineDescriptor) else 0
