"""The WebSocket of the OpenPI protocol, as `openpi-client` speaks it.

A thin shell: observations become steps of a session, and what comes of them goes back through
a bounded egress queue. The first frame is the policy's metadata. An error is one text frame,
and the connection is closed (1011) behind it: what is binary would be taken for actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway.access import Access
from gateway.hosting import Attachment, SessionHost
from gateway.http_errors import can_answer, error_response
from gateway.metrics import FrameCounts, GatewayMetrics
from gateway.surfaces.ahead import Ahead
from gateway.surfaces.farewell import CLOSE_INTERNAL, farewell
from gateway.surfaces.faults import faults
from gateway.surfaces.openpi.control import check_parameters, chosen_control
from gateway.surfaces.openpi.requests import MAX_PENDING, Requests, read_request
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.priority import asked_priority
from gateway.surfaces.reading_on import ReadingOn
from gateway.surfaces.resume import Return, returning, wants_resume
from gateway.surfaces.while_waiting import while_waiting
from protocol.errors import AntiphonError, ErrorInfo, ErrorKind, NotFound
from protocol.openpi import pack, unpack
from sessions.client import Attached, LetGo, Refused, Role, SessionEnded
from sessions.pipeline import Kind, StepRoles
from sessions.steps.events import (
    EmergencyStopped,
    Restore,
    SafeAction,
    StateLost,
    StepDone,
    StepFailed,
    WasReset,
    WasRestored,
)

log = structlog.get_logger(__name__)

_RESTORE = "restore"


class OpenPiSocket:
    """The ASGI application of `WS /v1/openpi/{pipeline}`, or of a whole port for `pipeline`.

    Host and Origin are checked before it.
    """

    def __init__(
        self,
        host: SessionHost,
        access: Access,
        metrics: GatewayMetrics,
        pipeline: str | None = None,
    ) -> None:
        self._host = host
        self._access = access
        self._metrics = metrics
        self._only = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it ends."""
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        connection = _Connection(self._metrics, receive, send)
        refusal: AntiphonError | None = None
        try:
            with faults():
                tenant = self._access.tenant(scope, scope["subprotocols"])
                pipeline = self._pipeline(scope)
                check_parameters(scope)
                priority = asked_priority(scope)
                back = returning(scope)
                resumable = wants_resume(scope)
                control = chosen_control(scope)
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            log.info("open_refused", surface="openpi", code=error.code)
            if can_answer(scope):
                await error_response(error)(scope, receive, send)
                return
            refusal = error
        try:
            # At once: a client gives an upgrade 10 s, and waits for its metadata for ever.
            await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
        except OSError:
            return  # The client hung up during the upgrade.
        if refusal is not None:
            await connection.refuse(refusal)
            return
        try:
            if back is None:
                secret = f"secret_{secrets.token_hex(12)}" if resumable else None
                opening = self._open(connection, pipeline, tenant, secret, priority, control)
            else:
                opening = self._come_back(connection, pipeline, tenant, back)
            with faults():
                attachment = await while_waiting(
                    opening,
                    connection.ahead.until_gone(),
                    undo=lambda opened: opened.close("client"),
                )
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            log.info("open_refused", surface="openpi", code=error.code)
            await connection.refuse(error)
            return
        except OSError:
            log.info("open_given_up", surface="openpi")
            return
        try:
            await connection.run(attachment)
        finally:
            if connection.goodbye:
                attachment.close("client")
            else:
                attachment.detach()

    def _pipeline(self, scope: Scope) -> str:
        """The pipeline that the client means. Raises NotFound."""
        name = self._only or self._host.resolve(scope["path_params"]["pipeline"])
        if self._host.pipelines[name].kind is not Kind.ROBOT:
            raise NotFound(f"{name} serves no robots", field="model", code="model_not_found")
        return name

    async def _open(
        self,
        connection: _Connection,
        pipeline: str,
        tenant: str,
        secret: str | None,
        priority: int | None,
        control: dict[str, Any],
    ) -> Attachment:
        attachment = await self._host.open(
            pipeline=pipeline,
            tenant=tenant,
            priority=priority,
            control=control,
            secret=secret,
            on_output=connection.on_output,
        )
        said = {} if secret is None else {"secret": secret}
        try:
            self._welcome(connection, attachment.session, tenant, said)
        except BaseException:
            connection.hear_nothing()
            attachment.close("client")
            raise
        return attachment

    async def _come_back(
        self, connection: _Connection, pipeline: str, tenant: str, back: Return
    ) -> Attachment:
        if self._host.summary(back.session, tenant).pipeline != pipeline:
            raise NotFound(f"{pipeline} has no such session", code="session_not_found")
        attachment, attached = await self._host.attach(
            back.session,
            tenant=tenant,
            role=Role.CONTROLLER,
            secret=back.secret,
            cursor=None,
            on_output=connection.on_output,
        )
        said = {"secret": attached.secret, "resumed": True}
        try:
            self._welcome(connection, back.session, tenant, said)
        except BaseException:
            attachment.detach()
            raise
        return attachment

    def _welcome(
        self, connection: _Connection, session: str, tenant: str, said: dict[str, Any]
    ) -> None:
        """The metadata: what the policy says, and how the session is called."""
        description = self._host.describe(session, tenant)
        pipeline = self._host.pipelines[description.summary.pipeline]
        state = StepRoles.of(pipeline).state
        packed = description.about.get(state, {}).get("metadata")
        metadata = unpack(packed) if packed is not None else {}
        metadata["antiphon"] = {
            "session": session,
            "committed_step": connection.committed,
            "resumed": False,
            **said,
        }
        covered = description.control.safe_action is not None
        connection.begin(state, pack(metadata), covered=covered)


