"""The control side of one session on one worker: its mailbox, its input, its answers.

A plain state machine: commands whose fence has been checked come in, actions go out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec.structs import replace

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorInfo,
    InvalidRequest,
    SessionBusy,
    SessionStateLost,
)
from protocol.messages import (
    CHECKPOINT,
    RELEASE,
    RESET,
    REWIND,
    Answer,
    Configure,
    Feed,
    Fork,
    Open,
    Park,
    RaiseFloor,
    ReceivedThrough,
    Replay,
    Report,
    Run,
    Signal,
    SnapshotOrder,
    SnapshotTaken,
    StageEvent,
    TurnStatus,
    Update,
)
from protocol.payloads import Payload
from sessions.deadlines import earliest
from sessions.ledger import Ledger, OutOfBytes
from sessions.steps.refusals import source_gone
from workers.control_events import (
    Action,
    ApplyInput,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    ForgetParked,
    FreeSession,
    OpenSession,
    OperationDone,
    ParkSession,
    Restore,
    RoomAsked,
    RoomGiven,
    SendOutput,
    SignalSession,
)
from workers.input_order import InputOrder
from workers.mailbox import InOrder, Mailbox, Waiting
from workers.turn_control import Totals, TurnControl


class SessionState(Enum):
    """Where a session stands on its worker."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_CHANGES = frozenset({RESET, CHECKPOINT, REWIND, RELEASE})
"""The signals after which the state is another one than what is stored of it."""

Declare = Callable[[dict[str, Any]], Mapping[str, int]]
"""The bytes, by device, that a session with these settings may hold at most.

Raises AntiphonError for settings that the engine refuses. A function of the settings alone.
"""


