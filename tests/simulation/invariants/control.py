"""The control loop of robots: whoever is stopped gets nothing fresh, and no answer comes twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sessions.steps.events import (
    EmergencyStopped,
    Reason,
    SafeAction,
    StepDone,
    StepFailed,
    StopReleased,
)
from tests.simulation.client import Client
from tests.simulation.rollout import Rollout
from tests.simulation.watch import Invariant
from tests.simulation.world import World


@dataclass
class _Loop:
    stopped: bool = False
    fresh: bool = False
    """Whether there has been anything fresh, which arms the deadline."""
    covered: set[int] = field(default_factory=set)
    """Steps in flight that have been answered."""


class ControlLoop(Invariant):
    """From an emergency stop until its release nothing fresh is given. A step that was answered
    before it was done is not answered again: what became of it is told. What is answered as late
    is late."""

    name = "control loop"
    preconditions = (
        "steps answered for being late",
        "steps answered because of a stop",
        "steps answered because their worker or state was lost",
        "steps that a newer one took the place of",
        "ends told of steps that were answered before",
        "stops released",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._loops: dict[str, _Loop] = {}

    def opened(self, client: Client) -> None:
        """A loop begins."""
        if isinstance(client, Rollout) and client.controlled:
            self._loops[client.session] = _Loop()

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """Hold what it says against what may be."""
        loop = self._loops.get(client.session)
        if loop is None:
            return
        match output:
            case EmergencyStopped():
                loop.stopped = True
            case StopReleased():
                self.check(loop.stopped, f"{client.session} is released and was not stopped")
                self.count("stops released")
                loop.stopped = False
            case StepDone():
                self.check(not loop.stopped, f"{client.session} is stopped and gets {output}")
                self.check(output.step not in loop.covered, f"{output} was answered before")
                loop.fresh = True
            case StepFailed(step=step, in_flight=True):
                self.check(step not in loop.covered, f"{output} was answered before")
                loop.covered.add(step)
            case StepFailed(step=step) if step in loop.covered:
                self.count("ends told of steps that were answered before")
                loop.covered.discard(step)
            case SafeAction():
                self._covered(client, loop, output)

    def _covered(self, client: Client, loop: _Loop, safe: SafeAction) -> None:
        assert isinstance(client, Rollout)
        assert client.gateway is not None
        self.check(loop.fresh, f"{safe} comes before anything whose form it could have")
        stopped = safe.reason is Reason.STOPPED
        self.check(stopped == loop.stopped, f"{client.session}: {safe}, stopped: {loop.stopped}")
        match safe.reason:
            case Reason.LATE:
                self.count("steps answered for being late")
                asked_ms = client.asked_ms.get(safe.ref or "")
                within_ms = client.deadline_ms or 0.0
                late = asked_ms is None or client.gateway.now_ms >= asked_ms + within_ms
                self.check(late, f"{safe} is not late: it was asked for at {asked_ms}")
            case Reason.STOPPED:
                self.count("steps answered because of a stop")
            case Reason.WORKER_LOST | Reason.STATE_LOST:
                self.count("steps answered because their worker or state was lost")
            case Reason.SUPERSEDED:
                self.count("steps that a newer one took the place of")
        if safe.in_flight:
            self.check(safe.step not in loop.covered, f"{safe} was answered before")
            loop.covered.add(safe.step)
