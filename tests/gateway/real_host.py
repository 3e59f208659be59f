"""The gateway's host over the real link, with workers whose engines are synthetic.

The whole of it is in this process: a test can tell an engine when to go on.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.app import build_app
from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from gateway.server import listen
from protocol.config import GatewayConfig
from protocol.payloads import PayloadType, audio_payload, text_payload
from sessions.pipeline import Pipeline
from tests.gateway.conftest import Server
from tests.sessions.harness import voice_pipeline
from tests.synthetic_engine import SyntheticEngine, SyntheticOptions, SyntheticSession
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult
from workers.spec import WorkerSpec
from workers.worker import Worker

WAIT_S = 30

SENTENCES = ["The first thing. ", "Then the second. ", "And a third. ", "That is all of it."]


class TalkingEngine(SyntheticEngine):
    """Answers whatever it is told by `SENTENCES`, and speaks them, and all else it echoes.

    It waits for `may_go_on` before every sentence but the first.
    """

    outputs = frozenset({PayloadType.TEXT, PayloadType.AUDIO})

    def __init__(self, options: SyntheticOptions) -> None:
        super().__init__(options)
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    @classmethod
    def create(cls, options: SyntheticOptions) -> TalkingEngine:
        return cls(options)

    def open(self, session: str, settings: dict[str, object], emit: EmitEvent) -> EngineSession:
        self.open_sessions.add(session)
        return _Talking(self, session, settings, emit)


class _Talking(SyntheticSession):
    async def run(self, turn: Turn) -> TurnResult:
        engine = self._engine
        assert isinstance(engine, TalkingEngine)
        async for payload in turn.inputs:
            if payload.attributes.get("schema") == "conversation":
                for index, sentence in enumerate(SENTENCES):
                    if index:
                        await engine.may_go_on.wait()
                    turn.emit(text_payload(sentence))
            elif "clause" in payload.attributes:
                spoken = spoken_as(payload.data.decode())
                half, clause = len(spoken) // 4 * 2, payload.attributes["clause"]
                for piece, ends in ((spoken[:half], False), (spoken[half:], True)):
                    turn.emit(audio_payload(piece, 24_000, clause=clause, clause_end=ends))
            else:
                turn.emit(payload)
        return TurnResult()


def spoken_as(text: str) -> bytes:
    """What the synthetic voice makes of a text: other samples for other words."""
    return b"".join(bytes([ord(letter) % 256, 1]) * 240 for letter in text)


@asynccontextmanager
async def serving(
    engine: type[SyntheticEngine] = SyntheticEngine,
    metrics: GatewayMetrics | None = None,
    **limits: int,
) -> AsyncIterator[tuple[GatewayHost, dict[str, SyntheticEngine]]]:
    """A host, and a worker with an engine of this kind for each stage of a voice pipeline."""
    pipeline = voice_pipeline(**limits)
    engines = {stage: engine.create(SyntheticOptions()) for stage in pipeline.stages}
    async with hosting(pipeline, engines, metrics) as host:
        yield host, engines


@asynccontextmanager
async def hosting(
    pipeline: Pipeline, engines: Mapping[str, Engine], metrics: GatewayMetrics | None = None
) -> AsyncIterator[GatewayHost]:
    """A host, and a worker with each of `engines`, all in this process."""
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        async with asyncio.TaskGroup() as tasks:
            workers = []
            for stage, engine in engines.items():
                endpoint = f"ipc://{Path(directory) / stage}"
                workers.append(Worker(WorkerSpec(stage, stage, "synthetic", endpoint, "t"), engine))
                tasks.create_task(workers[-1].serve(lambda: None))
            host = GatewayHost(
                {pipeline.name: pipeline},
                {pipeline.name: pipeline.name},
                frozenset({pipeline.name}),
                [(stage, stage, f"ipc://{Path(directory) / stage}") for stage in engines],
                metrics or GatewayMetrics(),
            )
            try:
                async with asyncio.timeout(WAIT_S):
                    await host.ready()
                yield host
                host.drain()
                async with asyncio.timeout(WAIT_S):
                    await host.drained()
            finally:
                host.close()
                for worker in workers:
                    worker.stop()


@dataclass
class RealGateway:
    """A gateway on a port of its own, over a real host."""

    host: GatewayHost
    engines: dict[str, SyntheticEngine]
    metrics: GatewayMetrics
    server: Server
    port: int

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stream(self, session: str) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/sessions/{session}/stream"

    @property
    def think(self) -> TalkingEngine:
        engine = self.engines["think"]
        assert isinstance(engine, TalkingEngine)
        return engine


@asynccontextmanager
async def real_gateway(
    config: GatewayConfig | None = None, **limits: int
) -> AsyncIterator[RealGateway]:
    """A gateway whose sessions talk, as fast as they are let."""
    limits = {"lead_ms": 600_000, **limits}
    metrics = GatewayMetrics()
    async with (
        serving(TalkingEngine, metrics, **limits) as (host, engines),
        listening(host, config or GatewayConfig(), metrics) as (server, port),
    ):
        yield RealGateway(host, engines, metrics, server, port)


@asynccontextmanager
async def listening(
    host: GatewayHost, config: GatewayConfig, metrics: GatewayMetrics
) -> AsyncIterator[tuple[Server, int]]:
    """The application over `host`, and the port on which it is served."""

    async def drain() -> None:
        host.drain()

    server = Server(build_app(host, config, metrics), drain)
    listener = listen("127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.stop()
