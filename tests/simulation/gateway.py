"""A gateway process: the real sessions, placement, wires and link ends.

What `gateway.host`, `gateway.pools` and `protocol.worker_link` do on a loop is done here on
virtual time: actions are carried out, nothing is decided.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from gateway.hosted import Hosted, HostedSessions
from gateway.placement import Placement, Replica
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.edges import ConnectorKind
from protocol.errors import AntiphonError, EngineLost, ErrorInfo, NotFound
from protocol.link import GatewayEnd, NotLinked
from protocol.link_events import (
    Action,
    Connected,
    Crowded,
    Deliver,
    Disconnected,
    Down,
    Event,
    Flush,
    PeerStatus,
    Received,
    Refused,
    Tick,
    Transmit,
    Up,
)
from protocol.messages import (
    Command,
    Feed,
    Fork,
    RaiseFloor,
    Report,
    Run,
    Update,
    WorkerStatus,
    decode_report,
    encode,
)
from sessions import actions as core
from sessions.actions import NotFresh, StageCrowded, TurnMeasured
from sessions.chosen_control import controlled
from sessions.chosen_limits import chosen
from sessions.directory import Create, Outcome, Record, Remove, Reply, Request
from sessions.lifecycle import State
from sessions.opening import Opening
from sessions.resume_secret import digest
from sessions.session import Identity, Session
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.client import Client
    from tests.simulation.deployment import Deployment

TENANT = "tenant"


class SimulatedLink:
    """A link to one worker, as `gateway.placement.CommandLink`."""

    def __init__(self, gateway: GatewayProcess, place: str, stage: str) -> None:
        self.place = place
        self.endpoint = f"ipc:///simulation/{place}"
        self.ready = False
        self.replica = Replica(place, stage, self)
        self._gateway = gateway
        attempt = gateway.world.number("attempt") * 1000
        self.end = GatewayEnd(gateway.incarnation, gateway.profile.link, attempt=attempt)

    @property
    def worker(self) -> str | None:
        """The incarnation that is linked now."""
        return self.end.peer

    def leads_to(self, incarnation: str) -> bool:
        """Whether the worker that is linked is this process."""
        worker = self.worker
        return worker is not None and worker.rpartition(".")[0] == incarnation

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the worker that no more should be made for it."""
        return self.end.crowded

    @property
    def unacknowledged(self) -> int:
        """Messages that the worker has not acknowledged."""
        return self.end.unacknowledged

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineLost or CapacityExceeded."""
        urgent = isinstance(command, RaiseFloor)
        payload = isinstance(command, Update | Run | Feed)
        try:
            actions = self.end.send(encode(command), urgent=urgent, payload=payload)
        except NotLinked:
            raise EngineLost("the worker is not connected") from None
        self._carry_out(actions)
        self._gateway.watch.sent(self._gateway, self, command)

    def start_afresh(self) -> None:
        """Give the link up, and open a new one."""
        self.ready = False
        self._gateway.world.count("links started afresh")
        self._gateway.soon(lambda: self._start_afresh(self.end.peer))

    def _start_afresh(self, peer: str | None) -> None:
        if peer == self.end.peer:
            self.handle(Disconnected())
            self.handle(Connected())

    def handle(self, event: Event) -> None:
        """Feed the machine, and carry out what it asks for."""
        self._carry_out(self.end.handle(event, self._gateway.now_ms))

    def _carry_out(self, actions: list[Action]) -> None:
        gateway = self._gateway
        for action in actions:
            match action:
                case Transmit():
                    gateway.transmit(self, action.data)
                case Deliver():
                    self._report(decode_report(action.message))
                case PeerStatus():
                    self._report(decode_report(action.status))
                case Up():
                    assert action.info is not None
                    self.ready = action.info.ready
                    gateway.linked(self, action.peer)
                case Down():
                    self.ready = False
                    gateway.unlinked(self, action.reason)
                case Refused():
                    gateway.world.count("links refused")
                case Crowded():
                    gateway.world.count("links crowded")
                    gateway.soon(lambda: gateway.crowded(self))
                case _:
                    assert_never(action)

    def _report(self, report: Report) -> None:
        if isinstance(report, WorkerStatus):
            self.ready = report.ready
        self._gateway.reported(self, report)


class _Stream:
    """One session's input to one stage, on its way beside the link."""

    def __init__(self, link: SimulatedLink, worker: str | None) -> None:
        self.link = link
        self.worker = worker
        self.opened = False
        self.void = False
        self.due: deque[Update] = deque()


