"""The world engine: rollouts of many players, denoised together step by step.

One thread a worker calls the denoiser, and the event loop is always free. A session has one
denoising step here at a time, of whichever frame it is at and at whichever noise level: those
that wait go together in one call.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from protocol.allocator import keep_freed_memory
from protocol.device_bytes import HOST
from protocol.errors import ModelFileError
from protocol.payloads import PayloadType
from workers.engine import DeviceUse, EmitEvent, Engine, EngineSession, NeedsRoom
from workers.engines.world.architecture import Architecture
from workers.engines.world.blocks import BlockPool
from workers.engines.world.pace import CallTime
from workers.engines.world.settings import WorldOptions, WorldSettings
from workers.gathering import UNHURRIED_MS, Gathering, Waiting
from workers.reading import SETTINGS, read
from workers.to_the_end import to_the_end

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.world.model import Denoised, Denoising, Model
    from workers.engines.world.rollout import Draft, Rollout
    from workers.engines.world.session import WorldSession


@dataclass(frozen=True)
class Work:
    """A denoising step, and whose it is."""

    session: WorldSession
    denoising: Denoising


_COUNTED = ("calls", "denoising_steps", "frames", "hurried_frames", "cut_frames")


class WorldEngine(Engine):
    """One world model for many players."""

    Options = WorldOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.ACTIONS})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.FRAMES})

    def __init__(self, options: WorldOptions) -> None:
        self.options = options
        self.pool = BlockPool(options.blocks)
        self.call_time = CallTime()
        self.counted: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._gathering: Gathering[Work] = Gathering(options.window_ms, options.batch)
        self._answers: dict[Waiting[Work], asyncio.Future[Denoised]] = {}
        self._playing: set[WorldSession] = set()
        """Who took part in the last call, or waits: the others are waited for by nobody."""
        self._thread = ThreadPoolExecutor(1, "world")
        self._running = False
        self._begun_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._model: Model | None = None
        self.about: dict[str, Any] = {}
        """What clients are told of the world."""

    @classmethod
    def create(cls, options: WorldOptions) -> WorldEngine:
        """An engine with the world that `options` name."""
        return cls(options)

    async def load(self) -> None:
        """Load the world, in the engine's thread."""
        keep_freed_memory()
        try:
            from workers.engines.world.model import load_model
        except ModuleNotFoundError as error:
            raise ModelFileError(
                f"a world needs {error.name}: pip install 'antiphon[world]'"
            ) from None
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._thread, load_model, self.options)
        a, options = self.architecture, self.options
        self.about = {
            "width": a.width,
            "height": a.height,
            "keys": list(a.keys),
            "axes": list(a.axes),
            "scenes": list(a.scenes),
            "chunk": options.chunk,
            "steps": options.steps,
            "checkpoints": options.checkpoints,
        }

    @property
    def model(self) -> Model:
        """The model; it must be loaded."""
        if self._model is None:
            raise RuntimeError("the world is not loaded")
        return self._model

    @property
    def architecture(self) -> Architecture:
        """The form of the world."""
        return self.model.architecture

    # Bytes

    @property
    def device(self) -> str:
        """Where the cache lies, as the ledger names it."""
        device = self.model.device
        return HOST if device.type == "cpu" else f"{device.type}:{device.index}"

    @property
    def block_bytes(self) -> int:
        """Of a block of the cache."""
        return self.model.cache.size_bytes // (self.options.blocks + 1)

    def devices(self) -> dict[str, DeviceUse]:
        """The weights, and the blocks that sessions share."""
        model, pool = self.model, self.options.blocks * self.block_bytes
        if self.device == HOST:
            return {HOST: DeviceUse(pool=pool)}
        import torch

        total = torch.cuda.get_device_properties(model.device).total_memory
        return {self.device: DeviceUse(model.weight_bytes + self.block_bytes, pool, total)}

    def counters(self) -> dict[str, int]:
        """`calls` of the denoiser, `denoising_steps` in them, `frames`, and of those
        `hurried_frames`; `cut_frames` were left out."""
        return dict(self.counted)

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """`reserve_blocks` of the cache, or all that it can hold: its own, those of a chunk beside
        them, and those of its checkpoints. A block is larger than the frame it begins with."""
        read(settings, WorldSettings, SETTINGS).check(self.architecture)
        options, layout = self.options, self.model.layout
        states = 1 + options.checkpoints
        blocks = states * layout.slots + 1 + -(-options.chunk // options.block_frames)
        if options.reserve_blocks is not None:
            blocks = min(blocks, options.reserve_blocks)
        return {self.device: blocks * self.block_bytes}

    # Sessions

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A world that begins with its first frame."""
        return self.opened(read(settings, WorldSettings, SETTINGS).check(self.architecture))

    def opened(self, settings: WorldSettings) -> WorldSession:
        """The same, of settings that are right."""
        from workers.engines.world.session import WorldSession

        return WorldSession(self, settings)

    def closed(self, session: WorldSession) -> None:
        """It is waited for by nobody any more."""
        self._playing.discard(session)
        self._gathering.forget(session)
        self._go_on()

    def weights(self) -> str:
        """Of the world, and of how many frames a block has."""
        named = f"{self.model.world.digest} {self.options.block_frames}"
        return hashlib.sha256(named.encode()).hexdigest()

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, path: Path
    ) -> EngineSession:
        """A world in the state of the snapshot at `path`. Raises as `open` does,
        SessionStateLost, and NeedsRoom where the cache has no room for it."""
        from workers.engines.world.parked import placed, read_state

        wanted = read(settings, WorldSettings, SETTINGS).check(self.architecture)
        parked, content = await asyncio.to_thread(read_state, path)
        if self.pool.free < len(content[0]):
            needs = {self.device: len(content[0]) * self.block_bytes}
            raise NeedsRoom("no block of the cache is free", needs)
        restored = self.opened(wanted)
        blocks: list[int] = []
        try:
            for _ in content[0]:
                blocks.append(self.pool.take(restored))
            cache = self.model.cache
            await to_the_end(asyncio.to_thread(cache.load, blocks, content))
        except BaseException:
            self.pool.drop(blocks, restored)
            restored.close()
            raise
        restored.resume(placed(parked, blocks, self.pool, restored))
        return restored

    async def shutdown(self) -> None:
        """Stop the thread after the call that it is at."""
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # For sessions

    def begin(self, settings: WorldSettings) -> tuple[Rollout, int]:
        """A rollout of no frames, and its scene."""
        return self.model.begin(settings)

    def scene_of(self, settings: WorldSettings) -> int:
        """The scene that settings name, or that of the frame they begin with."""
        return self.model.begin(settings)[1]

    def draft(self, rollout: Rollout, session: WorldSession) -> Draft:
        """What a step makes beside `rollout`."""
        from workers.engines.world.rollout import Draft

        return Draft(rollout, self.model.layout, self.pool, self.model.cache, session)

    @property
    def cache(self) -> Any:
        """The memory of the blocks."""
        return self.model.cache

    async def denoise(
        self,
        session: WorldSession,
        rollout: Rollout,
        actions: tuple[float, ...],
        scene: int,
        levels: list[float],
        due_ms: float | None,
    ) -> tuple[Tensor, Tensor]:
        """The frame after `rollout` as bytes, and what it leaves in the cache.

        Cancelled it waits no more. Raises what the model raised.
        """
        from workers.engines.world.model import picture

        denoised: Denoised | None = None
        for step in self.model.denoising(rollout, actions, scene, tuple(levels)):
            if denoised is not None:
                step = replace(step, noisy=denoised.frame)
            denoised = await self._call(Work(session, step), due_ms)
        assert denoised is not None
        return picture(denoised.frame), denoised.left

    def now_ms(self) -> float:
        """A clock that is finer than uvloop's, which has whole ms."""
        return time.monotonic() * 1000.0

    # Calls

    @property
    def waiting(self) -> int:
        """How many denoising steps the model has not been given yet."""
        return len(self._gathering)

    async def _call(self, work: Work, due_ms: float | None) -> Denoised:
        now_ms = self.now_ms()
        due_ms = now_ms + UNHURRIED_MS if due_ms is None else due_ms
        waiting = Waiting(work.session, work, None, now_ms, due_ms)
        answer: asyncio.Future[Denoised] = asyncio.get_running_loop().create_future()
        self._answers[waiting] = answer
        self._gathering.add(waiting)
        self._playing.add(work.session)
        self._go_on_soon()
        try:
            return await answer
        finally:
            self._answers.pop(waiting, None)
            self._gathering.remove(waiting)

    def _go_on_soon(self) -> None:
        """Once all who run now have said what they want next."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Hand the next batch to the model, if both are ready, or look again when it is."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._gathering.due_ms(len(self._playing))
        if self._running or due_ms is None:
            return
        loop = asyncio.get_running_loop()
        if (wait_ms := due_ms - self.now_ms()) > 0:
            # Rounded down by uvloop it would look in every loop turn of the rest.
            self._timer = loop.call_later(math.ceil(wait_ms) / 1000.0, self._go_on)
            return
        batch = self._gathering.take()
        self._running = True
        self._begun_ms = self.now_ms()
        left_over = [one.work.session for one in self._answers if one not in batch]
        self._playing = {one.work.session for one in batch} | set(left_over)
        done = loop.run_in_executor(
            self._thread, _denoise, self.model, [one.work.denoising for one in batch]
        )
        done.add_done_callback(lambda outcomes: self._answered(batch, outcomes))

    def _answered(self, batch: list[Waiting[Work]], done: asyncio.Future[Outcome]) -> None:
        self._running = False
        if done.cancelled():
            return  # The engine is shut down.
        now_ms, outcome = self.now_ms(), done.result()
        sessions = [one.session for one in batch]
        self._gathering.answered(sessions, now_ms - self._begun_ms, now_ms)
        self.call_time.took(outcome.call_ms)
        self.counted["calls"] += outcome.calls
        self.counted["denoising_steps"] += len(batch)
        for waiting, result in zip(batch, outcome.results, strict=True):
            answer = self._answers.get(waiting)
            if answer is None or answer.done():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._go_on_soon()


class Outcome(msgspec.Struct, frozen=True):
    """What became of a batch: one result each, in `calls` calls, the last of `call_ms`."""

    results: list[Any]
    calls: int
    call_ms: float


def _denoise(model: Model, batch: Sequence[Denoising]) -> Outcome:
    """In the model's thread. Where several fail together each is tried alone."""
    begun_s = time.perf_counter()
    try:
        results: list[Denoised | Exception] = [*model.denoise(batch)]
    except Exception as error:
        if len(batch) == 1:
            results = [error]
        else:
            alone = [_denoise(model, [one]) for one in batch]
            results = [result for outcome in alone for result in outcome.results]
            return Outcome(results, 1 + len(batch), alone[-1].call_ms)
    return Outcome(results, 1, (time.perf_counter() - begun_s) * 1000.0)
