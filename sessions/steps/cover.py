"""What stands in for a fresh answer: when one is due, what is given instead, and until when.

A robot that asks in time is answered in time, whatever its worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.errors import DeadlineMissed, ErrorInfo, ErrorKind
from protocol.payloads import Payload
from sessions.actions import NotFresh
from sessions.pipeline import Kind, Pipeline
from sessions.steps.events import (
    NEXT,
    EmergencyStopped,
    Reason,
    Reset,
    SafeAction,
    Step,
    StepOutput,
    StoppedBy,
    StopReleased,
)
from sessions.steps.refusals import stopped
from sessions.steps.safe_action import SafeActions


class Cover:
    """The deadline, the safe action and the emergency stop of one loop. Times are monotonic ms."""

    def __init__(
        self,
        pipeline: Pipeline,
        emit: Callable[[StepOutput], None],
        measured: Callable[[NotFresh], None],
    ) -> None:
        self._robot = pipeline.kind is Kind.ROBOT
        self._within_ms = pipeline.control.deadline_ms
        self._restore_ms = pipeline.limits.restore_ms
        self._safe = SafeActions(pipeline.control)
        self._emit = emit
        self._measured = measured
        self._stops = {StoppedBy(hold) for hold in pipeline.control.stopped}
        self._stopped_ms = 0.0
        """When the client said its last stop."""
        self._worker_lost = False
        """Whether the state's stage has lost its worker, and has no other yet."""
        self._lost_ms: float | None = None
        """When the state was lost; None: it was not."""
        self._lost_told = False
        """Whether that has been answered with a safe action."""

    @property
    def stopped(self) -> bool:
        """Whether nothing is to run."""
        return bool(self._stops)

    def due_ms(self, verb: Step | Reset) -> float | None:
        """When the answer to a verb is due; None: it may take as long as it likes, as the first
        fresh one may always."""
        if self._within_ms is None or verb.since_ms is None or not self._safe.armed:
            return None
        return verb.since_ms + self._within_ms

    def given(self, outputs: Mapping[str, list[Payload]], now_ms: float) -> None:
        """The robot gets this, fresh. Raises EngineFailed where the safe action does not fit."""
        if self._robot:
            self._safe.given(outputs, now_ms)

    def answer(
        self,
        verb: Step | Reset,
        reason: Reason,
        committed: int,
        now_ms: float,
        *,
        in_flight: bool = False,
    ) -> bool:
        """Answer a verb with the safe action; False where there is none."""
        outputs = self._safe.make(now_ms)
        due_ms = self.due_ms(verb)
        late = due_ms is not None and due_ms <= now_ms
        self._measured(NotFresh(reason, outputs is not None, late))
        if outputs is None:
            return False
        step = verb.step if isinstance(verb, Step) else NEXT
        self._emit(SafeAction(step, committed, reason, outputs, in_flight, verb.ref))
        if reason is Reason.STATE_LOST:
            self._lost_told = True
        return True

    # Why

    def why_late(self) -> Reason:
        """Why there is nothing fresh at a deadline."""
        if self.stopped:
            return Reason.STOPPED
        return Reason.WORKER_LOST if self._worker_lost else Reason.LATE

    def why_failed(self, error: ErrorInfo, now_ms: float) -> Reason | None:
        """Why a step that failed is answered with the safe action; None: with its error, as
        what the client has done wrong is."""
        if error.code == DeadlineMissed.code:
            return Reason.LATE
        if error.kind is ErrorKind.LOST:
            if self._lost_ms is None:
                return Reason.WORKER_LOST
            return Reason.STATE_LOST if self.covers_loss(now_ms) else None
        return Reason.FAILED if error.kind is ErrorKind.SERVER else None

    # What is lost

    def worker(self, lost: bool) -> None:
        """The worker that keeps the state is gone, or there is one again."""
        self._worker_lost = lost

    def state_lost(self, now_ms: float) -> None:
        """The state is gone until it begins anew or is restored."""
        if self._lost_ms is None:
            self._lost_ms = now_ms

    def state_found(self) -> None:
        """The state is what it is said to be."""
        self._lost_ms = None
        self._lost_told = False

    def covers_loss(self, now_ms: float) -> bool:
        """Whether the safe action is given although the state is lost: once in any case, and as
        long as a turn would wait for a worker, without which nothing begins anew."""
        assert self._lost_ms is not None
        waits = self._worker_lost and now_ms < self._lost_ms + self._restore_ms
        return waits or not self._lost_told

    # Emergency stop

    def stop(self, by: StoppedBy, now_ms: float) -> None:
        """Nothing fresh is given from here on."""
        if by is StoppedBy.CLIENT:
            self._stopped_ms = now_ms
        if not self._stops:
            self._emit(EmergencyStopped(by.told))
        self._stops.add(by)

    def outdated(self, said_ms: float | None) -> bool:
        """Whether what was said then came before the client's stop, which therefore holds."""
        return (
            said_ms is not None and StoppedBy.CLIENT in self._stops and said_ms <= self._stopped_ms
        )

    def release(self, by: StoppedBy, said_ms: float | None) -> None:
        """Let go of one hold, and of the client's with the operator's of this session.

        Raises InvalidRequest for a client's while an operator's stop holds, and for what was said
        before the stop.
        """
        if self.outdated(said_ms):
            raise stopped("an emergency stop was sent after it")
        if by is StoppedBy.CLIENT and self._stops - {StoppedBy.CLIENT}:
            raise stopped("an operator has stopped the session")
        released = {by}
        if by is StoppedBy.OPERATOR:
            released.add(StoppedBy.CLIENT)
        self._let_go(released)

    def begun_anew(self) -> None:
        """The loop was reset: that lets a client's stop go."""
        self._let_go({StoppedBy.CLIENT})

    def _let_go(self, released: set[StoppedBy]) -> None:
        if self._stops and self._stops <= released:
            self._emit(StopReleased())
        self._stops -= released

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self._safe.freeze(),
            tuple(sorted(self._stops)),
            self._worker_lost,
            self._lost_ms is not None,
            self._lost_told,
        )
