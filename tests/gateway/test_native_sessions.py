"""Native sessions over HTTP: opened, looked at, told things, closed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest

from gateway.app import MAX_BODY_BYTES
from protocol.config import GatewayConfig
from protocol.errors import CapacityExceeded, EngineFailed, ErrorInfo, ErrorKind
from sessions.client import Answered
from sessions.duplex.events import AppendAudio, ClearInput
from tests.gateway.conftest import Serve
from tests.gateway.native_client import WAIT_S, opened, requests, stream
from tests.gateway.real_host import RealGateway, real_gateway
from tests.gateway.scripted_host import ScriptedHost

KEY = "sk-0123456789"
OTHER_KEY = "sk-9876543210"
SAID_BY_NOBODY = {"role": "user", "parts": [{"kind": "output_text"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[RealGateway]:
    async with real_gateway(sessions=2) as served:
        yield served


@pytest.fixture
async def http(gateway: RealGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with requests(gateway.http) as client:
        yield client


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"]


async def test_a_session_is_opened_looked_at_and_closed(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/sessions",
        json={
            "model": "voice",
            "settings": {"audio": {"output": {"voice": "alloy"}}},
            "limits": {"grace_s": 12.5, "idle_s": 60},
        },
    )
    assert answer.status_code == 201
    session = answer.json()
    assert answer.headers["location"] == f"/v1/sessions/{session['id']}"
    assert answer.headers["cache-control"] == "no-store"
    assert (session["kind"], session["model"], session["state"]) == ("duplex", "voice", "detached")
    assert session["settings"]["audio"]["output"]["voice"] == "alloy"
    assert (session["limits"]["grace_s"], session["limits"]["idle_s"]) == (12.5, 60)
    assert session["expires_at_s"] > 1_600_000_000
    assert session["facts"] == {}
    seen = (await http.get(answer.headers["location"])).json()
    assert "secret" not in seen
    assert seen.keys() | {"secret"} == session.keys()
    (listed,) = (await http.get("/v1/sessions")).json()["sessions"]
    assert listed["id"] == session["id"]
    assert listed.keys() < seen.keys()
    for _ in range(3):
        closed = await http.delete(answer.headers["location"])
        assert (closed.status_code, closed.content) == (204, b"")
    never = await http.delete("/v1/sessions/sess_never")
    assert error(never) == (404, "session_not_found", None)


async def test_a_session_that_ended_by_itself_is_closed_for_its_tenant_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.host.ENDED", 1)
    async with (
        real_gateway(GatewayConfig(keys=(KEY, OTHER_KEY))) as gateway,
        requests(gateway.http, KEY) as http,
        requests(gateway.http, OTHER_KEY) as other,
    ):
        urls = []
        for _ in range(2):
            session = await opened(http, limits={"idle_s": 0.05})
            urls.append(f"/v1/sessions/{session['id']}")
            async with stream(gateway.stream(session["id"]), key=KEY, role="observer") as observer:
                await observer.until("session_ended")
            async with asyncio.timeout(WAIT_S):
                await gateway.host.drained()
        forgotten, ended = urls
        assert (await http.delete(ended)).status_code == 204
        assert (await http.get(ended)).status_code == 404
        assert error(await other.delete(ended)) == (404, "session_not_found", None)
        assert error(await http.delete(forgotten)) == (404, "session_not_found", None)


async def test_an_empty_object_opens_the_first_pipeline(http: httpx.AsyncClient) -> None:
    assert (await opened(http))["model"] == "voice"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_type", None),
        (b'{"model": "none"}', 404, "model_not_found", "model"),
        (b'{"modle": "voice"}', 400, "unknown_parameter", "modle"),
        (b'{"limits": {"idle_s": 1e9}}', 400, "invalid_value", "limits.idle_s"),
        (b'{"limits": {"sessions": 4}}', 400, "unknown_parameter", "limits.sessions"),
        (b'{"settings": {"tools": [1]}}', 400, "unsupported_parameter", "settings.tools"),
        (
            b'{"settings": {"audio": {"input": {"vad": true}}}}',
            400,
            "unknown_parameter",
            "settings.audio.input.vad",
        ),
        (b'{"settings": {"surprise": 1}}', 400, "unknown_parameter", "settings.surprise"),
    ],
)
async def test_f7_what_cannot_be_honoured_is_refused_by_its_name(
    http: httpx.AsyncClient, body: bytes, status: int, code: str, param: str | None
) -> None:
    answer = await http.post("/v1/sessions", content=body)
    assert error(answer) == (status, code, param)
    # Nothing is left of it: there is room for as many as before.
    for _ in range(2):
        await opened(http)


async def test_f7_chosen_limits_hold() -> None:
    async with real_gateway() as gateway, requests(gateway.http) as http:
        session = await opened(http, limits={"idle_s": 0.05})
        async with stream(gateway.stream(session["id"]), role="observer") as observer:
            assert (await observer.until("session_ended"))["reason"] == "idle"


async def test_a_full_pipeline_is_503_and_a_session_that_is_left_alone_makes_room(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    async def room() -> tuple[int, str]:
        answer = await http.get("/readyz?pipeline=voice&capacity=1")
        return answer.status_code, answer.json()["capacity"]

    one, two = await opened(http), await opened(http)
    # Their first clients are still to come.
    assert await room() == (503, "full")
    async with (
        stream(gateway.stream(one["id"]), role="controller", secret=one["secret"]) as first,
        stream(gateway.stream(two["id"]), role="controller", secret=two["secret"]) as second,
    ):
        await first.until("attached")
        await second.until("attached")
        refused = await http.post("/v1/sessions", json={})
        assert error(refused)[:2] == (503, "capacity_exceeded")
        assert await room() == (503, "full")
        await second.socket.close()
        await first.say("signal", signal={"type": "clear"})
        await first.until("input_cleared")
        async with stream(gateway.stream(two["id"]), role="observer") as observer:
            await observer.until("attached")
            assert await room() == (200, "free")
            await opened(http)
            assert await observer.closed() == (1000, "evicted")


async def test_a_command_is_answered_with_its_id_and_result(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = f"/v1/sessions/{session['id']}"
    settings = {"type": "settings", "settings": {"instructions": "Be kind."}}
    answer = await http.post(f"{url}/update", json={"id": "c1", "input": settings})
    assert (answer.status_code, answer.json()) == (200, {"id": "c1", "result": {}})
    assert (await http.get(url)).json()["settings"]["instructions"] == "Be kind."
    named = (await http.post(f"{url}/signal", json={"signal": {"type": "clear"}})).json()
    assert named["id"]
    pcm = base64.b64encode(b"\0\0" * 24 * 200).decode()
    audio = {"type": "audio", "pcm": pcm}
    assert (await http.post(f"{url}/update", json={"input": audio})).status_code == 200
    too_long = {"type": "audio", "pcm": base64.b64encode(b"\0" * 65_538).decode()}
    answer = await http.post(f"{url}/update", json={"input": too_long})
    assert error(answer) == (400, "invalid_value", "input.pcm")


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("update", {"input": {"type": "audio", "pcm": "AAA="}}, None, None),
        ("update", {"input": {"type": "audio", "pcm": "AA=="}}, "invalid_value", "input.pcm"),
        ("update", {"signal": {"type": "clear"}}, "unknown_parameter", "signal"),
        ("update", {"id": "é", "input": {"type": "audio", "pcm": ""}}, "invalid_value", "id"),
        (
            "update",
            {"input": {"type": "settings", "settings": {"audio": {"output": {"speed": 9}}}}},
            "invalid_value",
            "input.settings.audio.output.speed",
        ),
        (
            "update",
            {"input": {"type": "settings", "settings": {"surprise": 1}}},
            "unknown_parameter",
            "input.settings.surprise",
        ),
        (
            "signal",
            {"signal": {"type": "respond", "input": ["x"]}},
            "item_not_found",
            "signal.input[0]",
        ),
        (
            "update",
            {"input": {"type": "item", "item": SAID_BY_NOBODY}},
            "invalid_value",
            "input.item.parts[0].kind",
        ),
        (
            "update",
            {"input": {"type": "item", "item": {"role": "system", "parts": []}, "after": "x"}},
            "invalid_value",
            "input.after",
        ),
        (
            "signal",
            {"signal": {"type": "delete", "item_id": "x"}},
            "item_not_found",
            "signal.item_id",
        ),
        ("signal", {"signal": {"type": "cancel"}}, "response_cancel_not_active", None),
        ("signal", {"signal": {"type": "respond", "voice": "x"}}, "invalid_value", "signal.voice"),
    ],
)
async def test_f20_a_refused_command_is_no_success(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], code: str | None, param: str | None
) -> None:
    session = await opened(http)
    answer = await http.post(f"/v1/sessions/{session['id']}/{path}", json=body)
    if code is None:
        assert answer.status_code == 200
        return
    assert error(answer) == (400, code, param)
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_f20_the_status_says_whose_fault_it_is(serve: Serve) -> None:
    class Failing(ScriptedHost):
        answer = ErrorInfo("engine_failed", ErrorKind.SERVER, "It raised.")

        async def command(self, *arguments: Any) -> Answered:
            return Answered("c", self.answer)

    host = Failing()
    gateway = await serve(host=host)
    async with requests(gateway.http) as http:
        session = await opened(http)
        url = f"/v1/sessions/{session['id']}/signal"
        for kind, status in (
            (ErrorKind.SERVER, 500),
            (ErrorKind.CAPACITY, 503),
            (ErrorKind.LOST, 503),
            (ErrorKind.CLIENT, 400),
        ):
            host.answer = ErrorInfo("engine_failed", kind, "It raised.", retry_after_ms=1_500)
            answer = await http.post(url, json={"signal": {"type": "clear"}})
            assert answer.status_code == status
            assert answer.headers["retry-after"] == "2"
        host.open_error = CapacityExceeded("Full.", retry_after_ms=100)
        answer = await http.post("/v1/sessions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        host.open_error = EngineFailed("It raised.")
        assert (await http.post("/v1/sessions", json={})).status_code == 500
    assert 'antiphon_opens_refused_total{reason="engine_failed"} 1.0' in (
        gateway.metrics.render().decode()
    )


async def test_audio_goes_to_the_session_in_pieces(serve: Serve) -> None:
    gateway = await serve()
    async with requests(gateway.http) as http:
        session = await opened(http)
        pcm = bytes(range(256)) * 1_000
        async with stream(
            f"ws://127.0.0.1:{gateway.port}/v1/sessions/{session['id']}/stream",
            "antiphon.msgpack",
            role="controller",
            secret=session["secret"],
        ) as client:
            await client.until("attached")
            await client.say("update", input={"type": "audio", "pcm": pcm})
            await client.say("update", input={"type": "audio", "pcm": pcm}, id="c1")
            refused = await client.until("answer", id="c1")
            assert refused["error"]["field"] == "input.pcm"
            await client.say("signal", signal={"type": "clear"}, id="c2")
        attachment = gateway.host.attachments[-1]
        await attachment.gone.wait()
    pieces = attachment.verbs[:-1]
    assert attachment.verbs[-1] == ClearInput()
    assert all(isinstance(piece, AppendAudio) and len(piece.pcm) <= 65_536 for piece in pieces)
    assert b"".join(piece.pcm for piece in pieces if isinstance(piece, AppendAudio)) == pcm


async def test_requests_need_a_key_and_the_own_origin(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,)))
    async with requests(gateway.http) as http, requests(gateway.http, KEY) as let_in:
        assert error(await http.post("/v1/sessions", json={}))[:2] == (401, "missing_api_key")
        assert error(await http.get("/v1/sessions"))[:2] == (401, "missing_api_key")
        for method, path in (("POST", "/v1/sessions"), ("DELETE", "/v1/sessions/sess_0")):
            answer = await let_in.request(method, path, headers={"origin": "http://evil.example"})
            assert error(answer)[:2] == (403, "origin_not_allowed")
        await opened(let_in)


async def _each(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_body_has_a_bound(serve: Serve) -> None:
    gateway = await serve()
    async with requests(gateway.http) as http:
        answer = await http.post("/v1/sessions", content=b" " * (MAX_BODY_BYTES + 1))
        assert error(answer) == (413, "body_too_large", None)
        chunks = iter([b" " * 600_000] * 2)
        answer = await http.post("/v1/sessions", content=_each(chunks))
        assert error(answer) == (413, "body_too_large", None)


async def test_the_documents_are_served(serve: Serve) -> None:
    gateway = await serve()
    async with requests(gateway.http) as http:
        schema = (await http.get("/v1/sessions/schema")).json()
        assert "ClientFrame" in schema["$defs"]
        assert (await http.get("/v1/sessions/asyncapi.json")).json()["asyncapi"] == "3.0.0"
