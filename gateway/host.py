"""The shell around the session core: it carries the machines' actions out.

Everything runs on the event loop and by direct calls: a verb, a worker's report or
a deadline goes into the session's machine, and what comes out is done at once, in
order. One timer is armed for the earliest deadline of all sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.hosting import (
    OnOutput,
    PipelineHealth,
    SessionSummary,
    WorkerSummary,
)
from gateway.metrics import GatewayMetrics
from gateway.overview import session_summary, stage_health, worker_summary
from gateway.pools import Pools, Replica
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    InvalidRequest,
    NotFound,
)
from protocol.messages import (
    Fence,
    Output,
    ReceivedThrough,
    Report,
    WorkerStatus,
)
from sessions.actions import (
    AskDirectory,
    BindStage,
    ClientBlocked,
    ClientSaid,
    CloseRequested,
    DirectoryAnswered,
    Event,
    HoldClient,
    OpenRequested,
    Released,
    Reported,
    StageBound,
    StageCrowded,
    StageLost,
    StageUnavailable,
    Tick,
    ToClient,
    ToStage,
    TurnMeasured,
)
from sessions.admission import Admission
from sessions.deadlines import Deadlines
from sessions.directory import MemoryDirectory, Remove
from sessions.duplex.events import AppendAudio, ClientVerb, SessionCreated, SessionEnded
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Pipeline
from sessions.session import Identity, Session

_log = structlog.get_logger(__name__)


def new_id(prefix: str) -> str:
    """An unguessable id that says what it names."""
    return f"{prefix}_{secrets.token_urlsafe(15)}"


@dataclass
class _Hosted:
    """A session with its connections: to the client, and to the workers of its stages."""

    session: Session
    wires: SessionWires
    on_output: OnOutput
    opened: asyncio.Future[None]
    opened_at_ms: float
    told: int = 0
    """The number of the last output; 0 before the session was announced."""
    counted_state: State | None = None
    room: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the session takes verbs."""

    def __post_init__(self) -> None:
        self.room.set()


class HostedAttachment:
    """A client's hold on its session."""

    def __init__(self, host: GatewayHost, session: str) -> None:
        self._host = host
        self._session = session

    @property
    def session(self) -> str:
        """The session's id."""
        return self._session

    def send(self, verb: ClientVerb) -> None:
        """Hand a verb to the session; after its end it goes nowhere."""
        self._host.handle(self._session, ClientSaid(verb))

    async def room(self) -> None:
        """Wait until the session takes more verbs."""
        await self._host.room(self._session)

    def set_blocked(self, blocked: bool) -> None:
        """The client's egress queue is full, or has room again."""
        self._host.handle(self._session, ClientBlocked(blocked))

    def close(self, reason: str) -> None:
        """Close the session; idempotent, clean-up goes on after the call."""
        self._host.handle(self._session, CloseRequested(CloseReason(reason)))


