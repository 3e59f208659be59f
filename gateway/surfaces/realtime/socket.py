"""The WebSocket of the Realtime surface: `WS /v1/realtime?model=PIPELINE`.

A thin shell: frames go through `Translation` to a session and back through a bounded
egress queue. Programs are refused before the upgrade with an HTTP status; browsers,
which cannot read one, after it with an error event and a close code.
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import parse_qs

import structlog
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway.access import Access
from gateway.hosting import Attachment, SessionHost
from gateway.http_errors import can_answer, error_response
from gateway.metrics import FrameCounts, GatewayMetrics
from gateway.surfaces.farewell import CLOSE_CODES, CLOSE_POLICY, LET_GO, farewell
from gateway.surfaces.faults import faults
from gateway.surfaces.long_audio import in_pieces
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.priority import asked_priority
from gateway.surfaces.reading_on import ReadingOn
from gateway.surfaces.realtime.resume import numbered, with_secret
from gateway.surfaces.realtime.translation import Translation
from gateway.surfaces.realtime.upgrade import Upgrade
from gateway.surfaces.resume import Return, returning, wants_resume
from protocol.errors import AntiphonError, InvalidRequest, NotFound
from sessions.client import (
    Attached,
    LetGo,
    Refused,
    Role,
    SessionCreated,
    SessionEnded,
    SettingsUpdated,
)
from sessions.duplex.events import ClientOutput
from sessions.pipeline import Kind

SUBPROTOCOL = "realtime"
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"

CLOSE_UNSUPPORTED = 4000

log = structlog.get_logger(__name__)


class Unsupported(InvalidRequest):
    """A dialect or purpose of the protocol that is not served; told after the upgrade."""


class RealtimeSocket:
    """The ASGI application of `WS /v1/realtime`. Host and Origin are checked before it."""

    def __init__(self, host: SessionHost, access: Access, metrics: GatewayMetrics) -> None:
        self._host = host
        self._access = access
        self._metrics = metrics
        self._frames = metrics.frames("realtime")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it ends."""
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        subprotocol = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        upgrade = Upgrade(subprotocol, receive, send)
        try:
            with faults():
                tenant = self._access.tenant(scope, scope["subprotocols"])
                back = returning(scope)
                if back is None:
                    opening = self._open(tenant, scope, upgrade, send)
                    connection, attachment = await upgrade.hold(
                        opening, undo=lambda opened: opened[1].close("client")
                    )
                else:
                    connection, attachment = await self._come_back(tenant, back, receive, send)
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            log.info("open_refused", surface="realtime", code=error.code)
            await self._refuse(error, upgrade, scope, receive, send)
            return
        except OSError:
            log.info("open_given_up", surface="realtime")
            return
        try:
            await upgrade.accept()
            await connection.run(attachment)
        except OSError:
            pass  # The client hung up during the upgrade.
        finally:
            if connection.goodbye:
                attachment.close("client")
            else:
                attachment.detach()

    async def _open(
        self, tenant: str, scope: Scope, upgrade: Upgrade, send: Send
    ) -> tuple[_Connection, Attachment]:
        secret = _new_id("secret") if wants_resume(scope) else None
        pipeline, priority = self._pipeline(_asked_model(scope)), asked_priority(scope)
        connection = self._connection(pipeline, secret, upgrade.receive, send)
        attachment = await self._host.open(
            pipeline=pipeline,
            tenant=tenant,
            secret=secret,
            on_output=connection.on_output,
            on_position=upgrade.stands,
            priority=priority,
        )
        return connection, attachment

    def _pipeline(self, model: str | None) -> str:
        """The conversation that a client's `model` names; None: the first one."""
        conversations = [
            name for name, pipeline in self._host.pipelines.items() if pipeline.kind is Kind.DUPLEX
        ]
        if model is None and conversations:
            return conversations[0]
        pipeline = self._host.resolve(model)
        if pipeline not in conversations:
            raise NotFound(f"{pipeline} is no conversation", field="model", code="model_not_found")
        return pipeline

    async def _come_back(
        self, tenant: str, back: Return, receive: Receive, send: Send
    ) -> tuple[_Connection, Attachment]:
        summary = self._host.summary(back.session, tenant)
        if summary.kind != Kind.DUPLEX:
            raise InvalidRequest("that session is no conversation", field="session")
        connection = self._connection(summary.pipeline, back.secret, receive, send)
        attachment, _ = await self._host.attach(
            back.session,
            tenant=tenant,
            role=Role.CONTROLLER,
            secret=back.secret,
            cursor=back.cursor,
            on_output=connection.on_output,
        )
        return connection, attachment

    def _connection(
        self, model: str, secret: str | None, receive: Receive, send: Send
    ) -> _Connection:
        translation = self._translation(model)
        return _Connection(translation, self._metrics, self._frames, receive, send, secret)

    def _translation(self, model: str) -> Translation:
        return Translation(
            model,
            event_prefix=secrets.token_hex(6),
            new_id=_new_id,
            is_model=lambda name: self._is_model(name, model),
        )

    def _is_model(self, name: str, model: str) -> bool:
        try:
            return self._host.resolve(name) == model
        except NotFound:
            return False

    async def _refuse(
        self,
        error: AntiphonError,
        upgrade: Upgrade,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        answered = can_answer(scope) and upgrade.subprotocol is None
        if answered and not upgrade.accepted and not isinstance(error, Unsupported):
            await error_response(error)(scope, receive, send)
            return
        self._metrics.error_told(error.code)
        try:
            await upgrade.accept()
            await send({"type": "websocket.send", "text": self._translation("").refusal(error)})
            code = CLOSE_UNSUPPORTED if isinstance(error, Unsupported) else CLOSE_CODES[error.kind]
            reason = f"invalid_request_error.{error.code}" if code == 4000 else error.code
            await send({"type": "websocket.close", "code": code, "reason": reason})
        except OSError:
            pass  # The client hung up first.


class _Connection:
    """One connection and its session, from the upgrade to the close."""

    def __init__(
        self,
        translation: Translation,
        metrics: GatewayMetrics,
        frames: FrameCounts,
        receive: Receive,
        send: Send,
        secret: str | None,
    ) -> None:
        self.goodbye = False
        """Whether the client said that it wants no more of its session."""
        self._secret = secret
        self._welcomed = False
        """Whether this connection came to a session that was there already."""
        self._translation = translation
        self._metrics = metrics
        self._frames = frames
        self._receive = receive
        self._outlet = Outlet(send, frames)
        self._egress = self._outlet.egress
        self._tracing: str | dict[str, Any] | None = None

    def on_output(self, sequence: int, output: ClientOutput) -> None:
        """Queue what the session puts out; it may come before `run`."""
        for frame in self._frames_of(sequence, output):
            self._egress.put(frame)
        if isinstance(output, SettingsUpdated):
            self._trace(output)
        elif isinstance(output, Refused):
            self._metrics.error_told(output.error.code)
        elif isinstance(output, SessionEnded):
            ending = farewell(output.reason, output.error)
            if ending.error is not None:
                self._metrics.error_told(ending.error.code)
            self._outlet.finish(ending.code, ending.reason)
        elif isinstance(output, Attached):
            self._welcomed = True
        elif isinstance(output, LetGo):
            self._outlet.finish(*LET_GO.get(output.reason, (CLOSE_POLICY, output.reason)))

    def _frames_of(self, sequence: int, output: ClientOutput) -> list[str]:
        frames = self._translation.write(output)
        if self._secret is None:
            return frames
        if isinstance(output, Attached):
            # The number that counts is that of what is told again, behind it.
            return [with_secret(frames[0], output.secret, output)]
        if isinstance(output, SessionCreated) and not self._welcomed:
            frames = [with_secret(frames[0], self._secret, None)]
        return numbered(frames, sequence)

    def _trace(self, updated: SettingsUpdated) -> None:
        """What a client calls its trace is in the log, beside the session's id."""
        tracing = updated.settings.tracing
        if tracing != self._tracing:
            self._tracing = tracing
            log.info("session_traced", session=updated.session, tracing=tracing)

    async def run(self, attachment: Attachment) -> None:
        """Carry frames both ways until either side ends it."""

        def stalled() -> None:
            log.info("client_does_not_read", session=attachment.session)
            if self._secret is None:
                attachment.close("stalled")

        self._metrics.watch_egress(self._egress)
        try:
            await self._outlet.carry(
                self._read(attachment),
                attachment.session,
                stalled,
                self._fail,
                attachment.set_blocked,
            )
        finally:
            self._metrics.forget_egress(self._egress)

    def _fail(self, error: AntiphonError) -> None:
        self._metrics.error_told(error.code)
        self._egress.put(self._translation.refusal(error))
        self._outlet.finish(*LET_GO["failed"])

    async def _read(self, attachment: Attachment) -> None:
        # Without a secret the session ends with its connection, and all that waits for it.
        left_s = 0.0 if self._secret is None else None
        said: ReadingOn[Message] = ReadingOn(self._receive, lambda message, _: message, left_s)
        try:
            await self._carry_out(said, attachment)
        finally:
            self.goodbye = said.gone is not None and said.gone.get("code") == 1000

    async def _carry_out(self, said: ReadingOn[Message], attachment: Attachment) -> None:
        while True:
            await self._egress.room()
            message = await said.next()
            if message is None:
                return
            self._frames.received += 1
            frame = message.get("text")
            try:
                verb = self._translation.read(message["bytes"] if frame is None else frame)
            except InvalidRequest as error:
                self._metrics.error_told(error.code)
                self._egress.put(self._translation.refusal(error))
                continue
            for piece in in_pieces(verb):
                if not (attachment.has_room or await said.wait_for(attachment.room())):
                    return
                attachment.send(piece)


def _asked_model(scope: Scope) -> str | None:
    """The `model` of a request for a GA session. Raises InvalidRequest for other requests."""
    beta = Headers(scope=scope).get("openai-beta", "")
    if "realtime=v1" in beta or BETA_SUBPROTOCOL in scope["subprotocols"]:
        raise Unsupported(
            "The beta dialect is not served: leave out 'OpenAI-Beta: realtime=v1' and use the"
            " GA events.",
            code="beta_api_shape_disabled",
        )
    query = parse_qs(scope["query_string"].decode("latin-1"))
    if "call_id" in query:
        raise NotFound("There is no such call.", field="call_id")
    intent = query.get("intent", [""])[0]
    if intent:
        raise Unsupported(
            f"Intent '{intent[:64]}' is not served; name a model.",
            code="invalid_intent",
            field="intent",
        )
    models = query.get("model")
    return models[0] if models else None


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
