from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from starlette.types import Message
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.app import build_app
from gateway.hosting import StageHealth
from gateway.metrics import GatewayMetrics
from protocol.config import GatewayConfig
from protocol.errors import CapacityExceeded
from sessions.actions import TurnMeasured
from sessions.lifecycle import State
from tests.gateway.conftest import Serve
from tests.gateway.scripted_host import ScriptedHost

KEY = "sk-0123456789"
ADMIN_KEY = "adm-0123456789"
UPGRADE = (
    "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_healthz_and_readyz_answer_probes_under_any_name(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        for path in ("/healthz", "/readyz"):
            answer = await client.get(path, headers={"host": "service.example"})
            assert answer.status_code == 200
        body = answer.json()
    assert body["status"] == "ready"
    assert body["capacity"] == "free"
    assert body["pipelines"]["voice"]["stages"] == {"listen": "ready"}


@pytest.mark.parametrize("health", [StageHealth.WEDGED, StageHealth.LOST, StageHealth.STARTING])
async def test_a_required_pipeline_without_progress_is_not_ready(
    serve: Serve, health: StageHealth
) -> None:
    gateway = await serve()
    gateway.host.stages = {"listen": health}
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == [f"voice: stage listen is {health.value}"]
        gateway.host.required = False
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/readyz?pipeline=voice")).status_code == 503


async def test_full_is_ready_unless_asked_for_room(serve: Serve) -> None:
    gateway = await serve()
    gateway.host.session_limit = 0
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["capacity"]) == (200, "full")
        assert (await client.get("/readyz?pipeline=voice")).status_code == 200
        assert (await client.get("/readyz?pipeline=voice&capacity=1")).status_code == 503
        assert (await client.get("/readyz?pipeline=other")).status_code == 404


async def test_a_draining_gateway_or_one_without_lease_is_not_ready(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        gateway.host.holds_lease = False
        assert (await client.get("/readyz")).json()["reasons"] == ["no lease"]
        gateway.host.draining = True
        assert (await client.get("/readyz")).json()["reasons"] == ["draining", "no lease"]


async def test_models_lists_pipelines_to_who_has_a_key(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,)))
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        assert (await client.get("/v1/models")).status_code == 401
        answer = await client.get("/v1/models", headers=bearer(KEY))
    assert [model["id"] for model in answer.json()["data"]] == ["voice"]


async def test_foreign_host_names_get_nothing(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        for path in ("/", "/metrics", "/v1/models", "/v1/admin/sessions"):
            answer = await client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"


async def test_operators_see_and_close_sessions(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(admin_keys=(ADMIN_KEY,)))
    headers = bearer(ADMIN_KEY)
    async with httpx.AsyncClient(base_url=gateway.http) as client, connect(gateway.ws) as socket:
        await socket.recv()
        (entry,) = (await client.get("/v1/admin/sessions", headers=headers)).json()["sessions"]
        assert (entry["pipeline"], entry["state"]) == ("voice", "active")
        workers = (await client.get("/v1/admin/workers", headers=headers)).json()["workers"]
        assert workers[0]["worker"] == "listen-0"
        url = f"/v1/admin/sessions/{entry['id']}"
        assert (await client.get(url)).status_code == 401
        timeline = {"dropped": 0, "entries": []}
        answer = await client.get(url, headers=headers)
        assert answer.json() == {**entry, "timeline": timeline}
        assert (await client.delete(url)).status_code == 401
        assert (await client.delete(url, headers=headers)).status_code == 202
        assert json.loads(await socket.recv())["error"]["code"] == "session_closed"
        assert (await client.delete(url, headers=headers)).status_code == 404
        assert (await client.get(url, headers=headers)).status_code == 404


async def test_a_page_of_another_origin_cannot_close_sessions(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        for method in ("DELETE", "POST"):
            answer = await client.request(
                method, "/v1/admin/sessions/x", headers={"origin": "http://evil.example"}
            )
            assert answer.status_code == 403
        answer = await client.get("/v1/admin/sessions", headers={"origin": "http://evil.example"})
        assert answer.status_code == 403
        answer = await client.delete("/v1/admin/sessions/x", headers={"origin": gateway.http})
        assert answer.status_code == 404


async def test_the_console_is_served_with_its_policy(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html><title>Console</title>")
    (tmp_path / "capture.js").write_text("'use strict';")
    (tmp_path / "icons").mkdir()
    (tmp_path / "icons" / "talk.svg").write_text("<svg/>")
    gateway = await serve(console=tmp_path)
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        script = await client.get("/capture.js")
        assert script.headers["content-type"].startswith("text/javascript")
        icon = await client.get("/icons/talk.svg")
        assert icon.headers["content-type"].startswith("image/svg+xml")
        for path in ("/icons/", "/icons", "/../app.py", "/%2e%2e/app.py", "/nothing"):
            assert (await client.get(path, follow_redirects=True)).status_code == 404
        assert (await client.post("/")).status_code == 405


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET / HTTP/1.1\r\nHost: loc",
        # Not a valid upgrade: neither side would ever say another word.
        f"POST /v1/realtime HTTP/1.1\r\n{UPGRADE}\r\n",
        f"GET /v1/realtime?model={'m' * 30_000} HTTP/1.1\r\n{UPGRADE}\r\n",
        # The second request of a connection.
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
    ],
)
async def test_a_connection_without_a_request_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr("gateway.server.REQUEST_S", 0.05)
    gateway = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent.encode())
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/sessions", "GET, HEAD, POST"),
        ("POST", "/v1/sessions/sess_1", "DELETE, GET, HEAD"),
        ("GET", "/v1/sessions/sess_1/signal", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/admin/workers", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    serve: Serve, method: str, path: str, allowed: str
) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as http:
        answer = await http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/sessions/", "/v1/nothing", "/nothing"])