@dataclass
class SessionControl:
    """One session: mailbox, input order, turns, floors and remembered answers."""

    session: str
    epoch: int
    owner: str
    limits: ControlLimits
    totals: Totals
    ledger: Ledger
    declare: Declare
    act: Callable[[Action], None]
    report: Callable[[str, Report], None]
    send_output: Callable[[SendOutput], None]
    state: SessionState = SessionState.OPENING
    unsaid: bool = False
    gap_since_ms: float | None = None
    priority: int | None = 0
    progress_ms: float = 0.0
    """When the engine last got something done for it."""
    _parks: bool = False
    opened: tuple[Open, Answer] | None = None
    """How the open was answered."""
    _opening: Open | None = None
    forks: set[str] = field(default_factory=set)
    """The sessions that are to begin as this one is: it stays until they have."""
    forking: bool = False
    """Whether it has its bytes, and waits for the session that it begins as."""
    _forked_at: int | None = None
    """After which step of that one it begins."""
    parking: bool = False
    """Whether the state is on its way into the store."""
    parked: bool = False
    """Whether the state has gone into the store."""
    _kept_ms: float | None = None
    """When the state could last not be put away."""
    _stored: bool = False
    """Whether the state may be in the store."""
    _snapshots: int = 0
    _snapshot_due: bool = False
    """Whether the state has changed since it was stored."""
    _snapshot_order: SnapshotOrder | None = None
    """That of the one that is being written."""
    _snapshot_failed: bool = False
    _no_room: OutOfBytes | None = None
    """What it lacks, while it waits for that: to be opened, or for what its engine asked for."""
    _asked: RoomAsked | None = None
    """What its engine has asked for, and waits for."""
    _grown: bool = False
    """Whether what its engine has asked for is reserved beside what it declared."""
    _busy: str | None = None
    _reserving: bool = False
    _signal: Signal | None = None
    """The one that the engine carries out."""
    _input: InputOrder = field(default_factory=InputOrder)
    _answers: OrderedDict[str, Answer | None] = field(default_factory=OrderedDict)
    _closers: list[tuple[str, str]] = field(default_factory=list)
    """Who has it closed, by which command: they are answered, whoever owns it by then."""
    _close_by_ms: float = 0.0
    _freeing: bool = False
    """Whether the engine was told to close it."""
    _free_failures: int = 0
    _free_again_ms: float | None = None

    def __post_init__(self) -> None:
        self._mailbox = Mailbox(self.totals)
        self.turns = TurnControl(
            self.session,
            self.limits,
            self.totals,
            self.ledger,
            self.act,
            report=self._tell,
            send_output=self._send_output,
            ended=self._turn_over,
        )

    # Commands

    def command(self, command: InOrder, now_ms: float) -> None:
        """Take a command into the mailbox and carry out what can be."""
        if isinstance(command, Open | Configure | Signal | Park) and self._repeated(
            command.command
        ):
            return
        if isinstance(command, Run) and (
            self.turns.knows(command.turn) or self._mailbox.holds(command.turn)
        ):
            return
        if self.state is SessionState.CLOSING:
            self._refuse(command, SessionStateLost("the session is closing"), now_ms)
            return
        if len(self._mailbox) >= self.limits.waiting_commands:
            error = CapacityExceeded("too many commands wait for this session")
            self._refuse(command, error, now_ms)
            self._input.controls += isinstance(command, Configure | Signal)
            self._pump(now_ms)
            return
        barrier = self._input.last
        if isinstance(command, Configure | Signal | Run) and command.after_input is not None:
            barrier = command.after_input
        elif isinstance(command, Feed):
            barrier = 0
        self._mailbox.put(Waiting(command, barrier, now_ms))
        self._pump(now_ms)

    def knows(self, command: str) -> bool:
        """Whether a command with this id was taken."""
        return command in self._answers

    def update(self, update: Update, now_ms: float) -> None:
        """Apply one piece of stream input, or hold it until its turn comes."""
        if self.state is SessionState.CLOSING or not self._input.hold(update):
            self.act(DiscardPayload(update.payload))
            return
        self._pump(now_ms)
        while (
            len(self._input) > self.limits.held_inputs
            or self._input.held_bytes > self.limits.held_bytes
        ):
            self._give_up_gap(now_ms)

    def raise_floor(self, command: RaiseFloor, now_ms: float) -> None:
        """Cancel the lane's turns below the floor, also those that wait, and void what ended."""
        floor = self.turns.raise_floor(command.lane, command.floor, now_ms)
        for turn in self._mailbox.turns_below(command.lane, floor):
            self._drop_waiting(turn, TurnStatus.CANCELLED, None)
        self._pump(now_ms)

    def stop(self, turn: int, now_ms: float) -> None:
        """Cancel a turn that waits or runs; what has completed stays."""
        if self.turns.runs(turn):
            self.turns.cancel(turn, now_ms)
        elif self._mailbox.holds(turn):
            self._drop_waiting(turn, TurnStatus.CANCELLED, None)
            self._pump(now_ms)

    def replay(self, command: Replay) -> None:
        """Send again what is kept after the cursor, and say what is gone."""
        if self._repeated(command.command):
            return
        replayed = self.turns.replay(command.turn, command.after)
        self._answer(Answer(self.session, command.command, None, {"lost": replayed.lost}))
        self.turns.tell_again(command.turn, replayed)

    def close(self, command: str | None, now_ms: float) -> None:
        """Cancel everything, then free the session; answered once that is done."""
        self._refuse_asked(SessionStateLost("the session is closing"))
        if self._no_room is not None or self.forking:
            # Nothing has been made of it yet.
            self._refuse_opening(now_ms)
            if command is not None:
                assert self._opening is not None
                if self._opening.restore:
                    self.act(self.forget_parked)
                self.report(self.owner, Answer(self.session, command))
            return
        if command is not None and (self.owner, command) not in self._closers:
            self._closers.append((self.owner, command))
        if self.state is not SessionState.CLOSING:
            self.state = SessionState.CLOSING
            self._close_by_ms = now_ms + self.limits.cancel_ms
            self._discard_waiting("the session was closed", now_ms)
            self.turns.cancel_all(now_ms)
        self._finish_closing()

    # Room

    @property
    def shortage(self) -> Mapping[str, int] | None:
        """What others would have to free, by device, before the session can be opened, or its
        engine go on."""
        return None if self._no_room is None else self._no_room.shortage

    @property
    def room_of(self) -> str | None:
        """The tenant whose sessions alone can make the room; None: anybody's can."""
        return None if self._no_room is None else self._no_room.tenant

    @property
    def asking(self) -> bool:
        """Whether its engine waits for more room than was reserved."""
        return self._asked is not None

    @property
    def tenant(self) -> str:
        """Whom its bytes count for."""
        return "" if self._opening is None else self._opening.tenant

    @property
    def fork(self) -> Fork | None:
        """Whose state it was, or is to be, opened with."""
        return None if self._opening is None else self._opening.fork

    @property
    def opened_as(self) -> SnapshotOrder:
        """Which opening of the stage it is: the 0th of an owner who has taken it over."""
        opened = self._opening
        if opened is None or opened.fence.epoch != self.epoch:
            return SnapshotOrder(self.epoch, 0)
        return SnapshotOrder(self.epoch, opened.opening)

    @property
    def forget_parked(self) -> ForgetParked:
        """What removes all that is stored of it."""
        return ForgetParked(self.session, self.opened_as.epoch, self.opened_as.opening)

    @property
    def leaving(self) -> bool:
        """Whether it makes room already: it is being parked or closed, and the engine has not
        failed at that."""
        closing = self.state is SessionState.CLOSING and not self._free_failures
        return self.parking or closing

    @property
    def opening(self) -> bool:
        """Whether it may turn out to be one that can make room for another."""
        return self.state is SessionState.OPENING and self.priority is not None

    @property
    def parkable(self) -> bool:
        """Whether it can make room for another once it has nothing to do."""
        able = self.priority is not None and self._parks and not self.parking
        return able and self.state is SessionState.OPEN

    @property
    def evictable(self) -> bool:
        """Whether it can make room for another now."""
        return (
            self.parkable
            and self._busy is None
            and not self._mailbox
            and not self._input
            and self._unparkable() is None
        )

    def kept_lately(self, now_ms: float) -> bool:
        """Whether the state could not be put away, for a reason that may well still hold."""
        return self._kept_ms is not None and now_ms < self._kept_ms + self.limits.room_ms

    def go_on_if_room(self, now_ms: float) -> bool:
        """Have the engine open the session, or take what it has asked for; False while others have
        to make room first."""
        return self._open_if_room(now_ms) if self._asked is None else self._grow_if_room()

    def room_asked(self, event: RoomAsked, now_ms: float) -> None:
        """Reserve what the engine is about to take, now or once others have made room."""
        if event.turn is None:
            known = self.state is SessionState.OPENING and self._busy is not None
        else:
            known = self.turns.runs(event.turn)
        if not known or self._asked is not None:
            lost = SessionStateLost("nothing of this session that could take it runs")
            self.act(RoomGiven(self.session, lost.info()))
            return
        self._asked = event
        self._grow_if_room()

    def _grow_if_room(self) -> bool:
        asked = self._asked
        assert asked is not None
        self._no_room = None
        # What it has taken of what was reserved before has been measured.
        self._shrink()
        try:
            self.ledger.reserve(self.session, self.tenant, asked.needs)
        except AntiphonError as error:
            waits = asked.turn is not None or (self._opening is not None and self._opening.waits)
            if waits and isinstance(error, OutOfBytes):
                self._no_room = error
                return False
            self._refuse_asked(error)
            return True
        self._grown, self._asked = True, None
        self.act(RoomGiven(self.session))
        return True

    def _refuse_asked(self, error: AntiphonError) -> None:
        if self._asked is not None:
            self._asked = self._no_room = None
            self.act(RoomGiven(self.session, error.info()))

    def _shrink(self) -> None:
        """From now on it counts with what it declared, or with what it is measured to hold."""
        if self._grown:
            self._grown = False
            self.ledger.settle(self.session, taken=False)

    def _open_if_room(self, now_ms: float) -> bool:
        opened = self._opening
        assert opened is not None
        self._no_room = None
        if self._reserved(opened.settings, now_ms):
            if opened.fork is not None:
                self.forking = True
                return True
            restore = None
            if opened.restore is not None:
                restore = Restore(opened.restore, self.opened_as, self._durable)
            self._stored = restore is not None
            self.act(
                OpenSession(
                    self.session,
                    self.epoch,
                    opened.settings,
                    self.owner,
                    opened.output,
                    restore,
                )
            )
        return self._no_room is None

    def begin_as(self, source: SessionControl | None, now_ms: float) -> bool:
        """Have the engine open it with the state of `source`, or refuse it where there is none;
        False while a step of that one runs."""
        opened, error = self._opening, self._unforkable(source)
        assert opened is not None
        if error is None and source is not None:
            if source.turns.steps.running is not None:
                return False
            self._forked_at = source.turns.steps.committed
        self.forking = False
        if error is not None:
            self.operation_done(OperationDone(self.session, error.info()), now_ms)
        else:
            self.act(
                OpenSession(
                    self.session,
                    self.epoch,
                    opened.settings,
                    self.owner,
                    opened.output,
                    fork=opened.fork,
                )
            )
        return True

    def _unforkable(self, source: SessionControl | None) -> AntiphonError | None:
        """Why there is no state of `source` to begin with."""
        if source is None or source.state is not SessionState.OPEN or source.parking:
            return source_gone("its worker does not have it any more")
        if (source.owner, source.tenant) != (self.owner, self.tenant):
            return source_gone("it is another's")
        if source.turns.steps.lost:
            return source_gone("its state is lost")
        return None

    def _refuse_opening(self, now_ms: float) -> None:
        if self._no_room is not None:
            self.refuse_room(now_ms)
            return
        self.forking = False
        closed = SessionStateLost("the session was closed before it had begun")
        self.operation_done(OperationDone(self.session, closed.info()), now_ms)

    def refuse_room(self, now_ms: float) -> None:
        """Nobody can make the room that the session waits for."""
        error = self._no_room
        assert error is not None
        if self._asked is not None:
            self._refuse_asked(error)
            return
        self._no_room = None
        self.operation_done(OperationDone(self.session, error.info()), now_ms)

    # What the engine did

    def operation_done(self, event: OperationDone, now_ms: float) -> None:
        """Answer the command whose operation has ended, and go on."""
        command, self._busy = self._busy, None
        if command is None:
            raise ValueError(f"session {event.session} has no operation in progress")
        if self.state is not SessionState.OPENING or event.error is None:
            # Who is refused an open had nothing, and leaves nothing to others.
            self.totals.progress += 1
        if (order := self._snapshot_order) is not None:
            self._snapshot_done(order, event.error, now_ms)
            return
        self.progress_ms = now_ms
        opening = self.state is SessionState.OPENING
        self._asked = None
        self._shrink()
        parking, self.parking = self.parking, False
        # After a park that succeeded, and after a restore that failed.
        stays = self._durable or parking == (event.error is None)
        self._stored = self._stored and stays
        if parking:
            self._kept_ms = None if event.error is None else now_ms
        result = event.result
        if self._reserving:
            self._reserving = False
            self.ledger.settle(self.session, taken=event.error is None)
            reserved = self.ledger.of(self.session)
            if event.error is None and reserved:
                result = {**result, "bytes": reserved}
        signal, self._signal = self._signal, None
        if signal is not None and event.error is None:
            result = self._signalled(signal, result)
        if opening and event.error is not None:
            # What was done before it was refused made no room.
            result = {"progress": self.totals.progress}
        if opening and event.error is None:
            self._parks = result.get("parks", False)
            if self._forked_at is not None:
                result = {**result, "committed_step": self._forked_at}
                self._snapshot_due = True
            self.turns.steps.restore(result.get("committed_step", 0))
        answer = Answer(self.session, command, event.error, result)
        if opening and self._opening is not None:
            self.opened = (self._opening, answer)
        self._answer(answer)
        if self.state is SessionState.CLOSING:
            self._finish_closing()
        elif parking and event.error is None:
            self._discard_waiting("the session was parked", now_ms)
            self.parked = True
            self._free()
        elif opening and event.error is not None:
            self.state = SessionState.CLOSED
            self._discard_waiting("the session could not be opened", now_ms)
        else:
            self.state = SessionState.OPEN
            self._pump(now_ms)

    # Time

    def deadline_ms(self) -> float | None:
        """When `tick` is due."""
        first_ms = self.turns.deadline_ms
        if self.gap_since_ms is not None:
            first_ms = earliest(first_ms, self.gap_since_ms + self.limits.gap_ms)
        if self.state is SessionState.CLOSING:
            closing_ms = self._free_again_ms if self._freeing else self._close_by_ms
            first_ms = earliest(first_ms, closing_ms)
        return first_ms

    def tick(self, now_ms: float) -> None:
        """Give up on what has been waited for, or kept, too long."""
        self.turns.tick(now_ms)
        if self.gap_since_ms is not None and now_ms >= self.gap_since_ms + self.limits.gap_ms:
            self._give_up_gap(now_ms)
        if self._free_again_ms is not None and now_ms >= self._free_again_ms:
            self._free_again_ms = None
            self.act(FreeSession(self.session))
        if self.state is SessionState.CLOSING and now_ms >= self._close_by_ms:
            self._busy = None
        self._finish_closing()

    def settle(self) -> None:
        """Say how far input has been applied, if that has changed."""
        if self.unsaid and self.state is not SessionState.CLOSED:
            self.unsaid = False
            self.report(self.owner, ReceivedThrough(self.session, self._input.received))

    def freeze(self) -> tuple[object, ...]:
        """The canonical state, but for `progress_ms`, by which one of several is chosen."""
        return (
            self.session,
            self.epoch,
            self.owner,
            self.state.value,
            self._close_by_ms if self.state is SessionState.CLOSING else None,
            (self._freeing, self._free_failures, self._free_again_ms),
            tuple(self._closers),
            (self._busy, self._signal and self._signal.name),
            (self.unsaid, self.gap_since_ms),
            (self.priority, self._parks, self._no_room is not None),
            (self._asked, self._grown),
            (self.forking, self._forked_at, tuple(sorted(self.forks))),
            (self.parking, self._stored, self._kept_ms),
            (self._snapshots, self._snapshot_due, self._snapshot_order, self._snapshot_failed),
            self._mailbox.freeze(),
            self._input.freeze(),
            tuple(self._answers.items()),
            self.turns.freeze(),
        )

    # Inside

    def _pump(self, now_ms: float) -> None:
        """Carry out, in order, what nothing stands before any more."""
        self._snapshot_if_due()
        while self._busy is None and self.state in (SessionState.OPENING, SessionState.OPEN):
            head = self._mailbox.head
            if head is None or self._input.received < head.barrier:
                following = self._input.take()
                if following is None:
                    break
                self.unsaid = True
                self.totals.progress += 1
                self.progress_ms = now_ms
                self.act(ApplyInput(self.session, following.sequence, following.payload))
                self.gap_since_ms = None
                continue
            if self._must_wait(head.command):
                # Running turns get their input past a command that may wait for their end.
                for feed in self._mailbox.take_feeds(self.turns.runs):
                    self.turns.feed(feed, now_ms)
                break
            self._carry_out(self._mailbox.take(), now_ms)
        head = self._mailbox.head
        missing = self._busy is None and (bool(self._input) or head is not None)
        if head is not None and self._input.received >= head.barrier:
            missing = missing and not self._must_wait(head.command)
        if not missing or self.state is SessionState.CLOSING:
            self.gap_since_ms = None
        elif self.gap_since_ms is None:
            self.gap_since_ms = now_ms

    def _must_wait(self, command: InOrder) -> bool:
        """Whether a step runs whose state the command would change, or move on."""
        if self.turns.steps.running is None:
            return False
        return isinstance(command, Configure | Signal) or (
            isinstance(command, Run) and command.step is not None
        )

    def _give_up_gap(self, now_ms: float) -> None:
        """State as lost what is missing before the next held input or waiting command.

        Where nothing is missing (an operation takes too long) the oldest input is lost.
        """
        head = self._mailbox.head
        barrier = 0 if head is None else head.barrier
        first, last, lost = self._input.give_up(barrier)
        if lost is not None:
            self.act(DiscardPayload(lost.payload))
        self.unsaid = True
        self.gap_since_ms = None
        arguments = {"first": first, "last": last}
        self.report(self.owner, StageEvent(self.session, "input_lost", arguments))
        self._pump(now_ms)

    def _carry_out(self, waiting: Waiting, now_ms: float) -> None:
        match waiting.command:
            case Open() as opened:
                self._busy = opened.command
                self._opening = opened
                self.priority = opened.priority
                self._open_if_room(now_ms)
            case Park() as park if (error := self._unparkable()) is not None:
                self._refuse(park, error, now_ms)
            case Park(command=command, expires_at_s=expires_at_s):
                self._busy = command
                self.parking = self._stored = True
                step = self.turns.steps.committed
                self.act(
                    ParkSession(self.session, self.owner, self._next_order(), step, expires_at_s)
                )
            case Configure() | Signal() as control if (
                error := self._unusable(control)
            ) is not None:
                self._input.controls += 1
                self._refuse(control, error, now_ms)
            case Configure(command=command, settings=settings):
                self._busy = command
                self._input.controls += 1
                if self._reserved(settings, now_ms):
                    self.act(ConfigureSession(self.session, settings))
            case Signal(command=command, name=name, arguments=arguments) as signal:
                self._busy = command
                self._signal = signal
                self._input.controls += 1
                self.act(SignalSession(self.session, name, arguments))
            case Run() as run:
                self.turns.start(run, self.epoch, waiting.received_ms, now_ms)
            case Feed() as feed:
                self.turns.feed(feed, now_ms)

    def _signalled(self, signal: Signal, result: dict[str, Any]) -> dict[str, Any]:
        """The engine has done it; what is answered."""
        if signal.name in _CHANGES:
            self._snapshot_due = True
        if signal.name not in (RESET, REWIND):
            return result
        step = signal.arguments["step"] if signal.name == REWIND else 0
        self.turns.go_back(step)
        return {**result, "committed_step": step}

    @property
    def _durable(self) -> bool:
        """Whether its state is to be in the store as it is after each turn."""
        return self._opening is not None and self._opening.durable_until_s is not None

    def _next_order(self) -> SnapshotOrder:
        self._snapshots += 1
        return replace(self.opened_as, number=self._snapshots)

    def _snapshot_if_due(self) -> None:
        """Store the state between two turns: what comes waits for that, and nothing before."""
        if (
            not self._snapshot_due
            or self.state is not SessionState.OPEN
            or self._busy is not None
            or self.turns
        ):
            return
        self._snapshot_due = False
        # What came of stream input after it would be missing from it.
        if not self._durable or not self._parks or self._input.received or self.turns.steps.lost:
            return
        assert self._opening is not None
        assert self._opening.durable_until_s is not None
        self._busy = "snapshot"
        self._stored = True
        self._snapshot_order = order = self._next_order()
        until_s, step = self._opening.durable_until_s, self.turns.steps.committed
        self.act(ParkSession(self.session, self.owner, order, step, until_s, stays=True))

    def _snapshot_done(self, order: SnapshotOrder, error: ErrorInfo | None, now_ms: float) -> None:
        """The state is in the store, or an earlier one still is, if there is any."""
        self._snapshot_order = None
        if error is None or not self._snapshot_failed:
            step = self.turns.steps.committed
            self.report(self.owner, SnapshotTaken(self.session, order, step, error))
        self._snapshot_failed = error is not None
        if self.state is SessionState.CLOSING:
            self._finish_closing()
        else:
            self._pump(now_ms)

    def _reserved(self, settings: dict[str, Any], now_ms: float) -> bool:
        """Reserve what the engine declares for `settings`; else the command is answered."""
        assert self._opening is not None
        self._reserving = True
        try:
            self.ledger.reserve(self.session, self._opening.tenant, self.declare(settings))
        except AntiphonError as error:
            opening = self.state is SessionState.OPENING
            if opening and self._opening.waits and isinstance(error, OutOfBytes):
                self._no_room = error
            else:
                self.operation_done(OperationDone(self.session, error.info()), now_ms)
            return False
        return True

    def _unparkable(self) -> AntiphonError | None:
        """Why the state cannot be parked now."""
        if not self._parks:
            return InvalidRequest("this engine parks no sessions", code="unsupported")
        if self.forks:
            return SessionBusy("another session is being forked from it")
        if self.turns or self.turns.kept_bytes:
            return SessionBusy("a turn runs, or its output is still kept")
        if self.turns.steps.lost:
            return SessionBusy("the state is lost, and waits for a reset")
        return None

    def _unusable(self, control: Configure | Signal) -> AntiphonError | None:
        """Why a command cannot act on the state; a reset needs none."""
        match control:
            case Signal(name=name) if name == RESET:
                return None
            case Signal(name=name, arguments=arguments) if name == REWIND:
                if not isinstance(arguments.get("step"), int):
                    return InvalidRequest("a rewind names its step", field="rewind.step")
        return self.turns.steps.unusable()

    def _drop_waiting(self, turn: int, status: TurnStatus, error: ErrorInfo | None) -> None:
        """End a turn that waits to be started, with what was fed to it already."""
        for command in self._mailbox.take_turn(turn):
            match command:
                case Run() as run:
                    self.turns.end_unstarted(run, status, error)
                case Feed() as feed:
                    self.turns.discard(feed)

    def _discard_waiting(self, reason: str, now_ms: float) -> None:
        """Neither commands nor input that wait will be carried out."""
        self._refuse_waiting(SessionStateLost(reason), now_ms)
        for update in self._input.clear():
            self.act(DiscardPayload(update.payload))
        self.gap_since_ms = None

    def _refuse_waiting(self, error: AntiphonError, now_ms: float) -> None:
        closing = self.state is SessionState.CLOSING
        for command in self._mailbox.take_all():
            match command:
                case Run() as run if closing:
                    self.turns.end_unstarted(run, TurnStatus.CANCELLED, None)
                case Feed() as feed if closing:
                    self.turns.discard(feed)
                case _:
                    self._refuse(command, error, now_ms)

    def _refuse(self, command: InOrder, error: AntiphonError, now_ms: float) -> None:
        match command:
            case Run():
                self.turns.refuse(command, error)
            case Feed():
                # A turn that lacks one piece of its input must not go on without it.
                self.turns.discard(command)
                if self._mailbox.holds(command.turn):
                    self._drop_waiting(command.turn, TurnStatus.FAILED, error.info())
                else:
                    self.turns.fail_turn(command.turn, error.info(), now_ms)
            case _:
                self._answer(Answer(self.session, command.command, error.info()))

    def _repeated(self, command: str) -> bool:
        """Whether this id was seen; its answer is given again, once there is one."""
        if command in self._answers:
            answer = self._answers[command]
            if answer is not None:
                self.report(self.owner, answer)
            return True
        self._answers[command] = None
        if len(self._answers) > self.limits.remembered_answers:
            self._answers.popitem(last=False)
        return False

    def _answer(self, answer: Answer) -> None:
        if answer.command in self._answers:
            self._answers[answer.command] = answer
        self.report(self.owner, answer)

    def _finish_closing(self) -> None:
        if self.state is not SessionState.CLOSING or self.turns or self._busy is not None:
            return
        if not self._freeing:
            self._free()

    def _free(self) -> None:
        self.state = SessionState.CLOSING
        self._freeing = True
        self.turns.clear()
        self.act(FreeSession(self.session))

    def freed(self, error: ErrorInfo | None, now_ms: float) -> None:
        """The engine holds nothing of it any more, or could not close it: it is asked again."""
        if error is not None:
            limits = self.limits
            after_ms = limits.close_again_ms * 2 ** min(self._free_failures, 20)
            self._free_failures += 1
            self._free_again_ms = now_ms + min(after_ms, limits.close_again_most_ms)
            return
        self.state = SessionState.CLOSED
        self.totals.progress += 1
        if not self._closers and (self.parked or self._durable):
            # Whoever owns it has not ended it: it goes on from there.
            self.parked = self._stored
            return
        self.parked = False
        if self._stored or self._durable:
            self.act(self.forget_parked)
        for gateway, command in self._closers:
            self.report(gateway, Answer(self.session, command))

    def _turn_over(self, changed: bool, now_ms: float) -> None:
        self.progress_ms = now_ms
        if self._asked is not None and not self.turns.runs(self._asked.turn or 0):
            self._asked = self._no_room = None
        if not self.turns:
            self._shrink()
        self._snapshot_due = self._snapshot_due or changed
        self._pump(now_ms)
        self._finish_closing()

    def _tell(self, report: Report) -> None:
        self.report(self.owner, report)

    def _send_output(self, turn: int, sequence: int, payload: Payload) -> None:
        self.send_output(SendOutput(self.owner, self.session, turn, sequence, payload))
