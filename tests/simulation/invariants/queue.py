"""The opens that wait for a place: their order, their positions, and that nobody waits in vain."""

from __future__ import annotations

from collections import defaultdict

from sessions.lifecycle import CloseReason
from sessions.opening import Position
from sessions.openings import AT_ONCE
from tests.simulation.client import Client
from tests.simulation.gateway import GatewayProcess
from tests.simulation.process import Process
from tests.simulation.watch import Invariant
from tests.simulation.world import World

LEAST_PAUSE_MS = 250.0
"""Between two tries of the same open."""


class Queue(Invariant):
    """All of one gateway want the same and have the same priority: who came first goes first."""

    name = "queue"
    preconditions = (
        "opens that waited",
        "opens that moved up",
        "opens that began after they had waited",
        "opens that began again",
        "opens that waited for room on a stage",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._orders: defaultdict[str, list[Client]] = defaultdict(list)
        self._positions: dict[Client, int] = {}
        self._failed_ms: dict[Client, float] = {}
        """When a session of it could last not be opened, by its gateway's clock, unless that has
        opened one for another since."""

    def asked(self, client: Client) -> None:
        """It comes behind all others, or where it stood when it was promised a place."""
        assert client.gateway is not None
        self._orders[client.gateway.incarnation].append(client)

    def unqueued(self, client: Client) -> None:
        """It stands there no more."""
        if client.view.created:
            for other in self._order(client):
                self._failed_ms.pop(other, None)
            if client.opening is not None and client.opening.returning:
                self.count("opens that came for a promise")
        if client in self._order(client):
            assert client.gateway is not None
            self._orders[client.gateway.incarnation].remove(client)

    def begins(self, client: Client) -> None:
        """Nobody who came before it still waits."""
        order = self._order(client)
        self.check(client in order, f"{client.name} is opened, which has not asked")
        for other in order[: order.index(client)]:
            trying = other.opening is not None and other.opening.trying
            self.check(trying, f"{client.name} is opened before {other.name}")
        if client in self._positions:
            self.count("opens that began after they had waited")
        if (failed_ms := self._failed_ms.get(client)) is not None:
            self.count("opens that began again")
            assert client.gateway is not None
            self.check(
                client.gateway.now_ms >= failed_ms + LEAST_PAUSE_MS,
                f"{client.name} is tried again at once",
            )

    def released(self, client: Client, reason: CloseReason) -> None:
        """Its session could not be opened, or has ended."""
        assert client.gateway is not None
        self._failed_ms[client] = client.gateway.now_ms

    def stands(self, client: Client, position: Position) -> None:
        """It is told the truth, and no position twice or worse than before."""
        order = self._order(client)
        self.check(client in order, f"{client.name} is told of its position, and does not wait")
        at = order.index(client) + 1
        self.check(position.position == at, f"{client.name} is told {position}, and is number {at}")
        before = self._positions.get(client)
        if before is None:
            self.count("opens that waited")
        else:
            self.count("opens that moved up")
            pushed = any(other.opening.returning for other in order[: at - 1] if other.opening)
            moves = position.position < before or (position.position > before and pushed)
            self.check(moves, f"{client.name} moves from {before} to {at}")
        self._positions[client] = position.position

    def stepped(self, process: Process) -> None:
        """Nobody waits where there is a place, but for others that are being opened, for what a
        stage may lack, or for a promise."""
        if not isinstance(process, GatewayProcess):
            return
        openings, pipeline = process.hosted.openings, process.pipeline
        waiting = openings.waiting(pipeline.name)
        order = _in_order(self._orders[process.incarnation])
        known = [client.opening for client in order]
        self.check(known == waiting, f"{known} wait, and the gateway has {waiting}")
        for at, client in enumerate(order, 1):
            told = self._positions.get(client)
            tries = client.opening is not None and client.opening.trying
            self.check(
                told == at or (told is None and tries),
                f"{client.name} is number {at}, and was told {told}",
            )
        tried = sum(opening.trying for opening in waiting)
        if tried == len(waiting):
            return
        _, shut, promised = openings.freeze(process.now_ms)
        if shut:
            self.count("opens that waited for room on a stage")
        if shut or promised or tried >= AT_ONCE:
            return
        lacking = process.hosted.admission.lacking(pipeline, "tenant")
        self.check(lacking is not None, f"{len(waiting) - tried} opens wait, and there is a place")

    def gateway_died(self, gateway: GatewayProcess) -> None:
        """Who waited there waits no more."""
        self._orders.pop(gateway.incarnation, None)

    def _order(self, client: Client) -> list[Client]:
        assert client.gateway is not None
        return _in_order(self._orders[client.gateway.incarnation])


def _in_order(asked: list[Client]) -> list[Client]:
    """As they came, but for those who come for a promise: they stand before who came since."""
    order: list[Client] = []
    for client in asked:
        at = len(order)
        if client.opening is not None and client.opening.returning:
            number = client.opening.number
            at = sum(it.opening is not None and it.opening.number <= number for it in order)
        order.insert(at, client)
    return order