async def test_a_path_that_is_not_there_is_not_found(serve: Serve, path: str) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_who_hangs_up_before_its_body_is_here_is_no_fault() -> None:
    app = build_app(ScriptedHost(), GatewayConfig(), GatewayMetrics())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sessions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"10")],
        "client": ("127.0.0.1", 1),
    }
    incoming: list[Message] = [
        {"type": "http.request", "body": b"{}", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)
    assert not incoming


async def test_a_socket_outlives_the_time_for_a_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.REQUEST_S", 0.2)
    gateway = await serve()
    async with connect(gateway.ws) as socket:
        await socket.recv()
        # Whoever came later and asked for nothing has been closed: the time is over.
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        await reader.read()
        writer.close()
        await socket.send("{}")
        assert json.loads(await socket.recv())["type"] == "error"


async def test_every_metric_family_moves(serve: Serve) -> None:
    gateway = await serve()
    metrics = gateway.metrics
    metrics.session_state_changed("voice", None, State.ACTIVE)
    metrics.session_opened("voice", 0.02)
    metrics.session_closed("voice", "client")
    metrics.turn_finished(
        "voice",
        TurnMeasured(1, "default", "completed", None, None, 200.0, 600.0, 0.2, 900, 3, {}),
    )
    metrics.worker_state_changed("listen", "listen-0", True)
    metrics.worker_restarted("listen", "listen-0")
    metrics.watch_link("listen-0", lambda: 3)
    metrics.loop_lag(0.001)
    gateway.host.open_error = CapacityExceeded("Full.")
    with pytest.raises(InvalidStatus):
        await connect(gateway.ws)
    gateway.host.open_error = None
    async with httpx.AsyncClient(base_url=gateway.http) as client, connect(gateway.ws) as socket:
        await socket.recv()
        await socket.send("{")
        await socket.recv()
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = dict(
        line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")
    )
    assert values['antiphon_sessions{pipeline="voice",state="active"}'] == "1.0"
    assert values['antiphon_sessions_opened_total{pipeline="voice"}'] == "1.0"
    assert values['antiphon_sessions_closed_total{pipeline="voice",reason="client"}'] == "1.0"
    assert values['antiphon_turns_total{pipeline="voice",status="completed"}'] == "1.0"
    assert values['antiphon_server_ttft_seconds_sum{pipeline="voice"}'] == "0.2"
    assert values['antiphon_server_ttfp_seconds_sum{pipeline="voice"}'] == "0.6"
    assert values['antiphon_server_rtf_sum{pipeline="voice"}'] == "0.2"
    assert values['antiphon_worker_up{stage="listen",worker="listen-0"}'] == "1.0"
    assert values['antiphon_worker_restarts_total{stage="listen",worker="listen-0"}'] == "1.0"
    assert values['antiphon_link_queue_messages{worker="listen-0"}'] == "3.0"
    assert values['antiphon_errors_total{code="invalid_json"}'] == "1.0"
    assert values['antiphon_frames_total{direction="received",surface="realtime"}'] == "1.0"
    assert float(values['antiphon_frames_total{direction="sent",surface="realtime"}']) >= 1
    assert values['antiphon_opens_refused_total{reason="capacity_exceeded"}'] == "1.0"
    assert values["antiphon_connections"] == "1.0"
    assert values["antiphon_egress_queue_bytes"] == "0.0"
    assert values["antiphon_loop_lag_seconds_count"] == "1.0"
