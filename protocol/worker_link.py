"""A gateway's end of the link over a socket that leads to one worker."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from protocol.endpoints import check_endpoint, local_path
from protocol.errors import EngineLost, InvalidRequest
from protocol.link import GatewayEnd, NotLinked
from protocol.link_events import (
    Action,
    Connected,
    Crowded,
    Deliver,
    Disconnected,
    Down,
    LinkSettings,
    PeerStatus,
    Received,
    Refused,
    Transmit,
    Up,
)
from protocol.link_frames import WorkerInfo
from protocol.link_shell import LinkShell
from protocol.messages import (
    Acknowledge,
    Command,
    Feed,
    RaiseFloor,
    Report,
    Run,
    Update,
    WorkerStatus,
    decode_report,
    encode,
)
from protocol.unix_socket import UnixClient
from protocol.zmq_socket import ZmqDealer

_log = structlog.get_logger(__name__)


class WorkerLink(LinkShell):
    """A gateway's link to the worker at `endpoint`, whichever process that is.

    All callbacks are called on the loop: `on_up(worker_incarnation, info)` when a worker
    has been introduced, `on_report(report)` for everything that it says, in order, its
    `WorkerStatus` with each heartbeat included, and `on_down(reason)` when it is lost with
    all that it held for this gateway. `on_crowded(crowded)` is called, also from within
    `send`, when so much waits for the worker that no more payloads should be sent, and when
    little does again; it ends with the link. An exception in a callback is logged and goes
    no further. Make it on a running loop. Raises ConfigError for an endpoint that is not
    safe.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: str,
        *,
        on_report: Callable[[Report], None],
        on_up: Callable[[str, WorkerInfo], None],
        on_down: Callable[[str], None],
        on_crowded: Callable[[bool], None] = lambda _crowded: None,
        settings: LinkSettings | None = None,
    ) -> None:
        check_endpoint(endpoint)
        self.ready = False
        self.refusal: str | None = None
        self._end = GatewayEnd(incarnation, settings, attempt=time.monotonic_ns())
        super().__init__(self._end, endpoint)
        self._on_report = on_report
        self._on_up = on_up
        self._on_down = on_down
        self._on_crowded = on_crowded
        self._socket: UnixClient | ZmqDealer
        if (path := local_path(endpoint)) is not None:
            self._socket = UnixClient(
                path,
                incarnation,
                on_frame=self._on_frame,
                on_connected=self._on_connected,
                on_lost=lambda: self._handle(Disconnected()),
            )
        else:
            self._socket = ZmqDealer(
                endpoint,
                incarnation,
                on_frame=self._on_frame,
                on_connected=self._on_connected,
                on_malformed=self._on_malformed,
            )

    @property
    def worker(self) -> str | None:
        """The incarnation of the worker that is linked now."""
        return self._end.peer

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the worker that no more payloads should be sent."""
        return self._end.crowded

    @property
    def unacknowledged(self) -> int:
        """Messages that wait for the worker or for its acknowledgement."""
        return self._end.unacknowledged

    def send(self, command: Command) -> None:
        """Send `command`; it leaves at the end of the loop turn.

        An `Acknowledge` waits a moment for something to travel with. Commands arrive in the
        order of their sending, except that `RaiseFloor` may overtake others. Raises EngineLost
        when no worker is linked, CapacityExceeded when the queue to it is full (for what
        carries payloads before it is for the rest), InvalidRequest when the command is too
        long. If it raises, the command was not sent.
        """
        urgent = isinstance(command, RaiseFloor)
        payload = isinstance(command, Update | Run | Feed)
        try:
            actions = self._end.send(encode(command), urgent=urgent, payload=payload)
        except NotLinked:
            raise EngineLost("the worker is not connected") from None
        except ValueError as error:
            raise InvalidRequest(str(error), code="payload_too_large") from None
        if isinstance(command, Acknowledge):
            self._flush_later()
        else:
            self._flush_soon()
        for action in actions:
            self._carry_out(action)

    def start_afresh(self) -> None:
        """Give the link up, because it does not take what must be sent, and open a new one.

        The worker is not ready from now on; `on_down` follows in the next loop turn. Both
        ends drop what the old link held, so that neither takes the other for informed.
        """
        self.ready = False
        self._loop.call_soon(self._start_afresh, self._end.peer)

    async def run(self) -> None:
        """Stay until `close` is called; closes the link when cancelled."""
        try:
            await self._closed
        finally:
            self.close()

    def close(self) -> None:
        """End the link without a word to the callbacks; idempotent."""
        self.ready = False
        self._stop()
        self._socket.close()

    def _before_tick(self) -> None:
        self._socket.drain()

    def _on_frame(self, frame: bytes) -> None:
        self._handle(Received(frame))

    def _on_connected(self) -> None:
        self._handle(Connected())

    def _on_malformed(self) -> None:
        self._end.malformed += 1

    def _carry_out(self, action: Action) -> None:
        match action:
            case Transmit():
                self._socket.send(action.data)
            case Deliver():
                self._report(action.message)
            case PeerStatus():
                self._report(action.status)
            case Up():
                assert action.info is not None
                self.refusal = None
                self.ready = action.info.ready
                self._call(self._on_up, action.peer, action.info)
            case Down():
                self.ready = False
                self._call(self._on_down, action.reason)
            case Crowded():
                self._call(self._on_crowded, action.crowded)
            case Refused():
                self.refusal = action.reason
                _log.error("worker_refused_link", endpoint=self.endpoint, reason=action.reason)

    def _report(self, data: bytes) -> None:
        try:
            report = decode_report(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Skipping it would lose a report silently; starting afresh says what is lost.
            self._end.malformed += 1
            _log.error("malformed_report", endpoint=self.endpoint, worker=self.worker)
            self.start_afresh()
            return
        if isinstance(report, WorkerStatus):
            self.ready = report.ready
        self._call(self._on_report, report)

    def _start_afresh(self, peer: str | None) -> None:
        if peer == self._end.peer:
            self._handle(Disconnected())
            self._handle(Connected())
