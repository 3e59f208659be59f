"""The file of a world: its weights, its architecture, and frames that rollouts begin with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protocol.errors import ModelFileError
from workers.engines.world.architecture import Architecture
from workers.engines.world.denoiser import Denoiser

STARTS = "starts"
"""Frames that rollouts may begin with, (frames, 3, height, width), bytes."""
START_SCENES = "start_scenes"


@dataclass(frozen=True)
class World:
    """A denoiser with frames to begin with; `digest` is of all that frames depend on."""

    denoiser: Denoiser
    starts: Tensor
    start_scenes: list[int]
    digest: str


def save_world(path: Path, world: World, record: dict[str, object]) -> None:
    """Write a world, its weights in half precision; `record` says how it was trained."""
    tensors = {name: value.half() for name, value in world.denoiser.state_dict().items()}
    tensors |= {STARTS: world.starts, START_SCENES: torch.tensor(world.start_scenes)}
    architecture = msgspec.json.encode(world.denoiser.architecture).decode()
    save_file(tensors, path, {"architecture": architecture, "record": json.dumps(record)})


def load_world(path: Path) -> World:
    """Read a world, in single precision. Raises ModelFileError for any other file."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, "pt") as file:
            named = (file.metadata() or {}).get("architecture", "")
            architecture = msgspec.json.decode(named, type=Architecture)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        starts, scenes = tensors.pop(STARTS), tensors.pop(START_SCENES)
        denoiser = Denoiser(architecture)
        denoiser.load_state_dict({name: value.float() for name, value in tensors.items()})
    except (OSError, SafetensorError, msgspec.DecodeError, KeyError, RuntimeError) as error:
        raise ModelFileError(f"{path} is no world that can be read: {error}") from error
    if starts.shape[1:] != (3, architecture.height, architecture.width) or not len(starts):
        raise ModelFileError(f"{path} has no frames to begin with")
    return World(denoiser.eval(), starts, scenes.tolist(), digest)


def random_world(architecture: Architecture, seed: int) -> World:
    """A world whose weights mean nothing, the same for the same seed."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        denoiser = Denoiser(architecture)
        for value in denoiser.parameters():
            # Nothing may be zero, or less of the network would matter than of a trained one.
            if not value.any():
                torch.nn.init.normal_(value, std=0.1)
        shape = (2 * len(architecture.scenes), 3, architecture.height, architecture.width)
        starts = torch.randint(256, shape, dtype=torch.uint8)
    finally:
        torch.random.set_rng_state(state)
    named = hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(architecture), seed]))
    scenes = [index % len(architecture.scenes) for index in range(len(starts))]
    return World(denoiser.eval(), starts, scenes, named.hexdigest())
