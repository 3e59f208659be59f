"""The sessions of a gateway, each with its wires to the workers of its stages.

Without I/O and without a clock: what a session's machine asks for is carried out at once
and in order, by direct calls; what has to leave the process is the shell's to do
(`gateway.host`). One heap holds the deadlines of all sessions.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.forgetting import Forgetting
from gateway.forks import Forks
from gateway.lingering import Lingering
from gateway.placement import Placement, Replica
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo, ErrorKind, raised
from protocol.messages import Answer, Output, ReceivedThrough, Report, WorkerStatus
from sessions.actions import (
    AskDirectory,
    AttachRefused,
    BindStage,
    ClientSaid,
    CloseRequested,
    DirectoryAnswered,
    Event,
    ForgetParked,
    HoldClient,
    NotFresh,
    NotRestored,
    OpenRequested,
    Released,
    Reported,
    RestoreRequested,
    StageBound,
    StageLost,
    StageUnavailable,
    Tick,
    ToClient,
    ToStage,
    TurnMeasured,
    Unbind,
)
from sessions.admission import Admission
from sessions.client import SessionEnded
from sessions.deadlines import Deadlines
from sessions.directory import MemoryDirectory, Remove, Request
from sessions.duplex.events import AppendAudio
from sessions.lifecycle import CloseReason, State
from sessions.opening import Opening
from sessions.openings import Openings
from sessions.pipeline import Pipeline
from sessions.session import Session

_NONE: Mapping[str, str] = {}


@dataclass
class Hosted:
    """A session with its connections: to the clients, and to the workers of its stages.

    `on_output` and `on_refused` get what is for clients, `on_hold` whether the session takes
    no more verbs for now, `on_released` the reason once nothing is left of it.
    """

    session: Session
    wires: SessionWires
    on_output: Callable[[ToClient], None]
    on_refused: Callable[[AttachRefused], None]
    on_hold: Callable[[bool], None]
    on_released: Callable[[CloseReason], None]
    opening: Opening
    told: int = 0
    """The number of the last output; 0 before the session was announced."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.identity.session

    def refusal(self, reason: CloseReason) -> AntiphonError:
        """Why it could not be opened, if it could not."""
        if (info := self.session.error) is not None:
            return raised(info)
        why = f"the session was closed while it opened: {reason.value}"
        if reason is CloseReason.DRAINED:
            return CapacityExceeded(why, code="draining")
        return AntiphonError(why)


class Observer(Protocol):
    """What the shell is told of all sessions, for logs and metrics."""

    def failed(self, session: str, error: Exception) -> None:
        """The session's machine raised: it ends, and no other is touched."""

    def unsent(self, session: str, stage: str, error: AntiphonError) -> None:
        """A command or an output did not come across: the stage's worker is given up."""

    def not_restored(self, session: str, stage: str, error: ErrorInfo) -> None:
        """What was stored of a session on a stage did not come back."""

    def measured(self, hosted: Hosted, turn: TurnMeasured) -> None:
        """A turn has ended."""

    def not_fresh(self, hosted: Hosted, answered: NotFresh) -> None:
        """An observation was answered without anything fresh."""

    def evicted(self, hosted: Hosted) -> None:
        """A session that nobody is at ends, to make room for another."""

    def state_changed(self, hosted: Hosted, before: State | None, after: State | None) -> None:
        """A session entered a state; None for before its begin and after its end."""


