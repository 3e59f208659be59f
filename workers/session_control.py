"""The control side of one session on one worker: its mailbox, its input, its answers.

A plain state machine: commands whose fence has been checked come in, actions go out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorInfo,
    SessionStateLost,
)
from protocol.messages import (
    RESET,
    Answer,
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
    TurnStatus,
    Update,
)
from protocol.payloads import Payload
from workers.control_events import (
    Action,
    ApplyInput,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    FreeSession,
    OpenSession,
    OperationDone,
    SendOutput,
    SignalSession,
)
from workers.input_order import InputOrder
from workers.turn_control import Totals, TurnControl


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
    unsaid: bool = False
    gap_since_ms: float | None = None
    _busy: str | None = None
    _resetting: bool = False
    _mailbox: deque[_Waiting] = field(default_factory=deque)
    _input: InputOrder = field(default_factory=InputOrder)
    _answers: OrderedDict[str, Answer | None] = field(default_factory=OrderedDict)
    _closers: list[str] = field(default_factory=list)
    _close_by_ms: float = 0.0

    def __post_init__(self) -> None:
        self.turns = TurnControl(
            self.session,
            self.limits,
            self.totals,
            self.act,
            report=self._tell,
            send_output=self._send_output,
            ended=self._turn_over,
        )

    # Commands

    def command(self, command: Open | Configure | Signal | Run | Feed, now_ms: float) -> None:
        """Take a command into the mailbox and carry out what can be."""
        if isinstance(command, Open | Configure | Signal) and self._repeated(command.command):
            return
        if isinstance(command, Run) and (
            self.turns.knows(command.turn) or self._waits(command.turn)
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
        floor = self.turns.raise_floor(command.lane, command.floor, now_ms)
        for waiting in list(self._mailbox):
            run = waiting.command
            if isinstance(run, Run) and run.lane == command.lane and run.turn < floor:
                self._drop_waiting(run.turn, TurnStatus.CANCELLED, None)
        self._pump(now_ms)

    def stop(self, turn: int, now_ms: float) -> None:
        """Cancel a turn that waits or runs; what has completed stays."""
        if self.turns.runs(turn):
            self.turns.cancel(turn, now_ms)
        elif self._waits(turn):
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
        if command is not None and command not in self._closers:
            self._closers.append(command)
        if self.state is not SessionState.CLOSING:
            self.state = SessionState.CLOSING
            self._close_by_ms = now_ms + self.limits.cancel_ms
            self._refuse_waiting(SessionStateLost("the session was closed"), now_ms)
            for update in self._input.clear():
                self.act(DiscardPayload(update.payload))
            self.gap_since_ms = None
            self.turns.cancel_all(now_ms)
        self._finish_closing()

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
            self.turns.begin_anew()
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

    # Time

    @property
    def deadline_ms(self) -> float | None:
        """When `tick` is due."""
        times = [self.turns.deadline_ms]
        if self.gap_since_ms is not None:
            times.append(self.gap_since_ms + self.limits.gap_ms)
        if self.state is SessionState.CLOSING:
            times.append(self._close_by_ms)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """Give up on what has been waited for, or kept, too long."""
        self.turns.tick(now_ms)
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
            self._close_by_ms if self.state is SessionState.CLOSING else None,
            tuple(self._closers),
            (self._busy, self._resetting),
            (self.unsaid, self.gap_since_ms),
            tuple((item.barrier, item.command) for item in self._mailbox),
            self._input.freeze(),
            tuple(self._answers.items()),
            self.turns.freeze(),
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
        if self.turns.steps.running is None:
            return False
        return isinstance(command, Configure | Signal) or (
            isinstance(command, Run) and command.step is not None
        )

    def _pass_feeds(self, now_ms: float) -> None:
        """Hand running turns their input past a command that may wait for their end."""
        waiting, self._mailbox = self._mailbox, deque()
        for item in waiting:
            if isinstance(item.command, Feed) and self.turns.runs(item.command.turn):
                self.totals.waiting -= 1
                self.turns.feed(item.command, now_ms)
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
                self.turns.start(run, self.epoch, waiting.received_ms, now_ms)
            case Feed() as feed:
                self.turns.feed(feed, now_ms)

    def _unusable(self, control: Configure | Signal) -> AntiphonError | None:
        """Why a command cannot act on the state; a reset needs none."""
        if isinstance(control, Signal) and control.name == RESET:
            return None
        return self.turns.steps.unusable()

    def _waits(self, turn: int) -> bool:
        return any(isinstance(w.command, Run) and w.command.turn == turn for w in self._mailbox)

    def _drop_waiting(self, turn: int, status: TurnStatus, error: ErrorInfo | None) -> None:
        """End a turn that waits to be started, with what was fed to it already."""
        waiting, self._mailbox = self._mailbox, deque()
        for item in waiting:
            match item.command:
                case Run(turn=number) as run if number == turn:
                    self.turns.end_unstarted(run, status, error)
                case Feed(turn=number) as feed if number == turn:
                    self.turns.discard(feed)
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
                    self.turns.end_unstarted(run, TurnStatus.CANCELLED, None)
                case Feed() as feed if closing:
                    self.turns.discard(feed)
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
                self.turns.refuse(command, error)
            case Feed():
                # A turn that lacks one piece of its input must not go on without it.
                self.turns.discard(command)
                if self._waits(command.turn):
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
        self.state = SessionState.CLOSED
        self.turns.clear()
        self.act(FreeSession(self.session))
        for command in self._closers:
            self.report(self.owner, Answer(self.session, command))

    def _turn_over(self, now_ms: float) -> None:
        self._pump(now_ms)
        self._finish_closing()

    def _tell(self, report: Report) -> None:
        self.report(self.owner, report)

    def _send_output(self, turn: int, sequence: int, payload: Payload) -> None:
        self.send_output(SendOutput(self.owner, self.session, turn, sequence, payload))
