"""A simulated network that loses, repeats, reorders and delays frames, on virtual time.

It runs the real link machines of one gateway place and one worker place; either may be
replaced by a new incarnation at any time. Every delivery is checked as it happens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import CapacityExceeded
from protocol.link import GatewayEnd, GatewayState, NotLinked, WorkerEnd
from protocol.link_events import (
    Action,
    Connected,
    Deliver,
    Down,
    Event,
    Flush,
    LinkSettings,
    Received,
    StatusChanged,
    Tick,
    Transmit,
    Up,
)
from protocol.link_frames import WorkerInfo


@dataclass
class Faults:
    """How bad the network is: probabilities per frame, and the spread of its delay."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_ms: float = 0.0


@dataclass
class Side:
    """What one side has seen: the peer it is linked to, what it sent and got there."""

    linked: str | None = None
    ups: int = 0
    downs: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    last_link: str | None = None


class LinkNetwork:
    """Both ends, the frames under way, and the clock."""

    def __init__(self, seed: int, faults: Faults, settings: LinkSettings | None = None) -> None:
        self.now_ms = 0.0
        self.faults = faults
        self.random = random.Random(seed)
        self.settings = settings or LinkSettings()
        self.delivered = 0
        self._order = 0
        self._frames: list[tuple[float, int, str, str, bytes]] = []
        self._gateways = 0
        self._workers = 0
        self.restart_gateway()
        self.restart_worker()

    def restart_gateway(self) -> None:
        """The gateway process is replaced; what it knew is gone."""
        self._gateways += 1
        self.gateway = GatewayEnd(f"g{self._gateways}", self.settings)
        self.gateway_side = Side()
        self._at_gateway(Connected())

    def restart_worker(self) -> None:
        """The worker process is replaced; nobody is told."""
        self._workers += 1
        info = WorkerInfo("think", "synthetic", True)
        self.worker = WorkerEnd(f"w{self._workers}", info, self.settings)
        self.worker_sides: dict[str, Side] = {}
        self._at_worker(StatusChanged(b"status", True))

    def send_to_worker(self, size: int = 0, *, urgent: bool = False) -> bool:
        """Send the next message of the open link; False if there is none or no room."""
        side = self.gateway_side
        if side.linked is None:
            return False
        link = f"{self.gateway.incarnation}>{side.linked}{'!' if urgent else ''}"
        return self._send(
            side, link, size, lambda message: self.gateway.send(message, urgent=urgent)
        )

    def send_to_gateway(self, size: int = 0) -> bool:
        """As `send_to_worker`, to the gateway that is running, from the worker."""
        gateway = self.gateway.incarnation
        side = self.worker_sides.get(gateway)
        if side is None or side.linked is None:
            return False
        link = f"{self.worker.incarnation}#{side.ups}>{gateway}"
        return self._send(side, link, size, lambda message: self.worker.send(gateway, message))

    def flush(self) -> None:
        """The loop turn ends at both sides."""
        self._at_gateway(Flush())
        self._at_worker(Flush())

    def run(self, duration_ms: float) -> None:
        """Let virtual time pass."""
        end_ms = self.now_ms + duration_ms
        while (next_ms := self._next_ms()) <= end_ms:
            self.now_ms = max(self.now_ms, next_ms)
            while self._frames and self._frames[0][0] <= self.now_ms:
                _, _, target, peer, data = heapq.heappop(self._frames)
                if target == "gateway":
                    self._at_gateway(Received(data))
                else:
                    self._at_worker(Received(data, peer))
            for end, handle in ((self.gateway, self._at_gateway), (self.worker, self._at_worker)):
                deadline_ms = end.deadline_ms
                if deadline_ms is not None and deadline_ms <= self.now_ms:
                    handle(Tick())
        self.now_ms = end_ms

    def settle(self, limit_ms: float = 120_000.0) -> None:
        """Heal the network and run until both ends are linked and nothing is on its way."""
        self.faults = Faults()
        self.flush()
        end_ms = self.now_ms + limit_ms
        while not self.settled:
            assert self.now_ms < end_ms, "the link does not settle"
            self.run(100.0)

    @property
    def settled(self) -> bool:
        """Whether both ends agree on one link and everything is acknowledged."""
        gateway = self.gateway.incarnation
        return (
            self.gateway.state is GatewayState.OPEN
            and gateway in self.worker.gateways
            and self.gateway.peer is not None
            and self.gateway.peer.startswith(f"{self.worker.incarnation}.")
            and self.gateway.unacknowledged == 0
            and self.worker.unacknowledged(gateway) == 0
        )

    def _send(self, side: Side, link: str, size: int, send: Callable[[bytes], object]) -> bool:
        number = side.sent.get(link, 0) + 1
        try:
            send(f"{link}:{number}:".encode() + bytes(size))
        except (CapacityExceeded, NotLinked):
            return False
        side.sent[link] = number
        return True

    def _next_ms(self) -> float:
        times = [self.gateway.deadline_ms, self.worker.deadline_ms]
        if self._frames:
            times.append(self._frames[0][0])
        return min((time for time in times if time is not None), default=float("inf"))

    def _at_gateway(self, event: Event) -> None:
        for action in self.gateway.handle(event, self.now_ms):
            self._observe(action, self.gateway_side)
            if isinstance(action, Transmit):
                self._carry("worker", self.gateway.incarnation, action.data)

    def _at_worker(self, event: Event) -> None:
        for action in self.worker.handle(event, self.now_ms):
            side = self.worker_sides.setdefault(action_peer(action), Side())
            self._observe(action, side)
            if isinstance(action, Transmit) and action.peer == self.gateway.incarnation:
                self._carry("gateway", action.peer, action.data)

    def _observe(self, action: Action, side: Side) -> None:
        match action:
            case Up():
                assert side.linked is None
                side.linked = action.peer
                side.ups += 1
            case Down():
                assert side.linked == action.peer
                side.linked = None
                side.downs.append(action.reason)
            case Deliver():
                assert side.linked == action.peer
                self._check_delivery(action.message, side)

    def _check_delivery(self, message: bytes, side: Side) -> None:
        link, number, _ = message.split(b":", 2)
        name = link.decode()
        expected = side.received.get(name, 0) + 1
        assert int(number) == expected, f"{name}: got {int(number)}, expected {expected}"
        side.received[name] = expected
        self.delivered += 1

    def _carry(self, target: str, peer: str, data: bytes) -> None:
        faults = self.faults
        if self.random.random() < faults.drop:
            return
        for _ in range(2 if self.random.random() < faults.duplicate else 1):
            self._order += 1
            arrival_ms = self.now_ms + 0.1 + self.random.random() * faults.delay_ms
            heapq.heappush(self._frames, (arrival_ms, self._order, target, peer, data))


def action_peer(action: Action) -> str:
    """The peer that an action of a worker's end is about."""
    peer = getattr(action, "peer", "")
    assert isinstance(peer, str)
    return peer
