from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.app import build_app
from gateway.hosting import SessionHost
from gateway.metrics import GatewayMetrics
from gateway.server import GatewayServer, listen
from protocol.config import GatewayConfig
from tests.gateway.scripted_host import ScriptedHost


@dataclass
class Gateway:
    """A gateway over a scripted host, on a real port."""

    host: ScriptedHost
    metrics: GatewayMetrics
    server: GatewayServer
    port: int

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime"


class _Server(GatewayServer):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.up = asyncio.Event()

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        self.up.set()


@asynccontextmanager
async def listening(
    host: SessionHost,
    metrics: GatewayMetrics,
    config: GatewayConfig | None = None,
    console: Path | None = None,
) -> AsyncIterator[tuple[GatewayServer, int]]:
    """A gateway's server over any host, and its port."""
    app = build_app(host, config or GatewayConfig(), metrics, *([console] if console else []))

    async def drain() -> None:
        host.drain()

    server = _Server(app, drain)
    listener = listen("127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.stop()


@asynccontextmanager
async def serving(
    config: GatewayConfig | None = None,
    host: ScriptedHost | None = None,
    console: Path | None = None,
) -> AsyncIterator[Gateway]:
    host = host or ScriptedHost()
    metrics = GatewayMetrics()
    async with listening(host, metrics, config, console) as (server, port):
        yield Gateway(host, metrics, server, port)


Serve = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(
            config: GatewayConfig | None = None,
            host: ScriptedHost | None = None,
            console: Path | None = None,
        ) -> Gateway:
            return await stack.enter_async_context(serving(config, host, console))

        yield start
