"""The link: an ordered, acknowledged, bounded stream of messages between one gateway
incarnation and one worker incarnation, over a transport that may lose, repeat, reorder
and delay frames.

`GatewayEnd` and `WorkerEnd` are machines without I/O: `handle(event, now_ms)` returns
actions for a shell (`protocol.worker_link`, `protocol.worker_endpoint`), `deadline_ms` says
when the next `Tick` is due. The machines do not look inside messages.

Opening. The gateway says `Hello` with its incarnation and the versions it speaks; the
worker answers `Welcome` or `Refuse`. A link is the triple of gateway, worker and attempt
(the gateway's count of introductions), carried by every frame; frames of any other link
are dropped. A worker that gets a frame of a link it does not have asks for an
introduction. A link that was lost is never taken up again: both ends start afresh, and
what one side had not acknowledged is gone, which `Down` tells.

Channels. Each direction has two: `ordered`, and `urgent` for control that must not wait
behind a full window. Each is in order by itself; an urgent message may overtake ordered
ones, so it must name what it supersedes.

When full. What is not acknowledged is bounded by the receiver's credit; beyond it `send`
queues. When much waits `Crowded` says so, until little does: who makes payloads is to wait
meanwhile, control never waits. Who makes more nevertheless gets CapacityExceeded, and the
message is not accepted; room for control is left then, and when that is used up too,
control is refused in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

import msgspec

from protocol.link_events import (
    Action,
    Connected,
    Disconnected,
    Down,
    Event,
    Flush,
    LinkSettings,
    Received,
    Refused,
    StatusChanged,
    Tick,
    Transmit,
    Up,
)
from protocol.link_frames import (
    LINK_VERSION,
    OLDEST_LINK_VERSION,
    Acknowledge,
    Address,
    Data,
    Heartbeat,
    Hello,
    Introduce,
    Refuse,
    Welcome,
    WorkerInfo,
    decode_frame,
    encode_frame,
)
from protocol.link_state import OpenLink


class NotLinked(Exception):
    """There is no open link to that peer."""


class GatewayState(Enum):
    """Where a gateway's end stands."""

    DISCONNECTED = "disconnected"
    INTRODUCING = "introducing"
    REFUSED = "refused"
    OPEN = "open"


