"""The gateway's ASGI application: routes, and the guard in front of them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from gateway.access import Access, AccessDenied
from gateway.admin import AdminApi
from gateway.console_files import CONSOLE_FOLDER, ConsoleFiles
from gateway.health import readiness
from gateway.hosting import SessionHost
from gateway.http_errors import HttpRefusal, can_answer, error_response
from gateway.metrics import CONTENT_TYPE, GatewayMetrics
from gateway.surfaces.native import NativeSessions, NativeStream
from gateway.surfaces.openpi import OpenPiSocket
from gateway.surfaces.realtime import RealtimeSocket
from gateway.surfaces.worlds import Worlds, WorldStream
from gateway.surfaces.worlds.pictures import Studio
from protocol.config import GatewayConfig
from protocol.errors import AntiphonError, NotFound

MAX_BODY_BYTES = 1024 * 1024

_PROBES = frozenset({"/healthz", "/readyz"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def build_app(
    host: SessionHost,
    config: GatewayConfig,
    metrics: GatewayMetrics,
    console: Path = CONSOLE_FOLDER,
) -> Starlette:
    """The application that serves `host`. Starting and draining the host is the caller's."""
    access = Access(config)
    endpoints = _Endpoints(host, access, metrics)
    studio = Studio(metrics)
    app = _guarded(
        [
            WebSocketRoute("/v1/realtime", RealtimeSocket(host, access, metrics)),
            *NativeSessions(host, access, metrics).routes(),
            WebSocketRoute("/v1/sessions/{session}/stream", NativeStream(host, access, metrics)),
            *Worlds(host, access, metrics, studio).routes(),
            WebSocketRoute(
                "/v1/worlds/{session}/stream", WorldStream(host, access, metrics, studio)
            ),
            WebSocketRoute("/v1/openpi/{pipeline}", OpenPiSocket(host, access, metrics)),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/healthz", endpoints.healthz, methods=["GET"]),
            Route("/readyz", endpoints.readyz, methods=["GET"]),
            Route("/metrics", endpoints.metrics, methods=["GET"]),
            *AdminApi(host, access).routes(),
            WebSocketRoute("/{path:path}", _no_such_socket),
        ],
        access,
        metrics,
    )
    # Not a route for every path: a path that is known would be a file for a wrong method.
    app.router.default = ConsoleFiles(console)
    return app


def build_policy_app(
    host: SessionHost, config: GatewayConfig, metrics: GatewayMetrics, pipeline: str
) -> Starlette:
    """The application of a port of its own: OpenPI at any path, for one robot pipeline."""
    access = Access(config)
    return _guarded(
        [
            Route("/healthz", _policy_healthz, methods=["GET"]),
            WebSocketRoute("/{path:path}", OpenPiSocket(host, access, metrics, pipeline)),
        ],
        access,
        metrics,
    )


def _guarded(routes: list[BaseRoute], access: Access, metrics: GatewayMetrics) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, access=access, metrics=metrics)],
        exception_handlers={
            AntiphonError: _antiphon_error,
            HTTPException: _http_error,
            ClientDisconnect: _hung_up,
            Exception: _fault,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _policy_healthz(request: Request) -> Response:
    """`GET /healthz`, in the words of OpenPI's own server."""
    return PlainTextResponse("OK\n")


class Guard:
    """Checks Host and Origin before anything else sees a request, and bounds its body.

    Health probes are let through: they come by address and under service names.
    """

    def __init__(self, app: ASGIApp, access: Access, metrics: GatewayMetrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 403."""
        try:
            if scope["type"] in ("http", "websocket"):
                self._check(scope)
        except AccessDenied as error:
            if scope["type"] == "websocket":
                self._metrics.open_refused(error.code)
            await _refuse(error, scope, receive, send)
            return
        await self._app(scope, _bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        if scope["path"] in _PROBES:
            return
        self._access.check_host(scope)
        if scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS:
            self._access.check_origin(scope)


class _Endpoints:
    def __init__(self, host: SessionHost, access: Access, metrics: GatewayMetrics) -> None:
        self._host = host
        self._access = access
        self._metrics = metrics
        self._started_s = int(time.time())

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: what a client may name as its model."""
        self._access.tenant(request.scope)
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": self._started_s,
                        "owned_by": "antiphon",
                    }
                    for name in self._host.pipelines
                ],
            }
        )

    async def healthz(self, request: Request) -> Response:
        """`GET /healthz`: the event loop answers."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """`GET /readyz[?pipeline=P[&capacity=1]]`."""
        query = request.query_params
        strict = query.get("capacity", "") in ("1", "true")
        answer = readiness(self._host, query.get("pipeline"), strict)
        return JSONResponse(answer.body, status_code=200 if answer.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


def _bounded(receive: Receive) -> Receive:
    """`receive`, up to MAX_BODY_BYTES of a request's body: who reads more answers 413."""
    received = 0

    async def receive_within() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HttpRefusal(
                    f"A body has at most {MAX_BODY_BYTES} bytes.", code="body_too_large", status=413
                )
        return message

    return receive_within


async def _no_such_socket(socket: WebSocket) -> None:
    error = NotFound("There is no WebSocket at this path.")
    await socket.send_denial_response(error_response(error))


async def _refuse(error: AccessDenied, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and not can_answer(scope):
        with contextlib.suppress(OSError):
            await send({"type": "websocket.close", "code": 1008, "reason": error.code})
        return
    await error_response(error)(scope, receive, send)


async def _antiphon_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AntiphonError)
    return error_response(error)


async def _hung_up(request: Request, error: Exception) -> Response:
    """The client left before its body was here: nobody reads this, and it is no fault."""
    return Response(status_code=400)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses, and the console's files."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    refusal = HttpRefusal(f"{error.detail}.", code=code, status=error.status_code)
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    if error.status_code == 405 and (allowed := _methods(request)):
        # A path has a route for each method, and the error knows the first of them.
        response.headers["Allow"] = ", ".join(sorted(allowed))
    return response


async def _fault(request: Request, error: Exception) -> Response:
    """What nobody saw coming: the server logs it."""
    return error_response(AntiphonError("The gateway failed at this; its log says more."))


def _methods(request: Request) -> set[str]:
    """The methods that the request's path has."""
    return {
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
