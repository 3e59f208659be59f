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
from typing import Any

import structlog

from gateway.hosted import Hosted, HostedAttachment, raised
from gateway.hosting import (
    OnOutput,
    PipelineHealth,
    SessionDescription,
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
    SessionStateLost,
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
    AttachRefused,
    AttachRequested,
    BindStage,
    ClientSaid,
    CloseRequested,
    DirectoryAnswered,
    Event,
    HoldClient,
    OpenRequested,
    Released,
    Reported,
    StageBound,
    StageLost,
    StageUnavailable,
    Tick,
    ToClient,
    ToStage,
    TurnMeasured,
)
from sessions.admission import Admission
from sessions.chosen_limits import chosen
from sessions.client import Answered, Attached, Role, SessionCreated, SessionEnded, Verb
from sessions.deadlines import Deadlines
from sessions.directory import MemoryDirectory, Remove
from sessions.duplex.events import AppendAudio
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Pipeline
from sessions.resume_secret import digest
from sessions.session import Identity, Session

_log = structlog.get_logger(__name__)


def new_id(prefix: str) -> str:
    """An unguessable id that says what it names."""
    return f"{prefix}_{secrets.token_urlsafe(15)}"


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
        self._hosted: dict[str, Hosted] = {}
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
        settings_patch: dict[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        secret: str | None = None,
        on_output: OnOutput | None = None,
    ) -> HostedAttachment:
        """Open a session. Raises AntiphonError, and then holds nothing.

        Cancelled at any point it closes what it had opened.
        """
        spec = self.pipelines[pipeline]
        bounds = chosen(spec.limits, limits or {})
        await self._make_room(spec)
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
            expires_at_s=int(time.time() + bounds.max_age_ms / 1000),
        )
        name = new_id("att")
        session = Session(
            identity,
            spec,
            new_id,
            now_ms,
            controller=name if on_output is not None else None,
            secret_digest=None if secret is None else digest(secret),
            limits=bounds,
        )
        fence = Fence(identity.session, identity.epoch, identity.owner)
        wires = SessionWires(fence, spec, self._transfers)
        hosted = Hosted(session, wires, self._loop.create_future(), now_ms)
        if settings_patch:
            try:
                session.prepare(settings_patch)
            except InvalidRequest:
                self._admission.give_back(spec)
                raise
        if on_output is not None:
            hosted.listeners[name] = on_output
        self._hosted[identity.session] = hosted
        attachment = self._attachment(hosted, name)
        self.handle(identity.session, OpenRequested())
        try:
            await hosted.opened
        except asyncio.CancelledError:
            attachment.close(CloseReason.CLIENT)
            raise
        return attachment

    async def attach(
        self,
        session: str,
        *,
        tenant: str,
        role: Role,
        secret: str | None,
        cursor: int | None,
        on_output: OnOutput,
    ) -> tuple[HostedAttachment, Attached]:
        """Come to a session that is open. Raises AntiphonError.

        Cancelled at any point the client is not attached; the secret that it came with
        stays good.
        """
        hosted = self._find(session, tenant)
        name = new_id("att")
        arrival: asyncio.Future[Attached] = self._loop.create_future()
        hosted.arrivals[name] = arrival
        hosted.listeners[name] = on_output
        attachment = self._attachment(hosted, name)
        request = AttachRequested(name, role, cursor, secret, new_id("secret"))
        self.handle(session, request)
        try:
            attached = await arrival
        except asyncio.CancelledError:
            hosted.arrivals.pop(name, None)
            attachment.detach()
            raise
        except AntiphonError as error:
            self._metrics.attach_ended(hosted.session.pipeline.name, error.code)
            _log.warning("attach_refused", session=session, code=error.code)
            raise
        self._metrics.attach_ended(hosted.session.pipeline.name, role.value)
        return attachment, attached

    async def command(self, session: str, tenant: str, verb: Verb, command: str) -> Answered:
        """Have a verb carried out without an attachment. Raises AntiphonError."""
        hosted = self._find(session, tenant)
        await hosted.room.wait()
        answer = hosted.answers.get(command)
        if answer is None:
            answer = hosted.answers[command] = self._loop.create_future()
            self.handle(session, ClientSaid(verb, None, command))
        try:
            return await asyncio.shield(answer)
        finally:
            if hosted.answers.get(command) is answer:
                del hosted.answers[command]

    def _attachment(self, hosted: Hosted, name: str) -> HostedAttachment:
        def forget(attachment: str) -> None:
            hosted.listeners.pop(attachment, None)

        return HostedAttachment(self, hosted.session.identity.session, name, forget)

    async def _make_room(self, pipeline: Pipeline) -> None:
        """While the pipeline is full, end the session that was left alone the longest.

        Returns with a place free, or with no session that may go. Nothing is held meanwhile.
        """
        while self._admission.full(pipeline):
            alone = [
                hosted
                for hosted in self._hosted.values()
                if hosted.session.pipeline is pipeline and hosted.session.evictable
            ]
            if not alone:
                return
            victim = min(alone, key=lambda hosted: hosted.session.idle_since_ms)
            self.handle(victim.session.identity.session, CloseRequested(CloseReason.EVICTED))
            await victim.released.wait()

    def _find(self, session: str, tenant: str | None) -> Hosted:
        """A session that was announced. Raises NotFound, with the same words for one that is
        not there and for another tenant's."""
        hosted = self._hosted.get(session)
        if (
            hosted is None
            or not hosted.told
            or tenant not in (None, hosted.session.identity.tenant)
        ):
            raise NotFound(f"there is no session {session!r}", code="session_not_found")
        return hosted

    def summary(self, session: str, tenant: str | None) -> SessionSummary:
        """One session, of this tenant if one is given. Raises NotFound."""
        hosted = self._find(session, tenant)
        return session_summary(
            hosted.session, hosted.wires.turns, hosted.opened_at_ms, self._now_ms()
        )

    def describe(self, session: str, tenant: str) -> SessionDescription:
        """One session of this tenant, with its settings and limits. Raises NotFound."""
        summary = self.summary(session, tenant)
        known = self._find(session, tenant).session
        return SessionDescription(
            summary, known.settings, known.limits, known.identity.expires_at_s
        )

    def close_session(self, session: str, tenant: str | None = None) -> None:
        """Close a session: for the operator, or for its tenant. Raises NotFound."""
        self._find(session, tenant)
        reason = CloseReason.ADMIN if tenant is None else CloseReason.CLIENT
        self.handle(session, CloseRequested(reason))

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

    def _carry_out(self, hosted: Hosted, event: Event) -> int:
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
                    case AttachRefused():
                        hosted.refuse(action)
                    case HoldClient():
                        self._hold(hosted, action.hold)
                    case BindStage():
                        self._bind(hosted, action.stage, events)
                    case AskDirectory():
                        events.append(DirectoryAnswered(self._directory.call(action.request)))
                    case TurnMeasured():
                        self._measured(hosted, action)
                    case Released():
                        self._released(hosted, action.reason)
        return handled

    def _end_failed(self, hosted: Hosted) -> None:
        """End a session in order, as after any other end; if it fails at that, let it go."""
        identity = hosted.session.identity
        if hosted.session.state not in (State.CLOSING, State.CLOSED):
            try:
                self._carry_out(hosted, CloseRequested(CloseReason.ERROR))
                return
            except Exception:
                _log.exception("session_failed_again", session=identity.session)
        if identity.session not in self._hosted:
            return
        self._directory.call(Remove(identity.session, identity.epoch))
        with contextlib.suppress(Exception):
            hosted.tell(ToClient(hosted.told + 1, SessionEnded(CloseReason.ERROR.value)))
        self._released(hosted, CloseReason.ERROR)

    def _to_stage(self, hosted: Hosted, action: ToStage, events: deque[Event]) -> None:
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

    def _to_client(self, hosted: Hosted, action: ToClient) -> None:
        if isinstance(action.output, SessionCreated):
            if not hosted.opened.done():
                hosted.opened.set_result(None)
            self._metrics.session_opened(hosted.session.pipeline.name)
        hosted.tell(action)

    async def room(self, session: str) -> None:
        """Wait until the session takes more verbs, or has ended."""
        hosted = self._hosted.get(session)
        if hosted is not None:
            await hosted.room.wait()

    @staticmethod
    def _hold(hosted: Hosted, hold: bool) -> None:
        if hold:
            hosted.room.clear()
        else:
            hosted.room.set()

    def _bind(self, hosted: Hosted, stage: str, events: deque[Event]) -> None:
        session = hosted.session.identity.session
        try:
            replica = self._pools.pick(stage)
        except CapacityExceeded as error:
            self._waiting.setdefault(stage, {})[session] = None
            events.append(StageUnavailable(stage, error.info()))
            return
        events.append(self._bound(hosted, replica))

    @staticmethod
    def _bound(hosted: Hosted, replica: Replica) -> StageBound:
        hosted.wires.bind(replica.stage, replica)
        return StageBound(replica.stage, replica.link.worker or replica.name)

    def _measured(self, hosted: Hosted, turn: TurnMeasured) -> None:
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

    def _released(self, hosted: Hosted, reason: CloseReason) -> None:
        identity = hosted.session.identity
        hosted.wires.release()
        for waiting in self._waiting.values():
            waiting.pop(identity.session, None)
        del self._hosted[identity.session]
        self._deadlines.set(identity.session, None)
        self._admission.give_back(hosted.session.pipeline)
        self._changed.set()
        hosted.end(SessionStateLost("the session has ended"))
        if hosted.told:
            self._metrics.session_closed(hosted.session.pipeline.name, reason)
        elif not hosted.opened.done():
            hosted.opened.set_exception(_refusal(hosted.session, reason))
        _log.info("session_released", session=identity.session, epoch=identity.epoch, reason=reason)

    def _count_state(self, hosted: Hosted) -> None:
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
    return raised(info)
