"""A worker's end of the link over a socket that all gateways find."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from protocol.endpoints import check_endpoint, local_path
from protocol.errors import EngineLost, InvalidRequest
from protocol.link import NotLinked, WorkerEnd
from protocol.link_events import (
    Action,
    Crowded,
    Deliver,
    Disconnected,
    Down,
    LinkSettings,
    Received,
    StatusChanged,
    Transmit,
    Up,
)
from protocol.link_frames import WorkerInfo
from protocol.link_shell import LinkShell
from protocol.messages import Command, Output, Report, WorkerStatus, decode_command, encode
from protocol.unix_socket import UnixServer
from protocol.zmq_socket import ZmqRouter

_log = structlog.get_logger(__name__)


class WorkerEndpoint(LinkShell):
    """A worker's end of its links to all gateways, bound at `endpoint`.

    `on_gateway_up(gateway)` comes first for a gateway incarnation: everything that an
    earlier link with it had is gone. `on_command(gateway, command)` is called in order,
    `on_gateway_down(gateway)` when it is lost, `status()` before each heartbeat.
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
        status: Callable[[], WorkerStatus],
        on_crowded: Callable[[str, bool], None] = lambda _gateway, _crowded: None,
        settings: LinkSettings | None = None,
    ) -> None:
        check_endpoint(endpoint)
        self._end = WorkerEnd(incarnation, info, settings)
        super().__init__(self._end, endpoint)
        self._on_command = on_command
        self._on_gateway_up = on_gateway_up
        self._on_gateway_down = on_gateway_down
        self._status = status
        self._on_crowded = on_crowded
        self._socket: UnixServer | ZmqRouter
        if (path := local_path(endpoint)) is not None:
            self._socket = UnixServer(
                path,
                on_frame=self._on_frame,
                on_lost=lambda gateway: self._handle(Disconnected(gateway)),
            )
        else:
            self._socket = ZmqRouter(
                endpoint, on_frame=self._on_frame, on_malformed=self._on_malformed
            )

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
        self._socket.close()

    def _refresh_status(self, *, announce: bool = False) -> None:
        status = self._status()
        self._handle(StatusChanged(encode(status), status.ready, announce))

    def _before_tick(self) -> None:
        self._socket.drain()
        beat_ms = self._end.beat_ms
        if beat_ms is not None and beat_ms <= self._now_ms():
            self._refresh_status()

    def _on_frame(self, gateway: str, frame: bytes) -> None:
        self._handle(Received(frame, gateway))

    def _on_malformed(self) -> None:
        self._end.malformed += 1

    def _carry_out(self, action: Action) -> None:
        match action:
            case Transmit():
                self._socket.send(action.peer, action.data)
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
