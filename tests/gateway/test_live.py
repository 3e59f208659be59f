"""What operators see in one document, and its stream to who looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message
from websockets.asyncio.client import connect

from gateway import live
from gateway.live import Feed, LiveOverview, overview
from loadtest.synthetic_step import StepOptions, SyntheticStep
from protocol.config import GatewayConfig
from sessions.pipeline import Kind, Pipeline
from tests.cancel_at import Cut, at_every_suspension, comes_to, process
from tests.gateway.conftest import Serve
from tests.gateway.scripted_host import ScriptedHost
from tests.gateway.serving import served

ADMIN_KEY = "adm-0123456789"
LIVE = "/v1/admin/live"
LONG_S = 3600.0
SIZES = {"small": 1_000, "large": 3_000_000, "medium": 200_000}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents follow changes without a rest, and nothing else."""
    monkeypatch.setattr(live, "PERIOD_S", 0.0)
    monkeypatch.setattr(live, "REST", 0)
    monkeypatch.setattr(live, "CLOCKS_S", LONG_S)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when documents are made no more, because nobody looks."""
    event = asyncio.Event()
    stop = Feed.stop

    def noted(feed: Feed) -> None:
        stop(feed)
        event.set()

    monkeypatch.setattr(Feed, "stop", noted)
    return event


@asynccontextmanager
async def looking(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The documents of a stream."""

    async def documents() -> AsyncIterator[dict[str, Any]]:
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))

    async with client.stream("GET", LIVE) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield documents()


def code(answer: httpx.Response) -> str:
    told: str = answer.json()["error"]["code"]
    return told


