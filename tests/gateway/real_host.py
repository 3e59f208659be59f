"""The gateway's host over the real link, with workers whose engines are synthetic.

The whole of it is in this process: a test can tell an engine when to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.cameras import Cameras
from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from gateway.server import GatewayServer
from protocol.config import GatewayConfig
from protocol.payloads import PayloadType, audio_payload, text_payload
from sessions.pipeline import Pipeline
from tests.gateway.conftest import listening
from tests.gateway.serving import Served, served
from tests.sessions.harness import voice_pipeline
from tests.synthetic_engine import SyntheticEngine, SyntheticOptions, SyntheticSession
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult

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


@dataclass
class RealGateway:
    """A gateway on a port of its own, over a real host."""

    host: GatewayHost
    engines: dict[str, Engine]
    metrics: GatewayMetrics
    server: GatewayServer
    port: int
    served: Served

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
    pipeline = voice_pipeline(**{"lead_ms": 600_000, **limits})
    async with serving_kind(pipeline, lambda _: TalkingEngine(SyntheticOptions()), config) as it:
        yield it


@asynccontextmanager
async def serving_kind(
    pipeline: Pipeline,
    make_engine: Callable[[str], Engine],
    config: GatewayConfig | None = None,
    spec: Mapping[str, Any] | None = None,
    cameras: Cameras | None = None,
) -> AsyncIterator[RealGateway]:
    """A gateway that serves one pipeline, with what `make_engine` makes for each stage."""
    metrics = GatewayMetrics()
    async with (
        served({pipeline.name: pipeline}, make_engine, metrics, spec, cameras) as it,
        listening(it.host, metrics, config) as (server, port),
    ):
        yield RealGateway(it.host, it.engines, metrics, server, port, it)
