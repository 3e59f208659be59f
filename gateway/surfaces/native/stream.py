"""The WebSocket of the native surface: `WS /v1/sessions/{id}/stream`.

A thin shell: frames become verbs of a session, and its outputs go back through a bounded
egress queue. The first frame says what the connection is to be. Who hangs up is detached,
and its session waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway.access import Access
from gateway.hosting import Attachment, SessionHost, SessionSummary
from gateway.metrics import GatewayMetrics
from gateway.surfaces.attaching import Upgrade, first_frame
from gateway.surfaces.farewell import CLOSE_POLICY, LET_GO, farewell
from gateway.surfaces.faults import faults
from gateway.surfaces.native.cursors import Cursors
from gateway.surfaces.native.outputs import OutputWriter
from gateway.surfaces.native.verbs import verbs
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.reading_on import ReadingOn
from protocol.errors import AntiphonError, ErrorInfo, InvalidRequest
from protocol.free_form import Unreadable
from protocol.native import (
    WIRES,
    Attach,
    ClientFrame,
    Close,
    EmergencyStop,
    Failed,
    Have,
    Signal,
    Update,
)
from protocol.wires import Wire
from sessions.client import Answered, Attached, LetGo, Refused, Role, SessionEnded, Verb
from sessions.pipeline import Kind
from sessions.steps import events as steps

log = structlog.get_logger(__name__)


class NativeStream:
    """The ASGI application of the stream. Host and Origin are checked before it."""

    def __init__(self, host: SessionHost, access: Access, metrics: GatewayMetrics) -> None:
        self._host = host
        self._metrics = metrics
        self._upgrade = Upgrade("native", host, access, metrics, Failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it ends."""
        accepted = await self._upgrade.accept(WIRES, self._host.summary, scope, receive, send)
        if accepted is not None:
            wire, summary = accepted
            connection = _Connection(
                self._host, self._metrics, self._upgrade, wire, summary, receive, send
            )
            await connection.run()


@dataclass(frozen=True)
class _Said:
    """A frame of the client, and the earliest that it may have been said."""

    frame: ClientFrame
    said_ms: float


@dataclass(frozen=True)
class _Unread:
    """Why one could not be read, and what the client called it. The exception itself would hold
    the frame, and where it was raised, as long as this waits."""

    error: ErrorInfo
    command: str | None
    ref: str | None