class SimulatedTransfers(Transfers):
    """Everything inside messages; where the world has arenas stream input goes beside them."""

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__(gateway.incarnation, [], gateway.stage_lost)
        self._gateway = gateway
        self._streams: dict[tuple[str, str], _Stream] = {}

    def open_input(self, session: str, stage: str, consumer: str | None, kind: str) -> None:
        """Stream input to a worker with an arena goes that way."""
        if consumer is not None and kind == ConnectorKind.SHM:
            link = self._gateway.links[consumer]
            self._streams[session, stage] = _Stream(link, link.worker)

    def opened(self, session: str, stage: str) -> None:
        """The worker knows the session."""
        if (stream := self._streams.get((session, stage))) is not None:
            stream.opened = True

    def put_input(self, stage: str, update: Update) -> Update | None:
        """Send it beside the link; the update itself when it goes inside a message."""
        stream = self._streams.get((update.fence.session, stage))
        if stream is None or not stream.opened:
            return update
        world = self._gateway.world
        world.count("inputs beside the link")
        if world.chance(self._gateway.profile.lose_input):
            world.count("fault: input lost")
            return None
        stream.due.append(update)
        delay_ms = world.random.choice([0.0, 0.5, 5.0, 60.0])
        self._gateway.leave(lambda: world.after(delay_ms, lambda: self._arrive(stream)))
        return None

    def close_input(self, session: str, stage: str) -> None:
        """What is on its way is taken back."""
        if (stream := self._streams.pop((session, stage), None)) is not None:
            stream.void = True

    def _arrive(self, stream: _Stream) -> None:
        update = stream.due.popleft()
        if not stream.void and stream.worker is not None:
            process = stream.worker.rpartition(".")[0]
            self._gateway.deployment.input_arrives(
                stream.link.place, process, self._gateway.incarnation, update
            )


class SimulatedSessions(HostedSessions):
    """The sessions of a gateway whose directory may take its time, or leave it in doubt."""

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__(gateway.placement, gateway.transfers, gateway)
        self._gateway = gateway

    def _ask(self, hosted: Hosted, request: Request, events: deque[core.Event]) -> None:
        gateway, faults = self._gateway, self._gateway.profile.directory
        world = gateway.world
        if isinstance(request, Create) and world.chance(faults.taken):
            world.count("fault: record was there")
            gateway.record_of_another(replace(request.record, epoch=2, owner="another"))
        if gateway.deployment.quiet_since_ms is not None or not faults.slow:
            super()._ask(hosted, request, events)
            return
        reply: Reply | None = None
        if world.chance(faults.unknown):
            world.count("fault: directory call in doubt")
            if world.chance(0.5):
                self.directory.call(request)
            reply = Reply(Outcome.UNKNOWN)
        elif not world.chance(faults.slow):
            super()._ask(hosted, request, events)
            return
        delay_ms = world.random.choice([0.5, 30.0, 400.0])
        if world.chance(faults.silent):
            world.count("fault: directory away")
            gateway.deployment.blame(hosted.id, "directory")
            delay_ms = 12_000.0
        world.count("directory calls answered late")

        def answer() -> None:
            answered = reply or self.directory.call(request)
            if hosted.id not in self:
                # It was let go without this answer, and does not ask again.
                gateway.deployment.blame(hosted.id, "directory")
            self.handle(hosted.id, core.DirectoryAnswered(answered), gateway.now_ms)

        gateway.later(delay_ms, answer)


