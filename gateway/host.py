"""The shell around the hosted sessions: it opens them, and lets nobody wait for ever.

Everything runs on the event loop and by direct calls: a verb, a worker's report or
a deadline goes to `gateway.hosted`, and what comes out is done at once. One timer is
armed for the earliest deadline of all sessions.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.hosted import Hosted, HostedSessions
from gateway.hosting import (
    OnOutput,
    PipelineHealth,
    SessionSummary,
    WorkerSummary,
)
from gateway.metrics import GatewayMetrics
from gateway.overview import session_summary, stage_health, worker_summary
from gateway.placement import Placement, Replica
from gateway.pools import Pools
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    NotFound,
)
from protocol.messages import (
    Fence,
    Report,
    WorkerStatus,
)
from sessions.actions import (
    ClientBlocked,
    ClientSaid,
    CloseRequested,
    Event,
    OpenRequested,
    TurnMeasured,
)
from sessions.duplex.events import ClientOutput, ClientVerb, SessionCreated
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Pipeline
from sessions.session import Identity, Session

_log = structlog.get_logger(__name__)


def new_id(prefix: str) -> str:
    """An unguessable id that says what it names."""
    return f"{prefix}_{secrets.token_urlsafe(15)}"


class _Attached:
    """What the shell keeps of a session: who waits for its open, and for its room."""

    def __init__(self, opened: asyncio.Future[None], opened_at_ms: float) -> None:
        self.opened = opened
        self.opened_at_ms = opened_at_ms
        self.room = asyncio.Event()
        """Set while the session takes verbs."""
        self.room.set()

    def hold(self, hold: bool) -> None:
        """The session takes no verbs for now, or takes them again."""
        if hold:
            self.room.clear()
        else:
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
        self._timer_at_ms = 0.0
        self._attached: dict[str, _Attached] = {}
        self._transfers = Transfers(
            self.incarnation, [endpoint for _, _, endpoint in workers], self._stage_lost
        )
        self._placement = Placement()
        self._hosted = HostedSessions(self._placement, self._transfers, self)
        metrics.watch_edges(self._transfers.traffic)
        self._incarnations: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._pools = Pools(
            self.incarnation,
            self._placement,
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
        settings_patch: dict[str, Any] | None,
        on_output: OnOutput,
    ) -> HostedAttachment:
        """Open a session. Raises AntiphonError, and then holds nothing.

        Cancelled at any point it closes what it had opened.
        """
        spec = self.pipelines[pipeline]
        if self.draining:
            raise CapacityExceeded("this gateway is draining", code="draining")
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
        attached = _Attached(self._loop.create_future(), now_ms)

        def told(sequence: int, output: ClientOutput) -> None:
            if isinstance(output, SessionCreated):
                if not attached.opened.done():
                    attached.opened.set_result(None)
                self._metrics.session_opened(pipeline)
            on_output(sequence, output)

        def released(reason: CloseReason) -> None:
            self._released(hosted, attached, reason)

        hosted = Hosted(session, wires, told, attached.hold, released)
        self._hosted.admit(hosted, settings_patch)
        self._attached[identity.session] = attached
        attachment = HostedAttachment(self, identity.session)
        self.handle(identity.session, OpenRequested())
        try:
            await attached.opened
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
        for hosted in self._hosted.all():
            self.handle(hosted.id, CloseRequested(CloseReason.DRAINED))

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
        """Feed `event` to the session and carry out what it asks for."""
        self._hosted.handle(session, event, self._now_ms())
        self._arm()

    def _stage_lost(self, session: str, stage: str) -> None:
        self._hosted.stage_lost(session, stage, self._now_ms())
        self._arm()

    async def room(self, session: str) -> None:
        """Wait until the session takes more verbs, or has ended."""
        attached = self._attached.get(session)
        if attached is not None:
            await attached.room.wait()

    # What all sessions tell

    def failed(self, session: str, error: Exception) -> None:
        """A session's machine raised."""
        _log.error("session_failed", session=session, exc_info=error)

    def unsent(self, session: str, stage: str, error: AntiphonError) -> None:
        """A command or an output did not come across."""
        _log.warning("stage_given_up", session=session, stage=stage, error=error.code)

    def measured(self, hosted: Hosted, turn: TurnMeasured) -> None:
        """A turn has ended."""
        identity = hosted.session.identity
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

    def state_changed(self, hosted: Hosted, before: State | None, after: State | None) -> None:
        """A session entered a state, or was let go."""
        self._metrics.session_state_changed(hosted.session.pipeline.name, before, after)

    def _released(self, hosted: Hosted, attached: _Attached, reason: CloseReason) -> None:
        identity = hosted.session.identity
        attached.room.set()
        del self._attached[identity.session]
        self._changed.set()
        if hosted.told:
            self._metrics.session_closed(hosted.session.pipeline.name, reason)
        elif not attached.opened.done():
            attached.opened.set_exception(_refusal(hosted.session, reason))
        _log.info("session_released", session=identity.session, epoch=identity.epoch, reason=reason)

    # Time

    @staticmethod
    def _now_ms() -> float:
        return time.monotonic() * 1000.0

    def _arm(self) -> None:
        at_ms = self._hosted.deadlines.next_ms()
        if at_ms is None:
            return
        if self._timer is not None:
            if self._timer_at_ms <= at_ms:
                return
            self._timer.cancel()
        # Kept here: uvloop's handle of a time that has passed does not know it.
        self._timer_at_ms = at_ms
        when = self._loop.time() + max(0.0, at_ms - self._now_ms()) / 1000.0
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._hosted.tick(self._now_ms())
        self._arm()

    # Workers

    def _on_report(self, replica: Replica, report: Report) -> None:
        assert not isinstance(report, WorkerStatus)
        self._hosted.received(replica, report, self._now_ms())
        self._arm()

    def _on_ready(self, stage: str) -> None:
        self._hosted.ready(stage, self._now_ms())
        self._arm()

    def _on_lost(self, replica: Replica) -> None:
        self._hosted.lost(replica, self._now_ms())
        self._arm()

    def _on_change(self) -> None:
        self._changed.set()
        begun = self._loop.time()
        self._loop.call_soon(lambda: self._metrics.loop_lag(self._loop.time() - begun))
        for replica in self._placement.all():
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
                    stage: stage_health(self._placement.of(stage), now_ms)
                    for stage in pipeline.stages
                },
                sessions=self._hosted.admission.held(pipeline.name),
                session_limit=pipeline.limits.sessions,
            )
            for pipeline in self.pipelines.values()
        ]

    def sessions(self) -> list[SessionSummary]:
        """All sessions that hold anything."""
        now_ms = self._now_ms()
        return [
            session_summary(
                hosted.session, hosted.wires.turns, self._attached[hosted.id].opened_at_ms, now_ms
            )
            for hosted in self._hosted.all()
        ]

    def workers(self) -> list[WorkerSummary]:
        """All workers that the config names."""
        now_ms = self._now_ms()
        return [worker_summary(replica, now_ms) for replica in self._placement.all()]


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