async def test_the_overview_has_all_that_operators_see(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client, connect(gateway.ws) as socket:
        await socket.recv()
        document = (await client.get("/v1/admin/overview")).json()
        for name in ("sessions", "workers"):
            listed = (await client.get(f"/v1/admin/{name}")).json()
            assert document[name] == listed[name]
        assert document["pipelines"] == (await client.get("/readyz")).json()["pipelines"]
    assert (document["draining"], document["sessions_total"]) == (False, 1)


@pytest.mark.usefixtures("at_once")
async def test_a_document_comes_at_once_and_with_every_change(serve: Serve) -> None:
    gateway = await serve()
    async with (
        httpx.AsyncClient(base_url=gateway.http) as client,
        looking(client) as documents,
    ):
        first = await anext(documents)
        assert first == (await client.get("/v1/admin/overview")).json()
        gateway.host.session_limit = 7
        gateway.host.overview_changed.set()
        assert (await anext(documents))["pipelines"]["voice"]["session_limit"] == 7


async def test_a_document_comes_though_nothing_changes_since_clocks_move(
    serve: Serve, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "CLOCKS_S", 0.01)
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client, looking(client) as documents:
        for _ in range(3):
            await anext(documents)


@pytest.mark.usefixtures("at_once")
async def test_a_document_is_made_once_for_all_who_look(serve: Serve) -> None:
    gateway = await serve()
    async with (
        httpx.AsyncClient(base_url=gateway.http) as client,
        looking(client) as one,
        looking(client) as other,
    ):
        assert await anext(one) == await anext(other)
        looks = gateway.host.looks
        gateway.host.overview_changed.set()
        assert await anext(one) == await anext(other)
        assert gateway.host.looks == looks + 1


@pytest.mark.usefixtures("at_once")
async def test_nothing_is_made_while_nobody_looks(serve: Serve, stopped: asyncio.Event) -> None:
    gateway = await serve()
    host = gateway.host
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        host.overview_changed.set()
        await client.get("/healthz")
        assert host.looks == 0
        async with looking(client) as documents:
            await anext(documents)
        # The viewer has hung up, which the server finds out by itself.
        async with asyncio.timeout(10):
            await stopped.wait()
        looks = host.looks
        host.overview_changed.set()
        await client.get("/healthz")
        assert host.looks == looks
        async with looking(client) as documents:
            await anext(documents)


@pytest.mark.usefixtures("at_once")
async def test_more_viewers_than_may_look_are_refused(
    serve: Serve, stopped: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "VIEWERS", 1)
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        async with looking(client) as documents:
            await anext(documents)
            refused = await client.get(LIVE)
            assert (refused.status_code, code(refused)) == (503, "too_many_viewers")
        async with asyncio.timeout(10):
            await stopped.wait()
        async with looking(client) as documents:
            await anext(documents)


@pytest.mark.usefixtures("at_once")
async def test_draining_ends_the_stream_and_lets_nobody_in(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        async with looking(client) as documents:
            assert not (await anext(documents))["draining"]
            gateway.host.drain()
            assert [document["draining"] async for document in documents] == [True]
        refused = await client.get(LIVE)
        assert (refused.status_code, code(refused)) == (503, "draining")


async def test_looking_takes_an_admin_key(serve: Serve) -> None:
    gateway = await serve(GatewayConfig(admin_keys=(ADMIN_KEY,)))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        for path in (LIVE, "/v1/admin/overview"):
            assert (await client.get(path)).status_code == 401
            assert (await client.head(path, headers=headers)).status_code == 200
        client.headers.update(headers)
        async with looking(client) as documents:
            await anext(documents)


async def test_pages_of_other_origins_cannot_look(serve: Serve) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        for path in (LIVE, "/v1/admin/overview"):
            answer = await client.get(path, headers={"origin": "http://evil.example"})
            assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")


@pytest.mark.usefixtures("at_once")
async def test_who_reads_slowly_gets_the_latest_and_leaves_nothing() -> None:
    host = ScriptedHost()
    overviews = LiveOverview(host)
    sent: list[Message] = []
    reads, came, leaves = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            came.set()
            await reads.wait()

    async def receive() -> Message:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def limits() -> AsyncGenerator[int]:
        with overviews.looking() as feed:
            while await feed.after(feed.made):
                yield json.loads(feed.document[6:])["pipelines"]["voice"]["session_limit"]

    response = overviews.stream()
    viewer = asyncio.create_task(response({"type": "http"}, receive, send))
    await came.wait()
    made = limits()
    for limit in range(10, 15):
        host.session_limit = limit
        host.overview_changed.set()
        while await anext(made) != limit:
            pass
    await made.aclose()
    came.clear()
    reads.set()
    while len(sent) < 3:
        came.clear()
        await came.wait()
    bodies = [json.loads(message["body"][6:]) for message in sent[1:]]
    assert [body["pipelines"]["voice"]["session_limit"] for body in bodies] == [2, 14]
    assert overviews.viewers == 1
    reads.clear()
    leaves.set()
    await viewer
    assert overviews.viewers == 0
    assert len(asyncio.all_tasks()) == 1


async def test_an_overview_that_fails_ends_the_streams_and_nothing_else(
    serve: Serve, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await serve()
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        async with looking(client) as documents:
            await anext(documents)
            with monkeypatch.context() as patch:
                patch.setattr(ScriptedHost, "sessions", None)
                gateway.host.overview_changed.set()
                assert [document async for document in documents] == []
        async with looking(client) as documents:
            await anext(documents)


async def test_of_too_many_sessions_those_with_the_most_bytes_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SESSIONS", 2)
    pipelines = {name: step_pipeline(name) for name in SIZES}

    def make_engine(stage: str) -> SyntheticStep:
        return SyntheticStep(StepOptions(state_bytes=SIZES[stage]))

    async with served(pipelines, make_engine) as it:
        for name in SIZES:
            await it.host.open(pipeline=name, tenant="local", secret="a secret")
        document = overview(it.host)
    assert [session.pipeline for session in document["sessions"]] == ["large", "medium"]
    assert document["sessions_total"] == 3


def step_pipeline(name: str) -> Pipeline:
    return Pipeline(name, (name,), (), {"frames": name}, kind=Kind.WORLD)


async def test_a_viewer_that_is_cancelled_anywhere_leaves_nothing(at_once: None) -> None:
    host = ScriptedHost()
    overviews = LiveOverview(host)
    before = process()

    async def attempt(cut: Cut) -> None:
        leaves = asyncio.Event()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)
            host.overview_changed.set()
            await asyncio.sleep(0)
            if len(sent) == 4:
                leaves.set()

        async def receive() -> Message:
            await leaves.wait()
            return {"type": "http.disconnect"}

        await cut.run(overviews.stream()({"type": "http"}, receive, send))
        await comes_to(before, process)
        assert overviews.viewers == 0

    assert await at_every_suspension(attempt) >= 6