class GatewayHost:
    """The sessions of one gateway process. Make it on a running loop.

    `workers` is (name, stage, endpoint) of every worker; `aliases` maps every name
    that a client's `model` may be to a pipeline.
    """

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        aliases: Mapping[str, str],
        required: frozenset[str],
        workers: list[tuple[str, str, str]],
        metrics: GatewayMetrics,
    ) -> None:
        self.pipelines = pipelines
        self.incarnation = new_id("gateway")
        self.draining = False
        self._aliases = aliases
        self._required = required
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._hosted: dict[str, _Hosted] = {}
        self._admission = Admission()
        self._directory = MemoryDirectory()
        self._transfers = Transfers(
            self.incarnation, [endpoint for _, _, endpoint in workers], self._stage_lost
        )
        metrics.watch_edges(self._transfers.traffic)
        self._deadlines = Deadlines()
        self._waiting: dict[str, dict[str, None]] = {}
        self._incarnations: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._pools = Pools(
            self.incarnation,
            self._now_ms,
            on_report=self._on_report,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_change=self._on_change,
            on_crowded=self._on_crowded,
            attach=self._transfers.attach,
        )
        for name, stage, endpoint in workers:
            replica = self._pools.add(name, stage, endpoint)
            metrics.worker_state_changed(stage, name, False)
            metrics.watch_link(name, replica.unacknowledged)

    @property
    def holds_lease(self) -> bool:
        """With the memory directory the only gateway always may act."""
        return True

    # Opening

    def resolve(self, model: str | None) -> str:
        """The pipeline that a client's `model` names; None: the first one.

        Raises NotFound.
        """
        if model is None:
            return next(iter(self.pipelines))
        pipeline = self._aliases.get(model)
        if pipeline is None:
            names = ", ".join(sorted(self.pipelines))
            raise NotFound(
                f"no model {model!r}; this gateway serves {names}",
                field="model",
                code="model_not_found",
            )
        return pipeline

    async def open(
        self,
        *,
        pipeline: str,
        tenant: str,
        settings_patch: dict[str, Any] | None,
        on_output: OnOutput,
    ) -> HostedAttachment:
        """Open a session. Raises AntiphonError, and then holds nothing.

        Cancelled at any point it closes what it had opened.
        """
        spec = self.pipelines[pipeline]
        if self.draining:
            raise CapacityExceeded("this gateway is draining", code="draining")
        self._admission.take(spec)
        now_ms = self._now_ms()
        identity = Identity(
            session=new_id("sess"),
            epoch=1,
            owner=self.incarnation,
            tenant=tenant,
            model=pipeline,
            expires_at_s=int(time.time() + spec.limits.max_age_ms / 1000),
        )
        session = Session(identity, spec, new_id, now_ms)
        fence = Fence(identity.session, identity.epoch, identity.owner)
        wires = SessionWires(fence, spec, self._transfers)
        hosted = _Hosted(session, wires, on_output, self._loop.create_future(), now_ms)
        if settings_patch:
            try:
                session.prepare(settings_patch)
            except InvalidRequest:
                self._admission.give_back(spec)
                raise
        self._hosted[identity.session] = hosted
        attachment = HostedAttachment(self, identity.session)
        self.handle(identity.session, OpenRequested())
        try:
            await hosted.opened
        except asyncio.CancelledError:
            attachment.close(CloseReason.CLIENT)
            raise
        return attachment

    def close_session(self, session: str) -> bool:
        """Close a session for the operator; False when there is none of that id."""
        if session not in self._hosted:
            return False
        self.handle(session, CloseRequested(CloseReason.ADMIN))
        return True

    def drain(self) -> None:
        """Take no more sessions and close all."""
        self.draining = True
        for session in list(self._hosted):
            self.handle(session, CloseRequested(CloseReason.DRAINED))

    async def drained(self) -> None:
        """Wait until no session holds anything."""
        while self._hosted:
            self._changed.clear()
            await self._changed.wait()

    async def ready(self) -> None:
        """Wait until every required pipeline has a replica of each stage."""
        while not all(health.ready for health in self.health() if health.required):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Drop all links and the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._pools.close()
        self._transfers.close()

    # Events in, actions out

    def handle(self, session: str, event: Event) -> None:
        """Feed `event` to the session and carry out what it asks for.

        A session that fails at that ends, and no other is touched.
        """
        hosted = self._hosted.get(session)
        if hosted is None:
            return
        try:
            handled = self._carry_out(hosted, event)
        except Exception:
            _log.exception("session_failed", session=session)
            handled = 0
            self._end_failed(hosted)
        if handled == 1 and _only_postpones(event):
            return
        self._count_state(hosted)
        if session in self._hosted:
            self._deadlines.set(session, hosted.session.deadline())
            self._arm()

    def _carry_out(self, hosted: _Hosted, event: Event) -> int:
        """Carry out what follows from `event`; how many events that were with it."""
        events: deque[Event] = deque([event])
        handled = 0
        while events:
            handled += 1
            for action in hosted.session.handle(events.popleft(), self._now_ms()):
                match action:
                    case ToStage():
                        self._to_stage(hosted, action, events)
                    case ToClient():
                        self._to_client(hosted, action)
                    case HoldClient():
                        self._hold(hosted, action.hold)
                    case BindStage():
                        self._bind(hosted, action.stage, events)
                    case AskDirectory():
                        outcome = self._directory.call(action.request)
                        events.append(DirectoryAnswered(outcome))
                    case TurnMeasured():
                        self._measured(hosted, action)
                    case Released():
                        self._released(hosted, action.reason)
        return handled

    def _end_failed(self, hosted: _Hosted) -> None:
        """End a session in order, as after any other end; if it fails at that, let it go."""
        identity = hosted.session.identity
        if hosted.session.state in (State.OPENING, State.ACTIVE):
            try:
                self._carry_out(hosted, CloseRequested(CloseReason.ERROR))
                return
            except Exception:
                _log.exception("session_failed_again", session=identity.session)
        if identity.session not in self._hosted:
            return
        self._directory.call(Remove(identity.session, identity.epoch))
        self._released(hosted, CloseReason.ERROR)
        if hosted.told:
            with contextlib.suppress(Exception):
                hosted.on_output(hosted.told + 1, SessionEnded(CloseReason.ERROR.value))

    def _to_stage(self, hosted: _Hosted, action: ToStage, events: deque[Event]) -> None:
        try:
            hosted.wires.send(action.stage, action.command)
        except AntiphonError as error:
            _log.warning(
                "command_not_sent",
                session=hosted.session.identity.session,
                stage=action.stage,
                error=error.code,
            )
            hosted.wires.give_up(action.stage)
            events.append(StageLost(action.stage))

    def _stage_lost(self, session: str, stage: str) -> None:
        """Nothing reaches the stage, or comes from it: its worker is as good as gone."""
        hosted = self._hosted.get(session)
        if hosted is not None:
            hosted.wires.give_up(stage)
            self.handle(session, StageLost(stage))

    def _to_client(self, hosted: _Hosted, action: ToClient) -> None:
        if isinstance(action.output, SessionCreated):
            if not hosted.opened.done():
                hosted.opened.set_result(None)
            self._metrics.session_opened(hosted.session.pipeline.name)
        hosted.told = action.sequence
        hosted.on_output(action.sequence, action.output)

    async def room(self, session: str) -> None:
        """Wait until the session takes more verbs, or has ended."""
        hosted = self._hosted.get(session)
        if hosted is not None:
            await hosted.room.wait()

    @staticmethod
    def _hold(hosted: _Hosted, hold: bool) -> None:
        if hold:
            hosted.room.clear()
        else:
            hosted.room.set()

    def _bind(self, hosted: _Hosted, stage: str, events: deque[Event]) -> None:
        session = hosted.session.identity.session
        try:
            replica = self._pools.pick(stage)
        except CapacityExceeded as error:
            self._waiting.setdefault(stage, {})[session] = None
            events.append(StageUnavailable(stage, error.info()))
            return
        events.append(self._bound(hosted, replica))

    @staticmethod
    def _bound(hosted: _Hosted, replica: Replica) -> StageBound:
        hosted.wires.bind(replica.stage, replica)
        worker = replica.link.worker or replica.name
        return StageBound(replica.stage, worker, replica.crowded)

    def _measured(self, hosted: _Hosted, turn: TurnMeasured) -> None:
        identity = hosted.session.identity
        hosted.wires.turn_over(turn.turn)
        self._metrics.turn_finished(hosted.session.pipeline.name, turn)
        _log.info(
            "turn_ended",
            session=identity.session,
            epoch=identity.epoch,
            turn=turn.turn,
            lane=turn.lane,
            status=turn.status,
            reason=turn.reason,
            error=turn.error,
            server_ttft_ms=turn.ttft_ms,
            server_ttfp_ms=turn.ttfp_ms,
            server_rtf=turn.rtf,
            audio_ms=turn.audio_ms,
            prefill_tokens=turn.prefill_tokens,
            timelines=turn.timelines,
        )

    def _released(self, hosted: _Hosted, reason: CloseReason) -> None:
        identity = hosted.session.identity
        hosted.wires.release()
        hosted.room.set()
        for waiting in self._waiting.values():
            waiting.pop(identity.session, None)
        del self._hosted[identity.session]
        self._deadlines.set(identity.session, None)
        self._admission.give_back(hosted.session.pipeline)
        self._changed.set()
        if hosted.told:
            self._metrics.session_closed(hosted.session.pipeline.name, reason)
        elif not hosted.opened.done():
            hosted.opened.set_exception(_refusal(hosted.session, reason))
        _log.info("session_released", session=identity.session, epoch=identity.epoch, reason=reason)

    def _count_state(self, hosted: _Hosted) -> None:
        known = hosted.session.identity.session in self._hosted
        after = hosted.session.state if known else None
        if after is not hosted.counted_state:
            self._metrics.session_state_changed(
                hosted.session.pipeline.name, hosted.counted_state, after
            )
            hosted.counted_state = after

    # Time

    @staticmethod
    def _now_ms() -> float:
        return time.monotonic() * 1000.0

    def _arm(self) -> None:
        at_ms = self._deadlines.next_ms()
        if at_ms is None:
            return
        when = self._loop.time() + max(0.0, at_ms - self._now_ms()) / 1000.0
        if self._timer is not None:
            if self._timer_at_s <= when:
                return
            self._timer.cancel()
        # Kept here: uvloop's handle of a time that has passed does not know it.
        self._timer_at_s = when
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for session in self._deadlines.due(self._now_ms()):
            self.handle(session, Tick())
        self._arm()

    # Workers

    def _on_report(self, replica: Replica, report: Report) -> None:
        assert not isinstance(report, WorkerStatus)
        session, stage = report.session, replica.stage
        hosted = self._hosted.get(session)
        if hosted is None or not hosted.wires.bound_to(replica):
            if isinstance(report, Output):
                self._transfers.discard(report.payload)
            return
        try:
            event = hosted.wires.received(stage, report)
        except AntiphonError as error:
            _log.error("output_lost", session=session, stage=stage, error=error.code)
            self._stage_lost(session, stage)
            return
        if event is not None:
            self.handle(session, event)

    def _on_ready(self, stage: str) -> None:
        for session in list(self._waiting.get(stage, ())):
            try:
                replica = self._pools.pick(stage)
            except CapacityExceeded:
                return
            del self._waiting[stage][session]
            self.handle(session, self._bound(self._hosted[session], replica))

    def _on_lost(self, replica: Replica) -> None:
        for session, hosted in list(self._hosted.items()):
            if hosted.wires.bound_to(replica):
                self._stage_lost(session, replica.stage)

    def _on_crowded(self, replica: Replica) -> None:
        for session in list(replica.sessions):
            self.handle(session, StageCrowded(replica.stage, replica.crowded))

    def _on_change(self) -> None:
        self._changed.set()
        begun = self._loop.time()
        self._loop.call_soon(lambda: self._metrics.loop_lag(self._loop.time() - begun))
        for replica in self._pools.all():
            self._metrics.worker_state_changed(
                replica.stage, replica.name, replica.link.worker is not None
            )
            known = self._incarnations.get(replica.name, 0)
            if known and replica.incarnations > known:
                self._metrics.worker_restarted(replica.stage, replica.name)
            self._incarnations[replica.name] = replica.incarnations

    # What operators see

    def health(self) -> list[PipelineHealth]:
        """The state of every pipeline."""
        now_ms = self._now_ms()
        return [
            PipelineHealth(
                name=pipeline.name,
                required=pipeline.name in self._required,
                stages={
                    stage: stage_health(self._pools.of(stage), now_ms) for stage in pipeline.stages
                },
                sessions=self._admission.held(pipeline.name),
                session_limit=pipeline.limits.sessions,
            )
            for pipeline in self.pipelines.values()
        ]

    def sessions(self) -> list[SessionSummary]:
        """All sessions that hold anything."""
        now_ms = self._now_ms()
        return [
            session_summary(hosted.session, hosted.wires.turns, hosted.opened_at_ms, now_ms)
            for hosted in self._hosted.values()
        ]

    def workers(self) -> list[WorkerSummary]:
        """All workers that the config names."""
        now_ms = self._now_ms()
        return [worker_summary(replica, now_ms) for replica in self._pools.all()]


def _only_postpones(event: Event) -> bool:
    """Whether `event` can at most make the session's deadline later.

    These come with every audio frame. A deadline that is left as it was only makes the
    timer look once more.
    """
    match event:
        case ClientSaid(verb=AppendAudio()) | Reported(report=ReceivedThrough()):
            return True
    return False


def _refusal(session: Session, reason: CloseReason) -> AntiphonError:
    """Why a session could not be opened, as the error that `open` raises."""
    info = session.error
    if info is None:
        return CapacityExceeded(f"the session was closed while it opened: {reason.value}")
    error = AntiphonError(
        info.message, field=info.field, code=info.code, retry_after_ms=info.retry_after_ms
    )
    error.kind = info.kind
    return error