class GatewayEnd:
    """A gateway's end of the link to the worker at one endpoint, whichever it is.

    Introductions are counted from `attempt`, which must be above that of any earlier end
    of the same incarnation at the same endpoint.

    Counters: `malformed` frames that are none, `stale` frames of other links.
    """

    def __init__(
        self, incarnation: str, settings: LinkSettings | None = None, *, attempt: int = 0
    ) -> None:
        self.incarnation = incarnation
        self.state = GatewayState.DISCONNECTED
        self.malformed = 0
        self.stale = 0
        self._settings = settings or LinkSettings()
        self._attempt = attempt
        self._link: OpenLink | None = None
        self._introduce_ms: float | None = None

    @property
    def peer(self) -> str | None:
        """The incarnation of the worker that the open link leads to."""
        return self._link.peer if self._link else None

    @property
    def unacknowledged(self) -> int:
        """Messages that the worker has not acknowledged."""
        return self._link.unacknowledged if self._link else 0

    @property
    def deadline_ms(self) -> float | None:
        """When the next `Tick` is due."""
        return self._link.deadline_ms if self._link else self._introduce_ms

    @property
    def crowded(self) -> bool:
        """Whether much waits for the worker; `Crowded` tells of every change."""
        return self._link is not None and self._link.crowded

    def send(self, message: bytes, *, urgent: bool = False, payload: bool = False) -> list[Action]:
        """Accept `message` for the worker; it leaves with the next `Flush`.

        `payload` says that it is more than control. Raises NotLinked when no link is open,
        CapacityExceeded when the queue is full.
        """
        if self._link is None:
            raise NotLinked
        return self._link.send(message, urgent, payload)

    def handle(self, event: Event, now_ms: float) -> list[Action]:
        """Take `event` in; the actions are to be carried out in order."""
        match event:
            case Received():
                return self._received(event.data, now_ms)
            case Flush():
                return self._link.flush(now_ms) if self._link else []
            case Tick():
                return self._tick(now_ms)
            case Connected():
                # Over a link that outlived its connection, ask at once who is there now.
                return [self._link.beat(b"", now_ms)] if self._link else self._introduce(now_ms)
            case Disconnected():
                actions = self._lose("the connection to the worker ended")
                self.state = GatewayState.DISCONNECTED
                self._introduce_ms = None
                return actions
            case StatusChanged():
                raise TypeError("a gateway has no status")

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (self.state.value, self._attempt, self._link.freeze() if self._link else None)

    def _tick(self, now_ms: float) -> list[Action]:
        if self._link is not None:
            if self._link.silent(now_ms):
                return [*self._lose("the worker fell silent"), *self._introduce(now_ms)]
            return self._link.tick(b"", now_ms)
        if self._introduce_ms is None or now_ms < self._introduce_ms:
            return []
        if self.state is GatewayState.REFUSED:
            return self._introduce(now_ms)
        return [self._hello(now_ms)]

    def _received(self, data: bytes, now_ms: float) -> list[Action]:
        frame = decode_frame(data)
        match frame:
            case Data() | Acknowledge() | Heartbeat():
                if self._link is None or frame.address != self._link.address:
                    self.stale += 1
                    return []
                return self._link.receive(frame, now_ms)
            case Welcome() if self._is_mine(frame.address):
                return self._welcomed(frame, now_ms)
            case Introduce() if self._is_mine(frame.address) and self._link is not None:
                same = frame.address.worker == self._link.address.worker
                reason = "the worker had given the link up" if same else "the worker restarted"
                return [*self._lose(reason), *self._introduce(now_ms)]
            case Introduce() if (
                self._is_mine(frame.address) and self.state is GatewayState.INTRODUCING
            ):
                return self._introduce(now_ms)
            case Refuse() if self._is_current(frame.gateway, frame.attempt):
                return self._refused(frame, now_ms)
            case Welcome() | Introduce() | Refuse():
                self.stale += 1
            case _:
                self.malformed += 1
        return []

    def _is_mine(self, address: Address) -> bool:
        return self._is_current(address.gateway, address.attempt)

    def _is_current(self, gateway: str, attempt: int) -> bool:
        return gateway == self.incarnation and attempt == self._attempt

    def _welcomed(self, frame: Welcome, now_ms: float) -> list[Action]:
        if self._link is not None:
            if frame.address == self._link.address:
                return []
            return [*self._lose("the worker restarted"), *self._introduce(now_ms)]
        if self.state is not GatewayState.INTRODUCING:
            self.stale += 1
            return []
        if not OLDEST_LINK_VERSION <= frame.version <= LINK_VERSION:
            self.malformed += 1
            return []
        self.state = GatewayState.OPEN
        self._introduce_ms = None
        # A worker that lost this gateway and meets it again has freed what it held for it:
        # the attempt makes that a new incarnation.
        peer = f"{frame.address.worker}.{frame.address.attempt}"
        self._link = OpenLink(frame.address, peer, frame.credit, self._settings, now_ms)
        return [Up(peer, frame.info)]

    def _refused(self, frame: Refuse, now_ms: float) -> list[Action]:
        if self._link is not None or self.state is GatewayState.REFUSED:
            self.stale += 1
            return []
        self.state = GatewayState.REFUSED
        self._introduce_ms = now_ms + self._settings.refused_ms
        return [Refused(frame.code, frame.reason)]

    def _introduce(self, now_ms: float) -> list[Action]:
        self._attempt += 1
        self.state = GatewayState.INTRODUCING
        return [self._hello(now_ms)]

    def _hello(self, now_ms: float) -> Transmit:
        self._introduce_ms = now_ms + self._settings.introduce_ms
        hello = Hello(
            self.incarnation,
            self._attempt,
            OLDEST_LINK_VERSION,
            LINK_VERSION,
            self._settings.ordered.credit,
        )
        return Transmit("", encode_frame(hello))

    def _lose(self, reason: str) -> list[Action]:
        link, self._link = self._link, None
        return [Down(link.peer, reason)] if link else []


