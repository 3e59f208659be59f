"""One world that is played: its rollout, what is held down, its checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.arrays import array_payload
from protocol.device_bytes import HOST
from protocol.errors import InvalidRequest
from protocol.messages import CHECKPOINT, RELEASE, RESET, REWIND
from protocol.payloads import Payload, PayloadType
from sessions.steps.refusals import no_checkpoint
from workers.engine import EmitEvent, ParkableSession, Turn, TurnResult
from workers.engines.world.actions import Held, given_by, held_of
from workers.engines.world.pace import steps_of_next
from workers.engines.world.parked import Parked, create, write_state
from workers.engines.world.rollout import Draft, Rollout
from workers.engines.world.sampler import noise_levels
from workers.engines.world.settings import Rewind, StepParameters, WorldSettings
from workers.reading import PARAMETERS, SETTINGS, read
from workers.storages import storage_bytes
from workers.to_the_end import to_the_end

if TYPE_CHECKING:
    from workers.engines.world.engine import WorldEngine


TRIES = 8
"""How often a step asks for room for its blocks: what others make of it they may have shared."""


@dataclass(frozen=True)
class Checkpoint:
    """A rollout that is kept, and its scene."""

    rollout: Rollout
    scene: int


class WorldSession(ParkableSession):
    """A world. Blocks of the cache are held in its name."""

    def __init__(self, engine: WorldEngine, settings: WorldSettings) -> None:
        self._engine = engine
        self._settings = settings
        """Those of the open, which a reset replaces."""
        self._begun = settings
        """Those that the rollout has begun with."""
        self.rollout, self.scene = engine.begin(settings)
        self.held = Held((0.0,) * engine.architecture.action_size)
        self.step = 0
        """The last one that is committed."""
        self.checkpoints: dict[int, Checkpoint] = {}
        self._draft: Draft | None = None

    def describe(self) -> dict[str, Any]:
        """What a client has to know before the first frame."""
        return self._engine.about

    # Steps

    async def run(self, turn: Turn) -> TurnResult:
        """Make a chunk of frames; they are the session's once that is committed.

        The inputs are actions, a row for each frame or one for all, instead of what is held.
        """
        engine = self._engine
        wanted = read(turn.parameters, StepParameters, PARAMETERS).check(
            engine.options, engine.architecture
        )
        rows: list[Held] = []
        async for payload in turn.inputs:
            rows += given_by(payload, engine.architecture)
        if rows and len(rows) not in (1, wanted.frames):
            raise InvalidRequest(f"{len(rows)} rows for {wanted.frames} frames", field="inputs")
        scene = self.scene
        if wanted.scene is not None:
            scene = engine.architecture.scenes.index(wanted.scene)
        if self._draft is not None:
            # It was finished, and never committed.
            self._draft.give_up()
        self._draft = draft = self._engine.draft(self.rollout, self)
        try:
            await self._take_blocks(turn, draft, wanted.frames)
            usage = await self._make(turn, wanted, rows, scene, draft)
        except BaseException:
            draft.give_up()
            raise

        def commit() -> None:
            before, self.rollout = self.rollout, draft.keep()
            self._engine.pool.drop(before.table.blocks, self)
            self.scene = scene
            self.step = self.step + 1 if turn.step is None else turn.step

        return TurnResult(usage, commit)

    async def _take_blocks(self, turn: Turn, draft: Draft, frames: int) -> None:
        """Have the blocks of all frames before the first is made; others may have to be parked for
        that. Raises CapacityExceeded."""
        engine, lacks = self._engine, draft.lacks(frames)
        for _ in range(TRIES):
            if engine.pool.free >= lacks:
                break
            needs = self.measure()
            needs[engine.device] += lacks * engine.block_bytes
            await turn.reserve(needs)
        draft.take(lacks)

    async def _make(
        self, turn: Turn, wanted: StepParameters, rows: list[Held], scene: int, draft: Draft
    ) -> dict[str, Any]:
        engine = self._engine
        begun_ms = engine.now_ms()
        due_ms = None if wanted.deadline_ms is None else begun_ms + wanted.deadline_ms
        most = wanted.steps or engine.options.steps
        least = min(most, engine.options.least_steps)
        made = calls = hurried = 0
        for index in range(wanted.frames):
            steps = most
            if due_ms is not None:
                steps = steps_of_next(
                    due_ms - engine.now_ms(),
                    wanted.frames - index,
                    engine.call_time.expected_ms,
                    most,
                    least,
                    first=index == 0,
                )
                if steps == 0:
                    break
            await turn.room()
            # Sampled now: whatever comes later counts for the next frame.
            held = rows[min(index, len(rows) - 1)] if rows else self.held
            frame, left = await engine.denoise(
                self, draft.rollout, held.values, scene, noise_levels(steps), due_ms
            )
            draft.append(frame, left)
            made, calls, hurried = made + 1, calls + steps, hurried + (steps < most)
            turn.emit(
                array_payload(
                    PayloadType.FRAMES,
                    frame.permute(1, 2, 0).contiguous(),
                    frame=draft.rollout.frames,
                    action_sequence=held.sequence,
                    steps=steps,
                    scene=engine.architecture.scenes[scene],
                    made_ms=round(engine.now_ms() - begun_ms, 3),
                )
            )
        engine.counted["frames"] += made
        engine.counted["hurried_frames"] += hurried
        engine.counted["cut_frames"] += wanted.frames - made
        return {
            "frames": made,
            "denoising_steps": calls,
            "hurried_frames": hurried,
            "cut_frames": wanted.frames - made,
        }

    # Between steps

    def update(self, payload: Payload) -> None:
        """What is held down from now on."""
        self.held = held_of(payload, self._engine.architecture, self.held)

    def configure(self, settings: dict[str, Any]) -> None:
        """Another scene, from the next chunk on. The rest of the settings is a reset's."""
        wanted = read(settings, WorldSettings, SETTINGS).check(self._engine.architecture)
        if (wanted.seed, wanted.frame) != (self._settings.seed, self._settings.frame):
            raise InvalidRequest("seed and frame are a reset's to change", field="settings")
        scene = self._engine.scene_of(wanted)
        self._settings, self.scene = wanted, scene

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`reset` with settings that replace those of the open; `checkpoint` keeps the state,
        `rewind` goes back to one that was kept; `release` lets go of all keys."""
        match name:
            case "reset":
                # Those of a reset are its own: a worker that takes over knows those of the open.
                changed = {**_plain(self._settings), **arguments}
                settings = read(changed, WorldSettings, SETTINGS).check(self._engine.architecture)
                rollout, scene = self._engine.begin(settings)
                self._let_go()
                self.rollout, self.scene = rollout, scene
                self._begun, self.step = settings, 0
                return {}
            case "checkpoint":
                return self._checkpoint()
            case "rewind":
                return self._rewind(read(arguments, Rewind, "rewind").step)
            case "release":
                self.held = self.held.released()
                return {}
        known = ", ".join((RESET, CHECKPOINT, REWIND, RELEASE))
        raise InvalidRequest(f"{name} is not a signal; there are {known}")

    def _checkpoint(self) -> dict[str, Any]:
        most = self._engine.options.checkpoints
        if not most:
            raise InvalidRequest("this world keeps no checkpoints", code="unsupported")
        pool = self._engine.pool
        pool.hold(self.rollout.table.blocks, self)
        if (before := self.checkpoints.pop(self.step, None)) is not None:
            pool.drop(before.rollout.table.blocks, self)
        self.checkpoints[self.step] = Checkpoint(self.rollout, self.scene)
        if len(self.checkpoints) > most:
            oldest = self.checkpoints.pop(min(self.checkpoints))
            pool.drop(oldest.rollout.table.blocks, self)
        return {"step": self.step, "kept": sorted(self.checkpoints)}

    def _rewind(self, step: int) -> dict[str, Any]:
        checkpoint = self.checkpoints.get(step)
        if checkpoint is None:
            raise no_checkpoint(step, sorted(self.checkpoints))
        pool = self._engine.pool
        pool.hold(checkpoint.rollout.table.blocks, self)
        pool.drop(self.rollout.table.blocks, self)
        self.rollout, self.scene, self.step = checkpoint.rollout, checkpoint.scene, step
        for later in [kept for kept in self.checkpoints if kept > step]:
            pool.drop(self.checkpoints.pop(later).rollout.table.blocks, self)
        return {"committed_step": step, "frame": self.rollout.frames}

    def fork(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> WorldSession:
        """A world that goes on from this one's state, with nothing held down and no checkpoint.

        `settings` replace this one's; a frame or a seed of its own cannot be among them. Raises
        InvalidRequest.
        """
        plain = _plain(self._begun)
        wanted = read({**plain, **settings}, WorldSettings, SETTINGS).check(
            self._engine.architecture
        )
        if (wanted.seed, wanted.frame) != (self._begun.seed, self._begun.frame):
            raise InvalidRequest("seed and frame are a reset's to change", field="settings")
        forked = self._engine.opened(wanted)
        forked.rollout, forked.step, forked.scene = self.rollout, self.step, self.scene
        if "scene" in settings:
            forked.scene = self._engine.scene_of(wanted)
        self._engine.pool.hold(forked.rollout.table.blocks, forked)
        return forked

    # Bytes

    def measure(self) -> dict[str, int]:
        """The blocks that are charged to it, and the frame that it begins with."""
        kept = [self.rollout, *(checkpoint.rollout for checkpoint in self.checkpoints.values())]
        starts = [rollout.start for rollout in kept]
        found = {HOST: storage_bytes(starts).get(HOST, 0)}
        device = self._engine.device
        blocks = self._engine.pool.charged(self) * self._engine.block_bytes
        found[device] = found.get(device, 0) + blocks
        return found

    async def snapshot(self, path: Path) -> None:
        """Write the state with its checkpoints. Cancelling leaves no file."""
        if self._draft is not None:
            self._draft.give_up()
            self._draft = None
        parked = Parked(
            self.rollout,
            self.scene,
            self.step,
            self.held,
            {step: (kept.rollout, kept.scene) for step, kept in self.checkpoints.items()},
            None if self._begun == self._settings else self._begun,
        )
        create(path)
        try:
            await to_the_end(asyncio.to_thread(write_state, path, parked, self._engine.cache))
        except BaseException:
            await to_the_end(asyncio.to_thread(path.unlink, missing_ok=True))
            raise

    def resume(self, parked: Parked) -> None:
        """Go on from a parked state, whose blocks are held in this session's name."""
        self.rollout, self.scene, self.step = parked.rollout, parked.scene, parked.step
        self.held = parked.held
        self._begun = parked.begun or self._settings
        self.checkpoints = {
            step: Checkpoint(rollout, scene)
            for step, (rollout, scene) in parked.checkpoints.items()
        }

    def kept(self) -> list[int]:
        """Those of the checkpoints."""
        return sorted(self.checkpoints)

    def close(self) -> None:
        """Everything goes."""
        self._let_go()
        self._engine.closed(self)

    def _let_go(self) -> None:
        """Of all blocks."""
        if self._draft is not None:
            self._draft.give_up()
            self._draft = None
        for rollout in (self.rollout, *(kept.rollout for kept in self.checkpoints.values())):
            self._engine.pool.drop(rollout.table.blocks, self)
        self.checkpoints = {}
        self.rollout = Rollout(0, None)


def _plain(settings: WorldSettings) -> dict[str, Any]:
    return {"seed": settings.seed, "scene": settings.scene, "frame": settings.frame}
