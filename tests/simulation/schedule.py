"""One run of a world: clients come and go, things go wrong, then all is quiet again."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import ErrorInfo
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.faults import Faults
from tests.simulation.invariants import ALL
from tests.simulation.invariants.answers import I7Answers
from tests.simulation.kinds import client_of
from tests.simulation.profile import GONE_MS, OUT_OF_BYTES, SMALL_UNIT_BYTES, Profile, profile_of
from tests.simulation.watch import Invariant, Watch
from tests.simulation.world import SimulationFailure, World

FINISH_MS = 50_000.0
"""A reply is played out as fast as it is spoken, and a client may be blocked for a while."""
FORGOTTEN_MS = 3_000.0
"""A worker may be told to forget what is parked of a session when that has ended everywhere."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run. `failure` is None, or what does not hold and what led to it."""

    seed: int
    events: int
    counts: Counter[str]
    failure: str | None = None


class Schedule:
    """A world from its seed to its end."""

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        self.world = World(seed)
        self.profile = profile or profile_of(seed)
        invariants: list[Invariant] = [invariant(self.world) for invariant in ALL]
        self.watch = Watch(invariants)
        self.deployment = Deployment(self.world, self.profile, self.watch)
        self.watch.watches(self.deployment)
        self.clients: list[Client] = []
        answers = next(i for i in invariants if isinstance(i, I7Answers))
        self.faults = Faults(self.deployment, answers, lambda: list(self.clients))
        self._ending = False

    def begin(self) -> None:
        """Clients come, and faults."""
        for _ in range(self.profile.clients):
            self.world.after(self.world.random.uniform(10, 2_000), self._client)
        self.faults.begin()
        crowds = random.Random(f"crowds {self.world.seed}")
        if self.profile.clients > 2 and crowds.random() < 0.25:
            for _ in range(6):
                self.world.after(crowds.uniform(1_000, 20_000), self._another_crowd)

    def _another_crowd(self) -> None:
        """All clients are cut off at once, and while they may still come back as many others come:
        somebody has to make room, and there is a choice."""
        if self._ending:
            return
        self.world.count("crowds cut off")
        for client in list(self.clients):
            if client.line.resumable:
                client.line.vanish()
            self.world.after(self.world.random.uniform(50, 3_000), self._client)

    def _client(self) -> None:
        if self._ending:
            return
        place = self.world.random.choice(self.deployment.gateway_places)
        name = f"client-{self.world.number('client')}"
        client = client_of(self.deployment, place, name)
        client.on_end = self._gone
        self.clients.append(client)
        client.open()

    def _gone(self, client: Client) -> None:
        self.clients.remove(client)
        if len(self.clients) >= self.profile.clients:
            return
        self.world.after(self.world.random.uniform(1, 1_500), self._client)

    def end(self) -> None:
        """Everybody leaves, nothing goes wrong any more, and nothing may be left."""
        self._ending = True
        self.faults.stop()
        self.deployment.calm_down()
        self._finish()
        for client in list(self.clients):
            if client.gateway is not None:
                client.gateway.run(client.close)
        self._settle()
        for place in self.deployment.gateway_places:
            self._probe(place)
        self._settle()

    def _finish(self) -> None:
        """Once nothing goes wrong any more all that was begun comes to an end."""
        for client in self.clients:
            client.talks = False
        end_ms = self.world.now_ms + FINISH_MS
        while self.world.now_ms < end_ms and any(map(self._busy, self.clients)):
            self.world.run_for(250.0)
        for client in self.clients:
            if self._busy(client):
                what = client.pending() or "verbs held back"
                self.world.fail("responses end", f"{client.session} does not get on: {what}")

    def _busy(self, client: Client) -> bool:
        stolen = "stolen" in self.deployment.causes[client.session]
        if client.over or stolen or client.view.ended is not None:
            return False
        return bool(client.pending()) or client.held

    def _settle(self) -> None:
        gone_ms = self.world.now_ms + GONE_MS
        self._wait_until_empty(gone_ms)
        end_ms = self.world.now_ms + FORGOTTEN_MS
        while self.world.now_ms < end_ms and self.deployment.store.snapshots:
            self.world.run_for(500.0)
        # What was on its way may have come to something meanwhile.
        self._wait_until_empty(gone_ms)
        self.watch.settled()

    def _wait_until_empty(self, until_ms: float) -> None:
        while self.world.now_ms < until_ms and not self._empty():
            self.world.run_for(500.0)

    def _empty(self) -> bool:
        deployment = self.deployment
        processes = [*deployment.gateways.values(), *deployment.workers.values()]
        if any(process is None or process.paused for process in processes):
            return False
        hosted = (g.hosted for g in deployment.gateways.values() if g is not None)
        controls = (w.control for w in deployment.workers.values() if w is not None)
        waiting = (len(h) + len(h.forgetting) + len(h.lingering) for h in hosted)
        return not any(waiting) and not any(
            c.sessions or c.deadline_ms is not None for c in controls
        )

    def _probe(self, place: str) -> None:
        """After all that, a session opens, answers and closes."""
        wait_ms = self.world.now_ms + 30_000
        while True:
            client = client_of(self.deployment, place, f"probe-{place}")
            client.rude, client.fickle, client.slow, client.talks = 0.0, 0.0, False, False
            client.line.opens_apart = False
            while not self._ready(place) and self.world.now_ms < wait_ms:
                self.world.run_for(250.0)
            client.open()
            self.world.run_for(3_000.0)
            if client.view.created:
                break
            if client.gateway is not None and not client.over:
                client.gateway.run(client.close)
            # The other end of a link may just have given it up.
            if self.world.now_ms >= wait_ms:
                message = f"nobody can open a session any more: {client.refusal}"
                self.world.fail("I6 cancel", message)
        gateway = client.gateway
        assert gateway is not None
        gateway.run(client.probe)
        while client.probed() is None and self.world.now_ms < wait_ms + 30_000:
            self.world.run_for(500.0)
        answer = client.probed()
        if answer is None or (answer[0] is not None and not self._too_tight(answer[0])):
            self.world.fail("I6 cancel", f"nobody is answered any more: {answer}")
        gateway.run(client.close)

    def _too_tight(self, error: ErrorInfo) -> bool:
        places = self.profile.places
        small = places is not None and places.unit_bytes == SMALL_UNIT_BYTES
        return (self.profile.tight or small) and error.code in OUT_OF_BYTES

    def _ready(self, place: str) -> bool:
        """Whether the gateway is linked to every worker that runs, and each can take sessions."""
        gateway = self.deployment.gateways[place]
        if gateway is None:
            return False
        for link in gateway.links.values():
            worker = self.deployment.workers[link.place]
            linked = link.worker is not None and link.replica.works(gateway.now_ms)
            if worker is None or not worker.control.ready or not linked:
                return False
            both = link.leads_to(worker.incarnation)
            if not both or gateway.incarnation not in worker.end.gateways:
                return False
        return True


def run(seed: int) -> Outcome:
    """Run the world of `seed` for as long as the seed says, then to its end."""
    schedule = Schedule(seed)
    events = random.Random(f"events {seed}").choice([300, 600, 1_200, 1_200, 2_500])

    def play() -> None:
        schedule.begin()
        schedule.world.run(events)
        schedule.end()

    return attempt(schedule, play)


def attempt(schedule: Schedule, play: Callable[[], None]) -> Outcome:
    """What came of playing a schedule: a failure is told, not raised."""
    world = schedule.world
    try:
        play()
    except SimulationFailure as failure:
        return _failed(schedule, f"{failure}")
    except Exception:
        return _failed(schedule, f"a machine raised:\n{traceback.format_exc()}")
    return Outcome(world.seed, world.events, world.counts)


def _failed(schedule: Schedule, message: str) -> Outcome:
    world = schedule.world
    story = f"{world.story()}\n\nseed {world.seed}, event {world.events}: {message}"
    return Outcome(world.seed, world.events, world.counts, story)
