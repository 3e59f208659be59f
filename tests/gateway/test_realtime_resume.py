"""Realtime connections that break off and are taken up again, over the real session host."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from gateway.surfaces.resume import RESUME_SUBPROTOCOL
from loadtest.synthetic_voice import (
    NoOptions,
    SpeakOptions,
    SyntheticListen,
    SyntheticSpeak,
    SyntheticThink,
    ThinkOptions,
)
from tests.gateway.conftest import listening
from tests.gateway.serving import served
from tests.sessions.harness import voice_pipeline
from workers.engine import Engine

WAIT_S = 30


@asynccontextmanager
async def gateway(**limits: int) -> AsyncIterator[tuple[str, GatewayHost]]:
    """The address of a gateway's Realtime endpoint, and its host."""
    engines: dict[str, Engine] = {
        "listen": SyntheticListen(NoOptions()),
        "think": SyntheticThink(ThinkOptions(clauses=4)),
        "speak": SyntheticSpeak(SpeakOptions()),
    }
    async with (
        served({"voice": voice_pipeline(**limits)}, engines.__getitem__) as it,
        listening(it.host, GatewayMetrics()) as (_, port),
    ):
        yield f"ws://127.0.0.1:{port}/v1/realtime", it.host


@asynccontextmanager
async def connection(
    running: str, query: str, secret: str | None = None
) -> AsyncIterator[ClientConnection]:
    offered = [Subprotocol("realtime")]
    if secret is not None:
        offered.append(Subprotocol(RESUME_SUBPROTOCOL + secret))
    async with connect(f"{running}?{query}", subprotocols=offered if secret else None) as socket:
        yield socket


async def event(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        received: dict[str, Any] = json.loads(await socket.recv())
        return received


async def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    """All events up to the first of this type."""
    events = [await event(socket)]
    while events[-1]["type"] != kind:
        events.append(await event(socket))
    return events


async def ask(socket: ClientConnection) -> None:
    await socket.send(json.dumps({"type": "response.create"}))


def audio(events: list[dict[str, Any]]) -> bytes:
    deltas = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
    return b"".join(map(base64.b64decode, deltas))


def drop(socket: ClientConnection) -> None:
    """The network is gone, without a word."""
    socket.transport.abort()


async def test_a_reply_goes_on_where_the_connection_broke_off() -> None:
    async with gateway(lead_ms=60_000) as (running, _):
        async with connection(running, "resume=1") as socket:
            created = await event(socket)
            assert created["antiphon"]["resumed"] is False
            await ask(socket)
            whole = await until(socket, "response.done")
        async with connection(running, "resume=1") as socket:
            created = await event(socket)
            session, secret = created["session"]["id"], created["antiphon"]["secret"]
            await ask(socket)
            before = await until(socket, "response.output_audio.delta")
            drop(socket)
        cursor = before[-1]["sequence"] if "sequence" in before[-1] else before[-2]["sequence"]
        kept = [e for e in before if e.get("sequence", cursor + 1) <= cursor]
        back = f"session={session}&cursor={cursor}"
        async with connection(running, back, secret) as socket:
            again = await event(socket)
            assert again["type"] == "session.created"
            assert again["session"]["id"] == session
            assert again["antiphon"]["resumed"] is True
            assert again["antiphon"]["lost"] is None
            assert again["antiphon"]["secret"] != secret
            after = await until(socket, "response.done")
        assert after[-1]["response"]["status"] == "completed"
        assert audio(kept) + audio(after) == audio(whole)
        numbers = [e["sequence"] for e in after if "sequence" in e]
        assert numbers == list(range(cursor + 1, cursor + 1 + len(numbers)))


async def test_a_session_without_resume_ends_with_its_connection() -> None:
    async with gateway() as (running, host):
        async with connection(running, "") as socket:
            created = await event(socket)
            assert "antiphon" not in created
            assert "sequence" not in created
            drop(socket)
        async with asyncio.timeout(WAIT_S):
            await host.drained()


async def test_a_client_that_says_goodbye_ends_its_session() -> None:
    async with gateway() as (running, host):
        async with connection(running, "resume=1") as socket:
            await event(socket)
        async with asyncio.timeout(WAIT_S):
            await host.drained()


async def test_who_comes_back_replaces_who_is_there() -> None:
    async with gateway() as (running, _), connection(running, "resume=1") as first:
        created = await event(first)
        back = f"session={created['session']['id']}"
        secret = created["antiphon"]["secret"]
        async with connection(running, back, secret) as second:
            await event(second)
            with pytest.raises(ConnectionClosed) as closed:
                await event(first)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "replaced")
            await first.close(1000)
            await second.send(json.dumps({"type": "input_audio_buffer.clear"}))
            assert (await event(second))["type"] == "input_audio_buffer.cleared"


@pytest.mark.parametrize(
    ("query", "secret", "status", "param"),
    [
        ("resume=yes", None, 400, "resume"),
        ("session=SESSION", None, 400, "session"),
        ("session=SESSION&cursor=-1", "SECRET", 400, "cursor"),
        ("session=SESSION&cursor=99", "SECRET", 400, "cursor"),
        ("session=SESSION", "wrong", 400, "secret"),
        ("session=sess_none", "SECRET", 404, None),
    ],
)
async def test_a_return_that_cannot_be_is_refused_before_the_upgrade(
    query: str, secret: str | None, status: int, param: str | None
) -> None:
    async with gateway() as (running, _), connection(running, "resume=1") as first:
        created = await event(first)
        query = query.replace("SESSION", created["session"]["id"])
        headers = {}
        if secret is not None:
            good = created["antiphon"]["secret"]
            headers["sec-websocket-protocol"] = RESUME_SUBPROTOCOL + secret.replace("SECRET", good)
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{running}?{query}", additional_headers=headers)
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["param"] == param
        await first.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert (await event(first))["type"] == "input_audio_buffer.cleared"
