"""Native streams over the real host: coming, going, coming back, and who may do what."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.egress import LIMIT_BYTES
from gateway.server import WS_MAX_BYTES
from gateway.surfaces.native.outputs import OutputWriter
from protocol.config import GatewayConfig
from protocol.native import MAX_FRAME_BYTES
from sessions.client import LetGo
from sessions.duplex.events import AudioDelta, InputCleared
from tests.gateway.conftest import Gateway as ScriptedGateway
from tests.gateway.conftest import Serve
from tests.gateway.native_client import Stream, opened, requests, stream
from tests.gateway.real_host import SENTENCES, RealGateway, real_gateway, spoken_as
from tests.gateway.scripted_host import ScriptedAttachment
from tests.gateway.serving import WAIT_S

RESPOND = {"type": "respond"}
ALL_AUDIO = b"".join(map(spoken_as, SENTENCES))
WIRES = ["antiphon.json", "antiphon.msgpack"]


@pytest.fixture
async def gateway() -> AsyncIterator[RealGateway]:
    async with real_gateway() as served:
        yield served


@pytest.fixture
async def http(gateway: RealGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with requests(gateway.http) as client:
        yield client


async def controller(session: dict[str, Any], client: Stream, **attach: Any) -> dict[str, Any]:
    await client.say("attach", role="controller", **({"secret": session["secret"]} | attach))
    return await client.until("attached")


def numbers(client: Stream) -> list[int]:
    return [frame["sequence"] for frame in client.frames if frame["type"] != "attached"]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_reply_comes_whole_in_either_encoding(
    gateway: RealGateway, http: httpx.AsyncClient, wire: str
) -> None:
    session = await opened(http)
    assert session["state"] == "detached"
    async with stream(gateway.stream(session["id"]), wire) as client:
        attached = await controller(session, client)
        assert attached["session"] == session["id"]
        assert attached["settings"] == session["settings"]
        assert attached["limits"] == session["limits"]
        assert attached["role"] == "controller"
        assert attached["lost"] is None
        assert attached["secret"] != session["secret"]
        assert attached["snapshot"]["items"] == []
        await client.say("signal", id="r1", signal=RESPOND)
        done = await client.until("response_done")
        assert done["response"]["status"] == "completed"
        assert client.pcm == ALL_AUDIO
        answers = [frame for frame in client.frames if frame["type"] == "answer"]
        assert [(answer["id"], answer["error"]) for answer in answers] == [("r1", None)]
        assert numbers(client) == list(range(2, 2 + len(client.frames) - 1))


async def test_a_reply_goes_on_while_the_socket_is_gone_and_nothing_is_missing(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    gateway.think.may_go_on.clear()
    session = await opened(http)
    async with stream(gateway.stream(session["id"])) as first:
        attached = await controller(session, first)
        await first.say("signal", signal=RESPOND)
        await first.until("audio_delta")
        # Cut off, not closed: no close frame says goodbye.
        first.socket.transport.abort()
    gateway.think.may_go_on.set()
    async with stream(gateway.stream(session["id"])) as second:
        again = await controller(session, second, secret=attached["secret"], cursor=first.cursor)
        assert again["lost"] is None
        await second.until("response_done")
    assert first.pcm + second.pcm == ALL_AUDIO
    assert numbers(first) + numbers(second) == list(
        range(2, 2 + len(first.frames) + len(second.frames) - 2)
    )


async def test_secrets_rotate_and_an_old_one_is_refused(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as first:
        one = await controller(session, first)
    # The answer with the new secret may have been lost: the one before is good once more.
    async with stream(url) as second:
        two = await controller(session, second)
        assert two["secret"] not in (session["secret"], one["secret"])
        await second.say("have", cursor=second.cursor)
        await second.say("signal", signal={"type": "clear"})
        await second.until("input_cleared")
    for old, code in ((session["secret"], "secret_reused"), ("guess", "resume_refused")):
        async with stream(url, role="controller", secret=old) as refused:
            error = (await refused.next())["error"]
            assert (error["code"], error["field"]) == (code, "secret")
            assert await refused.closed() == (1008, code)
    async with stream(url) as third:
        await controller(session, third, secret=two["secret"])
    text = gateway.metrics.render().decode()
    assert 'antiphon_attaches_total{pipeline="voice",result="secret_reused"} 1.0' in text


async def test_secrets_and_what_is_said_are_in_no_log(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    with capture_logs() as log:
        session = await opened(http, settings={"instructions": "a private matter"})
        url = gateway.stream(session["id"])
        async with stream(url) as client, stream(url) as refused:
            attached = await controller(session, client)
            await client.say("signal", signal={"type": "private"}, id="c1")
            await client.until("answer")
            await refused.say("attach", role="controller", secret="a guessed secret")
            await refused.until("error")
            await client.say("close")
            await client.closed()
    assert {line["event"] for line in log} >= {"attach_refused"}
    for secret in (session["secret"], attached["secret"], "a guessed secret", "private"):
        assert secret not in str(log)


async def test_of_two_that_come_back_at_once_the_last_one_has_the_session(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as one, stream(url) as other:
        for client in (one, other):
            await client.say("attach", role="controller", secret=session["secret"])
        for client in (one, other):
            await client.until("attached")
        let_go = {asyncio.create_task(client.until("let_go")): client for client in (one, other)}
        done, waiting = await asyncio.wait(let_go, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        (replaced,), (last,) = ([let_go[task] for task in some] for some in (done, waiting))
        assert await replaced.closed() == (4001, "replaced")
        await last.say("signal", id="c1", signal={"type": "clear"})
        await last.until("answer", id="c1", error=None)


async def test_who_comes_back_replaces_who_was_there(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as first, stream(url) as second:
        attached = await controller(session, first)
        await controller(session, second, secret=attached["secret"])
        assert (await first.until("let_go"))["reason"] == "replaced"
        assert await first.closed() == (4001, "replaced")
        await second.say("signal", signal={"type": "clear"})
        await second.until("input_cleared")


async def test_a_takeover_needs_the_key_alone(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url, role="controller") as asked:
        assert (await asked.next())["error"]["code"] == "secret_required"
        assert await asked.closed() == (1008, "secret_required")
    async with stream(url) as first, stream(url, role="controller", takeover=True) as second:
        attached = await second.until("attached")
        assert attached["secret"]
        await first.say("attach", role="controller", secret=session["secret"])
        assert (await first.next())["error"]["code"] == "secret_reused"


async def test_an_observer_sees_all_and_may_do_nothing(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with (
        stream(url) as client,
        stream(url, "antiphon.msgpack", role="observer") as observer,
    ):
        await controller(session, client)
        assert (await observer.until("attached"))["secret"] is None
        for frame in (
            {"kind": "signal", "signal": {"type": "clear"}, "ref": "mine"},
            {"kind": "close"},
        ):
            await observer.say(**frame)
            refused = await observer.until("refused")
            assert refused["error"]["code"] == "not_controller"
            assert refused["ref"] == frame.get("ref")
        await observer.say("signal", signal={"type": "clear"}, id="c1")
        assert (await observer.until("answer"))["error"]["code"] == "not_controller"
        await client.say("signal", signal=RESPOND)
        await client.until("response_done")
        await observer.until("response_done")
        assert observer.pcm == client.pcm == ALL_AUDIO


async def test_f5_a_repeated_command_is_answered_again_and_not_carried_out_again(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    item = {"role": "user", "id": "mine", "parts": [{"kind": "input_text", "text": "Hello."}]}
    said = {"id": "c1", "input": {"type": "item", "item": item}}
    async with stream(url) as first:
        attached = await controller(session, first)
        await first.say("update", **said)
        answer = await first.until("answer")
        assert (answer["id"], answer["error"]) == ("c1", None)
    async with stream(url) as second:
        await controller(session, second, secret=attached["secret"])
        await second.say("update", **said)
        assert (await second.until("answer"))["error"] is None
        repeated = await http.post(f"/v1/sessions/{session['id']}/update", json=said)
        assert repeated.status_code == 200
        assert repeated.json() == {"id": "c1", "result": {"item_id": "mine"}}
        # Under another id it is another command, and there is such an item.
        await second.say("update", **(said | {"id": "c2"}))
        error = (await second.until("answer", id="c2"))["error"]
        assert error["code"] == "item_create_duplicate_item_id"
        assert error["field"] == "input.item.id"
        assert second.kinds.count("item_added") == 0


async def test_f6_a_resumed_session_has_every_setting_it_had(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    asked = {"audio": {"output": {"speed": 1.25}, "input": {"turn_detection": None}}}
    session = await opened(http, settings=asked, limits={"grace_s": 20})
    async with stream(gateway.stream(session["id"])) as first:
        attached = await controller(session, first)
        await first.say(
            "update", input={"type": "settings", "settings": {"instructions": "Be kind."}}
        )
        updated = await first.until("settings_updated")
    async with stream(gateway.stream(session["id"])) as second:
        again = await controller(session, second, secret=attached["secret"])
    assert again["settings"] == updated["settings"]
    assert again["settings"]["audio"]["output"]["speed"] == 1.25
    assert again["settings"]["audio"]["input"]["turn_detection"] is None
    assert again["limits"] == session["limits"]
    assert again["limits"]["grace_s"] == 20


async def test_f9_a_gap_is_stated_and_the_session_goes_on() -> None:
    async with real_gateway(replay_bytes=12_000) as gateway, requests(gateway.http) as http:
        session = await opened(http)
        url = gateway.stream(session["id"])
        async with stream(url) as first:
            attached = await controller(session, first)
            await first.say("signal", signal=RESPOND)
            await first.until("response_done")
        async with stream(url) as second:
            again = await controller(
                session, second, secret=attached["secret"], cursor=first.frames[0]["cursor"]
            )
            lost_from, lost_to = again["lost"]
            assert lost_from == first.frames[1]["sequence"]
            (item,) = again["snapshot"]["items"]
            assert item["parts"][0]["text"] == "".join(SENTENCES)
            await second.say("signal", signal=RESPOND)
            await second.until("response_created")
            assert numbers(second)[0] == lost_to + 1
            await second.until("response_done")


async def test_f8_a_session_that_nobody_comes_to_ends_by_itself() -> None:
    async with real_gateway(grace_ms=1_500) as gateway, requests(gateway.http) as http:
        session = await opened(http)
        async with stream(gateway.stream(session["id"]), role="observer") as observer:
            ended = await observer.until("session_ended")
            assert (ended["reason"], ended["error"]["code"]) == ("detached", "session_expired")
            assert await observer.closed() == (1000, "detached")
        async with asyncio.timeout(WAIT_S):
            await gateway.host.drained()
        assert (await http.get(f"/v1/sessions/{session['id']}")).status_code == 404


async def test_hanging_up_leaves_the_session_and_close_ends_it(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as first:
        attached = await controller(session, first)
    async with stream(url) as second:
        await controller(session, second, secret=attached["secret"])
        await second.say("close")
        assert (await second.until("session_ended"))["reason"] == "client"
        assert await second.closed() == (1000, "client")


async def test_f27_a_cursor_is_good_for_its_session_alone(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    one, other = await opened(http), await opened(http)
    async with stream(gateway.stream(one["id"])) as client:
        await controller(one, client)
        foreign = client.cursor
    for cursor in (foreign, f"{foreign}0", "x", foreign.replace(".", ".-")):
        async with stream(
            gateway.stream(other["id"]), role="controller", secret=other["secret"], cursor=cursor
        ) as refused:
            error = (await refused.next())["error"]
            assert (error["code"], error["field"]) == ("invalid_value", "cursor")
            assert await refused.closed() == (1008, "invalid_value")
    async with stream(gateway.stream(other["id"])) as client:
        await controller(other, client)
        await client.say("have", cursor=foreign)
        assert (await client.until("refused"))["error"]["field"] == "cursor"


async def test_f27_nothing_of_a_cancelled_reply_comes_after_a_return(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    gateway.think.may_go_on.clear()
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as first:
        attached = await controller(session, first)
        await first.say("signal", signal=RESPOND)
        old = (await first.until("response_created"))["response"]["id"]
        await first.until("audio_delta")
    answer = await http.post(
        f"/v1/sessions/{session['id']}/signal", json={"signal": {"type": "cancel"}}
    )
    assert answer.status_code == 200
    async with stream(url) as second:
        await controller(session, second, secret=attached["secret"])
        gateway.think.may_go_on.set()
        await second.say("signal", signal=RESPOND)
        await second.until("response_done")
        assert old not in str(second.frames[1:])
        assert second.pcm == ALL_AUDIO


async def test_sessions_of_another_tenant_are_not_there() -> None:
    keys = ("sk-tenant-one-0", "sk-tenant-two-0")
    async with (
        real_gateway(GatewayConfig(keys=keys)) as gateway,
        requests(gateway.http, keys[0]) as mine,
        requests(gateway.http, keys[1]) as theirs,
    ):
        session = await opened(mine)
        url = f"/v1/sessions/{session['id']}"
        assert [s["id"] for s in (await mine.get("/v1/sessions")).json()["sessions"]] == [
            session["id"]
        ]
        assert (await theirs.get("/v1/sessions")).json() == {"sessions": []}
        said = {"signal": {"type": "clear"}}
        for answer in (
            await theirs.get(url),
            await theirs.delete(url),
            await theirs.post(f"{url}/signal", json=said),
        ):
            missing = (await theirs.get("/v1/sessions/sess_none")).json()["error"]
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, missing["code"])
            assert error["message"] == missing["message"].replace("sess_none", session["id"])
        async with stream(gateway.stream(session["id"]), key=keys[1]) as refused:
            assert (await refused.next())["error"]["code"] == "session_not_found"
            assert await refused.closed() == (1008, "session_not_found")
        assert (await mine.get(url)).json()["state"] == "detached"


# What is no frame, and who does not read


async def test_bad_frames_are_refused_by_path_and_the_session_goes_on(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"])) as client:
        await controller(session, client)
        await client.socket.send("{")
        assert (await client.until("refused"))["error"]["code"] == "invalid_json"
        await client.say("update", id="c1", input={"type": "audio", "pcm": 3})
        answer = await client.until("answer")
        assert (answer["id"], answer["error"]["field"]) == ("c1", "input.pcm")
        # An id is answered once: what comes under it later is not looked at.
        await client.say("signal", id="c1", signal={"type": "clear"})
        same = await client.until("answer")
        assert (same["id"], same["error"]) == ("c1", answer["error"])
        await client.say("signal", id="c2", signal={"type": "clear"})
        done = await client.until("answer")
        assert (done["id"], done["error"]) == ("c2", None)
        await client.say("update", id="c2", input={"type": "audio", "pcm": 3})
        same = await client.until("answer")
        assert (same["id"], same["error"]) == ("c2", None)
        await client.say("attach", role="observer")
        assert (await client.until("refused"))["error"]["field"] == "type"
        await client.socket.send("x" * (MAX_FRAME_BYTES + 1))
        assert (await client.until("refused"))["error"]["code"] == "event_too_large"
        await client.say("signal", signal={"type": "clear"}, ref="mine")
        await client.until("input_cleared")
        with contextlib.suppress(ConnectionClosed):
            await client.socket.send("x" * (WS_MAX_BYTES + 1))
        assert (await client.closed())[0] == 1009
    # Whose connection broke down comes back.
    async with stream(gateway.stream(session["id"])) as again:
        await controller(session, again, secret=client.frames[0]["secret"])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
GOOD: list[dict[str, Any]] = [
    {"type": "update", "input": {"type": "audio", "pcm": "AAAA"}},
    {"type": "update", "input": {"type": "settings", "settings": {"instructions": "x"}}},
    {"type": "update", "input": {"type": "settings", "settings": {"tracing": {"a": 1}}}},
    {"type": "update", "input": {"type": "item", "item": {"role": "user", "parts": []}}},
    {"type": "signal", "signal": {"type": "respond", "metadata": {"a": "b"}}},
    {"type": "signal", "signal": {"type": "truncate", "item_id": "x", "audio_end_ms": 3}},
    {"type": "have", "cursor": "x"},
    {"type": "attach", "role": "observer"},
]


@st.composite
def nearly_good(draw: st.DrawFn) -> dict[str, Any]:
    """A good frame with one thing in it replaced, added or taken away."""
    frame: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    place = frame
    while draw(st.booleans()):
        inner = [value for value in place.values() if isinstance(value, dict)]
        if not inner:
            break
        place = inner[0]
    name = draw(st.sampled_from([*place, "id", "ref", "more"]))
    if draw(st.booleans()):
        place.pop(name, None)
    else:
        place[name] = draw(JSON_VALUES)
    return frame


@pytest.mark.parametrize("wire", WIRES)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    frames=st.lists(nearly_good() | JSON_VALUES | st.binary(max_size=30), min_size=5, max_size=30)
)
async def test_no_frame_kills_a_session(
    gateway: RealGateway, http: httpx.AsyncClient, wire: str, frames: list[Any]
) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"]), wire) as client:
        await controller(session, client)
        for frame in frames:
            if isinstance(frame, bytes):
                await client.socket.send(frame)
            elif wire == "antiphon.msgpack":
                await client.socket.send(msgspec.msgpack.encode(frame))
            else:
                await client.socket.send(json.dumps(frame))
        await client.say("signal", signal={"type": "clear"}, id="after-all-of-it")
        await client.until("answer", id="after-all-of-it", error=None)
        await client.say("close")
        await client.closed()


async def test_what_comes_first_is_attach_and_comes_in_time(
    gateway: RealGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    for frame, code, field in (
        ({"kind": "signal", "signal": {"type": "clear"}}, "attach_required", "type"),
        ({"kind": "attach"}, "missing_required_parameter", "role"),
        ({"kind": "attach", "role": "observer", "secret": "x"}, "invalid_value", "secret"),
        ({"kind": "attach", "role": "observer", "takeover": True}, "invalid_value", "takeover"),
        (
            {"kind": "attach", "role": "controller", "secret": "x", "takeover": True},
            "invalid_value",
            "takeover",
        ),
    ):
        async with stream(url) as client:
            await client.say(**frame)
            error = (await client.until("error"))["error"]
            assert (error["code"], error["field"]) == (code, field)
            assert await client.closed() == (1008, code)
    monkeypatch.setattr("gateway.surfaces.attaching.ATTACH_S", 0.01)
    async with stream(url) as late:
        assert (await late.until("error"))["error"]["code"] == "attach_required"
        assert await late.closed() == (1008, "attach_required")


async def test_who_offers_no_sub_protocol_speaks_json_and_is_refused_with_a_status(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"]), None, role="observer") as client:
        assert client.socket.subprotocol is None
        await client.until("attached")
    with pytest.raises(InvalidStatus) as refused:
        async with stream(gateway.stream("sess_none"), None):
            pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["code"] == "session_not_found"


LONG_ITEM = {
    "role": "user",
    "id": "long",
    "parts": [{"kind": "input_text", "text": "x" * 60_000}],
}
ASK_LONG = {"type": "retrieve", "item_id": "long"}
ENOUGH = 400
"""So many times the long item is more than the queue and the kernel's buffers take."""


