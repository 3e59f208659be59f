"""The turns of one session on one worker: what runs, what it makes, how it ends.

Output is kept until its consumer has acknowledged it; what ended is remembered, so that it
can be told again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
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
    Acknowledge,
    Command,
    Feed,
    Report,
    Run,
    TurnEnded,
    TurnStatus,
    Update,
)
from protocol.payloads import Payload
from sessions.deadlines import earliest
from sessions.ledger import Ledger
from workers.control_events import (
    AbandonTurn,
    Action,
    CancelTurn,
    CommitTurn,
    ControlLimits,
    DiscardPayload,
    Emitted,
    FeedTurn,
    InputTaken,
    PaceTurn,
    RepeatTurn,
    StartTurn,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
    VoidTurn,
)
from workers.ended_turns import EndedTurn, EndedTurns
from workers.retention import Replayed, Retention
from workers.step_order import StepOrder


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
class Totals:
    """Counts over all sessions of the worker, for its bounds and its status."""

    turns: int = 0
    waiting: int = 0
    progress: int = 0


class TurnControl:
    """The turns of one session, running and ended, with their output and their steps.

    `report` and `send_output` go to whoever owns the session now. `ended` is called after the
    last word about a turn that ran, with whether it may have changed the session's state: what
    waited for it may go on.
    """

    def __init__(
        self,
        session: str,
        limits: ControlLimits,
        totals: Totals,
        ledger: Ledger,
        act: Callable[[Action], None],
        report: Callable[[Report], None],
        send_output: Callable[[int, int, Payload], None],
        ended: Callable[[bool, float], None],
    ) -> None:
        self.session = session
        self.limits = limits
        self.totals = totals
        self._ledger = ledger
        self.act = act
        self.report = report
        self.crowded = False
        """Whether the link to the session's owner has no room."""
        self.steps = StepOrder()
        self._send_output = send_output
        self._on_ended = ended
        self._turns: dict[int, _Turn] = {}
        self._ended = EndedTurns(limits.remembered_turns)
        self._floors: OrderedDict[str, int] = OrderedDict()
        self._retention: Retention[tuple[int, Payload]] = Retention(limits.retention)

    def __bool__(self) -> bool:
        return bool(self._turns)

    @property
    def kept_bytes(self) -> int:
        """Output of the session that has not been acknowledged."""
        return self._retention.bytes

    def runs(self, turn: int) -> bool:
        """Whether this turn is running."""
        return turn in self._turns

    def knows(self, turn: int) -> bool:
        """Whether this turn runs, or has ended not long ago."""
        return turn in self._turns or turn in self._ended

    # Begin

    def start(self, run: Run, epoch: int, received_ms: float, now_ms: float) -> None:
        """Run a turn, or end it at once with the reason why not."""
        if run.turn < self._floors.get(run.lane, 0):
            self.end_unstarted(run, TurnStatus.CANCELLED, None)
        elif (lost := self.steps.unusable()) is not None:
            self.refuse(run, lost)
        elif run.step is not None and run.step != self.steps.committed + 1:
            self._answer_again(run, now_ms)
        elif len(self._turns) >= self.limits.turns_per_session:
            self.refuse(run, CapacityExceeded("too many turns run in this session"))
        elif self.totals.turns >= self.limits.turns:
            self.refuse(run, CapacityExceeded("too many turns run on this worker"))
        else:
            self._turns[run.turn] = _Turn(
                run.lane, received_ms, now_ms, not run.last, step=run.step
            )
            if run.step is not None:
                self.steps.begin(run.step, run.turn)
            self.totals.turns += 1
            self.act(
                StartTurn(
                    self.session,
                    epoch,
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

    def feed(self, feed: Feed, now_ms: float) -> None:
        """Give a running turn more input; a turn that lacks a piece of it cannot be completed."""
        state = self._turns.get(feed.turn)
        if state is None or not state.open_input or state.cancel_by_ms is not None:
            self.discard(feed)
            return
        state.open_input = not feed.last
        if feed.payload is not None:
            state.fed_payloads += 1
            state.fed_bytes += feed.payload.size_bytes
            if (
                state.fed_payloads > self.limits.fed_payloads
                or state.fed_bytes > self.limits.fed_bytes
            ):
                self.discard(feed)
                error = CapacityExceeded("the turn's input queue is full")
                self.fail_turn(feed.turn, error.info(), now_ms)
                return
        self.act(FeedTurn(self.session, feed.turn, feed.payload, feed.last))

    def _answer_again(self, run: Run, now_ms: float) -> None:
        """Answer a step that is not the next: as it was answered, or with the reason."""
        assert run.step is not None
        ended = self._ended.answer_to(run.step)
        if ended is None:
            self.refuse(run, self.steps.refusal(run.step))
            return
        earlier = ended.report.turn
        kept = self._retention.replay(earlier, 0)
        if ended.void or kept.lost:
            self.refuse(run, self.steps.refusal(run.step))
            return
        self.discard(run)
        self._void(earlier)
        ended.step, ended.void = None, True
        self.act(RepeatTurn(self.session, run.turn, run.readers, run.to_client))
        for sequence, payload in kept.pieces:
            self._keep(run.turn, sequence, payload, now_ms)
        report = replace(ended.report, turn=run.turn, committed_step=self.steps.committed)
        self._turn_ended(report, run.lane, void=False, step=run.step)

    def go_back(self, step: int) -> None:
        """The engine's state is the one after `step`: no later step is one of it."""
        self.steps.go_back(step)
        self._ended.go_back(step)

    # Floors

    def raise_floor(self, lane: str, floor: int, now_ms: float) -> int:
        """Cancel the lane's turns below the floor and void what ended; the floor as it is."""
        floor = max(floor, self._floors.get(lane, 0))
        self._floors[lane] = floor
        self._floors.move_to_end(lane)
        if len(self._floors) > self.limits.lanes:
            self._floors.popitem(last=False)
        for turn, state in list(self._turns.items()):
            if state.lane == lane and turn < floor:
                self._cancel(turn, state, now_ms)
        for turn in self._ended.void_below(lane, floor):
            self._void(turn)
        return floor

    def cancel(self, turn: int, now_ms: float) -> None:
        """Stop a running turn; what has completed stays."""
        self._cancel(turn, self._turns[turn], now_ms)

    def cancel_all(self, now_ms: float) -> None:
        """Stop every running turn."""
        for turn, state in list(self._turns.items()):
            self._cancel(turn, state, now_ms)

    # What the engine did, and what becomes of it

    def output(self, event: Emitted, now_ms: float) -> None:
        """Send a piece of a turn's output, unless its content is no longer wanted."""
        state = self._turns.get(event.turn)
        if state is None or state.cancel_by_ms is not None:
            return
        if self._retention.overfull:
            reason = "the engine made more than is kept for a session: it did not wait for room"
            self.fail_turn(event.turn, CapacityExceeded(reason).info(), now_ms)
            return
        if not self._ledger.has_room(self._size(event.payload)):
            reason = "the worker's memory budget has no room for more output"
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

    def replay(self, turn: int, after: int) -> Replayed[tuple[int, Payload]]:
        """What is kept of a turn's output after a cursor, to be told again."""
        return self._retention.replay(turn, after)

    def tell_again(self, turn: int, replayed: Replayed[tuple[int, Payload]]) -> None:
        """Send output again, and the turn's last word if it has ended."""
        for sequence, payload in replayed.pieces:
            self._send_output(turn, sequence, payload)
        if (report := self._ended.report(turn)) is not None:
            self.report(report)

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
        self.steps.lost = True
        lost = SessionStateLost(f"the turn's state could not be kept: {event.error.message}")
        self._end_started(event.turn, TurnStatus.FAILED, lost.info(), usage, now_ms)

    # Time

    @property
    def deadline_ms(self) -> float | None:
        """When `tick` is due."""
        first_ms = self._retention.deadline_ms
        for state in self._turns.values():
            first_ms = earliest(first_ms, state.cancel_by_ms)
        return first_ms

    def tick(self, now_ms: float) -> None:
        """Give up on engines that did not stop, and on output that was kept too long."""
        self._release(self._retention.expire(now_ms))
        for turn, state in list(self._turns.items()):
            if state.cancel_by_ms is not None and now_ms >= state.cancel_by_ms:
                self.act(AbandonTurn(self.session, turn))
                status = TurnStatus.FAILED if state.error else TurnStatus.CANCELLED
                self._end_started(turn, status, state.error, {}, now_ms)

    def clear(self) -> None:
        """The session is over: nothing is kept."""
        self._release(self._retention.clear())

    # Ends

    def refuse(self, run: Run, error: AntiphonError) -> None:
        """Say that a turn does not run, and why."""
        self.end_unstarted(run, TurnStatus.FAILED, error.info())

    def end_unstarted(self, run: Run, status: TurnStatus, error: ErrorInfo | None) -> None:
        """Say the last word about a turn that never ran."""
        self.discard(run)
        committed = None if run.step is None else self.steps.committed
        ended = TurnEnded(self.session, run.turn, status, error, committed_step=committed)
        self._turn_ended(ended, run.lane, void=True)

    def discard(self, command: Run | Feed) -> None:
        """Give back what came with a command."""
        for payload in payloads_of(command):
            self.act(DiscardPayload(payload))

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
        self.steps.end(turn)
        answered = state.step if status is TurnStatus.COMPLETED else None
        if answered is not None:
            self.steps.commit()
        committed = None if state.step is None else self.steps.committed
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
        self._on_ended(state.step is None or answered is not None, now_ms)

    def _turn_ended(
        self, ended: TurnEnded, lane: str, *, void: bool, step: int | None = None
    ) -> None:
        forgotten = self._ended.remember(EndedTurn(ended, lane, void, step))
        self.report(ended)
        if forgotten is not None:
            self._release(self._retention.forget(forgotten))

    def _keep(self, turn: int, sequence: int, payload: Payload, now_ms: float) -> None:
        """Keep a piece of output until it is acknowledged, and send it."""
        self._retention.keep(turn, sequence, len(payload.data), (sequence, payload), now_ms)
        self._ledger.keep(self._size(payload))
        self._send_output(turn, sequence, payload)

    def _release(self, gone: list[tuple[int, Payload]]) -> None:
        self._ledger.drop(sum(self._size(payload) for _, payload in gone))
        if gone:
            self._pace()

    def _size(self, payload: Payload) -> int:
        """The memory, in bytes, that a kept piece takes."""
        size = len(payload.data)
        return 2 * size if size > self.limits.twice_over_bytes else size

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

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple(
                (
                    turn,
                    state.lane,
                    state.outputs,
                    (state.open_input, state.fed_payloads, state.fed_bytes),
                    state.cancel_by_ms,
                    state.paced,
                    state.error,
                    state.step,
                    state.committing is not None,
                )
                for turn, state in sorted(self._turns.items())
            ),
            self._ended.freeze(),
            tuple(sorted(self._floors.items())),
            self._retention.freeze(),
            self.steps.freeze(),
            self.crowded,
        )


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
