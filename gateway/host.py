"""The shell around the hosted sessions: it opens them, and lets nobody wait for ever.

Everything runs on the event loop and by direct calls: a verb, a worker's report or
a deadline goes to `gateway.hosted`, and what comes out is done at once. One timer is
armed for the earliest deadline of all sessions.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.bookkeeping import Bookkeeping
from gateway.cameras import Cameras, Seen
from gateway.clients import Clients, HostedAttachment
from gateway.hosted import Hosted, HostedSessions
from gateway.hosting import (
    OnOutput,
    OnPosition,
    PipelineHealth,
    SessionDescription,
    SessionHistory,
    SessionSummary,
    WaitingSummary,
    WorkerSummary,
)
from gateway.metrics import GatewayMetrics
from gateway.opening import SessionOpening, prioritised
from gateway.overview import session_summary, stage_health, waiting_summary, worker_summary
from gateway.placement import Placement, Replica
from gateway.pools import Pools
from gateway.stops import Stops
from gateway.timeline import NOTED
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.deadline_timer import DeadlineTimer
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    InvalidRequest,
    NotFound,
    SessionBusy,
    SessionStateLost,
)
from protocol.messages import Fork, Report, WorkerStatus
from sessions.actions import (
    AttachRequested,
    ClientSaid,
    CloseRequested,
    Event,
    ParkRequested,
    RestoreRequested,
    StageCrowded,
    ToClient,
)
from sessions.chosen_control import controlled
from sessions.chosen_limits import chosen
from sessions.client import Answered, Attached, Origin, Role, Verb
from sessions.lifecycle import CloseReason
from sessions.pipeline import Kind, Limits, Pipeline
from sessions.resume_secret import digest
from sessions.session import Identity, Session
from sessions.steps.events import EmergencyStop, Step

ENDED = 1024
"""Sessions whose end is remembered, so that who closes one of them is not refused."""


def _commonness(error: AntiphonError) -> int:
    if isinstance(error, SessionBusy):
        return 1
    return 2 if isinstance(error, InvalidRequest) else 0


def new_id(prefix: str) -> str:
    """An unguessable id that says what it names."""
    return f"{prefix}_{secrets.token_urlsafe(15)}"


class GatewayHost:
    """The sessions of one gateway process. Make it on a running loop.

    `workers` is (name, stage, endpoint) of every worker; `aliases` maps every name
    that a client's `model` may be to a pipeline. With `cameras` operators may look at what
    robots sense.
    """

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        aliases: Mapping[str, str],
        required: frozenset[str],
        workers: list[tuple[str, str, str]],
        metrics: GatewayMetrics,
        cameras: Cameras | None = None,
    ) -> None:
        self.pipelines = pipelines
        self._cameras = cameras
        self.incarnation = new_id("gateway")
        self._aliases = aliases
        self._required = required
        self._books = Bookkeeping(metrics)
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._tick, self._now_ms)
        self._clients: dict[str, Clients] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """The tenants of the sessions that ended last."""
        self._transfers = Transfers(
            self.incarnation, [endpoint for _, _, endpoint in workers], self._stage_lost
        )
        self._placement = Placement()
        self._hosted = HostedSessions(self._placement, self._transfers, self._books)
        metrics.watch_edges(self._transfers.traffic)
        metrics.watch_waiting(
            lambda: {name: len(self._hosted.openings.waiting(name)) for name in pipelines}
        )
        self._stops = Stops(pipelines, self._known, self.handle)
        self._changed = asyncio.Event()
        self._pools = Pools(
            self.incarnation,
            self._placement,
            self._now_ms,
            on_report=self._on_report,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_change=self._on_change,
            on_crowded=self._on_crowded,
            attach=self._transfers.attach,
        )
        for name, stage, endpoint in workers:
            self._books.watch(self._pools.add(name, stage, endpoint))

    @property
    def draining(self) -> bool:
        """Whether this gateway takes no more sessions."""
        return self._hosted.openings.over is not None

    @property
    def holds_lease(self) -> bool:
        """With the memory directory the only gateway always may act."""
        return True

    @property
    def overview_changed(self) -> asyncio.Event:
        """Set when something of what operators see has changed; its one reader clears it."""
        return self._books.changed

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
        priority: int | None = None,
        control: Mapping[str, Any] | None = None,
        secret: str | None = None,
        on_output: OnOutput | None = None,
        on_position: OnPosition | None = None,
        fork: str | None = None,
    ) -> HostedAttachment:
        """Open a session, once there is room for it. Raises AntiphonError, and then holds nothing.

        Cancelled at any point it closes what it had opened, and waits no more.
        """
        spec = controlled(prioritised(self.pipelines[pipeline], priority), control or {})
        bounds = chosen(spec.limits, limits or {})
        name = new_id("att") if on_output is not None else None

        def new_session() -> Session:
            patch, begins = settings_patch or {}, None
            if fork is not None:
                patch, begins = self._forked(fork, tenant, pipeline, patch)
            return self._session(spec, tenant, name, secret, bounds, patch, begins)

        def begin(session: Session) -> None:
            self._begin(session, opening, name, on_output)

        opening = SessionOpening(
            self._hosted, spec, tenant, new_session, begin, on_position, self._opens_changed, fork
        )
        clients = await opening.opened(self._now_ms)
        return self._attachment(clients, name or "")

    def _forked(
        self, source: str, tenant: str, pipeline: str, patch: dict[str, Any]
    ) -> tuple[dict[str, Any], Fork]:
        """The settings of a fork, and what it begins with. Raises NotFound, and InvalidRequest
        for what cannot be forked."""
        session = self._find(source, tenant).session
        if session.pipeline.kind not in (Kind.WORLD, Kind.ROBOT):
            raise InvalidRequest(
                f"a session of kind {session.pipeline.kind} cannot be forked",
                field="fork.session",
                code="unsupported",
            )
        if session.pipeline.name != pipeline:
            raise InvalidRequest(
                f"the session to fork is one of {session.pipeline.name!r}", field="model"
            )
        return {**session.settings, **patch}, Fork(source, patch)

    def _opens_changed(self) -> None:
        """Opens wait, or wait no more."""
        self._books.changed.set()
        self._arm()

    def _begin(
        self,
        session: Session,
        opening: SessionOpening,
        controller: str | None,
        on_output: OnOutput | None,
    ) -> None:
        """Host a session that is to be opened. Raises CapacityExceeded."""
        wires = SessionWires(session.fence, session.pipeline, self._transfers)
        clients = Clients(session, opening.result, self._now_ms(), lambda: wires.turns)

        def told(action: ToClient) -> None:
            if type(action.output) not in NOTED:
                clients.tell(action)
                return
            self._books.told(session, action)
            announced = clients.announced
            clients.tell(action)
            if clients.announced and not announced:
                self._books.opened(session, self._now_ms() - opening.since_ms)

        def released(reason: CloseReason) -> None:
            self._released(clients, reason)

        hosted = Hosted(
            session, wires, told, clients.refuse, clients.hold, released, opening.opening
        )
        self._books.begun(session, opening.since_ms)
        self._clients[session.identity.session] = clients
        if controller is not None and on_output is not None:
            clients.listeners[controller] = on_output
        try:
            self._hosted.admit(hosted, self._now_ms())
        except CapacityExceeded:
            del self._clients[session.identity.session]
            self._books.forget(self._summary(clients, self._now_ms()), keep=False)
            raise

    def _session(
        self,
        pipeline: Pipeline,
        tenant: str,
        controller: str | None,
        secret: str | None,
        limits: Limits,
        settings_patch: dict[str, Any],
        fork: Fork | None,
    ) -> Session:
        """A session that nothing knows of yet. Raises InvalidRequest for its settings."""
        pipeline = self._stops.begun(pipeline)
        identity = Identity(
            session=new_id("sess"),
            epoch=1,
            owner=self.incarnation,
            tenant=tenant,
            model=pipeline.name,
            expires_at_s=int(time.time() + limits.max_age_ms / 1000),
        )
        session = Session(
            identity,
            pipeline,
            new_id,
            self._now_ms(),
            controller=controller,
            secret_digest=None if secret is None else digest(secret),
            limits=limits,
            fork=fork,
        )
        if settings_patch:
            session.prepare(settings_patch)
        return session

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
        clients = self._find(session, tenant)
        name = new_id("att")
        arrival: asyncio.Future[Attached] = self._loop.create_future()
        clients.arrivals[name] = arrival
        clients.listeners[name] = on_output
        attachment = self._attachment(clients, name)
        request = AttachRequested(name, role, cursor, secret, new_id("secret"))
        self.handle(session, request)
        try:
            attached = await arrival
        except asyncio.CancelledError:
            clients.arrivals.pop(name, None)
            attachment.detach()
            raise
        except AntiphonError as error:
            self._books.attach_refused(clients.session, error)
            raise
        self._books.attached(clients.session, role)
        return attachment, attached

    async def command(self, session: str, tenant: str, verb: Verb, command: str) -> Answered:
        """Have a verb carried out without an attachment. Raises AntiphonError."""
        clients = self._find(session, tenant)
        if not isinstance(verb, EmergencyStop):
            await clients.room.wait()
        self._find(session, tenant)  # It may have ended meanwhile, and answers nobody then.
        answer: asyncio.Future[Answered] = self._loop.create_future()
        waiting = clients.answers.get(command)
        if waiting is not None:
            waiting.append(answer)
        else:
            clients.answers[command] = [answer]
            self.handle(session, ClientSaid(verb, None, command))
        return await answer

    def _attachment(self, clients: Clients, name: str) -> HostedAttachment:
        def forget(attachment: str) -> None:
            clients.listeners.pop(attachment, None)

        return HostedAttachment(self, clients.session.identity.session, name, forget)

    def _find(self, session: str, tenant: str | None) -> Clients:
        """A session; for its tenant one that is open. Raises NotFound, with the same words for
        one that is not there and for another tenant's."""
        clients = self._clients.get(session)
        if clients is None or (
            tenant is not None
            and not (clients.announced and clients.session.identity.tenant == tenant)
        ):
            raise NotFound(f"there is no session {session!r}", code="session_not_found")
        return clients

    def summary(self, session: str, tenant: str | None) -> SessionSummary:
        """One session, of this tenant if one is given. Raises NotFound."""
        return self._summary(self._find(session, tenant), self._now_ms())

    def _summary(self, clients: Clients, now_ms: float) -> SessionSummary:
        session = clients.session.identity.session
        return session_summary(
            clients.session,
            clients.turns(),
            clients.opened_at_ms,
            self._books.timelines.noted(session),
            self._books.figures(session),
            now_ms,
        )

    def history(self, session: str) -> SessionHistory:
        """One session with its timeline, also one of those that ended last. Raises NotFound."""
        return self._books.timelines.ended(session) or self._books.timelines.running(
            self.summary(session, None)
        )

    def describe(self, session: str, tenant: str) -> SessionDescription:
        """One session of this tenant, with its settings and limits. Raises NotFound."""
        summary = self.summary(session, tenant)
        known = self._find(session, tenant).session
        return SessionDescription(
            summary,
            known.settings,
            known.limits,
            known.identity.expires_at_s,
            known.about,
            known.pipeline.control,
        )

    def ended(self, session: str, tenant: str) -> bool:
        """Whether there was such a session of this tenant, as long as that is remembered."""
        return self._ended.get(session) == tenant

    def close_session(self, session: str, tenant: str | None = None) -> None:
        """Close a session: for the operator, or for its tenant. Raises NotFound.

        A tenant's that has ended is closed: an answer may have been lost on its way, or the
        session have ended by itself a moment before.
        """
        if tenant is not None and self.ended(session, tenant):
            return
        self._find(session, tenant)
        reason = CloseReason.ADMIN if tenant is None else CloseReason.CLIENT
        self.handle(session, CloseRequested(reason))

    def evict_session(self, session: str) -> None:
        """End a session to make room for others. Raises NotFound, and SessionBusy while a turn
        is in flight."""
        if self._find(session, None).session.working:
            raise SessionBusy("a turn of this session is in flight")
        self.handle(session, CloseRequested(CloseReason.EVICTED))

    async def park_session(self, session: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Put the state of a session away: the stages where it is once that is done, and why
        it is not at the others.

        Where it is at none it raises why: NotFound, SessionBusy, InvalidRequest where it can
        never be, and CapacityExceeded where the store has no room.
        """
        clients = self._find(session, None)
        known = clients.session
        self.handle(session, ParkRequested())
        kept = known.kept
        parked = set(known.stored)
        asked = known.putting_away
        outcomes = await asyncio.gather(*(clients.moves.put_away(stage) for stage in asked))
        for stage, error in zip(asked, outcomes, strict=True):
            if error is not None:
                kept[stage] = error
            else:
                parked.add(stage)
        if not parked:
            # What went wrong says more than what has work, and that more than what never can.
            raise min(kept.values(), key=_commonness)
        stages = tuple(stage for stage in known.pipeline.stages if stage in parked)
        return stages, {stage: error.message for stage, error in kept.items()}

    async def restore_session(self, session: str) -> tuple[dict[str, str], dict[str, str]]:
        """Have what is parked of a session brought back: the `origin` of what the stages have
        once that is done, and why the others have nothing of it.

        Where it is none of several it raises why; NotFound.
        """
        clients = self._find(session, None)
        parked = clients.session.parked
        moves = [clients.moves.brought_back(stage) for stage in parked]
        self.handle(session, RestoreRequested())
        restored: dict[str, str] = {}
        lost: dict[str, AntiphonError] = {}
        for stage, (origin, error) in zip(parked, await asyncio.gather(*moves), strict=True):
            if origin is None or origin is Origin.NOTHING:
                lost[stage] = error or SessionStateLost(f"the state of stage {stage} is lost")
            else:
                restored[stage] = origin.value
        if lost and not restored:
            raise next(iter(lost.values()))
        return restored, {stage: error.message for stage, error in lost.items()}

    def stop_session(self, session: str, stopped: bool) -> bool:
        """Have a robot's session stand still, or go on; whether it stands still. Raises NotFound,
        and InvalidRequest for one that is no robot's."""
        return self._stops.session(self._find(session, None).session, stopped)

    def stop_robots(self, pipeline: str | None, stopped: bool) -> dict[str, list[str]]:
        """The same for all of a pipeline, or of all, those that come later too; their ids by
        pipeline. Raises NotFound."""
        name = None if pipeline is None else self._aliases.get(pipeline, pipeline)
        touched = self._stops.robots(name, stopped)
        self._books.changed.set()
        return touched

    async def seen(self, session: str) -> Seen:
        """What the cameras of a robot saw last. Raises NotFound, and InvalidRequest where that is
        not allowed."""
        self._find(session, None)
        if self._cameras is None:
            raise InvalidRequest(
                "this gateway shows no cameras: `gateway.cameras` is not set",
                code="cameras_not_allowed",
            )
        return await self._cameras.seen(session)

    def _known(self) -> list[Session]:
        return [clients.session for clients in self._clients.values()]

    def drain(self) -> None:
        """Take no more sessions and close all."""
        self._hosted.openings.close(CapacityExceeded("this gateway is draining", code="draining"))
        self._books.changed.set()
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

    async def until_ready(self, pipeline: str, ready: bool) -> None:
        """Wait until the pipeline has a replica of each stage, or until it has not."""
        while any(it.name == pipeline and it.ready is not ready for it in self.health()):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Drop all links and the timer."""
        self._timer.cancel()
        self._pools.close()
        self._transfers.close()

    # Events in, actions out

    def handle(self, session: str, event: Event) -> None:
        """Feed `event` to the session and carry out what it asks for."""
        if self._cameras is not None and isinstance(event, ClientSaid):
            self._look(self._cameras, session, event.verb)
        self._hosted.handle(session, event, self._now_ms())
        self._arm()

    def _look(self, cameras: Cameras, session: str, verb: Verb) -> None:
        if isinstance(verb, Step) and session in self._clients:
            cameras.observed(session, verb.inputs)

    def superseded(self, session: str, count: int) -> None:
        """So many inputs of the session were answered with what a newer one gave."""
        if (clients := self._clients.get(session)) is not None:
            self._books.superseded(clients.session, count)

    def _stage_lost(self, session: str, stage: str) -> None:
        self._hosted.stage_lost(session, stage, self._now_ms())
        self._arm()

    def has_room(self, session: str) -> bool:
        """Whether the session takes more verbs, or has ended."""
        clients = self._clients.get(session)
        return clients is None or clients.room.is_set()

    async def room(self, session: str) -> None:
        """Wait until the session takes more verbs, or has ended."""
        clients = self._clients.get(session)
        if clients is not None:
            await clients.room.wait()

    def _released(self, clients: Clients, reason: CloseReason) -> None:
        session = clients.session
        del self._clients[session.identity.session]
        if self._cameras is not None:
            self._cameras.forget(session.identity.session)
        clients.end(SessionStateLost("the session has ended"))
        self._changed.set()
        if clients.announced:
            self._remember_end(session.identity)
        self._books.released(session, reason, opened=clients.announced)
        self._books.forget(self._summary(clients, self._now_ms()), keep=clients.announced)

    def _remember_end(self, identity: Identity) -> None:
        self._ended[identity.session] = identity.tenant
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    # Time

    @staticmethod
    def _now_ms() -> float:
        return time.monotonic() * 1000.0

    def _arm(self) -> None:
        self._timer.arm_soon(self._hosted.deadlines.next_ms)

    def _tick(self) -> None:
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

    def _on_crowded(self, replica: Replica) -> None:
        for session in list(replica.sessions):
            self.handle(session, StageCrowded(replica.stage, replica.crowded))

    def _on_change(self, replica: Replica) -> None:
        self._changed.set()
        self._hosted.room(replica.stage, self._now_ms(), replica.changed)
        self._arm()
        self._books.workers_changed(self._placement.all())

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
                full=self._hosted.full(pipeline, now_ms),
                stopped=self._stops.stopped(pipeline.name),
            )
            for pipeline in self.pipelines.values()
        ]

    def sessions(self, most: int | None = None) -> list[SessionSummary]:
        """All sessions that hold anything; at most so many, those with the most bytes."""
        now_ms = self._now_ms()
        shown: Iterable[Clients] = self._clients.values()
        if most is not None and len(self._clients) > most:
            shown = heapq.nlargest(most, shown, key=lambda clients: clients.session.reserved_bytes)
        return [self._summary(clients, now_ms) for clients in shown]

    def waiting(self, most: int | None = None) -> list[WaitingSummary]:
        """The opens that are not sessions yet, by pipeline, in their order; of each at most so
        many."""
        now_ms = self._now_ms()
        return [
            waiting_summary(opening, position, self._hosted.openings.why(opening), now_ms)
            for name in self.pipelines
            for position, opening in enumerate(self._hosted.openings.waiting(name)[:most], 1)
        ]

    def workers(self) -> list[WorkerSummary]:
        """All workers that the config names."""
        now_ms = self._now_ms()
        return [worker_summary(replica, now_ms) for replica in self._placement.all()]
