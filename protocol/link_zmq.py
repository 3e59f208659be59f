"""The link over ZeroMQ: a worker binds one ROUTER, a gateway has one DEALER a worker.

These shells own a socket and one timer, armed for the machine's next deadline. What is
sent in one loop turn leaves at its end, several messages a frame.

Where the connection is a Unix socket its end is the peer's end, and the peer is declared
lost at once. A tcp connection may come back: there only silence tells.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec
import structlog
import zmq

from protocol.deadline_timer import DeadlineTimer
from protocol.errors import AntiphonError, EngineLost, InvalidRequest
from protocol.link import GatewayEnd, NotLinked, WorkerEnd
from protocol.link_events import (
    Action,
    Connected,
    Crowded,
    Deliver,
    Disconnected,
    Down,
    Event,
    Flush,
    LinkSettings,
    PeerStatus,
    Probe,
    Received,
    Refused,
    StatusChanged,
    Tick,
    Transmit,
    Up,
)
from protocol.link_frames import WorkerInfo
from protocol.messages import (
    Command,
    Feed,
    Output,
    RaiseFloor,
    Report,
    Run,
    Update,
    WorkerStatus,
    decode_command,
    decode_report,
    encode,
)
from protocol.zmq_socket import LoopSocket, SendOutcome, check_endpoint, is_local

_log = structlog.get_logger(__name__)

_PROBE_S = 0.25
"""How long after a connection has ended the socket is asked whose it was."""


class _Shell(ABC):
    """What both shells share: the clock, the timer and the end of the loop turn."""

    def __init__(self, end: GatewayEnd | WorkerEnd) -> None:
        self._machine = end
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._tick, self._now_ms)
        self._flush_due = False
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @abstractmethod
    def _carry_out(self, action: Action) -> None: ...

    @abstractmethod
    def _before_tick(self) -> None: ...

    def _handle(self, event: Event) -> None:
        if self._closed.done():
            return
        for action in self._machine.handle(event, self._now_ms()):
            self._carry_out(action)
        if not self._closed.done():
            self._timer.arm(self._machine.deadline_ms)

    def _now_ms(self) -> float:
        return self._loop.time() * 1000.0

    def _tick(self) -> None:
        # After a pause of this process the peer's frames wait in the socket: read them
        # before judging its silence.
        self._before_tick()
        self._handle(Tick())

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._handle(Flush())

    def _stop(self) -> None:
        self._timer.cancel()
        if not self._closed.done():
            self._closed.set_result(None)


class WorkerLink(_Shell):
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
        self.endpoint = endpoint
        self.ready = False
        self.refusal: str | None = None
        self._end = GatewayEnd(incarnation, settings, attempt=time.monotonic_ns())
        super().__init__(self._end)
        self._on_report = on_report
        self._on_up = on_up
        self._on_down = on_down
        self._on_crowded = on_crowded
        self._local = is_local(endpoint)
        self._socket = LoopSocket(
            zmq.DEALER,
            on_message=self._on_message,
            on_monitor=self._on_monitor,
            events=zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED,
        )
        self._socket.set(zmq.ROUTING_ID, incarnation.encode())
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)

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

        Commands arrive in the order of their sending, except that `RaiseFloor` may
        overtake others. Raises EngineLost when no worker is linked, CapacityExceeded
        when the queue to it is full (for what carries payloads before it is for the rest),
        InvalidRequest when the command is too long. If it raises, the command was not sent.
        """
        urgent = isinstance(command, RaiseFloor)
        payload = isinstance(command, Update | Run | Feed)
        try:
            actions = self._end.send(encode(command), urgent=urgent, payload=payload)
        except NotLinked:
            raise EngineLost("the worker is not connected") from None
        except ValueError as error:
            raise InvalidRequest(str(error), code="payload_too_large") from None
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

    def _on_message(self, parts: list[bytes]) -> None:
        if len(parts) == 1:
            self._handle(Received(parts[0]))
        else:
            self._end.malformed += 1

    def _on_monitor(self, event: zmq.Event) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handle(Connected())
        elif self._local:
            self._socket.drain()
            self._handle(Disconnected())

    def _carry_out(self, action: Action) -> None:
        match action:
            case Transmit():
                self._socket.send([action.data])
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

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            _log.exception("link_callback_failed", endpoint=self.endpoint, worker=self.worker)