class _Connection:
    """One connection, from the upgrade to the close."""

    def __init__(
        self,
        host: SessionHost,
        metrics: GatewayMetrics,
        upgrade: Upgrade,
        wire: Wire[ClientFrame],
        summary: SessionSummary,
        receive: Receive,
        send: Send,
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._upgrade = upgrade
        self._wire = wire
        self._session = summary.id
        self._tenant = summary.tenant
        self._kind = summary.kind
        self._receive = receive
        self._frames = metrics.frames("native")
        self._outlet = Outlet(send, self._frames)
        self._egress = self._outlet.egress
        self._cursors = Cursors(summary.id)
        self._writer = OutputWriter(wire, self._cursors)
        self._attachment: Attachment | None = None
        self._observes = False
        self._came_with: int | None = None
        self._kept_through = 0
        """What the session had put out when this client came: it is told again, if at all."""
        self._over = False

    def on_output(self, sequence: int, output: Any) -> None:
        """Queue what the session puts out."""
        if isinstance(output, Attached):
            self._kept_through = output.sequence
            self._egress.put(self._writer.attached(output, self._came_with))
            return
        if isinstance(output, SessionEnded):
            ending = farewell(output.reason, output.error)
            output = SessionEnded(output.reason, ending.error)
        frame = self._writer.write(sequence, output)
        self._egress.put(frame, told_again=sequence <= self._kept_through)
        match output:
            case Refused(error=error) | Answered(error=ErrorInfo() as error):
                self._metrics.error_told(error.code)
            case LetGo(reason=reason):
                self._over = True
                self._outlet.finish(*LET_GO.get(reason, (CLOSE_POLICY, reason)))
            case SessionEnded():
                self._over = True
                if ending.error is not None:
                    self._metrics.error_told(ending.error.code)
                self._outlet.finish(ending.code, ending.reason)

    async def run(self) -> None:
        """Attach, then carry frames both ways until either side ends it."""
        self._metrics.watch_egress(self._egress)
        try:
            attachment = await self._attach()
            if attachment is not None:
                await self._outlet.carry(
                    self._read(attachment),
                    self._session,
                    self._stalled,
                    self._fail,
                    attachment.set_blocked,
                )
        except OSError:
            pass  # The client is gone.
        finally:
            self._metrics.forget_egress(self._egress)
            if self._attachment is not None:
                self._attachment.detach()

    async def _attach(self) -> Attachment | None:
        """Let the client in as its first frame says; None: it is not, and has been told."""
        try:
            with faults(self._session):
                attach: Attach | None = await first_frame(self._receive, self._read_frame, Attach)
                if attach is None:
                    return None
                role = Role(attach.role)
                self._observes = role is Role.OBSERVER
                if attach.cursor is not None:
                    self._came_with = self._cursors.read(attach.cursor)
                self._attachment, _ = await self._host.attach(
                    self._session,
                    tenant=self._tenant,
                    role=role,
                    secret=attach.secret,
                    cursor=self._came_with,
                    on_output=self.on_output,
                )
        except AntiphonError as error:
            await self._upgrade.refuse(self._outlet, self._wire, error)
            return None
        return self._attachment

    def _fail(self, error: AntiphonError) -> None:
        self._over = True
        self._metrics.error_told(error.code)
        self._egress.put(self._wire.write(Failed(error.info())))
        self._outlet.finish(*LET_GO["failed"])

    def _stalled(self) -> None:
        log.info("client_does_not_read", session=self._session, observer=self._observes)

    async def _read(self, attachment: Attachment) -> None:
        reading: ReadingOn[_Said | _Unread] = ReadingOn(
            self._receive, lambda message, said_ms: self._heard(message, said_ms, attachment)
        )
        while True:
            if self._egress.blocked and not await reading.wait_for(self._egress.room()):
                return
            said = await reading.next()
            if said is None:
                return
            if self._over:
                continue  # It spoke before it read that its session goes on without it.
            if isinstance(said, _Unread):
                self._answer(said.error, said.command, said.ref, attachment)
                continue
            try:
                if not await self._carry_out(said, attachment, reading):
                    return
            except AntiphonError as error:
                named = said.frame if isinstance(said.frame, Update | Signal) else None
                command, ref = (named.id, named.ref) if named is not None else (None, None)
                self._answer(error.info(), command, ref, attachment)

    def _heard(
        self, message: Message, said_ms: float, attachment: Attachment
    ) -> _Said | _Unread | None:
        """What a message says, to be carried out in its turn; None: it was a stop, which has
        none."""
        try:
            frame = self._read_frame(message)
        except Unreadable as error:
            return _Unread(error.info(), error.id, error.ref)
        if isinstance(frame, Signal) and isinstance(frame.signal, EmergencyStop) and self._may_stop:
            for verb in self._verbs(frame):
                attachment.send(verb, frame.id)
            return None
        return _Said(frame, said_ms)

    @property
    def _may_stop(self) -> bool:
        return self._kind == Kind.ROBOT and not (self._observes or self._over)

    def _read_frame(self, message: Any) -> ClientFrame:
        self._frames.received += 1
        text = message.get("text")
        return self._wire.read(message["bytes"] if text is None else text)

    async def _carry_out(
        self, said: _Said, attachment: Attachment, reading: ReadingOn[_Said | _Unread]
    ) -> bool:
        """Whether to read on: not where the client has left and there is no room for this.

        Raises InvalidRequest, and then nothing of it was carried out.
        """
        match frame := said.frame:
            case Have():
                attachment.has(self._cursors.read(frame.cursor))
            case Attach():
                raise InvalidRequest("this connection is attached already", field="type")
            case _ if self._observes:
                raise InvalidRequest("an observer only looks on", code="not_controller")
            case Close():
                attachment.close("client")
            case Update() | Signal():
                return await self._ask(frame, said.said_ms, attachment, reading)
        return True

    async def _ask(
        self,
        frame: Update | Signal,
        said_ms: float,
        attachment: Attachment,
        reading: ReadingOn[_Said | _Unread],
    ) -> bool:
        for verb in self._verbs(frame):
            if not (attachment.has_room or await reading.wait_for(attachment.room())):
                return False
            if isinstance(verb, steps.ReleaseStop | steps.Reset):
                verb = replace(verb, said_ms=said_ms)
            if not self._over:
                attachment.send(verb, frame.id)
        return True

    def _verbs(self, frame: Update | Signal) -> Iterator[Verb]:
        said = frame.input if isinstance(frame, Update) else frame.signal
        return verbs(self._kind, said, frame.id, frame.ref)

    def _answer(
        self, error: ErrorInfo, command: str | None, ref: str | None, attachment: Attachment
    ) -> None:
        """Say that what a frame asks for cannot be; its session answers one with an id, once."""
        if command is not None and not self._observes:
            attachment.misspoke(command, error)
            return
        self._metrics.error_told(error.code)
        if command is None:
            self._egress.put(self._writer.alone(Refused(error, ref)))
        else:
            self._egress.put(self._writer.alone(Answered(command, error)))