class HostedSessions:
    """All sessions of one gateway. Times are monotonic ms."""

    def __init__(self, placement: Placement, transfers: Transfers, observer: Observer) -> None:
        self.admission = Admission()
        self.openings = Openings(self.admission, self._evict)
        self.directory = MemoryDirectory()
        self.deadlines = Deadlines()
        self.forgetting = Forgetting(placement)
        self.lingering = Lingering()
        self.forks = Forks(self._session, self._restore)
        self._placement = placement
        self._transfers = transfers
        self._observer = observer
        self._hosted: dict[str, Hosted] = {}
        self._states: dict[str, State] = {}
        self._stirred = False
        """Whether those that wait for a place may have one now."""
        self._opens_timed = False
        """Whether an open waits for a time."""
        self._now_ms = 0.0

    def __len__(self) -> int:
        return len(self._hosted)

    def __contains__(self, session: str) -> bool:
        return session in self._hosted

    def all(self) -> list[Hosted]:
        """All sessions that hold anything."""
        return list(self._hosted.values())

    def get(self, session: str) -> Hosted | None:
        """The session of that id, while it holds anything."""
        return self._hosted.get(session)

    def open(self, opening: Opening, now_ms: float) -> None:
        """Have a session opened; `opening.begin` is to call `admit`. Its `on_refused` is told
        when that is refused, now or later."""
        self._now_ms = now_ms
        self.openings.ask(opening, now_ms)
        self._arm_openings()

    def withdraw(self, opening: Opening, now_ms: float) -> None:
        """Nobody waits for this open any more; what was opened for it is closed."""
        self._now_ms = now_ms
        for hosted in self.all():
            if hosted.opening is opening and not hosted.told:
                self.handle(hosted.id, CloseRequested(CloseReason.CLIENT), now_ms)
        self.openings.withdraw(opening, now_ms)
        self._arm_openings()

    def admit(self, hosted: Hosted, now_ms: float) -> None:
        """Host a session and open it. It gives its place back by itself, however it ends.

        Raises CapacityExceeded when there is no place for it, and then holds nothing of it.
        """
        identity = hosted.session.identity
        self.admission.take(hosted.session.pipeline, identity.tenant, hosted.id, now_ms)
        self._hosted[hosted.id] = hosted
        self.handle(hosted.id, OpenRequested(), now_ms)

    def _evict(self, pipeline: Pipeline, tenant: str) -> bool:
        """End the session that was left alone the longest; whether there is one."""
        victim = self.least_needed(pipeline, tenant)
        if victim is not None:
            self._observer.evicted(victim)
            self.handle(victim.id, CloseRequested(CloseReason.EVICTED), self._now_ms)
        return victim is not None

    def least_needed(self, pipeline: Pipeline, tenant: str) -> Hosted | None:
        """The session that may end to make room for one of `tenant`.

        Nobody is there, nothing runs, and it has been idle the longest. It is one of the
        tenant's own, or of a tenant that would still have as many as this one then; that one
        cannot help a tenant which has all that it may have.
        """
        own_only = self.admission.tenant_full(pipeline, tenant)
        held = Counter(
            hosted.session.identity.tenant
            for hosted in self._hosted.values()
            if hosted.session.pipeline.name == pipeline.name
        )
        alone = [
            hosted
            for hosted in self._hosted.values()
            if hosted.session.pipeline.name == pipeline.name
            and hosted.session.evictable
            and not self.openings.forks(hosted.id)
            and (
                (owner := hosted.session.identity.tenant) == tenant
                or (not own_only and held[owner] > held[tenant] + 1)
            )
        ]
        return min(alone, key=lambda hosted: hosted.session.idle_since_ms, default=None)

    def full(self, pipeline: Pipeline, now_ms: float) -> bool:
        """Whether there is no place, and no session that may end to make room for its tenant; or
        others wait already for what it needs."""
        if self.openings.full(pipeline, now_ms):
            return True
        places = pipeline.limits.sessions
        return self.admission.held(pipeline.name) >= places and not any(
            hosted.session.pipeline.name == pipeline.name and hosted.session.evictable
            for hosted in self._hosted.values()
        )

    def handle(self, session: str, event: Event, now_ms: float) -> None:
        """Feed `event` to the session and carry out what it asks for.

        A session that fails at that ends, and no other is touched. One that is not here
        takes no notice.
        """
        hosted = self._hosted.get(session)
        if hosted is None:
            return
        self._now_ms = now_ms
        # A session that nobody has come to may make room from a time on.
        self._stirred = self._stirred or isinstance(event, Tick)
        try:
            handled = self._carry_out(hosted, event, now_ms)
        except Exception as error:
            self._observer.failed(session, error)
            handled = 0
            self._end_failed(hosted, now_ms)
        if handled == 1 and _only_postpones(event):
            return
        self._count_state(hosted)
        if session in self._hosted:
            self.deadlines.ask(session, hosted.session.deadline)
        if self.forks.awaits(session):
            self._begin_forks(session)
        self._serve()

    def _serve(self) -> None:
        """Let in who waits, if that may be possible now."""
        if self._stirred:
            self._stirred = False
            if len(self.openings):
                self.openings.serve(self._now_ms)
        if len(self.openings) or self._opens_timed:
            self._arm_openings()

    def _arm_openings(self) -> None:
        deadline_ms = self.openings.deadline_ms
        self._opens_timed = deadline_ms is not None
        self.deadlines.set(_OPENINGS, deadline_ms)

    def _room_on(self, stage: str, changed: bool = True) -> None:
        self.openings.room_on(stage, changed)
        self._stirred = True

    def tick(self, now_ms: float) -> None:
        """Tell the sessions whose deadline has come."""
        self._now_ms = now_ms
        for due in self.deadlines.due(now_ms):
            if due == _OPENINGS:
                self._stirred = True
                self._serve()
            else:
                self.handle(due, Tick(), now_ms)

    # What becomes of workers

    def received(self, replica: Replica, report: Report, now_ms: float) -> None:
        """A worker's report about a session, which may be bound to it no longer."""
        assert not isinstance(report, WorkerStatus)
        session, stage = report.session, replica.stage
        if isinstance(report, Answer):
            self._now_ms = now_ms
            if report.error is not None:
                replica.refused(report)
            self.forgetting.answered(stage, report)
            self.lingering.answered(report)
            self._serve()
        hosted = self._hosted.get(session)
        if hosted is None or not hosted.wires.bound_to(replica):
            if isinstance(report, Output):
                self._transfers.discard(report.payload)
            return
        try:
            event = hosted.wires.received(stage, report)
        except AntiphonError as error:
            self._observer.unsent(session, stage, error)
            self.stage_lost(session, stage, now_ms)
            return
        if event is not None:
            self.handle(session, event, now_ms)

    def ready(self, stage: str, now_ms: float) -> None:
        """A replica of `stage` can take sessions: those that wait for one get it."""
        # First: what comes after it is of a later opening.
        self.forgetting.ready(stage, now_ms)
        for session, replica in self._placement.served(stage, now_ms):
            self.handle(session, self._bound(self._hosted[session], replica), now_ms)
        self.room(stage, now_ms)

    def room(self, stage: str, now_ms: float, changed: bool = True) -> None:
        """There may be more room on `stage` than there was: something has `changed` there, or its
        worker has been heard of."""
        self._now_ms = now_ms
        self._room_on(stage, changed)
        self._serve()

    def lost(self, replica: Replica, now_ms: float) -> None:
        """The worker is gone, with all that it held."""
        self._now_ms = now_ms
        self.forgetting.lost(replica, now_ms)
        self.lingering.lost(replica)
        self._serve()
        for hosted in self.all():
            if hosted.wires.bound_to(replica):
                self.stage_lost(hosted.id, replica.stage, now_ms)

    def stage_lost(self, session: str, stage: str, now_ms: float) -> None:
        """Nothing reaches the stage, or comes from it: its worker is as good as gone."""
        hosted = self._hosted.get(session)
        if hosted is not None:
            hosted.wires.give_up(stage)
            self.handle(session, StageLost(stage), now_ms)

    # Actions

    def _carry_out(self, hosted: Hosted, event: Event, now_ms: float) -> int:
        """Carry out what follows from `event`; how many events that were with it."""
        events: deque[Event] = deque([event])
        handled = 0
        while events:
            handled += 1
            for action in hosted.session.handle(events.popleft(), now_ms):
                match action:
                    case ToStage():
                        events.extend(hosted.wires.send(action.stage, action.command))
                    case ToClient():
                        opened, hosted.told = not hosted.told, action.sequence
                        try:
                            hosted.on_output(action)
                        except Exception as error:
                            if hosted.session.state not in (State.CLOSING, State.CLOSED):
                                raise
                            # It ends: its workers are told so all the same.
                            self._observer.failed(hosted.id, error)
                        if opened:
                            self.openings.opened(hosted.opening, now_ms)
                            # Served once all of this is carried out: it may be this session that
                            # makes room, and what it was about to say comes first.
                            self._stirred = True
                    case AttachRefused():
                        hosted.on_refused(action)
                    case HoldClient():
                        hosted.on_hold(action.hold)
                    case BindStage():
                        self._bind(hosted, action.stage, events, now_ms)
                    case Unbind():
                        hosted.wires.unbind(action.stage)
                        self._room_on(action.stage)
                    case ForgetParked():
                        self.forgetting.forget(action.stage, action.command, now_ms)
                    case NotRestored():
                        self._observer.not_restored(hosted.id, action.stage, action.error)
                    case AskDirectory():
                        self._ask(hosted, action.request, events)
                    case TurnMeasured():
                        hosted.wires.turn_over(action.turn)
                        # What has nothing to do any more may make room.
                        for stage in hosted.session.pipeline.stages:
                            self._room_on(stage)
                        self._observer.measured(hosted, action)
                    case NotFresh():
                        self._observer.not_fresh(hosted, action)
                    case Released():
                        self._released(hosted, action.reason, action.unanswered)
        return handled

    def _ask(self, hosted: Hosted, request: Request, events: deque[Event]) -> None:
        """Call the directory; what it answers is the session's next event."""
        events.append(DirectoryAnswered(self.directory.call(request)))

    def _end_failed(self, hosted: Hosted, now_ms: float) -> None:
        """End a session in order, as after any other end; if it fails at that, let it go."""
        identity = hosted.session.identity
        if hosted.session.state not in (State.CLOSING, State.CLOSED):
            try:
                self._carry_out(hosted, CloseRequested(CloseReason.ERROR), now_ms)
                return
            except Exception as error:
                self._observer.failed(identity.session, error)
        if identity.session not in self._hosted:
            return
        self.directory.call(Remove(identity.session, identity.epoch))
        if hosted.told:
            with contextlib.suppress(Exception):
                hosted.on_output(ToClient(hosted.told + 1, SessionEnded(CloseReason.ERROR.value)))
        self._released(hosted, CloseReason.ERROR)

    def _bind(self, hosted: Hosted, stage: str, events: deque[Event], now_ms: float) -> None:
        # The session may have found out by itself that its worker has lost it.
        hosted.wires.give_up(stage)
        source = hosted.session.source_of(stage)
        if source is not None:
            try:
                if self.forks.ready(hosted.id, source, stage):
                    events.append(self._bound_beside(hosted, source, stage))
            except AntiphonError as error:
                events.append(StageUnavailable(stage, error.info()))
            return
        try:
            replica = self._placement.pick(stage, now_ms)
        except CapacityExceeded as error:
            self._placement.wait(stage, hosted.id)
            events.append(StageUnavailable(stage, error.info()))
            return
        events.append(self._bound(hosted, replica))

    @staticmethod
    def _bound(hosted: Hosted, replica: Replica) -> StageBound:
        hosted.wires.bind(replica.stage, replica)
        worker = replica.link.worker or replica.name
        return StageBound(replica.stage, worker, replica.crowded)

    def _bound_beside(self, hosted: Hosted, source: str, stage: str) -> StageBound:
        """On the worker that has the state of the session it begins as."""
        return self._bound(hosted, self._hosted[source].wires.replica(stage))

    def _begin_forks(self, source: str) -> None:
        """What has become of a session may be what its forks wait for."""
        for fork, stage, error in self.forks.due(source):
            event: Event
            if error is None:
                event = self._bound_beside(self._hosted[fork], source, stage)
            else:
                event = StageUnavailable(stage, error.info())
            self.handle(fork, event, self._now_ms)

    def _session(self, session: str) -> Session | None:
        hosted = self._hosted.get(session)
        return None if hosted is None else hosted.session

    def _restore(self, session: str) -> None:
        self.handle(session, RestoreRequested(), self._now_ms)

    def _released(
        self, hosted: Hosted, reason: CloseReason, unanswered: Mapping[str, str] = _NONE
    ) -> None:
        awaited = hosted.wires.replicas(unanswered)
        hosted.wires.release()
        self._placement.forget(hosted.id)
        self.forks.forget(hosted.id)
        del self._hosted[hosted.id]
        self.deadlines.set(hosted.id, None)
        pipeline, opened = hosted.session.pipeline, hosted.told > 0
        refusal, refused_by = hosted.refusal(reason), hosted.session.refused_by

        def give_back() -> None:
            self.admission.give_back(pipeline.name, hosted.id, self._now_ms, opened=opened)
            for stage in pipeline.stages:
                # Who found no room there has taken none, and leaves none.
                held = opened or stage != refused_by or refusal.kind is not ErrorKind.CAPACITY
                self._room_on(stage, changed=held)

        self.lingering.release(hosted.id, awaited, give_back)
        hosted.on_released(reason)
        if not opened:
            self.openings.failed(hosted.opening, refusal, refused_by, self._now_ms)

    def _count_state(self, hosted: Hosted) -> None:
        before = self._states.get(hosted.id)
        after = hosted.session.state if hosted.id in self._hosted else None
        if after is before:
            return
        if after is None:
            del self._states[hosted.id]
        else:
            self._states[hosted.id] = after
            # Nobody is there: it may go, or be the next to come back.
            self._stirred = self._stirred or after is State.DETACHED
        self._observer.state_changed(hosted, before, after)


_OPENINGS = "openings"
"""Among the deadlines, that of those who wait for a session."""


def _only_postpones(event: Event) -> bool:
    """Whether `event` can at most make the session's deadline later.

    These come with every audio frame. A deadline that is left as it was only makes the
    timer look once more.
    """
    match event:
        case ClientSaid(verb=AppendAudio()) | Reported(report=ReceivedThrough()):
            return True
    return False
