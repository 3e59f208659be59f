"""Where processes run: places that are restarted, and the ways between them."""

from __future__ import annotations

from collections import defaultdict

from protocol.messages import Update
from tests.simulation.client import Client
from tests.simulation.gateway import GatewayProcess
from tests.simulation.network import Network
from tests.simulation.profile import Profile
from tests.simulation.store import Store
from tests.simulation.watch import Watch
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World


class Deployment:
    """All processes of one world, alive or between two lives.

    `causes` says by session what was done to it that may make it fail.
    """

    def __init__(self, world: World, profile: Profile, watch: Watch) -> None:
        self.world = world
        self.profile = profile
        self.watch = watch
        self.network = Network(world, profile.weather)
        self.worker_places = {
            f"{stage}-{number}": stage
            for stage in profile.stages
            for number in range(profile.replicas)
        }
        self.gateway_places = [f"gateway-{number}" for number in range(profile.gateways)]
        self.workers: dict[str, WorkerProcess | None] = dict.fromkeys(self.worker_places)
        self.gateways: dict[str, GatewayProcess | None] = dict.fromkeys(self.gateway_places)
        self.store = Store()
        self.causes: defaultdict[str, set[str]] = defaultdict(set)
        self.clients: dict[str, Client] = {}
        """Clients by their session."""
        self.runs: dict[int, int] = {}
        """The last word of each run that an engine has thought to its end."""
        self.spoken: dict[int, tuple[int, int]] = {}
        """The last clause, and its last piece, of each run that an engine has spoken so far."""
        self.quiet_since_ms: float | None = None
        """Since when nothing goes wrong any more."""
        self._by_incarnation: dict[str, GatewayProcess] = {}
        for place in self.worker_places:
            self.start_worker(place)
        for place in self.gateway_places:
            self.start_gateway(place)

    def blame(self, session: str, cause: str) -> None:
        """Something was done to `session`."""
        self.causes[session].add(cause)

    def living(self) -> list[GatewayProcess | WorkerProcess]:
        """All processes that run, paused ones included."""
        processes = [*self.gateways.values(), *self.workers.values()]
        return [process for process in processes if process is not None]

    def calm_down(self) -> None:
        """From now on nothing goes wrong any more, in places that were restarted either."""
        self.quiet_since_ms = self.world.now_ms
        self.network.heal()
        for worker in self.workers.values():
            if worker is not None:
                worker.run(worker.engine.obey)

    # Lives

    def start_worker(self, place: str) -> None:
        """A new incarnation of a worker."""
        incarnation = f"{place}.{self.world.number(place)}"
        self.world.note(place, f"{incarnation} starts")
        worker = WorkerProcess(self, place, self.worker_places[place], incarnation)
        self.workers[place] = worker
        for gateway in self.gateways.values():
            if gateway is not None:
                self._connect(gateway, place)

    def start_gateway(self, place: str) -> None:
        """A new incarnation of a gateway, which knows nothing of the one before."""
        incarnation = f"{place}.{self.world.number(place)}"
        self.world.note(place, f"{incarnation} starts")
        gateway = GatewayProcess(self, place, incarnation)
        self.gateways[place] = gateway
        self._by_incarnation[incarnation] = gateway
        for worker_place, worker in self.workers.items():
            if worker is not None:
                self._connect(gateway, worker_place)

    def kill_worker(self, place: str) -> None:
        """A worker ends without a word."""
        worker = self.workers[place]
        if worker is None:
            return
        for gateway in self.gateways.values():
            # A step that waits for a state which is on its way into the store fails before the
            # silence of the link is long enough.
            for session in gateway.links[place].replica.sessions if gateway is not None else ():
                self.blame(session, "lost")
        worker.die()
        self.workers[place] = None
        if self.profile.local:
            for gateway in self.gateways.values():
                if gateway is not None:
                    self._tell_disconnected(gateway, place)

    def kill_gateway(self, place: str) -> None:
        """A gateway ends without a word, and with it its directory."""
        gateway = self.gateways[place]
        if gateway is None:
            return
        gateway.die()
        self.gateways[place] = None
        del self._by_incarnation[gateway.incarnation]
        self.watch.gateway_died(gateway)
        if self.profile.local:
            for worker in self.workers.values():
                if worker is not None:
                    self._lose_gateway(worker, gateway.incarnation)

    def _connect(self, gateway: GatewayProcess, place: str) -> None:
        delay_ms = self.world.random.choice([0.1, 5.0, 50.0])

        def connect() -> None:
            if self.workers[place] is not None:
                gateway.connected(place)

        gateway.later(delay_ms, connect)

    def _tell_disconnected(self, gateway: GatewayProcess, place: str) -> None:
        gateway.later(0.1, lambda: gateway.disconnected(place))

    def _lose_gateway(self, worker: WorkerProcess, incarnation: str) -> None:
        worker.later(0.3, lambda: worker.disconnected(incarnation))

    # Ways

    def to_worker(self, source: GatewayProcess, place: str, data: bytes) -> None:
        """A frame leaves a gateway; whoever runs at the place when it comes gets it."""

        def arrive(data: bytes) -> None:
            worker = self.workers[place]
            if worker is not None:
                worker.run(lambda: worker.receive(source.incarnation, data))

        self.network.carry(source.place, place, data, arrive)

    def to_gateway(self, source: WorkerProcess, incarnation: str, data: bytes) -> None:
        """A frame leaves a worker for the gateway of this incarnation."""
        gateway = self._by_incarnation.get(incarnation)
        if gateway is None:
            if self.profile.local:
                self._lose_gateway(source, incarnation)
            return

        def arrive(data: bytes) -> None:
            gateway.run(lambda: gateway.receive(source.place, data))

        self.network.carry(source.place, gateway.place, data, arrive)

    def input_arrives(self, place: str, process: str, gateway: str, update: Update) -> None:
        """Stream input reaches a worker beside the link, unless that has ended meanwhile."""
        worker = self.workers[place]
        if worker is not None and worker.incarnation == process:
            worker.run(lambda: worker.input_arrived(gateway, update))
