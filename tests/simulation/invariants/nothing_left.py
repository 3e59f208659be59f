"""I4: a closed session holds nothing anywhere after a bounded time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from protocol.messages import Close, Command
from sessions.client import SessionEnded
from sessions.lifecycle import CloseReason
from tests.simulation.client import Client
from tests.simulation.gateway import GatewayProcess, SimulatedLink
from tests.simulation.process import Process
from tests.simulation.profile import GONE_MS, PARKS
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import Action, Event, OpenSession, SessionFreed


class I4NothingLeft(Invariant):
    """What is held belongs to sessions that are hosted; after GONE_MS workers agree."""

    name = "I4 nothing left"
    preconditions = (
        "sessions closed",
        "sessions of a dead gateway",
        "sessions whose place was given back",
        "worlds that settled",
        "sessions that ended while they were parked",
        "snapshots left to their time",
        "sessions that could not be freed at once",
        "places held for a worker that cleans up",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._orphans: set[str] = set()
        """Sessions of gateways that died, or that ended while nobody could be told to forget
        their parked state."""
        self._ended: defaultdict[str, set[str]] = defaultdict(set)
        """By gateway, the sessions that ended while they were parked."""
        self._told: dict[tuple[str, str], tuple[SimulatedLink, str | None]] = {}
        """Who was told last that a session has ended, by session and stage."""

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """What is parked of a session that ends goes with it, where anybody can see to that."""
        if not isinstance(output, SessionEnded):
            return
        gateway = client.gateway
        assert gateway is not None
        for stage in PARKS:
            if (client.session, stage) in self.deployment.store.snapshots:
                self.count("sessions that ended while they were parked")
                self._ended[gateway.incarnation].add(client.session)
                replicas = gateway.placement.of(stage)
                if not any(replica.works(gateway.now_ms) for replica in replicas):
                    self._orphans.add(client.session)

    def released(self, client: Client, reason: CloseReason) -> None:
        """At the gateway everything goes at once, at the workers within GONE_MS."""
        self.count("sessions closed")
        gateway = client.gateway
        assert gateway is not None
        self.check(client.session not in gateway.hosted, f"{client.session} is hosted still")
        record = gateway.hosted.directory.get(client.session)
        # Of a directory that does not answer nobody knows what it keeps.
        in_doubt = "directory" in self.deployment.causes[client.session]
        late = self.deployment.profile.directory.slow > 0
        self.check(record is None or in_doubt or late, f"the directory keeps {record}")
        self.count("sessions whose place was given back")
        self._look_later(client.session)

    def gateway_died(self, gateway: GatewayProcess) -> None:
        """Its sessions are gone from the workers in time as well. What others have left in the
        store, and nobody was told of yet, it can have removed no more."""
        self._orphans |= self._ended.pop(gateway.incarnation, set())
        for hosted in gateway.hosted.all():
            self.count("sessions of a dead gateway")
            self._orphans.add(hosted.id)
            self._look_later(hosted.id)

    def _look_later(self, session: str) -> None:
        self.world.after(GONE_MS, lambda: self._look(session))

    def _look(self, session: str) -> None:
        for worker in self.deployment.workers.values():
            if worker is None or worker.paused:
                continue
            self.check(
                session not in worker.engine.sessions,
                f"{worker.place} holds {session} {GONE_MS} ms after its end",
            )

    def sent(self, gateway: GatewayProcess, link: SimulatedLink, command: Command) -> None:
        """A worker is told of an end, over a link that may be lost before it hears that."""
        if isinstance(command, Close):
            self._told[command.fence.session, link.replica.stage] = (link, link.worker)

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """A session that is freed has no account any more, unless it is opened anew."""
        if not isinstance(event, SessionFreed):
            return
        opened = any(isinstance(a, OpenSession) and a.session == event.session for a in actions)
        held, there = worker.ledger.of(event.session), event.session in worker.engine.sessions
        if event.error is None and not opened:
            self.check(not held, f"{worker.place} has freed {event.session} and keeps {held}")
        elif event.error is not None and there and self.deployment.profile.places is not None:
            self.count("sessions that could not be freed at once")
            self.check(bool(held), f"{worker.place} has not freed {event.session}: {held}")

    def stepped(self, process: Process) -> None:
        """The counts of what is held agree with each other."""
        if isinstance(process, GatewayProcess):
            hosted = process.hosted
            held = hosted.admission.held(process.pipeline.name)
            lingering = len(hosted.lingering)
            self.check(
                held == len(hosted) + lingering,
                f"{held} places for {len(hosted)} sessions, and {lingering} that linger",
            )
            if lingering:
                self.count("places held for a worker that cleans up")
            if not self.deployment.profile.directory.slow:
                records = len(hosted.directory)
                if records > len(hosted):
                    records -= self._in_doubt(process)
                self.check(records <= len(hosted), f"{records} records for {len(hosted)} sessions")
            waits = hosted.openings.deadline_ms is not None
            self.check(
                len(hosted.deadlines) <= len(hosted) + waits,
                f"{len(hosted.deadlines)} timers for {len(hosted)} sessions",
            )
        elif isinstance(process, WorkerProcess):
            control = process.control
            self.check(control.kept_bytes >= 0, f"{control.kept_bytes} bytes are kept")
            self.check(control.waiting >= 0, f"{control.waiting} turns and commands wait")

    def _in_doubt(self, gateway: GatewayProcess) -> int:
        """Records of sessions that ended while the directory was away."""
        causes, hosted = self.deployment.causes, gateway.hosted
        return sum(
            session not in hosted and hosted.directory.get(session) is not None
            for session, why in causes.items()
            if "directory" in why
        )

    def settled(self) -> None:
        """Nothing is held by anybody."""
        self.count("worlds that settled")
        for gateway in self.deployment.gateways.values():
            if gateway is None:
                continue
            hosted = gateway.hosted
            self.check(len(hosted) == 0, f"{gateway.place} hosts {[h.id for h in hosted.all()]}")
            self.check(len(hosted.openings) == 0, f"{gateway.place} has opens that wait")
            left = (len(hosted.lingering), len(hosted.forgetting), len(hosted.forks))
            self.check(left == (0, 0, 0), f"{gateway.place} waits for workers: {left}")
            records = len(hosted.directory) - self._in_doubt(gateway)
            self.check(records == 0, f"{gateway.place} has records")
            self.check(hosted.deadlines.next_ms() is None, f"{gateway.place} has a timer")
            for replica in gateway.placement.all():
                self.check(not replica.sessions, f"{replica.name} has {replica.sessions}")
                waiting = gateway.placement.waiting(replica.stage)
                self.check(not waiting, f"{waiting} wait for {replica.stage}")
        for worker in self.deployment.workers.values():
            if worker is None:
                continue
            control = worker.control
            held = (control.sessions, control.waiting, control.kept_bytes)
            self.check(held == (0, 0, 0), f"{worker.place} holds {held}")
            self.check(not worker.engine.sessions, f"{worker.place} has {worker.engine.sessions}")
            self.check(control.deadline_ms is None, f"{worker.place} has a timer")
            for device, bytes_ in worker.ledger.devices().items():
                taken = (bytes_.sessions, bytes_.kept)
                self.check(taken == (0, 0), f"{worker.place} has {taken} of {device} reserved")
        for session, stage in self.deployment.store.snapshots:
            lost = bool(self.deployment.causes[session] & {"lost", "stolen", "stopped"})
            if (session, stage) in self._told:
                link, worker_then = self._told[session, stage]
                lost = lost or link.worker != worker_then
            self.check(
                lost or session in self._orphans,
                f"the state of {session} on {stage} is parked, and the session has ended",
            )
            self.count("snapshots left to their time")
