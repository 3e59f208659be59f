"""The control side of one session on one worker: order of input, turns, floors, answers.

A plain state machine: commands whose fence has been checked come in, actions go out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec.structs import replace

from protocol.connectors import Descriptor
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    EngineFailed,
    ErrorInfo,
    SessionStateLost,
)
from protocol.messages import (
    RESET,
    Acknowledge,
    Answer,
    Command,
    Configure,
    Feed,
    Open,
    RaiseFloor,
    ReceivedThrough,
    Replay,
    Report,
    Run,
    Signal,
    StageEvent,
    TurnEnded,
    TurnStatus,
    Update,
)
from protocol.payloads import Payload
from workers.control_events import (
    AbandonTurn,
    Action,
    ApplyInput,
    CancelTurn,
    CommitTurn,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    Emitted,
    FeedTurn,
    FreeSession,
    InputTaken,
    OpenSession,
    OperationDone,
    PaceTurn,
    RepeatTurn,
    SendOutput,
    SignalSession,
    StartTurn,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
    VoidTurn,
)
from workers.input_order import InputOrder
from workers.retention import Retention
from workers.step_order import StepOrder


class SessionState(Enum):
    """Where a session stands on its worker."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass
class _Waiting:
    """A command in the mailbox; it is carried out once input through `barrier` is."""

    command: Open | Configure | Signal | Run | Feed
    barrier: int
    received_ms: float


@dataclass
class _Turn:
    lane: str
    received_ms: float
    started_ms: float
    open_input: bool
    first_output_ms: float | None = None
    outputs: int = 0
    fed_payloads: int = 0
    fed_bytes: int = 0
    cancel_by_ms: float | None = None
    paced: bool = False
    error: ErrorInfo | None = None
    step: int | None = None
    committing: TurnFinished | None = None
    """Set from when the turn counts as completed: it is too late to cancel it."""


@dataclass
class _Ended:
    """A turn that is over. `void`: none of its content is wanted, or there is none.

    `step` is set while the turn is the answer to that committed step.
    """

    report: TurnEnded
    lane: str
    void: bool
    step: int | None = None


@dataclass
class Totals:
    """Counts over all sessions of the worker, for its bounds and its status."""

    turns: int = 0
    waiting: int = 0
    progress: int = 0
    kept_bytes: int = 0


