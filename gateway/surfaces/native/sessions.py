"""The requests of the native surface: `/v1/sessions` and what lies below it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access import Access
from gateway.hosting import OnPosition, SessionHost, SessionSummary
from gateway.metrics import GatewayMetrics
from gateway.surfaces.native.about import told
from gateway.surfaces.native.documents import DOCUMENTS
from gateway.surfaces.native.outputs import limits_out
from gateway.surfaces.native.verbs import as_written, verbs
from gateway.surfaces.opening import OpenAnswer, wants_events
from protocol.errors import AntiphonError, raised
from protocol.native import (
    CommandResult,
    OpenBody,
    SessionBody,
    SessionList,
    SessionStatus,
    SignalBody,
    UpdateBody,
    read_body,
)
from sessions.lifecycle import State


class NativeSessions:
    """Open, list, look at, update, signal and close sessions, each tenant its own."""

    def __init__(self, host: SessionHost, access: Access, metrics: GatewayMetrics) -> None:
        self._host = host
        self._access = access
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """The routes, to be mounted at the root."""
        one = "/v1/sessions/{session}"
        return [
            Route("/v1/sessions", self.open, methods=["POST"]),
            Route("/v1/sessions", self.list, methods=["GET"]),
            Route("/v1/sessions/schema", self.schema, methods=["GET"]),
            Route("/v1/sessions/asyncapi.json", self.asyncapi, methods=["GET"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/update", self.update, methods=["POST"]),
            Route(f"{one}/signal", self.signal, methods=["POST"]),
        ]

    async def open(self, request: Request) -> OpenAnswer[SessionBody]:
        """`POST /v1/sessions`: a session that waits for its client for `grace_s`.

        While there is no room for it the answer waits, or says where the open stands.
        """
        with self._refusals_counted():
            tenant = self._access.tenant(request.scope)
            body = await _body(request, OpenBody)

        async def open_session(on_position: OnPosition) -> SessionBody:
            with self._refusals_counted():
                session, secret = await self._open(body, tenant, on_position)
            return self._describe(session, tenant, secret)

        def undo(opened: SessionBody) -> None:
            self._host.close_session(opened.id, tenant)

        return OpenAnswer(open_session, _created, undo, events=wants_events(request))

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            raise

    async def list(self, request: Request) -> Response:
        """`GET /v1/sessions`."""
        tenant = self._access.tenant(request.scope)
        return _json(
            SessionList(
                [
                    SessionStatus(**_status(summary))
                    for summary in self._host.sessions()
                    if summary.tenant == tenant and summary.state != State.OPENING
                ]
            )
        )

    async def get(self, request: Request) -> Response:
        """`GET /v1/sessions/{id}`."""
        tenant = self._access.tenant(request.scope)
        return _json(self._describe(request.path_params["session"], tenant))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/sessions/{id}`: close it, if it has not ended already."""
        tenant = self._access.tenant(request.scope)
        self._host.close_session(request.path_params["session"], tenant)
        return Response(status_code=204)

    async def update(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/update`."""
        tenant = self._access.tenant(request.scope)
        body = await _body(request, UpdateBody)
        return await self._command(request, tenant, body.input, body.id)

    async def signal(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/signal`."""
        tenant = self._access.tenant(request.scope)
        body = await _body(request, SignalBody)
        return await self._command(request, tenant, body.signal, body.id)

    async def schema(self, request: Request) -> Response:
        """`GET /v1/sessions/schema`: every frame and body as JSON Schema."""
        return _json(DOCUMENTS.json_schema)

    async def asyncapi(self, request: Request) -> Response:
        """`GET /v1/sessions/asyncapi.json`: the stream as an AsyncAPI document."""
        return _json(DOCUMENTS.asyncapi)

    async def _open(self, body: OpenBody, tenant: str, on_position: OnPosition) -> tuple[str, str]:
        secret = f"secret_{secrets.token_urlsafe(24)}"
        fork = None if body.fork is None else body.fork.session
        if fork is not None and body.model is None:
            pipeline = self._host.summary(fork, tenant).pipeline
        else:
            pipeline = self._host.resolve(body.model)
        attachment = await self._host.open(
            pipeline=pipeline,
            fork=fork,
            tenant=tenant,
            settings_patch=body.settings,
            limits=msgspec.to_builtins(body.limits),
            priority=body.priority,
            control=msgspec.to_builtins(body.control),
            secret=secret,
            on_position=on_position,
        )
        return attachment.session, secret

    async def _command(
        self, request: Request, tenant: str, said: Any, command: str | None
    ) -> Response:
        session = request.path_params["session"]
        kind = self._host.summary(session, tenant).kind
        command = command or f"cmd_{secrets.token_hex(12)}"
        (verb,) = verbs(kind, said, command, None)
        answer = await self._host.command(session, tenant, verb, command)
        if answer.error is not None:
            raise raised(as_written(answer.error))
        return _json(CommandResult(command, answer.result))

    def _describe(self, session: str, tenant: str, secret: str | None = None) -> SessionBody:
        known = self._host.describe(session, tenant)
        return SessionBody(
            **_status(known.summary),
            settings=known.settings,
            limits=limits_out(known.limits),
            expires_at_s=known.expires_at_s,
            about=told(known.about),
            secret=secret,
        )


async def _body(request: Request, kind: type[Any]) -> Any:
    return read_body(await request.body(), kind)


def _status(summary: SessionSummary) -> dict[str, Any]:
    return {
        "id": summary.id,
        "kind": summary.kind,
        "model": summary.pipeline,
        "state": summary.state,
        "turns": summary.turns,
        "age_s": summary.age_s,
        "idle_s": summary.idle_s,
        "facts": summary.facts,
        "bytes": summary.bytes,
    }


def _created(body: SessionBody) -> Response:
    answer = _json(body, 201)
    answer.headers["location"] = f"/v1/sessions/{body.id}"
    return answer


def _json(body: Any, status: int = 200) -> Response:
    # What is said here belongs to who asked, and a secret is in one of the answers.
    return Response(
        msgspec.json.encode(body),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )
