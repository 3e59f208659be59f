"""Train the world of the arena: `python -m training.worlds.train --minutes 55 --out FILE`.

The denoiser is the engine's own. It sees sequences of frames, each with a noise level of its
own, and what is before them with noise added, or as it has drawn it itself: a rollout goes on
for hundreds of frames from frames that are never quite right.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from training.worlds import arena
from workers.engines.world.architecture import Architecture
from workers.engines.world.denoiser import Denoiser
from workers.engines.world.weights import World, save_world

LENGTH = 6
"""Frames of a sequence: a sink, and those that follow each other."""
WORLDS, HISTORY = 48, 160
"""Of what is drawn from at one time."""
SEQUENCES_OF_A_DRAW = 900
HELD_OUT = 1_000_000
"""Seeds from here on are never trained on."""


@dataclass(frozen=True)
class Sequences:
    """A batch: (sequences, frames, ...). `before` is the frame before each."""

    frames: Tensor
    before: Tensor
    actions: Tensor
    scenes: Tensor
    times: Tensor


def sequences(batch: int, seed: int) -> Iterator[Sequences]:
    """Batches without end, of new rollouts every so often."""
    random = np.random.default_rng(seed)
    while True:
        frames, keys, scenes = arena.rollouts(
            WORLDS, HISTORY, int(random.integers(HELD_OUT - 2)), scene_changes=0.01
        )
        for _ in range(SEQUENCES_OF_A_DRAW // batch):
            worlds = random.integers(WORLDS, size=(batch, 1))
            first = random.integers(1, HISTORY - LENGTH + 2, size=batch)
            times = first[:, None] + np.arange(LENGTH)
            # The sink is the first frame of a rollout: just before the others, or long before.
            far = random.random(batch) < 0.6
            times[far, 0] = random.integers(1, first[far] + 1)
            yield Sequences(
                _pixels(frames[worlds, times]),
                _pixels(frames[worlds, times - 1]),
                torch.from_numpy(keys[worlds, times - 1]),
                torch.from_numpy(scenes[worlds, times - 1]),
                torch.from_numpy(times),
            )


def _pixels(frames: arena.Bytes) -> Tensor:
    moved = np.moveaxis(frames, -1, 2).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(moved)) / 127.5 - 1.0


def loss_of(denoiser: Denoiser, batch: Sequences, itself: float, random: torch.Generator) -> Tensor:
    """The error of the frames, where they change above all.

    `itself` is the share of sequences whose frames follow on what the denoiser made.
    """
    count, length = batch.times.shape
    before = batch.before
    if itself > 0:
        with torch.no_grad():
            noise = torch.randn(batch.frames.shape, generator=random)
            ones = torch.ones(count, length)
            made = denoiser.sequence(
                noise, ones, batch.actions, batch.scenes, before, batch.times
            ).clamp(-1, 1)
        follows = (batch.times[:, 1:] - batch.times[:, :-1] == 1) & (
            torch.rand(count, 1, generator=random) < itself
        )
        before = before.clone()
        before[:, 1:] = torch.where(follows[..., None, None, None], made[:, :-1], before[:, 1:])
    blur = 0.4 * torch.rand(count, length, 1, 1, 1, generator=random)
    blur = blur * (torch.rand(blur.shape, generator=random) < 0.6)
    before = before + blur * torch.randn(before.shape, generator=random)
    noise = torch.rand(count, length, generator=random)
    noise = torch.where(torch.rand(noise.shape, generator=random) < 0.4, 1.0, noise)
    level = noise[..., None, None, None]
    gaussian = torch.randn(batch.frames.shape, generator=random)
    noisy = (1 - level) * batch.frames + level * gaussian
    made = denoiser.sequence(noisy, noise, batch.actions, batch.scenes, before, batch.times)
    changed = ((batch.frames - batch.before).abs().amax(2, keepdim=True) > 0.1).float()
    weights = 1 + 8 * changed
    return ((made - batch.frames).pow(2) * weights).mean()


def train(options: argparse.Namespace) -> None:
    """The whole of it."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    random = torch.Generator().manual_seed(options.seed)
    denoiser = Denoiser(Architecture(scenes=arena.SCENES, keys=arena.KEYS))
    average = copy.deepcopy(denoiser)
    optimiser = torch.optim.AdamW(
        denoiser.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    batches = sequences(options.batch, options.seed)
    began_s, step, recent, lines = time.monotonic(), 0, math.nan, []
    while (done := _done(options, step, time.monotonic() - began_s)) < 1:
        rate = options.rate * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * _fall(done))
        for group in optimiser.param_groups:
            group["lr"] = rate
        itself = 0.0 if done < 0.35 else 0.5
        loss = loss_of(denoiser, next(batches), itself, random)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimiser.step()
        step += 1
        recent = loss.item() if math.isnan(recent) else 0.97 * recent + 0.03 * loss.item()
        _follow(average, denoiser, min(0.997, step / (step + 10)))
        if step % options.report == 0 or step == 1:
            line = f"step {step} seconds {time.monotonic() - began_s:.0f} loss {recent:.5f}"
            lines.append(line)
            print(line, flush=True)
        if step % options.save == 0:
            _save(options, average, step, time.monotonic() - began_s, recent)
    _save(options, average, step, time.monotonic() - began_s, recent)


def _done(options: argparse.Namespace, step: int, seconds: float) -> float:
    """How much of the training is over, from 0 to 1."""
    if options.steps:
        return float(step / options.steps)
    return float(seconds / (options.minutes * 60))


def _fall(done: float) -> float:
    """The learning rate's course: level, then down."""
    return 1.0 if done < 0.3 else 0.5 * (1 + math.cos(math.pi * (done - 0.3) / 0.7))


@torch.no_grad()
def _follow(average: nn.Module, network: nn.Module, keep: float) -> None:
    for kept, value in zip(average.parameters(), network.parameters(), strict=True):
        kept.lerp_(value, 1 - keep)


def _save(
    options: argparse.Namespace, denoiser: Denoiser, step: int, seconds: float, loss: float
) -> None:
    frames, _, scenes = arena.rollouts(24, 1, HELD_OUT - 1)
    starts = torch.from_numpy(np.ascontiguousarray(np.moveaxis(frames[:, 0], -1, 1)))
    record: dict[str, object] = {
        "environment": "training/worlds/arena.py",
        "recipe": "training/worlds/train.py",
        "seed": options.seed,
        "batch": options.batch,
        "rate": options.rate,
        "steps": step,
        "seconds": round(seconds),
        "threads": options.threads,
        "loss": round(loss, 5),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    partial = options.out.with_suffix(".partial")
    save_world(partial, World(denoiser, starts, scenes[:, 0].tolist(), ""), record)
    partial.replace(options.out)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--steps", type=int, default=0, help="so many, whatever the time")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=20, help="steps between two lines")
    parser.add_argument("--save", type=int, default=200, help="steps between two files")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