class WorkerEndpoint(_Shell):
    """A worker's end of its links to all gateways, bound at `endpoint`.

    `on_gateway_up(gateway)` comes first for a gateway incarnation: everything that an
    earlier link with it had is gone. `on_command(gateway, command)` is called in order,
    `on_gateway_down(gateway)` when it is lost, `status()` before each heartbeat.
    `on_turn_end()` is called once after each loop turn that brought commands.
    `on_crowded(gateway, crowded)` is called, also from within `send`, when so much waits for
    a gateway that no more payloads should be made for it, and when little does again; it
    ends with the link.
    Make it on a running loop. Raises ConfigError when the endpoint is not safe or in use.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: str,
        info: WorkerInfo,
        *,
        on_command: Callable[[str, Command], None],
        on_gateway_up: Callable[[str], None],
        on_gateway_down: Callable[[str], None],
        on_turn_end: Callable[[], None],
        status: Callable[[], WorkerStatus],
        on_crowded: Callable[[str, bool], None] = lambda _gateway, _crowded: None,
        settings: LinkSettings | None = None,
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self._end = WorkerEnd(incarnation, info, settings)
        super().__init__(self._end)
        self._on_command = on_command
        self._on_gateway_up = on_gateway_up
        self._on_gateway_down = on_gateway_down
        self._on_turn_end = on_turn_end
        self._turn_end_due = False
        self._status = status
        self._on_crowded = on_crowded
        self._local = is_local(endpoint)
        self._probing: asyncio.TimerHandle | None = None
        self._socket = LoopSocket(
            zmq.ROUTER,
            on_message=self._on_message,
            on_monitor=self._on_monitor,
            on_wake=self._on_wake,
            events=zmq.EVENT_DISCONNECTED,
        )
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(endpoint)
        except AntiphonError:
            self.close()
            raise

    @property
    def gateways(self) -> tuple[str, ...]:
        """The incarnations of the gateways that are linked now."""
        return self._end.gateways

    def send(self, gateway: str, report: Report) -> None:
        """Send `report`; it leaves at the end of the loop turn.

        Raises EngineLost when that gateway is not linked, CapacityExceeded when the queue
        to it is full (for output before it is for the rest), InvalidRequest when the report
        is too long. If it raises, the report was not sent.
        """
        payload = isinstance(report, Output)
        try:
            actions = self._end.send(gateway, encode(report), payload=payload)
        except NotLinked:
            raise EngineLost("the gateway is not connected") from None
        except ValueError as error:
            raise InvalidRequest(str(error), code="payload_too_large") from None
        self._flush_soon()
        for action in actions:
            self._carry_out(action)

    def drop(self, gateway: str) -> None:
        """Give the link to `gateway` up: it is told so and loses what it had here."""
        self._loop.call_soon(self._handle, Disconnected(gateway))

    def announce(self) -> None:
        """Send the status to every gateway now."""
        self._refresh_status(announce=True)

    def close(self) -> None:
        """Unbind; idempotent."""
        self._stop()
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None
        self._socket.close()

    def _refresh_status(self, *, announce: bool = False) -> None:
        status = self._status()
        self._handle(StatusChanged(encode(status), status.ready, announce))

    def _before_tick(self) -> None:
        self._socket.drain()
        self._refresh_status()

    def _on_message(self, parts: list[bytes]) -> None:
        try:
            peer, data = parts
            gateway = peer.decode()
        except ValueError:
            self._end.malformed += 1
            return
        self._handle(Received(data, gateway))

    def _on_monitor(self, _event: zmq.Event) -> None:
        # A ROUTER does not say who left: a heartbeat to everyone finds out. The event comes
        # a moment before the socket itself knows, so what wakes it next asks again.
        if self._local and not self._closed.done():
            if self._probing is not None:
                self._probing.cancel()
            self._probing = self._loop.call_later(_PROBE_S, self._probe_last)
            self._handle(Probe())

    def _on_wake(self) -> None:
        if self._probing is not None:
            self._handle(Probe())

    def _probe_last(self) -> None:
        self._probing = None
        self._handle(Probe())

    def _carry_out(self, action: Action) -> None:
        match action:
            case Transmit():
                outcome = self._socket.send([action.peer.encode(), action.data])
                if outcome is SendOutcome.UNREACHABLE and self._local:
                    self._loop.call_soon(self._handle, Disconnected(action.peer))
            case Deliver():
                self._command(action.peer, action.message)
            case Up():
                self._call(self._on_gateway_up, action.peer)
            case Down():
                self._call(self._on_gateway_down, action.peer)
            case Crowded():
                self._call(self._on_crowded, action.peer, action.crowded)

    def _command(self, gateway: str, data: bytes) -> None:
        try:
            command = decode_command(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._end.malformed += 1
            _log.error("malformed_command", gateway=gateway)
            self.drop(gateway)
            return
        self._call(self._on_command, gateway, command)
        if not self._turn_end_due:
            self._turn_end_due = True
            self._loop.call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._turn_end_due = False
        self._call(self._on_turn_end)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            _log.exception("link_callback_failed", endpoint=self.endpoint)
