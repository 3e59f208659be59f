"""What goes wrong: processes die, stop and wake, clocks jump, connections are cut, commands
come twice or from those who may not give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protocol.messages import Close, Command, Feed, Fence, Open, RaiseFloor, Run, Signal, Update
from sessions.actions import CloseRequested, ParkRequested, RestoreRequested
from sessions.directory import Remove
from sessions.lifecycle import CloseReason
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.gateway import GatewayProcess
from tests.simulation.invariants.answers import I7Answers
from tests.simulation.process import Process
from tests.simulation.taker import THIEF, Taker
from tests.simulation.worker import WorkerProcess
from workers.control_events import CommandReceived, GatewayUp


class Faults:
    """Does something bad from time to time, until it is stopped."""

    def __init__(
        self, deployment: Deployment, answers: I7Answers, clients: Callable[[], list[Client]]
    ) -> None:
        self._deployment = deployment
        self._world = deployment.world
        self._answers = answers
        self._clients = clients
        self._stopped = False
        self._taker = Taker(deployment)
        self._kinds: list[Callable[[], None]] = [
            self._kill_worker,
            self._kill_worker,
            self._kill_gateway,
            self._pause,
            self._pause_before_send,
            self._pause_before_send,
            self._jump,
            self._cut,
            self._repeat,
            self._repeat,
            self._repeat,
            self._trespass,
            self._trespass,
            self._steal,
            self._steal,
            self._steal,
            self._open_elsewhere,
            self._take_record,
            self._start_afresh,
            self._operator,
            self._park,
            self._park,
            self._restore,
            self._stop_worker,
            self._drain,
        ]
        if deployment.profile.pipeline.durable:
            self._kinds += [self._kill_worker] * 8

    def begin(self) -> None:
        """From now on."""
        self._again()

    def stop(self) -> None:
        """No more."""
        self._stopped = True

    def _again(self) -> None:
        mean_ms = self._deployment.profile.fault_every_ms
        if mean_ms:
            self._world.after(self._world.random.expovariate(1 / mean_ms), self._one)

    def _one(self) -> None:
        if self._stopped:
            return
        self._world.random.choice(self._kinds)()
        self._again()

    def _process(self) -> Process | None:
        processes = [p for p in self._deployment.living() if not p.paused]
        return self._world.random.choice(processes) if processes else None

    def _worker(self) -> WorkerProcess | None:
        workers = [w for w in self._deployment.workers.values() if w is not None and not w.paused]
        return self._world.random.choice(workers) if workers else None

    def _gateway(self) -> GatewayProcess | None:
        gateways = [g for g in self._deployment.gateways.values() if g is not None]
        gateways = [gateway for gateway in gateways if not gateway.paused]
        return self._world.random.choice(gateways) if gateways else None

    # Kinds

    def _kill_worker(self) -> None:
        if (worker := self._worker()) is not None:
            self._world.count("fault: worker crashed")
            self._deployment.kill_worker(worker.place)
            delay_ms = self._world.random.choice([1.0, 300.0, 3_000.0, 9_000.0])
            self._world.after(delay_ms, lambda: self._deployment.start_worker(worker.place))

    def _stop_worker(self) -> None:
        worker = self._worker()
        if worker is None:
            return
        self._world.count("fault: worker stopped in order")
        for gateway in self._deployment.gateways.values():
            # What is parked may be asked back of it while it ends.
            for hosted in gateway.hosted.all() if gateway is not None else ():
                self._deployment.blame(hosted.id, "stopped")
        worker.run(worker.stop)

        def end() -> None:
            if worker.alive:
                self._deployment.kill_worker(worker.place)
                self._world.after(200.0, lambda: self._deployment.start_worker(worker.place))

        self._world.after(3_000.0, end)

    def _drain(self) -> None:
        """All sessions of a gateway are closed; it takes new ones afterwards."""
        if (gateway := self._gateway()) is None:
            return
        self._world.count("fault: gateway drained")
        mine = [c for c in self._clients() if c.gateway is gateway and not c.over]
        for client in mine:
            client.close_asked.add(CloseReason.DRAINED)

        def drain() -> None:
            for client in mine:
                gateway.handle(client.session, CloseRequested(CloseReason.DRAINED))

        gateway.run(drain)

    def _kill_gateway(self) -> None:
        if (gateway := self._gateway()) is not None:
            self._world.count("fault: gateway crashed")
            self._deployment.kill_gateway(gateway.place)
            for client in self._clients():
                if client.gateway is gateway:
                    client.gateway_died()
            delay_ms = self._world.random.choice([1.0, 300.0, 3_000.0])
            self._world.after(delay_ms, lambda: self._deployment.start_gateway(gateway.place))

    def _pause(self) -> None:
        if (process := self._process()) is not None:
            self._world.count("fault: process paused")
            process.pause(self._world.random.choice([100.0, 2_000.0, 8_000.0, 14_000.0]))

    def _pause_before_send(self) -> None:
        if (process := self._process()) is not None:
            process.pause_before_send_ms = self._world.random.choice([50.0, 1_500.0, 9_000.0])

    def _jump(self) -> None:
        if (process := self._process()) is not None:
            self._world.count("fault: clock jumped")
            process.jump(float(self._world.random.choice([500, 3_000, 10_000, 40_000])))

    def _cut(self) -> None:
        gateway, worker = self._gateway(), self._worker()
        if gateway is not None and worker is not None:
            self._world.count("fault: connection cut")
            duration_ms = self._world.random.choice([300.0, 3_000.0, 9_000.0])
            self._deployment.network.cut(gateway.place, worker.place, duration_ms)

    def _start_afresh(self) -> None:
        if (gateway := self._gateway()) is not None:
            link = self._world.random.choice(list(gateway.links.values()))
            self._world.count("fault: link given up")
            gateway.run(link.start_afresh)

    def _operator(self) -> None:
        clients = [c for c in self._clients() if not c.over and c.gateway is not None]
        if clients:
            client = self._world.random.choice(clients)
            gateway = client.gateway
            assert gateway is not None
            self._world.count("fault: closed by the operator")
            client.close_asked.add(CloseReason.ADMIN)
            close = CloseRequested(CloseReason.ADMIN)
            gateway.run(lambda: gateway.handle(client.session, close))

    def _park(self) -> None:
        self._ask_for(ParkRequested(), "fault: parked by the operator")

    def _restore(self) -> None:
        self._ask_for(RestoreRequested(), "fault: restored by the operator")

    def _ask_for(self, event: ParkRequested | RestoreRequested, count: str) -> None:
        clients = [c for c in self._clients() if not c.over and c.gateway is not None]
        if event == RestoreRequested():
            clients = [c for c in clients if c.hosted is not None and c.hosted.session.parked]
        if clients:
            client = self._world.random.choice(clients)
            gateway = client.gateway
            assert gateway is not None
            self._world.count(count)
            gateway.run(lambda: gateway.handle(client.session, event))

    def _repeat(self) -> None:
        """A command comes once more, as after an answer that was lost."""
        worker = self._worker()
        if worker is None:
            return
        events = [e for e in worker.recent if self._may_repeat(worker, e)]
        if not events:
            return
        if self._world.chance(0.4):
            events = [e for e in events if isinstance(e.command, Update)] or events
        again = self._world.random.choice(events)
        self._world.count("fault: command repeated")

        def repeat() -> None:
            self._answers.repeat(again)
            worker.inject(again)
            self._answers.repeat(None)

        worker.run(repeat)

    @staticmethod
    def _may_repeat(worker: WorkerProcess, event: CommandReceived) -> bool:
        # Feeds have no number of their own: the link alone sees to it that they come once.
        # What a closed session is told again is told to nobody.
        command = event.command
        session = worker.engine.sessions.get(command.fence.session)
        if isinstance(command, Feed | RaiseFloor) or session is None:
            return False
        if isinstance(command, Run) and worker.profile.tight:
            return False  # Its turn may have been forgotten.
        if "stolen" in worker.causes(command.fence.session):
            return False
        return session.owner == event.gateway and command.fence.epoch == 1

    def _session(self) -> tuple[WorkerProcess, Fence] | None:
        worker = self._worker()
        if worker is None or not worker.engine.sessions:
            return None
        name = self._world.random.choice(sorted(worker.engine.sessions))
        return worker, Fence(name, 1, worker.engine.sessions[name].owner)

    def _trespass(self) -> None:
        """Somebody who may not commands a session."""
        found = self._session()
        if found is None:
            return
        worker, fence = found
        if fence.owner == THIEF:
            return
        chance = self._world.random
        gateway, forged = chance.choice(
            [
                (THIEF, Fence(fence.session, 1, THIEF)),
                (fence.owner, Fence(fence.session, 0, fence.owner)),
                (THIEF, fence),
            ]
        )
        command = chance.choice(self._commands(forged))
        self._world.count("fault: command of a stranger")
        worker.run(lambda: worker.inject(GatewayUp(THIEF)))

        def trespass() -> None:
            before = worker.control.freeze()
            worker.inject(CommandReceived(gateway, command))
            if worker.control.freeze() != before:
                self._world.fail("I1 fence", f"{command} of {gateway} has changed {worker.place}")

        worker.run(trespass)

    def _commands(self, fence: Fence) -> list[Command]:
        number = self._world.number("forged")
        return [
            Open(fence, f"forged-{number}"),
            Signal(fence, f"forged-{number}", "clear"),
            Run(fence, 100_000 + number, "default"),
            RaiseFloor(fence, "default", 1_000_000),
            Feed(fence, 1, None, True),
            Close(fence, f"forged-{number}", "forged"),
        ]

    def _steal(self) -> None:
        """Another owner takes a session over, with the next epoch, and ends it in time."""
        if (found := self._session()) is not None:
            take = self._world.random.choice([self._taker.reopen, *[self._taker.adopt] * 3])
            take(found[0], found[1].session)

    def _open_elsewhere(self) -> None:
        """A gateway that nobody knows opens a session, wherever that goes."""
        if (worker := self._worker()) is not None:
            self._taker.open_own(worker)

    def _take_record(self) -> None:
        """Another owner takes a session over in the directory, and gives it up in time."""
        if (gateway := self._gateway()) is None:
            return
        directory = gateway.hosted.directory
        records = [directory.get(hosted.id) for hosted in gateway.hosted.all()]
        there = [record for record in records if record is not None and record.owner != THIEF]
        if not there:
            return
        record = self._world.random.choice(there)
        self._world.count("fault: record taken over")
        directory.call(Remove(record.session, record.epoch))
        gateway.record_of_another(replace(record, epoch=record.epoch + 1, owner=THIEF))