@dataclass
class SessionControl:
    """One session: mailbox, input order, turns, floors and remembered answers."""

    session: str
    epoch: int
    owner: str
    limits: ControlLimits
    totals: Totals
    act: Callable[[Action], None]
    report: Callable[[str, Report], None]
    send_output: Callable[[SendOutput], None]
    state: SessionState = SessionState.OPENING
    crowded: bool = False
    unsaid: bool = False
    gap_since_ms: float | None = None
    _busy: str | None = None
    _resetting: bool = False
    _mailbox: deque[_Waiting] = field(default_factory=deque)
    _input: InputOrder = field(default_factory=InputOrder)
    _turns: dict[int, _Turn] = field(default_factory=dict)
    _ended: OrderedDict[int, _Ended] = field(default_factory=OrderedDict)
    _floors: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _answers: OrderedDict[str, Answer | None] = field(default_factory=OrderedDict)
    _closers: list[str] = field(default_factory=list)
    _close_by_ms: float = 0.0
    _steps: StepOrder = field(default_factory=StepOrder)

    def __post_init__(self) -> None:
        self._retention: Retention[tuple[int, Payload]] = Retention(self.limits.retention)

    # Commands

    def command(self, command: Open | Configure | Signal | Run | Feed, now_ms: float) -> None:
        """Take a command into the mailbox and carry out what can be."""
        if isinstance(command, Open | Configure | Signal) and self._repeated(command.command):
            return
        if isinstance(command, Run) and (
            command.turn in self._turns or command.turn in self._ended or self._waits(command.turn)
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
        self._mailbox.append(_Waiting(command, barrier, now_ms))
        self.totals.waiting += 1
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
        floor = max(command.floor, self._floors.get(command.lane, 0))
        self._floors[command.lane] = floor
        self._floors.move_to_end(command.lane)
        if len(self._floors) > self.limits.lanes:
            self._floors.popitem(last=False)
        for turn, state in list(self._turns.items()):
            if state.lane == command.lane and turn < floor:
                self._cancel(turn, state, now_ms)
        for waiting in list(self._mailbox):
            run = waiting.command
            if isinstance(run, Run) and run.lane == command.lane and run.turn < floor:
                self._drop_waiting(run.turn, TurnStatus.CANCELLED, None)
        for turn, ended in self._ended.items():
            if ended.lane == command.lane and turn < floor and not ended.void:
                ended.void = True
                self._void(turn)
        self._pump(now_ms)

    def stop(self, turn: int, now_ms: float) -> None:
        """Cancel a turn that waits or runs; what has completed stays."""
        if (state := self._turns.get(turn)) is not None:
            self._cancel(turn, state, now_ms)
        elif self._waits(turn):
            self._drop_waiting(turn, TurnStatus.CANCELLED, None)
            self._pump(now_ms)

    def close(self, command: str | None, now_ms: float) -> None:
        """Cancel everything, then free the session; answered once that is done."""
        if command is not None and command not in self._closers:
            self._closers.append(command)
        if self.state is not SessionState.CLOSING:
            self.state = SessionState.CLOSING
            self._close_by_ms = now_ms + self.limits.cancel_ms
            self._refuse_waiting(SessionStateLost("the session was closed"), now_ms)
            for update in self._input.clear():
                self.act(DiscardPayload(update.payload))
            self.gap_since_ms = None
            self.cancel_turns(now_ms)
        self._finish_closing()

    def cancel_turns(self, now_ms: float) -> None:
        """Cancel every running turn."""
        for turn, state in list(self._turns.items()):
            self._cancel(turn, state, now_ms)

    # What the engine did

    def operation_done(self, event: OperationDone, now_ms: float) -> None:
        """Answer the command whose operation has ended, and go on."""
        command, self._busy = self._busy, None
        if command is None:
            raise ValueError(f"session {event.session} has no operation in progress")
        self.totals.progress += 1
        opening = self.state is SessionState.OPENING
        result = event.result
        if self._resetting and event.error is None:
            result = {**result, "committed_step": 0}
            self._begin_anew()
        self._resetting = False
        self._answer(Answer(self.session, command, event.error, result))
        if self.state is SessionState.CLOSING:
            self._finish_closing()
        elif opening and event.error is not None:
            self.state = SessionState.CLOSED
            self._refuse_waiting(SessionStateLost("the session could not be opened"), now_ms)
        else:
            self.state = SessionState.OPEN
            self._pump(now_ms)

    def output(self, event: Emitted, now_ms: float) -> None:
        """Send a piece of a turn's output, unless its content is no longer wanted."""
        state = self._turns.get(event.turn)
        if state is None or state.cancel_by_ms is not None:
            return
        if self._retention.overfull:
            reason = "the engine made more than is kept for a session: it did not wait for room"
            self.fail_turn(event.turn, CapacityExceeded(reason).info(), now_ms)
            return
        if state.first_output_ms is None:
            state.first_output_ms = now_ms
        state.outputs += 1
        self.totals.progress += 1
        self._keep(event.turn, state.outputs, event.payload, now_ms)
        self._pace()

    def acknowledge(self, command: Acknowledge) -> None:
        """The consumer has taken output: it goes, and paced turns may go on."""
        self._release(self._retention.acknowledge(command.turn, command.through))

    def link_crowded(self, crowded: bool) -> None:
        """The link to the session's owner is crowded, or has room: its turns wait, or go on."""
        if crowded is not self.crowded:
            self.crowded = crowded
            self._pace()

    def replay(self, command: Replay) -> None:
        """Send again what is kept after the cursor, and say what is gone."""
        if self._repeated(command.command):
            return
        replayed = self._retention.replay(command.turn, command.after)
        self._answer(Answer(self.session, command.command, None, {"lost": replayed.lost}))
        for sequence, payload in replayed.pieces:
            self._send_output(command.turn, sequence, payload)
        if (ended := self._ended.get(command.turn)) is not None:
            self.report(self.owner, ended.report)

    def input_taken(self, event: InputTaken) -> None:
        """A turn's queue has room again."""
        state = self._turns.get(event.turn)
        if state is not None:
            state.fed_payloads -= 1
            state.fed_bytes -= event.size

    def fail_turn(self, turn: int, error: ErrorInfo, now_ms: float) -> None:
        """End a running turn with `error`: its engine is stopped first."""
        state = self._turns.get(turn)
        if state is None or state.committing is not None:
            return
        if state.error is None and state.cancel_by_ms is None:
            state.error = error
            self._cancel(turn, state, now_ms)

    def turn_finished(self, event: TurnFinished, now_ms: float) -> None:
        """Say how a turn ended; one that completed is committed first."""
        state = self._turns.get(event.turn)
        if state is None:
            return
        self.totals.progress += 1
        status, error = _ending(state, event)
        if status is TurnStatus.COMPLETED and event.commit is not None:
            state.committing = event
            self.act(CommitTurn(self.session, event.turn, event.commit))
            return
        self._end_started(event.turn, status, error, event.usage, now_ms)

    def turn_committed(self, event: TurnCommitted, now_ms: float) -> None:
        """The completed turn's state has become the session's, or is lost."""
        state = self._turns.get(event.turn)
        if state is None or state.committing is None:
            raise ValueError(f"turn {event.turn} of session {event.session} was not to commit")
        usage = state.committing.usage
        if event.error is None:
            self._end_started(event.turn, TurnStatus.COMPLETED, None, usage, now_ms)
            return
        self._steps.lost = True
        lost = SessionStateLost(f"the turn's state could not be kept: {event.error.message}")
        self._end_started(event.turn, TurnStatus.FAILED, lost.info(), usage, now_ms)

    # Time

    @property
    def deadline_ms(self) -> float | None:
        """When `tick` is due."""
        times = [state.cancel_by_ms for state in self._turns.values()]
        times.append(self._retention.deadline_ms)
        if self.gap_since_ms is not None:
            times.append(self.gap_since_ms + self.limits.gap_ms)
        if self.state is SessionState.CLOSING:
            times.append(self._close_by_ms)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """Give up on what has been waited for, or kept, too long."""
        self._release(self._retention.expire(now_ms))
        for turn, state in list(self._turns.items()):
            if state.cancel_by_ms is not None and now_ms >= state.cancel_by_ms:
                self.act(AbandonTurn(self.session, turn))
                status = TurnStatus.FAILED if state.error else TurnStatus.CANCELLED
                self._end_started(turn, status, state.error, {}, now_ms)
        if self.gap_since_ms is not None and now_ms >= self.gap_since_ms + self.limits.gap_ms:
            self._give_up_gap(now_ms)
        if self.state is SessionState.CLOSING and now_ms >= self._close_by_ms:
            self._busy = None
        self._finish_closing()

    def settle(self) -> None:
        """Say how far input has been applied, if that has changed."""
        if self.unsaid and self.state is not SessionState.CLOSED:
            self.unsaid = False
            self.report(self.owner, ReceivedThrough(self.session, self._input.received))

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self.session,
            self.epoch,
            self.owner,
            self.state.value,
            self._busy,
            tuple((item.barrier, item.command) for item in self._mailbox),
            self._input.freeze(),
            tuple(
                (turn, state.lane, state.outputs, state.cancel_by_ms is not None, state.paced)
                for turn, state in sorted(self._turns.items())
            ),
            tuple(sorted(self._floors.items())),
            tuple(self._answers.items()),
            self._retention.freeze(),
            self._steps.freeze(),
            self.crowded,
        )

    # Inside

    def _pump(self, now_ms: float) -> None:
        """Carry out, in order, what nothing stands before any more."""
        while self._busy is None and self.state in (SessionState.OPENING, SessionState.OPEN):
            head = self._mailbox[0] if self._mailbox else None
            if head is None or self._input.received < head.barrier:
                following = self._input.take()
                if following is None:
                    break
                self.unsaid = True
                self.totals.progress += 1
                self.act(ApplyInput(self.session, following.sequence, following.payload))
                self.gap_since_ms = None
                continue
            if self._must_wait(head.command):
                self._pass_feeds(now_ms)
                break
            self._mailbox.popleft()
            self.totals.waiting -= 1
            self._carry_out(head, now_ms)
        head = self._mailbox[0] if self._mailbox else None
        missing = self._busy is None and (bool(self._input) or head is not None)
        if head is not None and self._input.received >= head.barrier:
            missing = missing and not self._must_wait(head.command)
        if not missing or self.state is SessionState.CLOSING:
            self.gap_since_ms = None
        elif self.gap_since_ms is None:
            self.gap_since_ms = now_ms

    def _must_wait(self, command: Open | Configure | Signal | Run | Feed) -> bool:
        """Whether a step runs whose state the command would change, or move on."""
        if self._steps.running is None:
            return False
        return isinstance(command, Configure | Signal) or (
            isinstance(command, Run) and command.step is not None
        )

    def _pass_feeds(self, now_ms: float) -> None:
        """Hand running turns their input past a command that may wait for their end."""
        waiting, self._mailbox = self._mailbox, deque()
        for item in waiting:
            if isinstance(item.command, Feed) and item.command.turn in self._turns:
                self.totals.waiting -= 1
                self._feed(item.command, now_ms)
            else:
                self._mailbox.append(item)

    def _give_up_gap(self, now_ms: float) -> None:
        """State as lost what is missing before the next held input or waiting command.

        Where nothing is missing (an operation takes too long) the oldest input is lost.
        """
        barrier = self._mailbox[0].barrier if self._mailbox else 0
        first, last, lost = self._input.give_up(barrier)
        if lost is not None:
            self.act(DiscardPayload(lost.payload))
        self.unsaid = True
        self.gap_since_ms = None
        arguments = {"first": first, "last": last}
        self.report(self.owner, StageEvent(self.session, "input_lost", arguments))
        self._pump(now_ms)

    def _carry_out(self, waiting: _Waiting, now_ms: float) -> None:
        match waiting.command:
            case Open(command=command, settings=settings, output=output):
                self._busy = command
                self.act(OpenSession(self.session, self.epoch, settings, self.owner, output))
            case Configure() | Signal() as control if (
                error := self._unusable(control)
            ) is not None:
                self._input.controls += 1
                self._refuse(control, error, now_ms)
            case Configure(command=command, settings=settings):
                self._busy = command
                self._input.controls += 1
                self.act(ConfigureSession(self.session, settings))
            case Signal(command=command, name=name, arguments=arguments):
                self._busy = command
                self._resetting = name == RESET
                self._input.controls += 1
                self.act(SignalSession(self.session, name, arguments))
            case Run() as run:
                self._start(run, waiting.received_ms, now_ms)
            case Feed() as feed:
                self._feed(feed, now_ms)

    def _start(self, run: Run, received_ms: float, now_ms: float) -> None:
        if run.turn < self._floors.get(run.lane, 0):
            self._end_unstarted(run, TurnStatus.CANCELLED, None)
        elif (lost := self._steps.unusable()) is not None:
            self._refuse(run, lost, now_ms)
        elif run.step is not None and run.step != self._steps.committed + 1:
            self._answer_again(run, now_ms)
        elif len(self._turns) >= self.limits.turns_per_session:
            self._refuse(run, CapacityExceeded("too many turns run in this session"), now_ms)
        elif self.totals.turns >= self.limits.turns:
            self._refuse(run, CapacityExceeded("too many turns run on this worker"), now_ms)
        else:
            self._turns[run.turn] = _Turn(
                run.lane, received_ms, now_ms, not run.last, step=run.step
            )
            if run.step is not None:
                self._steps.begin(run.step, run.turn)
            self.totals.turns += 1
            self.act(
                StartTurn(
                    self.session,
                    self.epoch,
                    run.turn,
                    run.lane,
                    run.parameters,
                    run.inputs,
                    run.last,
                    run.readers,
                    run.to_client,
                    run.step,
                )
            )
            self._pace()

    def _answer_again(self, run: Run, now_ms: float) -> None:
        """Answer a step that is not the next: as it was answered, or with the reason."""
        assert run.step is not None
        found = next(((t, e) for t, e in self._ended.items() if e.step == run.step), None)
        if found is None:
            self._refuse(run, self._steps.refusal(run.step), now_ms)
            return
        earlier, ended = found
        kept = self._retention.replay(earlier, 0)
        if ended.void or kept.lost:
            self._refuse(run, self._steps.refusal(run.step), now_ms)
            return
        self._discard(run)
        self._void(earlier)
        ended.step, ended.void = None, True
        self.act(RepeatTurn(self.session, run.turn, run.readers, run.to_client))
        for sequence, payload in kept.pieces:
            self._keep(run.turn, sequence, payload, now_ms)
        report = replace(ended.report, turn=run.turn, committed_step=self._steps.committed)
        self._turn_ended(report, run.lane, void=False, step=run.step)

    def _begin_anew(self) -> None:
        """The engine's state is as at its open: no earlier step is one of it."""
        self._steps.reset()
        for ended in self._ended.values():
            ended.step = None

    def _unusable(self, control: Configure | Signal) -> AntiphonError | None:
        """Why a command cannot act on the state; a reset needs none."""
        if isinstance(control, Signal) and control.name == RESET:
            return None
        return self._steps.unusable()

    def _keep(self, turn: int, sequence: int, payload: Payload, now_ms: float) -> None:
        """Keep a piece of output until it is acknowledged, and send it."""
        size = len(payload.data)
        self._retention.keep(turn, sequence, size, (sequence, payload), now_ms)
        self.totals.kept_bytes += size
        self._send_output(turn, sequence, payload)

    def _feed(self, feed: Feed, now_ms: float) -> None:
        state = self._turns.get(feed.turn)
        if state is None or not state.open_input or state.cancel_by_ms is not None:
            self._discard(feed)
            return
        state.open_input = not feed.last
        if feed.payload is not None:
            state.fed_payloads += 1
            state.fed_bytes += feed.payload.size_bytes
            if (
                state.fed_payloads > self.limits.fed_payloads
                or state.fed_bytes > self.limits.fed_bytes
            ):
                self._refuse(feed, CapacityExceeded("the turn's input queue is full"), now_ms)
                return
        self.act(FeedTurn(self.session, feed.turn, feed.payload, feed.last))

    def _send_output(self, turn: int, sequence: int, payload: Payload) -> None:
        self.send_output(SendOutput(self.owner, self.session, turn, sequence, payload))

    def _release(self, gone: list[tuple[int, Payload]]) -> None:
        self.totals.kept_bytes -= sum(len(payload.data) for _, payload in gone)
        if gone:
            self._pace()

    def _void(self, turn: int) -> None:
        """None of the ended turn's output is wanted any more."""
        self._release(self._retention.forget(turn))
        self.act(VoidTurn(self.session, turn))

    def _pace(self) -> None:
        """Let the session's turns make more, or wait, as retention and the link have room."""
        wait = self._retention.full or self.crowded
        for turn, state in self._turns.items():
            if state.paced is not wait:
                state.paced = wait
                self.act(PaceTurn(self.session, turn, wait))

    def _cancel(self, turn: int, state: _Turn, now_ms: float) -> None:
        if state.cancel_by_ms is None and state.committing is None:
            state.cancel_by_ms = now_ms + self.limits.cancel_ms
            self._release(self._retention.forget(turn))
            self.act(CancelTurn(self.session, turn))

    def _waits(self, turn: int) -> bool:
        return any(isinstance(w.command, Run) and w.command.turn == turn for w in self._mailbox)

    def _drop_waiting(self, turn: int, status: TurnStatus, error: ErrorInfo | None) -> None:
        """End a turn that waits to be started, with what was fed to it already."""
        waiting, self._mailbox = self._mailbox, deque()
        for item in waiting:
            match item.command:
                case Run(turn=number) as run if number == turn:
                    self._end_unstarted(run, status, error)
                case Feed(turn=number) as feed if number == turn:
                    self._discard(feed)
                case _:
                    self._mailbox.append(item)
        self.totals.waiting -= len(waiting) - len(self._mailbox)

    def _refuse_waiting(self, error: AntiphonError, now_ms: float) -> None:
        waiting, self._mailbox = self._mailbox, deque()
        self.totals.waiting -= len(waiting)
        closing = self.state is SessionState.CLOSING
        for item in waiting:
            match item.command:
                case Run() as run if closing:
                    self._end_unstarted(run, TurnStatus.CANCELLED, None)
                case Feed() as feed if closing:
                    self._discard(feed)
                case command:
                    self._refuse(command, error, now_ms)

    def _refuse(
        self,
        command: Open | Configure | Signal | Run | Feed,
        error: AntiphonError,
        now_ms: float,
    ) -> None:
        match command:
            case Run():
                self._end_unstarted(command, TurnStatus.FAILED, error.info())
            case Feed():
                # A turn that lacks one piece of its input must not go on without it.
                self._discard(command)
                if self._waits(command.turn):
                    self._drop_waiting(command.turn, TurnStatus.FAILED, error.info())
                else:
                    self.fail_turn(command.turn, error.info(), now_ms)
            case _:
                self._answer(Answer(self.session, command.command, error.info()))

    def _discard(self, command: Run | Feed) -> None:
        for payload in payloads_of(command):
            self.act(DiscardPayload(payload))

    def _end_unstarted(self, run: Run, status: TurnStatus, error: ErrorInfo | None) -> None:
        self._discard(run)
        committed = None if run.step is None else self._steps.committed
        ended = TurnEnded(self.session, run.turn, status, error, committed_step=committed)
        self._turn_ended(ended, run.lane, void=True)

    def _end_started(
        self,
        turn: int,
        status: TurnStatus,
        error: ErrorInfo | None,
        usage: dict[str, Any],
        now_ms: float,
    ) -> None:
        """Say a running turn's last word; what waited for its end goes on."""
        state = self._turns.pop(turn)
        self.totals.turns -= 1
        self._steps.end(turn)
        answered = state.step if status is TurnStatus.COMPLETED else None
        if answered is not None:
            self._steps.commit()
        committed = None if state.step is None else self._steps.committed
        timeline = {
            "received": 0.0,
            "queued": 0.0,
            "started": state.started_ms - state.received_ms,
            "done": now_ms - state.received_ms,
        }
        if state.first_output_ms is not None:
            timeline["first_output"] = state.first_output_ms - state.received_ms
        ended = TurnEnded(self.session, turn, status, error, usage, timeline, committed)
        void = state.cancel_by_ms is not None
        if not void and turn < self._floors.get(state.lane, 0):
            # Its floor was raised when it was too late to cancel it.
            void = True
            self._void(turn)
        self._turn_ended(ended, state.lane, void=void, step=answered)
        self._pump(now_ms)
        self._finish_closing()

    def _turn_ended(
        self, ended: TurnEnded, lane: str, *, void: bool, step: int | None = None
    ) -> None:
        self._ended[ended.turn] = _Ended(ended, lane, void, step)
        self.report(self.owner, ended)
        if len(self._ended) > self.limits.remembered_turns:
            oldest, _ = self._ended.popitem(last=False)
            self._release(self._retention.forget(oldest))

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
        if self.state is not SessionState.CLOSING or self._turns or self._busy is not None:
            return
        self.state = SessionState.CLOSED
        self._release(self._retention.clear())
        self.act(FreeSession(self.session))
        for command in self._closers:
            self.report(self.owner, Answer(self.session, command))


def payloads_of(command: Command) -> list[Descriptor]:
    """What a command brings, and what is to be given back where it is not carried out."""
    match command:
        case Run(inputs=inputs):
            return inputs
        case Update(payload=payload) | Feed(payload=payload) if payload is not None:
            return [payload]
    return []


def _ending(state: _Turn, event: TurnFinished) -> tuple[TurnStatus, ErrorInfo | None]:
    if state.error is not None:
        return TurnStatus.FAILED, state.error
    if state.cancel_by_ms is not None:
        return TurnStatus.CANCELLED, None
    match event.outcome:
        case TurnOutcome.COMPLETED:
            return TurnStatus.COMPLETED, None
        case TurnOutcome.CANCELLED:
            return TurnStatus.FAILED, EngineFailed("the engine gave the turn up").info()
        case TurnOutcome.FAILED:
            return TurnStatus.FAILED, event.error or EngineFailed("the engine failed").info()
