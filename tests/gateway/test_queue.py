"""Opens that wait for a place, on every surface: told where they stand, let in, given up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.clients import HostedAttachment
from gateway.surfaces.ahead import AHEAD_MESSAGES
from protocol.errors import AntiphonError, InvalidRequest, NotFound
from sessions.opening import Position
from tests.gateway.native_client import opened, requests
from tests.gateway.real_host import RealGateway, real_gateway
from tests.gateway.serving import WAIT_S, Client

EVENTS = {"accept": "text/event-stream"}


@pytest.fixture
async def gateway() -> AsyncIterator[RealGateway]:
    """One place, and a queue of three."""
    async with real_gateway(sessions=1, waiting=3) as served:
        yield served


@pytest.fixture
async def http(gateway: RealGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with requests(gateway.http) as client:
        yield client


class Queued:
    """An open over an event stream."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        """The next event: its name and data."""
        async with asyncio.timeout(WAIT_S):
            name = (await anext(self._lines)).removeprefix("event: ")
            data = json.loads((await anext(self._lines)).removeprefix("data: "))
            assert await anext(self._lines) == ""
        return name, data


@asynccontextmanager
async def queued(http: httpx.AsyncClient, **body: Any) -> AsyncIterator[Queued]:
    async with http.stream("POST", "/v1/sessions", json=body, headers=EVENTS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield Queued(answer)


def ahead(gateway: RealGateway) -> int:
    return len(gateway.host.waiting())


async def until_waiting(gateway: RealGateway, count: int) -> None:
    """Until so many opens wait, which this loop lets in beside."""
    async with asyncio.timeout(WAIT_S):
        while ahead(gateway) != count:
            await asyncio.to_thread(time.sleep, 0.001)


async def held(gateway: RealGateway) -> HostedAttachment:
    """A session whose client is there: it makes room for nobody."""
    return await gateway.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)


async def test_a_native_open_is_told_where_it_stands_and_then_its_session(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    first = await held(gateway)
    async with queued(http) as second, queued(http) as third:
        assert await second.next() == ("queued", {"position": 1, "estimate_ms": None})
        assert await third.next() == ("queued", {"position": 2, "estimate_ms": None})
        waiting = (await http.get("/v1/admin/waiting")).json()["waiting"]
        assert [(entry["position"], entry["opening"]) for entry in waiting] == [
            (1, False),
            (2, False),
        ]
        first.close("client")
        name, session = await second.next()
        assert name == "session"
        assert session["secret"]
        # Its first client is still to come: it makes room for nobody yet.
        name, moved = await third.next()
        # Now something is known of how long a session takes.
        assert (name, moved["position"], moved["estimate_ms"] is None) == ("queued", 1, False)
        await http.delete(f"/v1/sessions/{session['id']}")
        assert (await third.next())[0] == "session"
    assert not ahead(gateway)


async def test_an_open_that_need_not_wait_is_answered_as_ever(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/sessions", json={}, headers=EVENTS)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/sessions/{answer.json()['id']}"
    refused = await http.post("/v1/sessions", json={"model": "nothing"}, headers=EVENTS)
    assert refused.status_code == 404


async def test_a_native_open_without_events_just_waits(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    first = await held(gateway)
    second = asyncio.create_task(opened(http))
    await until_waiting(gateway, 1)
    first.close("client")
    assert (await second)["state"] == "detached"


@pytest.mark.parametrize("headers", [{}, EVENTS], ids=["plain", "events"])
async def test_who_hangs_up_leaves_the_queue_at_once(
    gateway: RealGateway, http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    await held(gateway)
    leaves = asyncio.create_task(http.post("/v1/sessions", json={}, headers=headers))
    await until_waiting(gateway, 1)
    async with queued(http) as stays:
        assert (await stays.next())[1]["position"] == 2
        leaves.cancel()
        assert (await stays.next())[1]["position"] == 1


async def test_a_full_queue_refuses_and_says_when_a_place_will_be_free(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    for _ in range(3):
        session = await opened(http)
        await http.delete(f"/v1/sessions/{session['id']}")
    await held(gateway)
    waits = [asyncio.create_task(http.post("/v1/sessions", json={})) for _ in range(3)]
    await until_waiting(gateway, 3)
    refused = await http.post("/v1/sessions", json={})
    assert refused.status_code == 503
    body = refused.json()["error"]
    assert (body["code"], body["param"]) == ("capacity_exceeded", "model")
    # Three wait for the one place that there is: nobody knows when the fourth gets one.
    assert "retry_after_ms" not in body
    for wait in waits:
        wait.cancel()


async def test_who_waits_too_long_is_told_in_the_stream() -> None:
    async with (
        real_gateway(sessions=1, waiting=3, wait_ms=300) as gateway,
        requests(gateway.http) as http,
    ):
        await held(gateway)
        async with queued(http) as waits:
            assert (await waits.next())[0] == "queued"
            name, said = await waits.next()
            assert name == "error"
            assert said["error"]["code"] == "capacity_exceeded"
            assert "has waited for" in said["error"]["message"]


async def test_a_lower_priority_waits_behind_and_a_higher_is_refused(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    first = await held(gateway)
    refused = await http.post("/v1/sessions", json={"priority": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    async with queued(http, priority=-5) as low, queued(http) as usual:
        assert (await low.next())[1]["position"] == 1
        assert (await usual.next())[1]["position"] == 1
        assert (await low.next())[1]["position"] == 2
        first.close("client")
        assert (await usual.next())[0] == "session"


async def test_a_session_of_a_lower_priority_is_so_for_its_workers(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    await opened(http, priority=-5)
    (session,) = gateway.host._hosted.all()
    assert session.session.pipeline.priority == -5


async def test_a_session_of_a_priority_of_its_own_makes_room_like_others(
    gateway: RealGateway,
) -> None:
    host = gateway.host
    first = await host.open(
        pipeline="voice", tenant="local", priority=-5, secret="s", on_output=Client().on_output
    )
    first.detach()
    second = await host.open(
        pipeline="voice", tenant="local", priority=-1, secret="s", on_output=Client().on_output
    )
    assert [session.id for session in host.sessions()] == [second.session]


async def event(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        said: dict[str, Any] = json.loads(await socket.recv())
        return said


def realtime(gateway: RealGateway, query: str = "") -> str:
    return f"ws://127.0.0.1:{gateway.port}/v1/realtime{query}"


async def test_a_realtime_client_may_ask_for_a_lower_priority(gateway: RealGateway) -> None:
    async with connect(realtime(gateway, "?priority=-5")) as socket:
        assert (await event(socket))["type"] == "session.created"
        (session,) = gateway.host._hosted.all()
        assert session.session.pipeline.priority == -5


@pytest.mark.parametrize("asked", ["1", "-1001", "high", "", "1e3", "٣"])
async def test_a_priority_that_cannot_be_is_refused_by_name(
    asked: str, gateway: RealGateway
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(realtime(gateway, f"?priority={quote(asked)}")):
            pass
    assert refused.value.response.status_code == 400
    assert json.loads(refused.value.response.body)["error"]["param"] == "priority"


async def test_a_realtime_client_waits_behind_an_upgrade_and_may_speak_already(
    gateway: RealGateway,
) -> None:
    async with connect(realtime(gateway)) as first:
        assert (await event(first))["type"] == "session.created"
        async with connect(realtime(gateway)) as second:
            queued_event = await event(second)
            assert queued_event.pop("event_id").startswith("event_")
            assert queued_event == {
                "type": "antiphon.queued",
                "position": 1,
                "estimate_ms": None,
            }
            for instructions in ("Be brief.", "Be kind."):
                session = {"type": "realtime", "instructions": instructions}
                await second.send(json.dumps({"type": "session.update", "session": session}))
            await first.close()
            assert (await event(second))["type"] == "session.created"
            for instructions in ("Be brief.", "Be kind."):
                updated = await event(second)
                assert updated["type"] == "session.updated"
                assert updated["session"]["instructions"] == instructions


async def test_a_realtime_client_that_hangs_up_leaves_the_queue(gateway: RealGateway) -> None:
    async with connect(realtime(gateway)) as first:
        await event(first)
        second = await connect(realtime(gateway))
        await event(second)
        async with connect(realtime(gateway)) as third:
            assert (await event(third))["position"] == 2
            await second.close()
            assert (await event(third))["position"] == 1


async def test_a_realtime_client_that_talks_while_it_waits_is_read_on(
    gateway: RealGateway,
) -> None:
    """Its audio is heard by nobody; that it has gone is seen behind however much of it."""
    append = json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 40_000})
    async with connect(realtime(gateway)) as first:
        await event(first)
        second = await connect(realtime(gateway))
        await event(second)
        for _ in range(200):
            await second.send(append)
        async with connect(realtime(gateway)) as third:
            assert (await event(third))["position"] == 2
            await second.close()
            assert (await event(third))["position"] == 1


async def test_a_realtime_client_that_says_too_much_while_it_waits_is_refused(
    gateway: RealGateway,
) -> None:
    async with connect(realtime(gateway)) as first:
        await event(first)
        async with connect(realtime(gateway)) as second:
            await event(second)
            for _ in range(AHEAD_MESSAGES + 1):
                await second.send('{"type": "input_audio_buffer.clear"}')
            refused = await event(second)
            assert (refused["type"], refused["error"]["code"]) == ("error", "too_many_events")
            with pytest.raises(ConnectionClosed):
                await event(second)
            assert second.close_code == 1008
    assert not ahead(gateway)


async def test_a_realtime_client_that_waited_too_long_is_told_and_closed() -> None:
    async with (
        real_gateway(sessions=1, waiting=3, wait_ms=300) as gateway,
        connect(realtime(gateway)) as first,
    ):
        await event(first)
        async with connect(realtime(gateway)) as second:
            assert (await event(second))["type"] == "antiphon.queued"
            refused = await event(second)
            assert (refused["type"], refused["error"]["code"]) == ("error", "capacity_exceeded")
            with pytest.raises(ConnectionClosed):
                await event(second)
            assert second.close_code == 1013


async def test_without_a_queue_the_upgrade_is_refused() -> None:
    async with real_gateway(sessions=1) as gateway, connect(realtime(gateway)) as first:
        await event(first)
        with pytest.raises(InvalidStatus) as refused:
            await connect(realtime(gateway))
        assert refused.value.response.status_code == 503


async def test_a_gateway_that_drains_refuses_who_waits(gateway: RealGateway) -> None:
    host = gateway.host
    first = Client()
    await host.open(pipeline="voice", tenant="t", on_output=first.on_output)
    positions: list[Position] = []
    waits = asyncio.create_task(
        host.open(pipeline="voice", tenant="t", on_position=positions.append)
    )
    await until_waiting(gateway, 1)
    host.drain()
    with pytest.raises(AntiphonError) as refused:
        await waits
    assert refused.value.code == "draining"
    assert positions == [Position(1, None)]
    await host.drained()


async def test_an_open_that_fails_by_a_fault_ends_nobody_else_and_leaves_the_queue(
    gateway: RealGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = gateway.host
    first = await held(gateway)
    fails = asyncio.create_task(host.open(pipeline="voice", tenant="t"))
    await until_waiting(gateway, 1)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the gateway")

    with monkeypatch.context() as patch:
        patch.setattr(host, "_begin", broken)
        first.close("client")
        with pytest.raises(AntiphonError) as refused:
            await fails
    assert refused.value.code == "internal_error"
    assert not ahead(gateway)
    (await held(gateway)).close("client")


async def test_what_cannot_be_opened_is_told_so_without_waiting(gateway: RealGateway) -> None:
    host = gateway.host
    await host.open(pipeline="voice", tenant="t", on_output=Client().on_output)
    with pytest.raises(InvalidRequest):
        await host.open(pipeline="voice", tenant="t", settings_patch={"nothing": 1})
    assert not ahead(gateway)


async def test_the_metrics_know_who_waits_and_for_how_long(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    async def value(name: str) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith(f'{name}{{pipeline="voice"}}')]
        return float(line.rsplit(" ", 1)[1])

    first = await held(gateway)
    async with queued(http) as second:
        await second.next()
        assert await value("antiphon_opens_waiting") == 1
        first.close("client")
        await second.next()
    assert await value("antiphon_opens_waiting") == 0
    assert await value("antiphon_open_seconds_count") == 2


async def test_a_session_that_somebody_left_alone_ends_for_who_waits(
    gateway: RealGateway, http: httpx.AsyncClient
) -> None:
    """Also when it was left alone only after the other had begun to wait."""
    host = gateway.host
    first = await host.open(
        pipeline="voice", tenant="local", secret="secret", on_output=Client().on_output
    )
    async with queued(http) as second:
        assert (await second.next())[0] == "queued"
        first.detach()
        assert (await second.next())[0] == "session"
    with pytest.raises(NotFound):
        host.summary(first.session, "local")
