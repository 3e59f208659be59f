"""A gateway's host over the real link, with workers in this process whose engine is synthetic."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gateway.cameras import Cameras
from gateway.clients import HostedAttachment
from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from protocol.edges import CLIENT, ConnectorKind, edge_name
from protocol.payloads import audio_payload, text_payload
from sessions.duplex.events import (
    CreateItem,
    Item,
    ItemStatus,
    Part,
    PartKind,
    Role,
)
from sessions.pipeline import Pipeline
from tests.sessions.harness import PCM_MS, voice_pipeline
from tests.synthetic_engine import SyntheticEngine, SyntheticOptions, SyntheticSession
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult
from workers.spec import WorkerSpec
from workers.worker import Worker

WAIT_S = 30

Kind = TypeVar("Kind")


@dataclass
class Client:
    """What a session put out, and a way to wait for it."""

    outputs: list[Any] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_output(self, sequence: int, output: Any) -> None:
        self.outputs.append(output)
        self.changed.set()

    async def until(self, kind: type[Kind]) -> Kind:
        """The first output of a type, once it has come."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for output in self.outputs:
                    if isinstance(output, kind):
                        return output
                self.changed.clear()
                await self.changed.wait()


class VoiceEngine(SyntheticEngine):
    """Plays the part of `stage`: hears "words", thinks "Hello there.", speaks 20 ms a clause.

    Its turns wait while `gate` is closed, and fail while `fault` is set.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(SyntheticOptions())
        self.stage = stage
        self.runs: list[str] = []
        """The sessions whose turns were begun, in order."""
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        super().open(session, settings, emit)
        return _VoiceSession(self, session, settings, emit)


class _VoiceSession(SyntheticSession):
    def __init__(
        self, engine: VoiceEngine, name: str, settings: dict[str, Any], emit: EmitEvent
    ) -> None:
        super().__init__(engine, name, settings, emit)
        self.part = engine
        self.name = name

    async def run(self, turn: Turn) -> TurnResult:
        self.part.runs.append(self.name)
        await self.part.gate.wait()
        if self.part.fault is not None:
            raise self.part.fault
        async for payload in turn.inputs:
            if self.part.stage == "speak":
                clause = payload.attributes.get("clause", 0)
                sound = audio_payload(PCM_MS * 20, 24_000, clause=clause, clause_end=True)
                turn.emit(sound)
        match self.part.stage:
            case "listen":
                turn.emit(text_payload("words"))
            case "think":
                turn.emit(text_payload("Hello there."))
        await turn.room()
        return TurnResult({"input_tokens": 1, "cached_tokens": 0, "output_tokens": 2})

    def update(self, payload: Any) -> None:
        """Audio is heard, and forgotten."""


@dataclass
class Served:
    """A host and one worker for each stage; `tasks` are those that serve the workers."""

    host: GatewayHost
    engines: dict[str, Any]
    workers: dict[str, Worker]
    tasks: dict[str, asyncio.Task[None]]
    directory: Path
    make_engine: Callable[[str], Engine]
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the workers' specs."""

    def endpoint(self, stage: str) -> str:
        """Where the worker of a stage is bound."""
        return f"ipc://{self.directory / stage}"

    def start(self, stage: str) -> None:
        """Start a worker for a stage."""
        engine = self.engines[stage] = self.make_engine(stage)
        spec = WorkerSpec(stage, stage, "synthetic", self.endpoint(stage), "t", **self.spec)
        worker = self.workers[stage] = Worker(spec, engine)
        self.tasks[stage] = asyncio.create_task(worker.serve(lambda: None))

    async def kill(self, stage: str) -> None:
        """The worker of a stage goes, without a word to anybody."""
        self.tasks[stage].cancel()
        await asyncio.wait([self.tasks[stage]])

    async def replace(self, stage: str) -> None:
        """The worker of a stage goes, which the host hears, and another takes its place."""
        await self.kill(stage)
        async with asyncio.timeout(WAIT_S):
            for name, pipeline in self.host.pipelines.items():
                if stage in pipeline.stages:
                    await self.host.until_ready(name, False)
        self.start(stage)

    async def ready(self) -> None:
        """Wait until every stage has a worker."""
        async with asyncio.timeout(WAIT_S):
            await self.host.ready()

    async def emptied(self) -> None:
        """Wait until no session holds anything."""
        async with asyncio.timeout(WAIT_S):
            await self.host.drained()


@asynccontextmanager
async def served(
    pipelines: Mapping[str, Pipeline] | None = None,
    make_engine: Callable[[str], Engine] = VoiceEngine,
    metrics: GatewayMetrics | None = None,
    spec: Mapping[str, Any] | None = None,
    cameras: Cameras | None = None,
) -> AsyncIterator[Served]:
    """A host for `pipelines` (one for voice if none are given) and a worker for each stage.

    Pipelines share the workers of stages that have the same name. `spec` is what the specs of
    all workers have besides.
    """
    pipelines = pipelines or {"voice": voice_pipeline()}
    stages = dict.fromkeys(stage for p in pipelines.values() for stage in p.stages)
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        path = Path(directory)
        host = GatewayHost(
            pipelines,
            {name: name for name in pipelines},
            frozenset(pipelines),
            [(stage, stage, f"ipc://{path / stage}") for stage in stages],
            metrics or GatewayMetrics(),
            cameras,
        )
        it = Served(host, {}, {}, {}, path, make_engine, spec or {})
        try:
            for stage in stages:
                it.start(stage)
            await it.ready()
            yield it
            host.drain()
            await it.emptied()
        finally:
            host.close()
            for worker in it.workers.values():
                worker.stop()
            await asyncio.gather(*it.tasks.values(), return_exceptions=True)
    for task in it.tasks.values():
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def serving(**limits: int) -> AsyncIterator[tuple[GatewayHost, dict[str, SyntheticEngine]]]:
    """A host for voice, with an engine a stage that echoes."""
    pipelines = {"voice": voice_pipeline(**limits)}
    make_engine = lambda _: SyntheticEngine.create(SyntheticOptions())  # noqa: E731
    async with served(pipelines, make_engine) as it:
        yield it.host, it.engines


def by_arena(pipeline: Pipeline) -> Pipeline:
    """The same pipeline, with payloads from and to the client in shared memory."""
    edges = [edge_name(CLIENT, pipeline.stages[0])]
    edges += [edge_name(stage, CLIENT) for stage in pipeline.outputs.values()]
    return replace(pipeline, connectors=dict.fromkeys(edges, ConnectorKind.SHM))


async def opened(host: GatewayHost, client: Client) -> HostedAttachment:
    """A session of the voice pipeline."""
    return await host.open(
        pipeline="voice", tenant="local", settings_patch=None, on_output=client.on_output
    )


def spoken_item(item_id: str) -> CreateItem:
    """An item that has to be heard."""
    part = Part(PartKind.INPUT_AUDIO, audio=b"words")
    return CreateItem(Item(item_id, Role.USER, ItemStatus.COMPLETED, [part]))
