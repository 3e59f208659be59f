"""The port of a policy: open while its pipeline is ready, at any path, with its own /healthz."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.app import build_policy_app
from gateway.metrics import GatewayMetrics
from gateway.server import POLICY_WS_MAX_BYTES, bind, server_config
from gateway.surfaces.openpi import PolicyPort
from protocol.config import GatewayConfig
from protocol.errors import ConfigError
from protocol.openpi import pack
from sessions.pipeline import Kind, Pipeline
from tests.gateway.openpi.robot import WAIT_S, robot
from tests.gateway.serving import Served, served
from workers.engines.vla import VlaEngine, VlaOptions

ARM = Pipeline("arm", ("act",), (), {"actions": "act"}, kind=Kind.ROBOT)


@dataclass
class Serving:
    """A policy's port, and what it depends on."""

    served: Served
    port: int
    opened: asyncio.Event

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def until_open(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.opened.wait()
        self.opened.clear()


@asynccontextmanager
async def serving(config: GatewayConfig | None = None) -> AsyncIterator[Serving]:
    """A policy on a port of its own, over the real host."""
    config = config or GatewayConfig()
    metrics = GatewayMetrics()
    engine = lambda _: VlaEngine.create(  # noqa: E731
        VlaOptions(policy="tests.workers.vla.policies:Counting")
    )
    async with served({"arm": ARM}, engine, metrics) as it:
        app = build_policy_app(it.host, config, metrics, "arm")
        opened = asyncio.Event()
        port = PolicyPort(
            it.host,
            "arm",
            bind("127.0.0.1", 0),
            server_config(app, POLICY_WS_MAX_BYTES),
            opened.set,
        )
        task = asyncio.create_task(port.serve())
        try:
            yield Serving(it, port.port, opened)
        finally:
            it.host.drain()
            task.cancel()
            await asyncio.wait({task})
    assert task.cancelled()


def refused(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


async def test_robots_are_served_at_any_path() -> None:
    async with serving() as it:
        await it.until_open()
        for path in ("", "/", "/some/path", "/v1/openpi/anything"):
            async with robot(it.url + path) as arm:
                assert (await arm.infer())["actions"][0, 0] == 1


async def test_its_health_is_told_in_the_words_of_openpi() -> None:
    async with serving() as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as http:
        await it.until_open()
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.text) == (200, "OK\n")
        assert (await http.get("/v1/models")).status_code == 404


async def test_it_is_open_only_while_the_policy_is_ready() -> None:
    async with serving() as it:
        await it.until_open()
        async with robot(it.url) as arm:
            await arm.infer()
            await it.served.kill("act")
            async with asyncio.timeout(WAIT_S):
                await it.served.host.until_ready("arm", False)
            await asyncio.sleep(0)
            assert refused(it.port)
            # The connection stays: its session tells it what became of its state.
            await arm.observe()
            text, code = await arm.failure()
            assert code == 1011
            assert text.startswith(("session_state_lost: ", "engine_lost: "))
        it.served.start("act")
        await it.until_open()
        async with robot(it.url) as arm:
            assert (await arm.infer())["actions"][0, 0] == 1


async def test_nothing_listens_before_the_policy_is_ready() -> None:
    class Never:
        async def until_ready(self, pipeline: str, ready: bool) -> None:
            assert (pipeline, ready) == ("arm", True)
            await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    port = PolicyPort(Never(), "arm", bind("127.0.0.1", 0), server_config(app, 1024))
    task = asyncio.create_task(port.serve())
    await asyncio.sleep(0)
    assert refused(port.port)
    task.cancel()
    await asyncio.wait({task})


async def test_an_address_that_is_taken_is_found_at_the_start() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"Choose another as gateway\.openpi\.port"):
            bind("127.0.0.1", taken.getsockname()[1], "gateway.openpi.port")


async def test_pages_of_others_are_not_let_in() -> None:
    async with serving() as it:
        await it.until_open()
        with pytest.raises(InvalidStatus) as denied:
            await connect(it.url, origin="https://elsewhere.example")  # type: ignore[arg-type]
        assert denied.value.response.status_code == 403


async def test_keys_are_asked_for() -> None:
    async with serving(GatewayConfig(keys=("a-key-for-robots",))) as it:
        await it.until_open()
        with pytest.raises(InvalidStatus) as denied:
            await connect(it.url)
        assert denied.value.response.status_code == 401
        async with robot(it.url, headers={"Authorization": "Api-Key a-key-for-robots"}) as arm:
            await arm.infer()


async def test_a_message_far_too_long_is_not_read() -> None:
    async with serving() as it:
        await it.until_open()
        async with connect(it.url, compression=None) as socket:
            message = pack({"a": bytes(POLICY_WS_MAX_BYTES)})
            with pytest.raises(ConnectionClosed) as closed:
                await _send_and_read(socket, message)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009


async def _send_and_read(socket: ClientConnection, message: bytes) -> None:
    await socket.recv()
    await socket.send(message)
    await socket.recv()
