"""I5 of parked state: what comes back is what was put away last, or that it is lost is said."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from protocol.messages import SnapshotOrder, SnapshotTaken
from sessions.client import Origin, Parked, Parking, Restored, Restoring, SnapshotFailed
from sessions.lifecycle import CloseReason
from sessions.steps.events import StateLost
from tests.simulation.client import Client
from tests.simulation.engine import EngineSession
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    AbandonTurn,
    Action,
    Event,
    ForgetParked,
    OpenSession,
    OperationDone,
    ParkSession,
    SendReport,
)


class I5Parked(Invariant):
    """A session that comes back from the store is as it was when a worker last answered that it
    is parked. Its clients are told of each way, and what was lost has a cause."""

    name = "I5 parked"
    preconditions = (
        "sessions parked",
        "restores from a snapshot",
        "restores to another worker",
        "restores that were lost and rebuilt",
        "restores that were lost and told",
        "restores put off",
        "states kept that could not be parked",
        "snapshots after a turn",
        "losses that a snapshot made up for",
        "losses that no snapshot made up for",
        "losses that a snapshot fell short of",
        "clients told that a snapshot failed",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._parking: dict[tuple[str, str], ParkSession] = {}
        self._parked: dict[tuple[str, str], tuple[SnapshotOrder, object, str]] = {}
        """The newest state that is stored by session and stage, and the worker that has done
        that."""
        self._failing: set[tuple[str, str]] = set()
        """Sessions by worker whose owner was told that a snapshot has failed."""
        self._way: defaultdict[tuple[str, str], str] = defaultdict(str)
        """What a client was told last of a stage."""
        self._restoring: dict[str, str] = {}
        """The stage of a session that was parked and should be coming back."""

    # The workers

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """The state as it is when its worker is told to put it away, and when it has."""
        if isinstance(event, OperationDone):
            park = self._parking.pop((worker.incarnation, event.session), None)
            session = worker.engine.sessions.get(event.session)
            if park is not None and event.error is None and session is not None:
                self.count("snapshots after a turn" if park.stays else "sessions parked")
                self._failing.discard((worker.incarnation, event.session))
                key = (event.session, worker.stage)
                there = self._parked.get(key)
                # Who steals a session for the second time counts from the beginning.
                stolen = "stolen" in self.deployment.causes[event.session]
                newer = there is None or there[0] < park.order
                self.check(newer or stolen, f"{park} comes after {there}")
                self._parked[key] = (park.order, _state(session), worker.incarnation)
                if worker.stage == "world":
                    self.check(park.step == session.steps, f"{park} of {session}")
        for action in actions:
            if isinstance(action, SendReport) and isinstance(action.report, SnapshotTaken):
                self._told_of_snapshot(worker, action.report)
            elif isinstance(action, OpenSession):
                self._failing.discard((worker.incarnation, action.session))
            elif isinstance(action, ForgetParked):
                key = (action.session, worker.stage)
                there = self._parked.get(key)
                if there is not None:
                    opening = (there[0].epoch, there[0].opening)
                    if opening <= (action.epoch, action.opening):
                        del self._parked[key]
            elif isinstance(action, ParkSession):
                self._parking[worker.incarnation, action.session] = action
                given_up = [a.turn for a in actions if isinstance(a, AbandonTurn)]
                running = [
                    turn
                    for name, turn in worker.engine.turns
                    if name == action.session and turn not in given_up
                ]
                self.check(not running, f"{action.session} is parked while {running} run")

    def _told_of_snapshot(self, worker: WorkerProcess, report: SnapshotTaken) -> None:
        """That one has failed is said once, until one succeeds."""
        key = (worker.incarnation, report.session)
        self.check(key not in self._failing, f"{worker.place} says again: {report}")
        if report.error is not None:
            self._failing.add(key)

    def session_made(
        self, worker: WorkerProcess, session: EngineSession, action: OpenSession
    ) -> None:
        """It is what was put away last."""
        restore = action.restore
        if restore is None:
            return
        key = (action.session, worker.stage)
        _, state, where = self._parked.pop(key, (restore.taken, None, ""))
        if restore.stays:
            self._parked[key] = (restore.taken, state, where)
        self.count("restores from a snapshot")
        if where != worker.incarnation:
            self.count("restores to another worker")
        self.check(_state(session) == state, f"{key} comes back as {session}, and was {state}")

    # The clients

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """Each way begins and ends."""
        match output:
            case Parking(stage):
                self._told(client, stage, "parking", {"", "restored"})
            case Parked(stage):
                # A turn that waits for it may wait for too long.
                self.deployment.blame(client.session, "parked")
                if self._way[client.session, stage] == "restoring":
                    self.count("restores put off")
                self._told(client, stage, "parked", {"parking", "restoring"})
            case Restoring(stage):
                if self._way[client.session, stage] == "parked":
                    self._restoring[client.session] = stage
                self._told(client, stage, "restoring", {"", "parking", "parked", "restored"}, True)
            case Restored(stage, origin):
                self._restored(client, stage, origin)
            case SnapshotFailed(stage):
                self.count("clients told that a snapshot failed")
                causes = self.deployment.causes[client.session] & {"store", "lost", "stolen"}
                self.check(bool(causes), f"{client.session} is told of {output}")
            case StateLost(restorable_step=step) if step is not None:
                self.count("losses that a snapshot fell short of")
            case StateLost() if client.session in self._restoring:
                self.count("restores that were lost and told")

    def _restored(self, client: Client, stage: str, origin: Origin) -> None:
        expected = {"parking"} if origin is Origin.KEPT else {"restoring"}
        self._told(client, stage, "restored", expected)
        parked = self._restoring.pop(client.session, None) == stage
        match origin:
            case Origin.KEPT:
                self.count("states kept that could not be parked")
                workers = [w for w in self.deployment.workers.values() if w and w.stage == stage]
                there = any(client.session in worker.engine.sessions for worker in workers)
                excused = self.deployment.causes[client.session] & {"lost", "stopped", "stolen"}
                self.check(there or bool(excused), f"no worker has kept {stage}: {client.session}")
            case Origin.SNAPSHOT if not parked:
                self.count("losses that a snapshot made up for")
            case Origin.REBUILT if not parked and self._durable(client):
                self.count("losses that no snapshot made up for")
            case Origin.REBUILT if parked:
                self.count("restores that were lost and rebuilt")
                causes = self.deployment.causes[client.session]
                explained = causes & {"snapshot", "lost", "stolen", "stopped"}
                self.check(bool(explained), f"{client.session} has lost {stage}: {causes}")

    @staticmethod
    def _durable(client: Client) -> bool:
        return client.hosted is not None and client.hosted.session.pipeline.durable

    def _told(
        self, client: Client, stage: str, now: str, before: set[str], again: bool = False
    ) -> None:
        way = self._way[client.session, stage]
        self.check(
            way in before or (again and way == now),
            f"{client.session} is told that {stage} is {now}, which was {way}",
        )
        self._way[client.session, stage] = now

    def released(self, client: Client, reason: CloseReason) -> None:
        """Nothing more to hold it against."""
        self._restoring.pop(client.session, None)


def _state(session: EngineSession) -> object:
    """What has to come back."""
    loop = (session.steps, session.checksum, session.checkpoints)
    return (session.applied, session.runs, *loop)
