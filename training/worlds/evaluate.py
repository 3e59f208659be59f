"""Measure a trained world: `python -m training.worlds.evaluate WEIGHTS --out FOLDER`.

Rollouts of held-out seeds run free through the engine, from one true frame each. What the
player did is recovered by finding the square in frames that follow each other: its place in the
first, and the keys, say where it must be in the second, on each axis, walls included. By chance
is the same with the keys of other moments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.arrays import array_of, array_payload
from protocol.payloads import Payload, PayloadType
from training.worlds import arena
from training.worlds.pictures import strip, write_picture, write_video
from training.worlds.recovery import recovered
from training.worlds.train import HELD_OUT
from workers.engine import EngineSession, Turn
from workers.engines.world import WorldEngine, WorldOptions
from workers.engines.world.weights import load_world, save_world

CHUNK = 8
FILMED, RATE_HZ = 100, 10.0
"""Frames of the video, and how fast it is shown."""
SHORT = 16
"""Frames over which pixels are held against the true ones."""


@dataclass(frozen=True)
class Rollouts:
    """True frames and generated ones, (worlds, frames, height, width, 3), from the same first
    frame on, and the keys that led to them."""

    true: arena.Bytes
    made: arena.Bytes
    keys: npt.NDArray[np.float32]


async def generate(engine: WorldEngine, worlds: int, frames: int, seed: int) -> Rollouts:
    """Rollouts of `worlds` worlds, all at once."""
    true, keys, scenes = arena.rollouts(worlds, frames, seed)
    made = np.empty_like(true)
    made[:, 0] = true[:, 0]

    async def play(world: int) -> None:
        scene = arena.SCENES[int(scenes[world, 0])]
        start = true[world, 0].tobytes()
        settings = {"seed": world, "scene": scene, "frame": start}
        session = engine.open(str(world), settings, lambda event, arguments: None)
        for first in range(0, frames, CHUNK):
            rows = keys[world, first : first + CHUNK]
            pieces = await step(session, rows, first // CHUNK + 1)
            for offset, piece in enumerate(pieces):
                made[world, first + 1 + offset] = array_of(piece)
        session.close()

    await asyncio.gather(*(play(world) for world in range(worlds)))
    return Rollouts(true, made, keys)


async def step(session: EngineSession, rows: Any, number: int) -> list[Payload]:
    """A committed step with a row of actions for each frame."""

    async def inputs() -> AsyncIterator[Payload]:
        yield array_payload(PayloadType.ACTIONS, rows)

    pieces: list[Payload] = []
    parameters = {"frames": len(rows)}
    turn = Turn(number, "default", parameters, inputs(), pieces.append, step=number)
    result = await session.run(turn)
    assert result.commit is not None
    result.commit()
    return pieces


def measures(rollouts: Rollouts, seed: int) -> dict[str, float]:
    """What a trained world is measured by."""
    true, made, keys = rollouts.true, rollouts.made, rollouts.keys
    right, found = recovered(made, keys)
    shuffled = np.random.default_rng(seed).permutation(keys, axis=1)
    chance, _ = recovered(made, shuffled)
    _, ball = arena.find_ball(made)
    measured = {
        "worlds": float(len(made)),
        "frames": float(keys.shape[1]),
        "action_recovered": float(right.mean()),
        "action_recovered_by_chance": float(chance.mean()),
        "player_found": float(found.mean()),
        "ball_found": float(ball.mean()),
    }
    if keys.shape[1] >= 600:
        measured["action_recovered_500_600"] = float(right[:, 500:600].mean())
        measured["player_found_500_600"] = float(found[:, 500:600].mean())
    first = true[:, 1 : SHORT + 1].astype(np.float64)
    last = true[:, :-1][:, :SHORT].astype(np.float64)
    changed = (np.abs(first - last).max(-1) > 12)[..., None]
    error = np.abs(made[:, 1 : SHORT + 1] - first) * changed
    repeated = np.abs(last - first) * changed
    measured["error_of_repeating"] = float(error.sum() / repeated.sum())
    measured["mean_error"] = float(np.abs(made[:, 1 : SHORT + 1] - first).mean())
    return measured


async def evaluate(options: argparse.Namespace, weights: Path) -> dict[str, float]:
    """All of it."""
    engine = WorldEngine.create(
        WorldOptions(
            weights=weights,
            batch=options.worlds,
            blocks=32 * options.worlds,
            steps=options.steps,
        )
    )
    await engine.load()
    try:
        begun_s = time.monotonic()
        rollouts = await generate(engine, options.worlds, options.frames, HELD_OUT + options.seed)
        seconds = time.monotonic() - begun_s
    finally:
        await engine.shutdown()
    measured = measures(rollouts, options.seed)
    measured["calls_per_frame"] = engine.counted["calls"] / engine.counted["frames"]
    measured["frames_per_second"] = engine.counted["frames"] / seconds
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        true, made = rollouts.true, rollouts.made
        write_picture(options.out / "strip.png", strip(true[:4], made[:4]))
        shown = slice(0, FILMED)
        write_video(options.out / "video.webp", true[:4, shown], made[:4, shown], rate_hz=RATE_HZ)
        (options.out / "measures.json").write_text(json.dumps(measured, indent=2) + "\n")
    return measured


def zeroed(weights: Path, target: Path) -> None:
    """Write the same world with all of its weights set to zero: what draws is the weights."""
    world = load_world(weights)
    with torch.no_grad():
        for value in world.denoiser.parameters():
            value.zero_()
    save_world(target, world, {"zeroed": str(weights)})


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--out", type=Path, help="a folder for the figures and a picture")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--steps", type=int, default=2, help="denoising steps of a frame")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zeroed", action="store_true", help="with all weights set to zero")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="antiphon-world-") as folder:
        weights: Path = options.weights
        if options.zeroed:
            weights = Path(folder) / weights.name
            zeroed(options.weights, weights)
        for name, value in asyncio.run(evaluate(options, weights)).items():
            print(f"{name} {value:.4g}")


if __name__ == "__main__":
    main()
