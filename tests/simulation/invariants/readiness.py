"""I10: readiness is truthful."""

from __future__ import annotations

from gateway.hosting import StageHealth
from gateway.overview import stage_health
from gateway.placement import WEDGED_MS
from tests.simulation.gateway import GatewayProcess, SimulatedLink
from tests.simulation.process import Process
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World

MARGIN_MS = 12_000.0
"""Silence, a heartbeat or two, and what a lossy network takes for them."""


class I10Readiness(Invariant):
    """A stage is ready only with a replica that is loaded, alive until a moment ago and not
    stuck; and when all has been well for a while it is ready."""

    name = "I10 readiness"
    preconditions = (
        "ready with a live replica",
        "not ready without one",
        "wedged replica seen",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._looked_ms = 0.0
        self._busy_ms = 0.0
        """When a gateway last had a session, or somebody who wanted one."""
        self._last_alive_ms: dict[str, float] = {}
        self._progress: dict[str, tuple[int, float]] = {}

    def stepped(self, process: Process) -> None:
        """Look from time to time: the truth here is one of seconds."""
        now_ms = self.world.now_ms
        if isinstance(process, WorkerProcess) and process.control.ready:
            self._last_alive_ms[process.place] = now_ms
        if now_ms - self._looked_ms < 500.0:
            return
        self._looked_ms = now_ms
        for worker in self.deployment.workers.values():
            if worker is None or worker.paused:
                continue
            progress, _ = self._progress.get(worker.incarnation, (-1, now_ms))
            if worker.control.progress != progress or not worker.control.waiting:
                self._progress[worker.incarnation] = (worker.control.progress, now_ms)
        gateways = [known for known in self.deployment.gateways.values() if known is not None]
        if any(len(it.hosted) or len(it.hosted.openings) or it.paused for it in gateways):
            self._busy_ms = now_ms
        for gateway in gateways:
            if not gateway.paused:
                self._look_for_room(gateway)
                for stage in self.deployment.profile.stages:
                    self._look(gateway, stage)

    def _look_for_room(self, gateway: GatewayProcess) -> None:
        """Where nobody has anything, whoever came would be let in."""
        replicas = [link.replica for link in gateway.links.values()]
        if self.world.now_ms - max(self._busy_ms, gateway.disturbed_ms) <= MARGIN_MS or not all(
            stage_health([it for it in replicas if it.stage == stage], gateway.now_ms)
            is StageHealth.READY
            for stage in self.deployment.profile.stages
        ):
            return
        self.count("idle with room")
        full = gateway.hosted.full(gateway.pipeline, gateway.now_ms)
        self.check(not full, f"{gateway.place} takes itself for full, and nobody is there")

    def _look(self, gateway: GatewayProcess, stage: str) -> None:
        now_ms = self.world.now_ms
        links = [link for link in gateway.links.values() if link.replica.stage == stage]
        health = stage_health([link.replica for link in links], gateway.now_ms)
        if health is StageHealth.READY:
            alive = max(self._last_alive_ms.get(link.place, 0.0) for link in links)
            # What a paused gateway believes it has not had the time to unlearn.
            since_ms = max(alive, gateway.disturbed_ms)
            self.check(
                now_ms - since_ms <= MARGIN_MS,
                f"{gateway.place} takes {stage} for ready, which was alive at {alive}",
            )
            self.count("ready with a live replica")
            self._not_stuck(gateway, links)
        else:
            self.count("not ready without one")
            if health is StageHealth.WEDGED:
                self.count("wedged replica seen")
            self._not_well(gateway, links, health)

    def _not_stuck(self, gateway: GatewayProcess, links: list[SimulatedLink]) -> None:
        now_ms = self.world.now_ms
        stuck = []
        for link in links:
            worker = self.deployment.workers[link.place]
            if worker is None:
                continue
            _, since_ms = self._progress.get(worker.incarnation, (0, now_ms))
            since_ms = max(since_ms, worker.disturbed_ms, gateway.disturbed_ms)
            stuck.append(now_ms - since_ms > WEDGED_MS + MARGIN_MS)
        if stuck and len(stuck) == len(links):
            self.check(
                not all(stuck), f"{gateway.place} takes stuck {links[0].replica.stage} for ready"
            )

    def _not_well(
        self, gateway: GatewayProcess, links: list[SimulatedLink], health: StageHealth
    ) -> None:
        if health is StageHealth.WEDGED:
            return
        now_ms = self.world.now_ms
        quiet = self.deployment.quiet_since_ms
        for link in links:
            worker = self.deployment.workers[link.place]
            if worker is None or not worker.control.ready or quiet is None:
                continue
            since_ms = max(quiet, worker.disturbed_ms, gateway.disturbed_ms)
            self.check(
                now_ms - since_ms <= 2 * MARGIN_MS,
                f"{gateway.place} has not seen for long that {link.place} is ready",
            )