class WorkerEnd:
    """A worker's end of its links to all gateways.

    Links are bounded by `settings.gateways`; a gateway beyond is refused. Counters as
    in `GatewayEnd`.
    """

    _REMEMBERED_GATEWAYS = 1024

    def __init__(
        self, incarnation: str, info: WorkerInfo, settings: LinkSettings | None = None
    ) -> None:
        self.incarnation = incarnation
        self.malformed = 0
        self.stale = 0
        self._info = info
        self._status = b""
        self._settings = settings or LinkSettings()
        self._links: dict[str, OpenLink] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()

    @property
    def gateways(self) -> tuple[str, ...]:
        """The incarnations of the gateways with an open link."""
        return tuple(self._links)

    @property
    def deadline_ms(self) -> float | None:
        """When the next `Tick` is due."""
        return min((link.deadline_ms for link in self._links.values()), default=None)

    @property
    def beat_ms(self) -> float | None:
        """When the next heartbeat is due; None without links."""
        return min((link.beat_ms for link in self._links.values()), default=None)

    def unacknowledged(self, gateway: str) -> int:
        """Messages that the gateway has not acknowledged."""
        link = self._links.get(gateway)
        return link.unacknowledged if link else 0

    def send(
        self, gateway: str, message: bytes, *, urgent: bool = False, payload: bool = False
    ) -> list[Action]:
        """Accept `message` for the gateway; it leaves with the next `Flush`.

        `payload` says that it is more than control. Raises NotLinked when no link is open,
        CapacityExceeded when the queue is full.
        """
        link = self._links.get(gateway)
        if link is None:
            raise NotLinked
        return link.send(message, urgent, payload)

    def handle(self, event: Event, now_ms: float) -> list[Action]:
        """Take `event` in; the actions are to be carried out in order."""
        match event:
            case Received():
                return self._received(event.peer, event.data, now_ms)
            case Flush():
                return [a for link in self._links.values() for a in link.flush(now_ms)]
            case Tick():
                return self._tick(now_ms)
            case Disconnected():
                return self._lose(event.peer, "the connection to the gateway ended")
            case StatusChanged():
                self._status = event.status
                self._info = msgspec.structs.replace(self._info, ready=event.ready)
                return self._beat_all(now_ms) if event.announce else []
            case Connected():
                raise TypeError("a worker does not connect")

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self._info.ready,
            tuple(self._links[gateway].freeze() for gateway in sorted(self._links)),
            tuple(sorted(self._attempts.items())),
        )

    def _beat_all(self, now_ms: float) -> list[Action]:
        return [link.beat(self._status, now_ms) for link in self._links.values()]

    def _tick(self, now_ms: float) -> list[Action]:
        actions: list[Action] = []
        for gateway, link in list(self._links.items()):
            if link.silent(now_ms):
                actions += self._lose(gateway, "the gateway fell silent")
            else:
                actions += link.tick(self._status, now_ms)
        return actions

    def _received(self, peer: str, data: bytes, now_ms: float) -> list[Action]:
        frame = decode_frame(data)
        match frame:
            case Data() | Acknowledge() | Heartbeat() if frame.address.gateway == peer:
                link = self._links.get(peer)
                if link is not None and frame.address == link.address:
                    return link.receive(frame, now_ms)
                self.stale += 1
                return [self._ask(peer, frame.address.attempt)]
            case Hello() if frame.gateway == peer:
                return self._greeted(frame, now_ms)
            case _:
                self.malformed += 1
                return []

    def _greeted(self, hello: Hello, now_ms: float) -> list[Action]:
        gateway, link = hello.gateway, self._links.get(hello.gateway)
        known = self._attempts.get(gateway, -1)
        if hello.attempt < known:
            self.stale += 1
            return []
        version = min(hello.newest_version, LINK_VERSION)
        if version < max(hello.oldest_version, OLDEST_LINK_VERSION):
            reason = (
                f"this worker speaks link versions {OLDEST_LINK_VERSION} to {LINK_VERSION}, "
                f"the gateway {hello.oldest_version} to {hello.newest_version}"
            )
            return [self._refuse(hello, "version_mismatch", reason)]
        if hello.attempt == known:
            if link is None:
                return [self._ask(gateway, hello.attempt)]
            # It knows of no link yet, so this is all that it can say.
            link.heard(now_ms)
            return [self._welcome(link, version)]
        actions: list[Action] = []
        if link is not None:
            actions += self._lose(gateway, "the gateway introduced itself again")
        elif len(self._links) >= self._settings.gateways:
            reason = f"this worker serves {self._settings.gateways} gateways already"
            return [self._refuse(hello, "capacity_exceeded", reason)]
        self._remember(gateway, hello.attempt)
        address = Address(gateway, self.incarnation, hello.attempt)
        link = OpenLink(address, gateway, hello.credit, self._settings, now_ms)
        self._links[gateway] = link
        return [*actions, self._welcome(link, version), Up(gateway)]

    def _remember(self, gateway: str, attempt: int) -> None:
        self._attempts[gateway] = attempt
        self._attempts.move_to_end(gateway)
        if len(self._attempts) > self._REMEMBERED_GATEWAYS:
            self._attempts.popitem(last=False)

    def _welcome(self, link: OpenLink, version: int) -> Transmit:
        credit = self._settings.ordered.credit
        return Transmit(link.peer, encode_frame(Welcome(link.address, version, credit, self._info)))

    def _ask(self, gateway: str, attempt: int) -> Transmit:
        address = Address(gateway, self.incarnation, attempt)
        return Transmit(gateway, encode_frame(Introduce(address)))

    def _refuse(self, hello: Hello, code: str, reason: str) -> Transmit:
        frame = Refuse(hello.gateway, hello.attempt, code, reason)
        return Transmit(hello.gateway, encode_frame(frame))

    def _lose(self, gateway: str, reason: str) -> list[Action]:
        link = self._links.pop(gateway, None)
        return [Down(gateway, reason)] if link else []