async def test_an_observer_that_does_not_read_is_let_go_and_holds_nobody_up(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    with capture_logs() as log:
        async with stream(url) as client, stream(url, role="observer") as observer:
            await observer.until("attached")
            await controller(session, client)
            await client.say("update", input={"type": "item", "item": LONG_ITEM})
            observer.socket.transport.pause_reading()
            for _ in range(ENOUGH):
                await client.say("signal", signal=ASK_LONG)
                await client.until("item_retrieved")
            await client.say("signal", signal=RESPOND)
            await client.until("response_done")
            assert client.pcm == ALL_AUDIO
            observer.socket.transport.resume_reading()
            # Broken off where the close frame found no room in time.
            assert (await observer.closed())[0] in (1008, 1006)
    slow = [line for line in log if line["event"] == "client_does_not_read"]
    assert [(line["session"], line["observer"]) for line in slow] == [(session["id"], True)]


async def test_an_observer_that_cannot_be_told_is_cut_off_and_holds_nobody_up(
    gateway: RealGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutputWriter.write

    def failing(writer: OutputWriter, sequence: int, output: Any) -> str | bytes:
        frame = write(writer, sequence, output)
        if isinstance(frame, bytes) and isinstance(output, InputCleared):
            raise RuntimeError("synthetic fault")
        return frame

    monkeypatch.setattr(OutputWriter, "write", failing)
    session = await opened(http)
    url = gateway.stream(session["id"])
    with capture_logs() as log:
        async with (
            stream(url) as client,
            stream(url, "antiphon.msgpack", role="observer") as observer,
        ):
            await observer.until("attached")
            await controller(session, client)
            await client.say("signal", signal={"type": "clear"})
            assert await observer.closed() == (1011, "internal_error")
            assert (observer.kinds[-1], observer.frames[-1]["reason"]) == ("let_go", "failed")
            await client.say("signal", signal=RESPOND)
            await client.until("response_done")
            assert client.pcm == ALL_AUDIO
    failed = [line for line in log if line["event"] == "observer_failed"]
    assert [line["session"] for line in failed] == [session["id"]]


async def test_a_controller_that_does_not_read_is_let_go_and_may_come_back(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    url = gateway.stream(session["id"])
    async with stream(url) as client:
        attached = await controller(session, client)
        await client.say("update", input={"type": "item", "item": LONG_ITEM})
        await client.until("item_done")
        client.socket.transport.pause_reading()
        for _ in range(ENOUGH):
            answer = await http.post(
                f"/v1/sessions/{session['id']}/signal", json={"signal": ASK_LONG}
            )
            assert answer.status_code == 200
        client.socket.transport.resume_reading()
        assert (await client.closed())[0] in (1008, 1006)
    async with stream(url) as again:
        await controller(session, again, secret=attached["secret"])
        await again.say("signal", signal=RESPOND)
        await again.until("response_done")
        assert again.pcm == ALL_AUDIO


LONG_AUDIO = AudioDelta("r", "i", 0, 0, bytes(200_000))


async def test_a_session_is_paced_by_a_client_that_has_much_to_catch_up_with(
    serve: Serve,
) -> None:
    gateway = await serve()
    async with requests(gateway.http) as http:
        session = await opened(http)
    gateway.host.missed = [LONG_AUDIO] * 30
    url = f"ws://127.0.0.1:{gateway.port}/v1/sessions/{session['id']}/stream"
    async with stream(url, "antiphon.msgpack") as client:
        client.socket.transport.pause_reading()
        await client.say("attach", role="controller", secret=session["secret"])
        async with asyncio.timeout(WAIT_S):
            await gateway.host.attached.wait()
            attachment = gateway.host.attachments[-1]
            await attachment.was_blocked.wait()
        assert attachment.blocked == [True]
        client.socket.transport.resume_reading()
        for _ in range(30):
            await client.until("audio_delta")
        assert attachment.blocked == [True, False]
    await attachment.gone.wait()
    assert (attachment.detached, attachment.closed) == (True, None)


@contextlib.asynccontextmanager
async def overfed(gateway: ScriptedGateway) -> AsyncIterator[tuple[Stream, ScriptedAttachment]]:
    """A controller that does not read while its session puts out more than is queued freely."""
    async with requests(gateway.http) as http:
        session = await opened(http)
    url = f"ws://127.0.0.1:{gateway.port}/v1/sessions/{session['id']}/stream"
    async with stream(url, "antiphon.msgpack") as client:
        await controller(session, client)
        attachment = gateway.host.attachments[-1]
        client.socket.transport.pause_reading()
        for _ in range(12):
            attachment.put_out(LONG_AUDIO)
        yield client, attachment


async def test_who_was_let_go_closes_nothing_any_more(serve: Serve) -> None:
    async with overfed(await serve()) as (client, attachment):
        attachment.put_out(LetGo("replaced"))
        await client.say("signal", signal={"type": "clear"})
        await client.say("close")
        client.socket.transport.resume_reading()
        assert await client.closed() == (4001, "replaced")
    await attachment.gone.wait()
    assert (attachment.verbs, attachment.detached, attachment.closed) == ([], True, None)


async def test_a_session_is_paced_by_its_client(serve: Serve) -> None:
    async with overfed(await serve()) as (client, attachment):
        assert attachment.blocked == [True]
        client.socket.transport.resume_reading()
        for _ in range(12):
            await client.until("audio_delta")
        assert attachment.blocked == [True, False]


async def test_a_resume_tells_more_than_the_queue_takes_otherwise() -> None:
    async with (
        real_gateway(replay_bytes=24 * 1024 * 1024) as gateway,
        requests(gateway.http) as http,
    ):
        session = await opened(http)
        url = gateway.stream(session["id"])
        async with stream(url) as first:
            attached = await controller(session, first)
            await first.say("update", input={"type": "item", "item": LONG_ITEM})
            for _ in range(120):
                await first.say("signal", signal=ASK_LONG)
                await first.until("item_retrieved")
        assert LIMIT_BYTES < 120 * 60_000
        async with stream(url) as second:
            again = await controller(
                session, second, secret=attached["secret"], cursor=first.frames[0]["cursor"]
            )
            assert again["lost"] is None
            await second.say("signal", id="c1", signal={"type": "clear"})
            await second.until("answer", id="c1")
            assert numbers(second)[: len(numbers(first))] == numbers(first)


async def test_a_stopping_gateway_tells_its_streams(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"]), role="observer") as client:
        await client.until("attached")
        gateway.server.stop()
        assert (await client.until("session_ended"))["reason"] == "drained"
        assert await client.closed() == (1001, "drained")


async def test_frames_and_errors_are_counted(gateway: RealGateway, http: httpx.AsyncClient) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"])) as client:
        await controller(session, client)
        await client.say("signal", id="c1", signal={"type": "cancel"})
        await client.until("answer", id="c1")
        await client.say("what")
        await client.until("refused")
    text = gateway.metrics.render().decode()
    assert 'antiphon_frames_total{direction="received",surface="native"} 3.0' in text
    assert (
        f'antiphon_frames_total{{direction="sent",surface="native"}} {len(client.frames)}.0' in text
    )
    assert 'antiphon_errors_total{code="response_cancel_not_active"} 1.0' in text
    assert 'antiphon_errors_total{code="invalid_value"} 1.0' in text


async def test_a_conversation_begins_anew_by_a_signal(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    session = await opened(http)
    async with stream(gateway.stream(session["id"])) as client:
        await controller(session, client)
        await client.say("update", input={"type": "item", "item": LONG_ITEM})
        await client.say("signal", signal={"type": "reset"})
        assert (await client.until("conversation_reset"))["item_ids"] == ["long"]
        await client.say("signal", id="c1", signal={"type": "reset", "parameters": {"seed": 1}})
        error = (await client.until("answer"))["error"]
        assert (error["code"], error["field"]) == ("unsupported_parameter", "signal.parameters")


@pytest.mark.parametrize(
    "said",
    [
        {"type": "update", "input": {"type": "settings", "settings": {"%": 1}}},
        {"type": "update", "input": {"type": "settings", "settings": {"tool_choice": "%"}}},
        {"type": "update", "input": {"type": "item", "item": {"role": "%", "parts": []}}},
        {"type": "have", "%": 1},
    ],
)
async def test_what_is_refused_is_quoted_to_a_bound(
    gateway: RealGateway, http: httpx.AsyncClient, said: dict[str, Any]
) -> None:
    session = await opened(http)
    frame = json.dumps(said).replace("%", "x" * LIMIT_BYTES)
    async with (
        stream(gateway.stream(session["id"])) as client,
        stream(gateway.stream(session["id"])) as observer,
    ):
        await controller(session, client)
        await observer.say("attach", role="observer")
        await observer.until("attached")
        await client.socket.send(frame)
        refused = await client.until("refused")
        assert len(json.dumps(refused)) < 4096
        await client.say("close")
        await observer.until("session_ended")
