"""Whatever a request or an upgrade was refused by, the answer has one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.app import MAX_BODY_BYTES
from gateway.hosting import PipelineHealth, SessionSummary
from protocol.config import GatewayConfig
from protocol.errors import AntiphonError, CapacityExceeded, EngineFailed, SessionStateLost
from tests.gateway.conftest import Serve
from tests.gateway.scripted_host import ScriptedHost

KEY = "sk-0123456789"
ADMIN_KEY = "adm-0123456789"
BEARER = {"authorization": f"Bearer {KEY}"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
STRANGER = {"origin": "http://evil.example"}


def told(body: bytes | bytearray) -> dict[str, Any]:
    """The error of an answer, which is all that is in it."""
    answer: dict[str, Any] = json.loads(body)
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() - {"retry_after_ms"} == {"type", "code", "message", "param"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/v1/models", {"host": "evil.example"}, 403, "host_not_allowed"),
        ("POST", "/v1/sessions", BEARER | STRANGER, 403, "origin_not_allowed"),
        ("GET", "/v1/models", {}, 401, "missing_api_key"),
        ("GET", "/v1/sessions", {"authorization": "Bearer x"}, 401, "invalid_api_key"),
        ("GET", "/v1/sessions/none", BEARER, 404, "session_not_found"),
        ("DELETE", "/v1/sessions/none", BEARER, 404, "session_not_found"),
        ("POST", "/v1/sessions/none/signal", BEARER, 400, "missing_required_parameter"),
        ("GET", "/v1/admin/sessions", {}, 401, "missing_api_key"),
        ("GET", "/v1/admin/sessions/none", ADMIN, 404, "session_not_found"),
        ("DELETE", "/v1/admin/sessions/none", ADMIN, 404, "session_not_found"),
        ("GET", "/readyz?pipeline=none", {}, 404, "not_found"),
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("GET", "/nothing.js", {}, 404, "not_found"),
        ("POST", "/", {}, 405, "method_not_allowed"),
        ("PUT", "/v1/sessions", BEARER, 405, "method_not_allowed"),
        ("DELETE", "/v1/admin/workers", ADMIN, 405, "method_not_allowed"),
    ],
)
async def test_refused_requests_are_told_alike(
    serve: Serve, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,), admin_keys=(ADMIN_KEY,)))
    async with httpx.AsyncClient(base_url=gateway.http, headers=headers) as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = told(answer.content)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


async def test_a_body_that_is_too_large_is_told_alike(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as http:
        answer = await http.post("/v1/sessions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert told(answer.content)["code"] == "body_too_large"


class Failing(ScriptedHost):
    """A host at which everything fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def open(self, **_: Any) -> Any:
        raise self._error

    def summary(self, session: str, tenant: str | None) -> SessionSummary:
        raise self._error

    def health(self) -> list[PipelineHealth]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (CapacityExceeded("Full.", retry_after_ms=1_200), 503, "rate_limit_error", "2"),
        (CapacityExceeded("Full."), 503, "rate_limit_error", None),
        (SessionStateLost("Gone."), 503, "server_error", None),
        (EngineFailed("It raised."), 500, "server_error", None),
    ],
)
async def test_failures_are_told_alike_on_every_surface(
    serve: Serve, error: AntiphonError, status: int, kind: str, retry_after: str | None
) -> None:
    gateway = await serve(host=Failing(error))
    answers: list[tuple[int, tuple[str | None, str | None], bytes | bytearray]] = []

    def waits(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
        return headers.get("retry-after"), headers.get("retry-after-ms")

    async with httpx.AsyncClient(base_url=gateway.http) as http:
        for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/admin/sessions/s")):
            answer = await http.request(method, path, content=b"{}")
            answers.append((answer.status_code, waits(answer.headers), answer.content))
    streams = gateway.ws.replace("/v1/realtime", "/v1/sessions/s/stream")
    for url in (gateway.ws, streams):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url)
        refusal = caught.value.response
        answers.append((refusal.status_code, waits(refusal.headers), refusal.body))
    exactly = None if error.retry_after_ms is None else str(error.retry_after_ms)
    for seen_status, seen_retry_after, body in answers:
        assert (seen_status, seen_retry_after) == (status, (retry_after, exactly))
        said = told(body)
        assert said.get("retry_after_ms") == error.retry_after_ms
        assert (said["type"], said["code"]) == (kind, error.code)


async def test_a_socket_that_is_not_there_is_told_alike(serve: Serve) -> None:
    gateway = await serve()
    with pytest.raises(InvalidStatus) as caught:
        await connect(gateway.ws.replace("/v1/realtime", "/v1/nothing"))
    assert caught.value.response.status_code == 404
    assert told(caught.value.response.body)["code"] == "not_found"


async def test_a_fault_is_told_alike_and_says_nothing_of_itself(serve: Serve) -> None:
    gateway = await serve(host=Failing(RuntimeError("of no concern to a client")))
    async with httpx.AsyncClient(base_url=gateway.http) as http:
        answer = await http.get("/readyz")
    assert answer.status_code == 500
    error = told(answer.content)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "concern" not in answer.text