class GatewayProcess(Process):
    """One incarnation of the gateway at a place."""

    def __init__(self, deployment: Deployment, place: str, incarnation: str) -> None:
        super().__init__(deployment.world, place, incarnation)
        self.deployment = deployment
        self.profile = deployment.profile
        self.watch = deployment.watch
        priorities = deployment.profile.priorities
        priority = priorities[deployment.gateway_places.index(place) % len(priorities)]
        pipeline = deployment.profile.pipeline
        parks = priority is not None
        self.pipeline = replace(
            pipeline, priority=priority or 0, parks=parks, durable=pipeline.durable and parks
        )
        self.placement = Placement()
        self.transfers = SimulatedTransfers(self)
        self.hosted = SimulatedSessions(self)
        self.links: dict[str, SimulatedLink] = {}
        for worker_place, stage in deployment.worker_places.items():
            link = SimulatedLink(self, worker_place, stage)
            self.links[worker_place] = link
            self.placement.add(link.replica)

    # From outside

    def receive(self, place: str, data: bytes) -> None:
        """The network brought a frame of a worker."""
        self.links[place].handle(Received(data))

    def connected(self, place: str) -> None:
        """The transport reaches a worker."""
        self.links[place].handle(Connected())

    def disconnected(self, place: str) -> None:
        """The transport has lost a worker for certain."""
        self.links[place].handle(Disconnected())

    # Clients

    def ask(self, client: Client, settings_patch: dict[str, Any] | None) -> None:
        """Open a session for `client`, once there is room. Raises AntiphonError for what can
        never be opened."""
        pipeline = controlled(self.pipeline, client.control)
        limits = chosen(pipeline.limits, client.limits)
        secret = client.line.secret

        def new_session() -> Session:
            patch, fork = settings_patch or {}, None
            if client.source is not None:
                source = self.hosted.get(client.source)
                if source is None or not source.told:
                    raise NotFound("there is no such session")
                fork = Fork(client.source, patch)
                patch = {**source.session.settings, **patch}
            identity = Identity(
                session=f"sess_{self.world.number('session')}",
                epoch=1,
                owner=self.incarnation,
                tenant=TENANT,
                model=pipeline.name,
                expires_at_s=0,
            )
            session = Session(
                identity,
                pipeline,
                self._new_id,
                self.now_ms,
                controller=None if client.line.opens_apart else client.name,
                secret_digest=None if secret is None else digest(secret),
                limits=limits,
                fork=fork,
            )
            if patch:
                session.prepare(patch)
            return session

        def begin() -> None:
            session = new_session()
            wires = SessionWires(session.fence, pipeline, self.transfers)
            hosted = Hosted(
                session,
                wires,
                client.put_out,
                client.line.refused,
                client.hold,
                client.released,
                opening,
            )
            client.hosted_as(self, hosted)
            self.hosted.admit(hosted, self.now_ms)

        if self.hosted.admission.lacking(pipeline, TENANT) is not None:
            new_session()
        opening = Opening(
            pipeline,
            TENANT,
            pipeline.priority,
            begin,
            client.stands,
            client.refused,
            client.source,
        )
        client.opening = opening
        self.watch.asked(client)
        self.hosted.open(opening, self.now_ms)

    def withdraw(self, opening: Opening) -> None:
        """A client wants no session any more."""
        self.hosted.withdraw(opening, self.now_ms)

    def handle(self, session: str, event: core.Event) -> None:
        """Feed an event to a session."""
        self.hosted.handle(session, event, self.now_ms)

    def record_of_another(self, record: Record) -> None:
        """Another owner has a session in the directory, and gives it up in time."""
        directory = self.hosted.directory
        self.deployment.blame(record.session, "directory")
        directory.call(Create(record))

        def give_up() -> None:
            directory.call(Remove(record.session, record.epoch))

        self.later(5_000.0, give_up)

    def stage_lost(self, session: str, stage: str) -> None:
        """A session's input cannot reach its stage."""
        self.hosted.stage_lost(session, stage, self.now_ms)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self.world.number(prefix)}"

    # What all sessions tell

    def failed(self, session: str, error: Exception) -> None:
        """A machine raised: that is never right."""
        raise error

    def unsent(self, session: str, stage: str, error: AntiphonError) -> None:
        """A command did not come across."""
        self.world.count("commands that a link did not take")
        self.deployment.blame(session, "lost")

    def not_restored(self, session: str, stage: str, error: ErrorInfo) -> None:
        """What was stored of a session did not come back."""
        self.world.note(self.place, f"{session} has lost {stage}: {error.message}")

    def measured(self, hosted: Hosted, turn: TurnMeasured) -> None:
        """A turn has ended."""
        self.watch.measured(self, hosted, turn)

    def not_fresh(self, hosted: Hosted, answered: NotFresh) -> None:
        self.world.count(f"answered without anything fresh: {answered.reason}")

    def evicted(self, hosted: Hosted) -> None:
        """A session ends to make room."""
        self.watch.evicted(self, hosted)

    def state_changed(self, hosted: Hosted, before: State | None, after: State | None) -> None:
        """A session entered a state."""
        self.world.note(self.place, f"{hosted.id} {before} -> {after}")
        client = self.deployment.clients.get(hosted.id)
        if client is not None and after is State.DETACHED:
            client.line.left_ms = self.now_ms

    # Links

    def transmit(self, link: SimulatedLink, data: bytes) -> None:
        """A frame leaves for a worker."""
        self.leave(lambda: self.deployment.to_worker(self, link.place, data))

    def linked(self, link: SimulatedLink, worker: str) -> None:
        """A worker has been introduced; its arena is attached after a while."""
        link.replica.came(worker)
        delay_ms = self.world.random.choice([0.0, 1.0, 40.0])
        self.later(delay_ms, lambda: self._attached(link, worker))

    def _attached(self, link: SimulatedLink, worker: str) -> None:
        if link.worker == worker:
            consumer = link.place if self.profile.arena else None
            if link.replica.attached(consumer):
                self.hosted.ready(link.replica.stage, self.now_ms)

    def unlinked(self, link: SimulatedLink, reason: str) -> None:
        """A link is lost."""
        self.world.note(self.place, f"loses {link.place}: {reason}")
        self.world.count("links lost")
        for session in link.replica.sessions:
            self.deployment.blame(session, "lost")
        link.replica.went()
        self.hosted.lost(link.replica, self.now_ms)

    def crowded(self, link: SimulatedLink) -> None:
        """Much waits on a link, or little does again."""
        for session in list(link.replica.sessions):
            self.handle(session, StageCrowded(link.replica.stage, link.crowded))

    def reported(self, link: SimulatedLink, report: Report) -> None:
        """A worker has said something."""
        if isinstance(report, WorkerStatus):
            if link.replica.beat(report, self.now_ms):
                self.hosted.ready(link.replica.stage, self.now_ms)
            self.hosted.room(link.replica.stage, self.now_ms, link.replica.changed)
            return
        self.watch.reported(self, link, report)
        self.hosted.received(link.replica, report, self.now_ms)

    # Time

    def deadline_ms(self) -> float | None:
        """The next deadline of all links and sessions."""
        times = [link.end.deadline_ms for link in self.links.values()]
        times.append(self.hosted.deadlines.next_ms())
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """Do what is due."""
        for link in self.links.values():
            if (due := link.end.deadline_ms) is not None and due <= now_ms:
                link.handle(Tick())
        self.hosted.tick(now_ms)

    def turn_ended(self) -> None:
        """Let go what was collected."""
        for link in self.links.values():
            link.handle(Flush())
        self.watch.stepped(self)
