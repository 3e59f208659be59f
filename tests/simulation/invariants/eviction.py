"""I8: who is evicted to make room."""

from __future__ import annotations

from gateway.hosted import Hosted
from sessions.lifecycle import CloseReason, State
from tests.simulation.gateway import GatewayProcess
from tests.simulation.watch import Invariant


class I8Eviction(Invariant):
    """The session that was left alone the longest, and never one with a turn in flight."""

    name = "I8 eviction"
    preconditions = ("sessions evicted", "others could have been evicted")

    def evicted(self, gateway: GatewayProcess, victim: Hosted) -> None:
        """Nobody is there, nothing is under way, and no other has been idle for longer."""
        self.count("sessions evicted")
        client = self.deployment.clients[victim.id]
        client.close_asked.add(CloseReason.EVICTED)
        state = victim.session.state
        self.check(state is State.DETACHED, f"{victim.id} is evicted, which is {state}")
        self.check(not client.pending(), f"{victim.id} is evicted with {client.pending()}")
        self.check(not gateway.hosted.openings.forks(victim.id), f"{victim.id} is being forked")
        for other in gateway.hosted.all():
            if other is victim or not other.session.evictable:
                continue
            if gateway.hosted.openings.forks(other.id):
                continue  # Another is to begin as it is.
            self.count("others could have been evicted")
            self.check(
                other.session.idle_since_ms >= victim.session.idle_since_ms,
                f"{victim.id} is evicted before {other.id}",
            )
