"""The model of a worker: its world and the cache, and one call for several sessions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import EngineFailed
from workers.engines.world.architecture import Architecture
from workers.engines.world.blocks import Layout
from workers.engines.world.cache import Cache
from workers.engines.world.denoiser import Denoiser
from workers.engines.world.rollout import Rollout
from workers.engines.world.sampler import euler_step, first_noise, noise_levels
from workers.engines.world.settings import WorldOptions, WorldSettings
from workers.engines.world.weights import World, load_world, random_world

TINY = Architecture(
    height=16,
    width=16,
    channels=8,
    dim=32,
    heads=2,
    layers=2,
    window=5,
    scenes=("one", "two"),
    axes=("turn",),
)
"""The architecture of random worlds."""


@dataclass(frozen=True)
class Denoising:
    """One denoising step of one session's frame."""

    noisy: Tensor
    level: float
    following: float
    actions: tuple[float, ...]
    scene: int
    ring: tuple[Tensor, ...]
    blocks: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Denoised:
    """What became of it: the frame at the following level, and what it leaves in the cache."""

    frame: Tensor
    left: Tensor


class Model:
    """A world with the cache of all its sessions. It is called in one thread."""

    def __init__(self, world: World, options: WorldOptions) -> None:
        torch.set_num_threads(options.threads)
        self.device = torch.device(options.device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.architecture = a = world.denoiser.architecture
        self.world = world
        self.denoiser: Denoiser = world.denoiser.to(self.device)
        self.layout = Layout(options.block_frames, a.window, a.sinks, a.ring)
        self.cache = Cache(a, options.blocks, options.block_frames, self.device)

    @property
    def weight_bytes(self) -> int:
        """Of the network."""
        return sum(value.nbytes for value in self.denoiser.state_dict().values())

    def begin(self, settings: WorldSettings) -> tuple[Rollout, int]:
        """A rollout of no frames, and its scene."""
        a, world = self.architecture, self.world
        chosen = settings.seed % len(world.starts)
        scene = 0 if settings.frame is not None else world.start_scenes[chosen]
        if settings.scene is not None:
            scene = a.scenes.index(settings.scene)
            fitting = [i for i, one in enumerate(world.start_scenes) if one == scene]
            chosen = fitting[settings.seed % len(fitting)] if fitting else chosen
        frame = world.starts[chosen]
        if settings.frame is not None:
            pixels = torch.frombuffer(bytearray(settings.frame), dtype=torch.uint8)
            frame = pixels.view(a.height, a.width, 3).permute(2, 0, 1)
        return Rollout(settings.seed, frame.clone().contiguous()), scene

    def ring(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """The last frames, newest first; before the first there was only the start."""
        found = [
            self.cache.picture(*self.layout.place(rollout.table, frame))
            for frame in range(rollout.frames)[: -self.layout.ring - 1 : -1]
        ]
        if rollout.start is not None:
            found += [rollout.start] * (self.layout.ring - len(found))
        return tuple(found)

    def denoising(
        self, rollout: Rollout, actions: tuple[float, ...], scene: int, levels: tuple[float, ...]
    ) -> list[Denoising]:
        """The steps of the frame after `rollout`, of which only the first knows its noise."""
        a, layout, table = self.architecture, self.layout, rollout.table
        missing = layout.slots - len(table.blocks)
        blocks = table.blocks + (self.cache.empty,) * missing
        offsets = tuple(layout.offsets(table, rollout.frames))
        noisy = first_noise(rollout.seed, rollout.frames, (3, a.height, a.width))
        ring = self.ring(rollout)
        return [
            Denoising(noisy, level, following, actions, scene, ring, blocks, offsets)
            for level, following in itertools.pairwise(levels)
        ]

    @torch.inference_mode()
    def denoise(self, batch: Sequence[Denoising]) -> list[Denoised]:
        """One call. What a session gets does not depend on the others.

        Raises EngineFailed where anything of it is not a number.
        """
        device = self.device
        levels = torch.tensor([one.level for one in batch], device=device)
        following = torch.tensor([one.following for one in batch], device=device)
        noisy = torch.stack([one.noisy for one in batch]).to(device)
        ring = torch.stack([torch.cat([frame.to(device) for frame in one.ring]) for one in batch])
        made, left = self.denoiser(
            noisy,
            levels,
            torch.tensor([one.actions for one in batch], device=device),
            torch.tensor([one.scene for one in batch], device=device),
            ring / 127.5 - 1.0,
            self.cache.past([one.blocks for one in batch], [one.offsets for one in batch]),
        )
        frames = euler_step(noisy, made.clamp(-1.0, 1.0), levels, following)
        if not bool(frames.isfinite().all() and left.isfinite().all()):
            raise EngineFailed("the denoiser made something that is no picture")
        frames, left = frames.cpu(), left.movedim(2, 0)
        return [
            Denoised(frame.clone(), one.clone()) for frame, one in zip(frames, left, strict=True)
        ]

    def warm_up(self) -> None:
        """A call, so that the first session does not wait for libraries."""
        rollout, scene = self.begin(WorldSettings())
        still = (0.0,) * self.architecture.action_size
        self.denoise(self.denoising(rollout, still, scene, tuple(noise_levels(1))))


def picture(frame: Tensor) -> Tensor:
    """A frame without noise as bytes, as clients and the next frame see it."""
    return ((frame + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def load_model(options: WorldOptions) -> Model:
    """The model that `options` name, ready. Raises ModelFileError."""
    if options.weights is not None:
        world = load_world(options.weights)
    else:
        assert options.random is not None
        world = random_world(TINY, options.random)
    model = Model(world, options)
    model.warm_up()
    return model
