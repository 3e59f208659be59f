from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

import pytest
from starlette.types import Message
from structlog.testing import capture_logs
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from gateway.access import Access
from gateway.metrics import GatewayMetrics
from gateway.server import WS_MAX_BYTES
from gateway.surfaces.long_audio import APPEND_BYTES
from gateway.surfaces.realtime.socket import RealtimeSocket
from protocol.config import GatewayConfig
from protocol.errors import CapacityExceeded, ErrorInfo, ErrorKind
from protocol.realtime import MAX_EVENT_BYTES
from sessions import client
from sessions.duplex import events as duplex
from sessions.duplex.settings import DuplexSettings
from tests.gateway.conftest import Serve
from tests.gateway.scripted_host import ScriptedAttachment, ScriptedHost
from tests.gateway.voice_turn import voice_turn

KEY = "sk-0123456789"


async def event(socket: ClientConnection) -> dict[str, Any]:
    received: dict[str, Any] = json.loads(await socket.recv())
    return received


async def closed(socket: ClientConnection) -> ConnectionClosed:
    with pytest.raises(ConnectionClosed) as caught:
        await socket.recv()
    return caught.value


def echo_clear(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
    """Answer a clear, so that a test knows that all before it has arrived."""
    if isinstance(verb, duplex.ClearInput):
        attachment.put_out(duplex.InputCleared())


async def test_session_created_comes_unasked(serve: Serve) -> None:
    gateway = await serve()
    async with connect(f"{gateway.ws}?model=gpt-realtime") as socket:
        created = await event(socket)
        assert created["type"] == "session.created"
        assert created["session"]["model"] == "voice"
        assert socket.subprotocol is None
    (attachment,) = gateway.host.attachments
    assert (attachment.pipeline, attachment.tenant) == ("voice", "local")


async def test_audio_reaches_the_session_and_a_turn_the_client(serve: Serve) -> None:
    def script(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
        if isinstance(verb, duplex.CommitInput):
            for output in voice_turn():
                attachment.put_out(output)

    gateway = await serve(host=ScriptedHost(script))
    pcm = bytes(range(256)) * 4
    async with connect(gateway.ws) as socket:
        await event(socket)
        audio = base64.b64encode(pcm).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        # JSON in a binary frame is read as well.
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}).encode())
        events = [await event(socket)]
        while events[-1]["type"] != "response.done":
            events.append(await event(socket))
    (attachment,) = gateway.host.attachments
    await attachment.gone.wait()
    assert attachment.verbs == [duplex.AppendAudio(pcm), duplex.CommitInput()]
    ids = [one["event_id"] for one in events]
    assert len(set(ids)) == len(ids)
    assert attachment.closed == "client"


async def test_bad_events_are_answered_and_the_session_goes_on(serve: Serve) -> None:
    gateway = await serve(host=ScriptedHost(echo_clear))
    bad = [
        ("{", "invalid_json"),
        ("[]", "invalid_type"),
        (json.dumps({"type": "what", "event_id": "e"}), "invalid_value"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "%%"}), "invalid_value"),
        (
            json.dumps(
                {
                    "type": "session.update",
                    "session": {
                        "type": "realtime",
                        "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}},
                    },
                }
            ),
            "invalid_value",
        ),
    ]
    async with connect(gateway.ws) as socket:
        await event(socket)
        for frame, code in bad:
            await socket.send(frame)
            answer = await event(socket)
            assert answer["type"] == "error"
            assert answer["error"]["code"] == code
            assert answer["error"]["type"] == "invalid_request_error"
        await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert (await event(socket))["type"] == "input_audio_buffer.cleared"
    assert gateway.host.attachments[0].verbs == [duplex.ClearInput()]
    text = gateway.metrics.render().decode()
    assert 'antiphon_errors_total{code="invalid_value"} 3.0' in text


async def test_an_oversize_event_is_answered_and_a_huge_frame_closes_1009(serve: Serve) -> None:
    gateway = await serve(host=ScriptedHost(echo_clear))
    async with connect(gateway.ws, compression=None) as socket:
        await event(socket)
        await socket.send("x" * (MAX_EVENT_BYTES + 1))
        assert (await event(socket))["error"]["code"] == "event_too_large"
        await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert (await event(socket))["type"] == "input_audio_buffer.cleared"
        # The server may hang up before all of the frame has been sent.
        with contextlib.suppress(ConnectionClosed):
            await socket.send("x" * (WS_MAX_BYTES + 1))
        await closed(socket)
        assert socket.close_code == 1009
    await gateway.host.attachments[0].gone.wait()
    assert gateway.host.attachments[0].closed == "client"


