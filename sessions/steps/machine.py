"""The machine of a step loop: a world's rollout, a robot's control.

One step is in flight at a time, and its output reaches the client only with the answer
that it is committed. What is committed is the worker's to say; this machine repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, assert_never

import msgspec

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    EngineFailed,
    ErrorInfo,
    InvalidRequest,
    SessionStateLost,
)
from protocol.messages import Answer, Report, TurnEnded
from sessions.actions import NotFresh, StageProduced, TurnMeasured
from sessions.bindings import Binding
from sessions.client import Refused
from sessions.client_pace import ClientPace
from sessions.flow import FlowEnded, FlowEvent, Produced
from sessions.lanes import DEFAULT_LANE, Lanes
from sessions.lifecycle import CloseReason
from sessions.orchestrator import Orchestrator
from sessions.passed_on import check_inputs, check_parameters
from sessions.pipeline import Pipeline, StepRoles
from sessions.steps.answers import Answers
from sessions.steps.changes import Changes, StateVerb
from sessions.steps.cover import Cover
from sessions.steps.events import (
    NEXT,
    ActionsReleased,
    Checkpoint,
    CheckpointKept,
    EmergencyStop,
    Interrupt,
    Reason,
    ReleaseActions,
    ReleaseStop,
    Reset,
    Restore,
    Rewind,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    StepOutput,
    StepSnapshot,
    StepVerb,
    StoppedBy,
    WasReset,
    WasRestored,
    WasRewound,
)
from sessions.steps.flight import Flight, cancelled, dropped
from sessions.steps.refusals import (
    deadline_missed,
    misplaced,
    nothing_to_restore,
    state_lost,
    stopped,
    superseded,
)


class StepMachine:
    """The loop of one session. Times are monotonic ms.

    The settings given with the open go to the stage that keeps the state.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        bindings: Mapping[str, Binding],
        emit: Callable[[StepOutput], None],
        measured: Callable[[TurnMeasured | NotFresh], None],
        progress: Callable[[], None],
        settings_changed: Callable[[], None],
        new_id: Callable[[str], str],
    ) -> None:
        self._pipeline = pipeline
        self._roles = StepRoles.of(pipeline)
        self._bindings = bindings
        self._emit = emit
        self._measured = measured
        self._progress = progress
        self._lanes = Lanes()
        self._orchestrator = Orchestrator(pipeline, bindings, self._lanes, self._flow)
        self._settings: dict[str, Any] = {}
        """Those of the open, which a new worker begins with."""
        self._replaced: dict[str, Any] = {}
        """What the last reset has put in their place."""
        self._answers = Answers()
        self._committed = 0
        self._lost = False
        self._restorable: int | None = None
        """Of a state that is lost: the step that the worker holds, or is about to."""
        self._lost_why: str | None = None
        self._in_doubt = False
        """Whether what is stored may be from before a reset or a rewind, or from after it."""
        self._as_opened = True
        """Whether the state after step 0 is what a new worker opens the session with."""
        self._flight: Flight | None = None
        self._waiting: Step | None = None
        """The step that follows the one in flight, whatever becomes of that."""
        self._cover = Cover(pipeline, emit, measured)
        self._changes = Changes(
            lambda: bindings[self._roles.state], pipeline.limits.restore_ms, emit
        )
        self._pace = ClientPace(pipeline.limits.stall_ms)
        self._owed: dict[int, None] = {}
        """Steps whose answers wait for a client that does not read."""
        self._now_ms = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """The effective settings: those of the open, with what the last reset said."""
        return {**self._settings, **self._replaced}

    @property
    def working(self) -> bool:
        """Whether a step is in flight, or a change of the state under way."""
        return self._flight is not None or self._changes.verb is not None

    @property
    def finished(self) -> bool:
        """A loop goes on until somebody ends it."""
        return False

    def facts(self) -> dict[str, Any]:
        """The last step that is committed, and the last one that is in the store; those that are
        kept; whether the state is lost, and which could be restored, and whether it is stopped."""
        facts: dict[str, Any] = {"committed_step": self._committed}
        if self._pipeline.durable:
            facts["restorable_step"] = self._bindings[self._roles.state].restorable_step
        if kept := self._kept:
            facts["kept"] = kept
        if self._lost:
            facts |= {"lost": True, "restorable_step": self._restorable}
        if self._cover.stopped:
            facts["stopped"] = True
        return facts

    def snapshot(self) -> StepSnapshot:
        """Where the loop stands."""
        step = None if self._flight is None else self._flight.verb.step
        stands = (self._committed, self._lost, step, self._restorable)
        return StepSnapshot(*stands, stopped=self._cover.stopped, kept=tuple(self._kept))

    @property
    def _kept(self) -> list[int]:
        """The steps to which a rewind leads."""
        return [] if self._lost else list(self._bindings[self._roles.state].kept_steps)

    def stage_settings(self, stage: str) -> dict[str, Any]:
        """The settings with which `stage` opens its part of this session."""
        return self._settings if stage == self._roles.state else {}

    def prepare(self, patch: dict[str, Any]) -> None:
        """Settings given with the open; the engine says which there are.

        Raises InvalidRequest when they are too long.
        """
        settings = {**self._settings, **patch}
        check_parameters(settings, "settings")
        self._settings = settings

    # Verbs

    def client(self, verb: StepVerb, now_ms: float) -> dict[str, Any]:
        """Take a verb up: what comes of it is told by an output of its own.

        Raises AntiphonError, and then everything is as it was.
        """
        self._now_ms = now_ms
        match verb:
            case Step():
                self._step(verb)
            case Interrupt():
                self._interrupt()
            case Reset():
                self._reset(verb)
            case Restore(ref=ref):
                self._restore(ref)
            case Checkpoint() | Rewind() | ReleaseActions():
                self._change(verb)
            case EmergencyStop(by=by):
                self._emergency_stop(by)
            case ReleaseStop(by=by, said_ms=said_ms):
                self._cover.release(by, said_ms)
            case _:
                assert_never(verb)
        self._settle()
        return {}

    def refusal(self, verb: StepVerb, error: ErrorInfo) -> StepOutput:
        """How a verb that was not carried out is answered."""
        if isinstance(verb, Step):
            return StepFailed(verb.step, self._committed, error, verb.ref)
        return Refused(error, verb.ref)

    def _step(self, verb: Step, *, waited: bool = False) -> None:
        flight = self._flight
        if flight is not None and verb.step == flight.verb.step:
            return
        if self._cover.stopped:
            if not self._answer_safely(verb, Reason.STOPPED):
                raise stopped()
            # Who is held still is there, and must not be ended for having nothing to do.
            self._progress()
            return
        if self._answers.get(verb.step) is not None:
            self._answer(verb.step)
            return
        resetting = self._changes.resetting
        if not waited and not (resetting and verb.step == NEXT):
            # What has waited came before the change that is under way.
            self._changes.check()
        if self._lost and not resetting:
            covered = self._cover.covers_loss(self._now_ms)
            if not (covered and self._answer_safely(verb, Reason.STATE_LOST)):
                raise self._state_lost()
            return
        self._check(verb)
        if verb.since_ms is None:
            verb = msgspec.structs.replace(verb, since_ms=self._now_ms)
        if flight is not None or resetting:
            self._answer_waiting(Reason.SUPERSEDED, superseded())
            self._waiting = verb
            return
        if self._owed:
            raise CapacityExceeded("read the answers to the steps before this one")
        self._begin(verb)

    def _begin(self, verb: Step) -> None:
        due_ms = self._cover.due_ms(verb)
        parameters, step = verb.parameters, self._committed + 1
        if due_ms is not None:
            left_ms = due_ms - self._now_ms
            if left_ms <= 0:
                if not self._answer_safely(verb, self._cover.why_late()):
                    raise deadline_missed()
                return
            parameters = {"deadline_ms": left_ms, **parameters, "stale_ms": left_ms}
        turn = self._orchestrator.start(
            DEFAULT_LANE,
            self._roles.enter,
            frozenset(self._pipeline.outputs),
            verb.inputs,
            {self._roles.state: parameters},
            self._now_ms,
            {self._roles.state: step},
        )
        numbered = msgspec.structs.replace(verb, step=step)
        self._flight = Flight(numbered, turn, self._roles.state, due_ms)
        if due_ms is None:
            # Otherwise what is never done in time would keep the session for ever.
            self._progress()

    def _check(self, verb: Step) -> None:
        """Raise InvalidRequest when this cannot be the next step."""
        if verb.step == NEXT:
            pass
        elif self._flight is not None and verb.step > self._committed:
            raise InvalidRequest(
                f"step {self._flight.verb.step} is in flight: its answer comes first",
                field="step",
                code="step_out_of_order",
            )
        elif verb.step != self._committed + 1:
            raise misplaced(verb.step, self._committed)
        check_inputs(verb.inputs)
        check_parameters(verb.parameters, "parameters")

    def _begin_waiting(self) -> None:
        """The step that waits is next, if the one in flight is over, and a reset."""
        if self._waiting is None or self._flight is not None or self._changes.resetting:
            return
        verb, self._waiting = self._waiting, None
        try:
            self._step(verb, waited=True)
        except AntiphonError as error:
            self._emit(self.refusal(verb, error.info()))
        self._settle()

    # Answers without anything fresh

    def _answer_safely(
        self, verb: Step | Reset, reason: Reason, *, in_flight: bool = False
    ) -> bool:
        return self._cover.answer(verb, reason, self._committed, self._now_ms, in_flight=in_flight)

    def _answer_flight(self, reason: Reason, error: AntiphonError) -> None:
        """Answer the step in flight without its output, whatever becomes of it."""
        flight = self._flight
        if flight is not None and not flight.answered:
            flight.answered = True
            if not self._answer_safely(flight.verb, reason, in_flight=True):
                verb, told = flight.verb, error.info()
                self._emit(StepFailed(verb.step, self._committed, told, verb.ref, in_flight=True))

    def _answer_reset(self, reason: Reason, error: AntiphonError) -> None:
        """Answer the reset that is under way, which goes on, if its client is owed that."""
        reset = self._changes.unanswered
        if reset is not None:
            self._changes.told = True
            if not self._answer_safely(reset, reason, in_flight=True):
                self._emit(Refused(error.info(), reset.ref))

    def _answer_waiting(self, reason: Reason, error: AntiphonError) -> None:
        """Answer the step that waits, which is not done."""
        verb, self._waiting = self._waiting, None
        if verb is not None and not self._answer_safely(verb, reason):
            self._emit(self.refusal(verb, error.info()))

    def _refuse_waiting(self, error: ErrorInfo) -> None:
        verb, self._waiting = self._waiting, None
        if verb is not None:
            self._emit(self.refusal(verb, error))

    def _waiting_due_ms(self) -> float | None:
        return None if self._waiting is None else self._cover.due_ms(self._waiting)

    def _reset_due_ms(self) -> float | None:
        reset = self._changes.unanswered
        return None if reset is None else self._cover.due_ms(reset)

    def _answer_what_is_due(self) -> None:
        flight, due_ms = self._flight, self._waiting_due_ms()
        if flight is not None and flight.late(self._now_ms):
            self._answer_flight(self._cover.why_late(), deadline_missed())
            if self._bindings[self._roles.state].waits(flight.turn):
                # No worker has it yet, and nobody needs it any more.
                self._stop(flight)
        reset_due_ms = self._reset_due_ms()
        if reset_due_ms is not None and reset_due_ms <= self._now_ms:
            self._answer_reset(self._cover.why_late(), deadline_missed())
        if due_ms is not None and due_ms <= self._now_ms:
            self._answer_waiting(self._cover.why_late(), deadline_missed())

    def _emergency_stop(self, by: StoppedBy) -> None:
        self._cover.stop(by, self._now_ms)
        self._answer_flight(Reason.STOPPED, stopped())
        if self._flight is not None:
            self._stop(self._flight)
        if by is StoppedBy.CLIENT:
            self._changes.releases = False
        self._answer_reset(Reason.STOPPED, stopped())
        self._answer_waiting(Reason.STOPPED, stopped())
        owed, self._owed = self._owed, {}
        for step in owed:
            if not self._answer_safely(Step(step, []), Reason.STOPPED):
                self._emit(StepFailed(step, self._committed, stopped().info(), None))

    # The client's other verbs

    def _interrupt(self) -> None:
        if self._flight is None:
            raise InvalidRequest("no step is in flight", code="step_not_active")
        self._stop(self._flight)

    def _stop(self, flight: Flight) -> None:
        if not flight.interrupted:
            flight.interrupted = True
            self._orchestrator.stop(flight.turn, self._roles.state)

    def _reset(self, verb: Reset) -> None:
        check_parameters(verb.parameters, "reset.parameters")
        self._changes.begin(verb)
        self._changes.releases = not self._cover.outdated(verb.said_ms)
        self._refuse_waiting(cancelled("a reset came first"))
        if self._flight is not None:
            self._stop(self._flight)
        self._go_on_changing()

    def _change(self, verb: StateVerb) -> None:
        """Do something to the state as it is after the steps that were asked for before."""
        if self._lost:
            raise self._state_lost()
        self._changes.begin(verb)
        self._go_on_changing()

    def _state_lost(self) -> SessionStateLost:
        return state_lost(self._committed, self._lost_why, self._restorable)

    def _restore(self, ref: str | None) -> None:
        """Take the state that the worker has, or is about to have, for what it is."""
        self._changes.check()
        if not self._lost or self._restorable is None:
            raise nothing_to_restore()
        if self._flight is not None:
            raise CapacityExceeded("a step is in flight: wait for its answer")
        self._pay()
        self._committed, self._restorable = self._restorable, None
        self._lost = self._as_opened = False
        self._cover.state_found()
        self._answers.clear()
        self._emit(WasRestored(self._committed, ref, self._kept))
        self._progress()

    def _go_on_changing(self) -> None:
        """Ask the worker once the step in flight is over and there is a worker."""
        if self._flight is not None:
            return
        if self._lost and not self._changes.resetting:
            self._changes.refuse(self._state_lost().info())
        self._changes.go_on(self._now_ms)

    # What the stages say

    def report(self, stage: str, report: Report, now_ms: float) -> None:
        """A worker's report about a turn, or its answer to a signal."""
        self._now_ms = now_ms
        match report:
            case TurnEnded():
                if stage == self._roles.state:
                    self._last_word(report)
                self._orchestrator.ended(stage, report, now_ms)
                self._settle()
            case Answer():
                self._answered(report)

    def _last_word(self, ended: TurnEnded) -> None:
        """What the worker says of the state after a step; it knows."""
        flight = self._flight
        if flight is None or flight.turn != ended.turn:
            return
        flight.last_word = ended
        committed = ended.committed_step
        if committed is None or committed < self._committed:
            self._lost = True
        else:
            self._committed = committed
        if ended.error is not None and ended.error.code == SessionStateLost.code:
            self._lost = True
        if self._lost:
            self._cover.state_lost(self._now_ms)

    def _answered(self, answer: Answer) -> None:
        releases, under_way = self._changes.releases, self._changes.verb
        match self._changes.answered(answer):
            case Reset() as reset:
                self._was_reset(reset, releases)
            case Rewind(step=step):
                self._was_rewound(step)
            case Checkpoint():
                self._was_kept(answer.result.get("kept", []))
            case ReleaseActions():
                self._emit(ActionsReleased(self._committed))
        if under_way is not self._changes.verb:
            self._begin_waiting()

    def _was_kept(self, kept: list[int]) -> None:
        self._bindings[self._roles.state].kept_steps = list(kept)
        # What a new worker opens the session with has none of them.
        self._as_opened = False
        self._emit(CheckpointKept(self._committed, list(kept)))

    def _was_rewound(self, step: int) -> None:
        self._pay()
        self._committed = step
        binding = self._bindings[self._roles.state]
        binding.kept_steps = [kept for kept in binding.kept_steps if kept <= step]
        binding.outdate_snapshot()
        self._answers.forget_after(step)
        self._emit(WasRewound(step))

    def _was_reset(self, reset: Reset, releases: bool) -> None:
        self._pay()
        self._committed = 0
        self._lost = False
        self._restorable = None
        self._in_doubt = False
        binding = self._bindings[self._roles.state]
        binding.kept_steps = []
        binding.outdate_snapshot()
        self._replaced = reset.parameters
        self._as_opened = not reset.parameters
        self._answers.clear()
        self._cover.state_found()
        self._emit(WasReset(0))
        if releases:
            self._cover.begun_anew()

    def produced(self, piece: StageProduced, now_ms: float) -> None:
        """A stage made a piece of a step's output."""
        self._now_ms = now_ms
        self._orchestrator.output(piece, now_ms)
        self._settle()

    def settings_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> bool:
        """Settings are fixed at the open: a stage that refuses them is of no use."""
        return False

    def stage_lost(
        self,
        stage: str,
        unapplied_bytes: int,
        now_ms: float,
        *,
        restorable: bool = False,
        reason: str | None = None,
    ) -> None:
        """The worker of `stage` is gone, with what it held of this session."""
        self._now_ms = now_ms
        self._orchestrator.stage_lost(stage)
        if stage == self._roles.state:
            self._cover.worker(lost=True)
            self._state_stage_lost(restorable, reason)
        self._settle()
        self._go_on_changing()

    def _state_stage_lost(self, restorable: bool, reason: str | None) -> None:
        """Its state is gone, unless a new worker begins with the same, or with what is stored
        of it."""
        if self._flight is not None:
            self._flight.state_lost()
        in_doubt = self._in_doubt or self._changes.moving
        self._in_doubt = restorable and in_doubt
        if not restorable and (self._committed > 0 or not self._as_opened):
            self._state_is_lost(None, reason)
        self._changes.worker_lost()

    def _state_is_lost(self, restorable: int | None, reason: str | None = None) -> None:
        """The state is not the one after the committed step; there is that after another."""
        newly = not self._lost or restorable != self._restorable
        self._lost, self._restorable, self._lost_why = True, restorable, reason
        self._cover.state_lost(self._now_ms)
        flight = self._flight
        if flight is None:
            if newly:
                self._tell_lost()
        elif flight.flow is None and flight.last_word is None:
            # It has not come to this stage yet, and must not begin on another state.
            flight.given_up = self._state_lost().info()
            self._stop(flight)

    def _tell_lost(self) -> None:
        self._emit(StateLost(self._committed, self._restorable, self._lost_why))

    def stage_restored(self, stage: str, step: int, now_ms: float) -> None:
        """The stage is about to go on from the state in the store, after `step`."""
        self._now_ms = now_ms
        if stage != self._roles.state:
            return
        if self._in_doubt:
            self._state_is_lost(None, "a reset or a rewind may have changed it")
            self._settle()
        elif self._lost or step != self._committed:
            self._state_is_lost(step)
            self._settle()

    def stage_forked(self, stage: str, step: int, now_ms: float) -> None:
        """The stage that keeps the state begins with another loop's, after `step`."""
        self._now_ms = now_ms
        self._committed = step
        self._as_opened = False

    def stage_ready(self, stage: str, now_ms: float) -> None:
        """A worker of `stage` holds this session, from its beginning."""
        self._now_ms = now_ms
        if stage == self._roles.state:
            self._cover.worker(lost=False)
        self._orchestrator.workers_ready(now_ms)
        self._go_on_changing()

    def rebuilt(self, stage: str) -> bool:
        """Whether the new worker of `stage` was told all that the session is to go on from."""
        return not (self._lost and stage == self._roles.state)

    def stage_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> None:
        """A new worker of `stage` refused the session."""
        self._now_ms = now_ms
        self._orchestrator.stage_refused(stage, error)
        self._settle()
        if stage == self._roles.state:
            self._changes.refuse(error)
            self._begin_waiting()

    # The step in flight

    def _flow(self, event: FlowEvent) -> None:
        flight = self._flight
        if flight is None or event.turn != flight.turn:
            return
        match event:
            case Produced():
                self._orchestrator.acknowledge(event.turn, event.stage, event.sequence)
                if not flight.take(event):
                    self._stop(flight)
            case FlowEnded():
                flight.flow = event

    def _settle(self) -> None:
        """Answer the step in flight, once everything about it has been said."""
        flight = self._flight
        if flight is None or not flight.over:
            return
        assert flight.flow is not None
        self._flight = None
        step = flight.verb.step
        failure = flight.failure()
        error = failure or self._give(flight)
        answer: StepDone | StepFailed
        if error is None:
            answer = StepDone(
                step, self._committed, flight.outputs, flight.flow.timelines, flight.verb.ref
            )
        else:
            answer = StepFailed(step, self._committed, error, flight.verb.ref)
        self._measured(flight.measured(error))
        if step <= self._committed:
            self._answers.remember(answer)
        if self._covers(flight, failure):
            pass
        elif step <= self._committed:
            self._answer(step)
        else:
            self._emit(answer)
        if error is None:
            self._progress()
        if self._lost:
            self._tell_lost()
        self._begin_waiting()
        self._go_on_changing()

    def _give(self, flight: Flight) -> ErrorInfo | None:
        """The output of a step is what its client gets; why it does not."""
        if flight.answered:
            return dropped(flight.verb.step)
        try:
            self._cover.given(flight.outputs, self._now_ms)
        except EngineFailed as error:
            return error.info()
        return None

    def _covers(self, flight: Flight, error: ErrorInfo | None) -> bool:
        """Whether a step that failed is answered with the safe action instead."""
        if error is None or flight.answered:
            return False
        reason = self._cover.why_failed(error, self._now_ms)
        return reason is not None and self._answer_safely(flight.verb, reason)

    def _answer(self, step: int) -> None:
        """Give the remembered answer, when the client reads. It says where the loop stands as it is
        given, which may be behind many later steps."""
        self._owed[step] = None
        if not self._pace.blocked:
            self._pay()

    def _pay(self) -> None:
        owed, self._owed = self._owed, {}
        for step in owed:
            if (answer := self._answers.get(step)) is not None:
                self._emit(replace(answer, committed_step=self._committed))

    # Time and the client's pace

    def blocked(self, blocked: bool, now_ms: float) -> None:
        """The client's egress queue is full, or has room again."""
        self._now_ms = now_ms
        self._pace.set(blocked, now_ms)
        if not blocked:
            self._orchestrator.stir(now_ms)
            self._pay()

    def _paused(self, lane: str) -> bool:
        return self._pace.blocked

    def stalled(self, now_ms: float) -> bool:
        """Whether the client has left its answers unread for too long."""
        return self._pace.stalled(now_ms)

    def give_up(self, reason: str, now_ms: float) -> None:
        """Nobody takes the answers: the step in flight is cancelled."""
        self._now_ms = now_ms
        self._refuse_waiting(cancelled("nobody takes the answers"))
        if self._flight is not None:
            self._stop(self._flight)
            self._settle()

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        deadlines_ms = (
            self._orchestrator.deadline(self._paused),
            self._pace.stalled_at_ms,
            self._waiting_due_ms(),
            None if self._flight is None else self._flight.unanswered_at_ms,
            self._reset_due_ms(),
            self._changes.wait_until_ms,
        )
        return min([at_ms for at_ms in deadlines_ms if at_ms is not None], default=None)

    def tick(self, now_ms: float) -> None:
        """A deadline has come."""
        self._now_ms = now_ms
        self._answer_what_is_due()
        self._orchestrator.tick(now_ms, self._paused)
        self._settle()
        if self._changes.tick(now_ms):
            self._begin_waiting()

    def end(self, reason: CloseReason, error: ErrorInfo | None, now_ms: float) -> None:
        """The session closes: what is under way gets its last word."""
        self._now_ms = now_ms
        self._pay()
        error = error or cancelled(f"the session ended: {reason}")
        self._refuse_waiting(error)
        if (flight := self._flight) is not None:
            self._flight = None
            self._emit(StepFailed(flight.verb.step, self._committed, error, flight.verb.ref))
            self._measured(flight.measured(error))
        self._changes.refuse(error)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        flight = self._flight
        return (
            tuple(sorted(self.settings)),
            self._lanes.freeze(),
            self._orchestrator.freeze(),
            self._answers.freeze(),
            self._committed,
            self._lost,
            (self._restorable, self._lost_why, self._in_doubt),
            self._as_opened,
            flight and flight.freeze(),
            self._waiting and self._waiting.since_ms,
            self._cover.freeze(),
            self._changes.freeze(),
            self._pace.blocked_since_ms,
            tuple(self._owed),
        )