@dataclass(frozen=True)
class _Came:
    """A message, when it came, and the earliest that it may have been said."""

    message: Message
    received_ms: float
    said_ms: float


class _Connection:
    """One connection and its session, from the upgrade to the close."""

    def __init__(self, metrics: GatewayMetrics, receive: Receive, send: Send) -> None:
        self.goodbye = False
        """Whether the client said that it wants no more of its session."""
        self.ahead = Ahead(receive)
        self._metrics = metrics
        self._frames: FrameCounts = metrics.frames("openpi")
        self._outlet = Outlet(send, self._frames)
        self._egress = self._outlet.egress
        self._attachment: Attachment | None = None
        self._requests = Requests(0)
        self._state = ""
        self._covered = False
        """Whether there is a safe action where there is nothing fresh."""
        self._restores = False
        """Whether the state is to go on from what is stored of it."""
        self._welcomed = False
        """Whether the metadata was sent: what follows are answers."""
        self._over = False
        self._room = asyncio.Event()

    @property
    def committed(self) -> int:
        """The session's last committed step, as far as this connection was told."""
        return self._requests.committed

    def begin(self, state: str, metadata: bytes, *, covered: bool) -> None:
        """The session is there; `state` is its stage with the policy. If it is `covered`, it has
        a safe action."""
        self._state, self._covered = state, covered
        if not self._over:
            self._egress.put(metadata)

    def on_output(self, sequence: int, output: Any) -> None:
        """Answer what the session says; all that is nobody's answer has no frame here."""
        if self._over:
            return
        now_ms = self._now_ms()
        match output:
            case Attached(snapshot=stands):
                committed, in_flight = stands.committed_step, stands.in_flight
                self._requests = Requests(committed, in_flight, resumed=True)
                self._restores = stands.lost and stands.restorable_step is not None
            case StepDone(step=step, committed_step=committed):
                if self._requests.step_over(step, committed):
                    self._answer(output, now_ms)
            case StepFailed(error=error):
                if self._requests.failed(output):
                    self._fail(error)
            case SafeAction():
                for frame in self._requests.safe(output, now_ms):
                    self._egress.put(frame)
            case StateLost(restorable_step=step):
                self._restores = step is not None
            case WasRestored(committed_step=committed):
                self._requests.committed = committed
            case EmergencyStopped():
                self._requests.stopped(now_ms)
            case WasReset():
                answer = self._requests.was_reset(now_ms)
                if answer is not None:
                    self._egress.put(answer)
            case Refused(ref=ref) if ref == _RESTORE:
                pass  # The state begins anew meanwhile, or is told to be lost by the next step.
            case Refused(error=error):
                self._fail(error)
            case SessionEnded(reason=reason, error=error):
                ending = farewell(reason, error)
                if ending.error is not None:
                    self._fail(ending.error)
                elif self._requests.pending:
                    self._fail(_closed(reason))
                else:
                    self._finish(ending.code, ending.reason)
            case LetGo(reason=reason):
                self._fail(_closed(reason))
        self._go_on()

    def _answer(self, done: StepDone, now_ms: float) -> None:
        before = self._requests.superseded
        try:
            frames = self._requests.done(done, self._state, now_ms)
        except AntiphonError as error:
            self._fail(error.info())
            return
        for frame in frames:
            self._egress.put(frame)
        superseded = self._requests.superseded - before
        if superseded and self._attachment is not None:
            self._attachment.superseded(superseded)

    def hear_nothing(self) -> None:
        """What follows of the session is its end, and `refuse` says why it ends."""
        self._over = True

    async def refuse(self, error: AntiphonError) -> None:
        """Say why there is no session, and close."""
        self._over = False
        self._fail(error.info())
        with contextlib.suppress(OSError):  # The client may hang up first.
            await self._outlet.run()

    async def run(self, attachment: Attachment) -> None:
        """Carry frames both ways until either side ends it."""
        self._attachment = attachment
        self._metrics.watch_egress(self._egress)
        try:
            await self._outlet.carry(
                self._read(attachment),
                attachment.session,
                lambda: self._stalled(attachment),
                lambda error: self._fail(error.info()),
                attachment.set_blocked,
                self._sent,
            )
        finally:
            self._metrics.forget_egress(self._egress)

    def _stalled(self, attachment: Attachment) -> None:
        log.info("client_does_not_read", session=attachment.session)

    async def _read(self, attachment: Attachment) -> None:
        # Of a client that has left nobody waits for an answer.
        said = ReadingOn(self.ahead.receive, self._came, left_s=0.0)
        try:
            await self._take(said, attachment)
        finally:
            self.goodbye = said.gone is not None and said.gone.get("code") == 1000

    def _came(self, message: Message, said_ms: float) -> _Came:
        return _Came(message, self._now_ms(), said_ms)

    async def _take(self, said: ReadingOn[_Came], attachment: Attachment) -> None:
        while True:
            if self._egress.blocked and not await said.wait_for(self._egress.room()):
                return
            if not self._has_place and not await said.wait_for(self._place()):
                return
            came = await said.next()
            if came is None:
                return
            if self._over:
                continue  # It spoke before it read that this is over.
            self._frames.received += 1
            text = came.message.get("text")
            try:
                asked = read_request(came.message["bytes"] if text is None else text)
            except AntiphonError as error:
                self._fail(error.info())
                continue
            if not (attachment.has_room or await said.wait_for(attachment.room())):
                return
            self._requests.ask(asked, came.received_ms, came.said_ms)
            self._go_on()

    @property
    def _has_place(self) -> bool:
        """Whether one more request may wait for its answer."""
        return self._requests.pending < MAX_PENDING or self._over

    async def _place(self) -> None:
        while not self._has_place:
            self._room.clear()
            await self._room.wait()

    def _go_on(self) -> None:
        """Hand the session what is next, if it has nothing to do."""
        if self._has_place:
            self._room.set()
        if self._over or self._attachment is None:
            return
        if self._restores and self._covered:
            # Robots of this protocol cannot say so; a step that is undone is told by its number.
            self._restores = False
            self._attachment.send(Restore(_RESTORE))
        while (verb := self._requests.begin()) is not None:
            self._attachment.send(verb)

    def _fail(self, error: ErrorInfo) -> None:
        """One text frame, and the end. Nothing binary follows."""
        if self._over:
            return
        self._metrics.error_told(error.code)
        place = "" if error.field is None else f" ({error.field})"
        self._egress.put(f"{error.code}: {error.message}{place}")
        self._finish(CLOSE_INTERNAL, error.code)

    def _finish(self, code: int, reason: str) -> None:
        self._over = True
        self._outlet.finish(code, reason)
        self._room.set()

    def _sent(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            if self._welcomed:
                self._requests.sent(self._now_ms())
            self._welcomed = True

    def _now_ms(self) -> float:
        # The host's clock; that of the loop knows whole milliseconds only.
        return time.monotonic() * 1000.0


def _closed(reason: str) -> ErrorInfo:
    return ErrorInfo("session_closed", ErrorKind.SERVER, f"The session ended here: {reason}.")