async def test_realtime_is_picked_among_the_sub_protocols(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,)))
    offered = ["openai-agents-sdk.1", f"openai-insecure-api-key.{KEY}", "realtime"]
    async with connect(gateway.ws, subprotocols=[Subprotocol(name) for name in offered]) as socket:
        assert socket.subprotocol == "realtime"
        assert (await event(socket))["type"] == "session.created"


@pytest.mark.parametrize("scheme", ["Bearer", "Api-Key"])
async def test_a_key_opens_a_session_and_a_wrong_one_is_401(serve: Serve, scheme: str) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,)))
    async with connect(
        gateway.ws, additional_headers={"Authorization": f"{scheme} {KEY}"}
    ) as socket:
        assert (await event(socket))["type"] == "session.created"
    with pytest.raises(InvalidStatus) as caught:
        await connect(gateway.ws, additional_headers={"Authorization": f"{scheme} wrong"})
    assert caught.value.response.status_code == 401
    body = json.loads(caught.value.response.body)
    assert body["error"]["code"] == "invalid_api_key"


async def test_a_browser_is_told_of_a_wrong_key_by_event_and_close_code(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(keys=(KEY,)))
    offered = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.wrong")]
    async with connect(gateway.ws, subprotocols=offered) as socket:
        assert (await event(socket))["error"]["code"] == "invalid_api_key"
        ended = await closed(socket)
    assert ended.rcvd is not None
    assert ended.rcvd.code == 1008
    assert gateway.host.attachments == []
    assert 'antiphon_opens_refused_total{reason="invalid_api_key"} 1.0' in (
        gateway.metrics.render().decode()
    )


async def test_an_unknown_model_is_404(serve: Serve) -> None:
    gateway = await serve()
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"{gateway.ws}?model=nothing")
    assert caught.value.response.status_code == 404
    assert json.loads(caught.value.response.body)["error"]["code"] == "model_not_found"
    async with connect(
        f"{gateway.ws}?model=nothing", subprotocols=[Subprotocol("realtime")]
    ) as socket:
        assert (await event(socket))["error"]["code"] == "model_not_found"


async def test_a_full_gateway_says_try_later(serve: Serve) -> None:
    gateway = await serve()
    gateway.host.open_error = CapacityExceeded("Full.", retry_after_ms=1500)
    with pytest.raises(InvalidStatus) as caught:
        await connect(gateway.ws)
    assert caught.value.response.status_code == 503
    assert caught.value.response.headers["retry-after"] == "2"
    async with connect(gateway.ws, subprotocols=[Subprotocol("realtime")]) as socket:
        assert (await event(socket))["error"]["type"] == "rate_limit_error"
        ended = await closed(socket)
    assert ended.rcvd is not None
    assert ended.rcvd.code == 1013


@pytest.mark.parametrize(
    ("headers", "subprotocols"),
    [
        ({"OpenAI-Beta": "realtime=v1"}, None),
        ({}, [Subprotocol("realtime"), Subprotocol("openai-beta.realtime-v1")]),
    ],
)
async def test_the_beta_dialect_is_refused_in_words(
    serve: Serve, headers: dict[str, str], subprotocols: list[Subprotocol] | None
) -> None:
    gateway = await serve()
    async with connect(gateway.ws, additional_headers=headers, subprotocols=subprotocols) as socket:
        answer = await event(socket)
        assert answer["error"]["code"] == "beta_api_shape_disabled"
        ended = await closed(socket)
    assert ended.rcvd is not None
    assert ended.rcvd.code == 4000
    assert gateway.host.attachments == []


async def test_a_transcription_intent_is_refused(serve: Serve) -> None:
    gateway = await serve()
    async with connect(f"{gateway.ws}?intent=transcription") as socket:
        assert (await event(socket))["error"]["code"] == "invalid_intent"
        ended = await closed(socket)
    assert ended.rcvd is not None
    assert ended.rcvd.code == 4000


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_a_page_of_another_origin_cannot_open_a_socket(serve: Serve, origin: str) -> None:
    gateway = await serve()
    for subprotocols in (None, [Subprotocol("realtime")]):
        with pytest.raises(InvalidStatus) as caught:
            await connect(
                gateway.ws,
                additional_headers={"Origin": origin},
                subprotocols=subprotocols,
            )
        assert caught.value.response.status_code == 403
    assert gateway.host.attachments == []


async def test_a_page_under_a_foreign_name_cannot_open_a_socket(serve: Serve) -> None:
    gateway = await serve()
    with pytest.raises(InvalidStatus) as caught:
        await connect(
            f"ws://evil.example:{gateway.port}/v1/realtime",
            host="127.0.0.1",
            port=gateway.port,
            additional_headers={"Origin": f"http://evil.example:{gateway.port}"},
        )
    assert caught.value.response.status_code == 403


async def test_the_own_page_may_open_a_socket(serve: Serve) -> None:
    gateway = await serve()
    async with connect(gateway.ws, additional_headers={"Origin": gateway.http}) as socket:
        assert (await event(socket))["type"] == "session.created"


async def test_a_refusal_is_not_logged_as_an_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await serve()
    gateway.host.open_error = CapacityExceeded("all are taken")
    with pytest.raises(InvalidStatus):
        await connect(gateway.ws)
    gateway.server.stop()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_text_that_is_no_text_closes_the_connection_without_a_traceback(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await serve()
    async with connect(gateway.ws) as socket:
        await event(socket)
        await socket.send(b"\xff\xfe", text=True)
        await closed(socket)
        assert socket.close_code == 1007
    gateway.server.stop()
    (record,) = [record for record in caplog.records if "UTF-8" in record.message]
    assert record.exc_info is None


async def test_the_trace_that_a_client_names_is_in_the_log(serve: Serve) -> None:
    settings = DuplexSettings(tracing={"workflow_name": "support", "group_id": "call-7"})

    def script(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
        attachment.put_out(client.SettingsUpdated(attachment.session, "voice", settings, 1))

    gateway = await serve(host=ScriptedHost(script))
    with capture_logs() as logs:
        async with connect(gateway.ws) as socket:
            await event(socket)
            for _ in range(2):
                await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
                await event(socket)
    traced = [line for line in logs if line["event"] == "session_traced"]
    session = gateway.host.attachments[0].session
    assert [(line["session"], line["tracing"]) for line in traced] == [(session, settings.tracing)]


@pytest.mark.parametrize("path", ["/", "/v1/realtime/", "/v1/other", "/metrics", "/healthz"])
async def test_a_socket_elsewhere_is_404(serve: Serve, path: str) -> None:
    gateway = await serve()
    with pytest.raises(InvalidStatus) as caught:
        await connect(gateway.http.replace("http", "ws") + path)
    assert caught.value.response.status_code == 404
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "not_found"


async def test_a_hang_up_closes_the_session(serve: Serve) -> None:
    gateway = await serve()
    socket = await connect(gateway.ws)
    await event(socket)
    socket.transport.abort()
    (attachment,) = gateway.host.attachments
    await attachment.gone.wait()
    assert attachment.closed == "client"


@pytest.mark.parametrize(
    ("reason", "code"), [("idle", 1000), ("drained", 1001), ("engine_lost", 1012)]
)
async def test_the_end_of_the_session_closes_the_socket(
    serve: Serve, reason: str, code: int
) -> None:
    gateway = await serve()
    async with connect(gateway.ws) as socket:
        await event(socket)
        gateway.host.attachments[0].end(reason)
        await socket.wait_closed()
    assert (socket.close_code, socket.close_reason) == (code, reason)


async def test_a_failure_of_one_session_is_told_to_it_alone(serve: Serve) -> None:
    def script(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
        if isinstance(verb, duplex.CommitInput):
            raise RuntimeError("synthetic fault")
        echo_clear(attachment, verb)

    gateway = await serve(host=ScriptedHost(script))
    async with connect(gateway.ws) as one, connect(gateway.ws) as other:
        await event(one)
        await event(other)
        await one.send(json.dumps({"type": "input_audio_buffer.commit"}))
        assert (await event(one))["error"]["code"] == "internal_error"
        ended = await closed(one)
        assert ended.rcvd is not None
        assert ended.rcvd.code == 1011
        await other.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert (await event(other))["type"] == "input_audio_buffer.cleared"


async def test_a_connection_that_the_server_closed_by_itself_is_no_fault_of_the_gateway() -> None:
    host = ScriptedHost()
    came: asyncio.Queue[Message] = asyncio.Queue()
    came.put_nowait({"type": "websocket.connect"})

    async def send(message: Message) -> None:
        if message["type"] != "websocket.accept":
            raise RuntimeError("Unexpected ASGI message, after sending 'websocket.close'.")

    serve = RealtimeSocket(host, Access(GatewayConfig()), GatewayMetrics())
    scope = {"type": "websocket", "subprotocols": [], "headers": [], "query_string": b""}
    with capture_logs() as logs:
        await serve(scope, came.get, send)
    assert logs == []
    assert host.attachments[0].closed == "client"


async def test_a_slow_reader_paces_the_session_and_loses_nothing(serve: Serve) -> None:
    told = asyncio.Event()

    class Paced(ScriptedAttachment):
        def set_blocked(self, blocked: bool) -> None:
            super().set_blocked(blocked)
            told.set()

    class Host(ScriptedHost):
        async def open(self, **arguments: Any) -> ScriptedAttachment:
            attachment = await super().open(**arguments)
            attachment.__class__ = Paced
            return attachment

    gateway = await serve(host=Host())
    size = 9600
    async with connect(gateway.ws, max_queue=1, compression=None) as socket:
        await event(socket)
        (attachment,) = gateway.host.attachments
        sent = 0
        while not attachment.blocked:
            attachment.put_out(duplex.AudioDelta("r", "i", 0, 0, bytes(size)))
            sent += 1
            if sent % 16 == 0:
                await asyncio.sleep(0)
        assert attachment.blocked == [True]
        told.clear()
        for _ in range(sent):
            assert len(base64.b64decode((await event(socket))["delta"])) == size
        await told.wait()
        assert attachment.blocked == [True, False]


async def test_a_long_append_waits_piece_by_piece_for_room(serve: Serve) -> None:
    got = asyncio.Event()

    def script(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
        attachment.roomy.clear()
        got.set()

    gateway = await serve(host=ScriptedHost(script))
    pcm = bytes(range(256)) * (APPEND_BYTES // 256 * 2) + b"end."
    async with connect(gateway.ws, compression=None) as socket:
        await event(socket)
        (attachment,) = gateway.host.attachments
        audio = base64.b64encode(pcm).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await socket.send(json.dumps({"type": "input_audio_buffer.commit", "event_id": "c"}))
        for _ in range(4):
            await got.wait()
            got.clear()
            attachment.roomy.set()
    *appends, commit = attachment.verbs
    assert commit == duplex.CommitInput("c")
    parts = [verb.pcm for verb in appends if isinstance(verb, duplex.AppendAudio)]
    assert [len(part) for part in parts] == [APPEND_BYTES, APPEND_BYTES, 4]
    assert b"".join(parts) == pcm


async def test_a_client_that_never_reads_is_closed_as_stalled(serve: Serve) -> None:
    gateway = await serve()
    async with connect(gateway.ws, max_queue=1, compression=None) as socket:
        await event(socket)
        (attachment,) = gateway.host.attachments
        while not attachment.gone.is_set():
            attachment.put_out(duplex.AudioDelta("r", "i", 0, 0, bytes(9600)))
            await asyncio.sleep(0)
        assert attachment.closed == "stalled"
        socket.transport.abort()


async def test_a_refusal_of_the_session_echoes_the_client_s_event(serve: Serve) -> None:
    def script(attachment: ScriptedAttachment, verb: duplex.ClientVerb) -> None:
        info = ErrorInfo("response_cancel_not_active", ErrorKind.CLIENT, "None is active.")
        attachment.put_out(client.Refused(info, verb.ref))

    gateway = await serve(host=ScriptedHost(script))
    async with connect(gateway.ws) as socket:
        await event(socket)
        await socket.send(json.dumps({"type": "response.cancel", "event_id": "mine"}))
        error = (await event(socket))["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "mine")


async def test_stopping_the_gateway_tells_clients_that_it_goes_away(serve: Serve) -> None:
    gateway = await serve()
    async with connect(gateway.ws) as socket:
        await event(socket)
        gateway.server.stop()
        ended = await closed(socket)
    assert ended.rcvd is not None
    assert ended.rcvd.code == 1001
