"""A world's state as a file: its blocks, each once, its frames, and what is known of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protocol.errors import SessionStateLost
from workers.engines.world.actions import Held
from workers.engines.world.blocks import BlockPool, Table
from workers.engines.world.cache import Cache
from workers.engines.world.rollout import Rollout
from workers.engines.world.settings import WorldSettings


@dataclass(frozen=True)
class Parked:
    """The whole state of a session."""

    rollout: Rollout
    scene: int
    step: int
    held: Held
    checkpoints: dict[int, tuple[Rollout, int]]
    begun: WorldSettings | None = None
    """With what a reset has begun; None: with what the session was opened with."""


class _Written(msgspec.Struct, frozen=True):
    """A rollout in a file: its blocks by their place there."""

    seed: int
    frames: int
    numbers: tuple[int, ...]
    blocks: tuple[int, ...]
    scene: int
    step: int
    started: bool


class _Head(msgspec.Struct, frozen=True):
    rollouts: list[_Written]
    """The session's own, then its checkpoints."""
    held: tuple[float, ...]
    sequence: int
    begun: WorldSettings | None = None


def create(path: Path) -> None:
    """Make the file, where none is yet, for nobody else to read."""
    path.touch(mode=0o600, exist_ok=False)


def write_state(path: Path, parked: Parked, cache: Cache) -> None:
    """Write to the file at `path`, which is there and empty."""
    rollouts = [(parked.step, parked.rollout, parked.scene)]
    rollouts += [(step, rollout, scene) for step, (rollout, scene) in parked.checkpoints.items()]
    blocks = sorted({block for _, rollout, _ in rollouts for block in rollout.table.blocks})
    places = {block: place for place, block in enumerate(blocks)}
    written = [
        _Written(
            rollout.seed,
            rollout.frames,
            rollout.table.numbers,
            tuple(places[block] for block in rollout.table.blocks),
            scene,
            step,
            rollout.start is not None,
        )
        for step, rollout, scene in rollouts
    ]
    head = _Head(written, parked.held.values, parked.held.sequence, parked.begun)
    cached, pictures = cache.read(blocks)
    content = {"cached": cached, "pictures": pictures}
    starts = [rollout.start for _, rollout, _ in rollouts if rollout.start is not None]
    if starts:
        # They are all the same.
        content["start"] = starts[0]
    save_file(content, path, {"head": msgspec.json.encode(head).decode()})


def read_state(path: Path) -> tuple[Parked, tuple[Tensor, Tensor]]:
    """The state in the file at `path`, its tables naming blocks by their place in the second
    result, which is as `Cache.read` has it. Raises SessionStateLost for any other file."""
    try:
        with safe_open(path, "pt") as file:
            head = msgspec.json.decode((file.metadata() or {}).get("head", ""), type=_Head)
            cached, pictures = file.get_tensor("cached"), file.get_tensor("pictures")
            start = file.get_tensor("start") if "start" in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise SessionStateLost(f"the parked state cannot be read: {error}") from error
    rollouts = [
        Rollout(
            one.seed,
            start if one.started else None,
            one.frames,
            Table(one.numbers, one.blocks),
        )
        for one in head.rollouts
    ]
    kept = {
        one.step: (rollout, one.scene)
        for one, rollout in zip(head.rollouts[1:], rollouts[1:], strict=True)
    }
    own = head.rollouts[0]
    held = Held(head.held, head.sequence)
    state = Parked(rollouts[0], own.scene, own.step, held, kept, head.begun)
    return state, (cached, pictures)


def placed(parked: Parked, blocks: list[int], pool: BlockPool, holder: Hashable) -> Parked:
    """The state with its tables naming `blocks` of the pool, each held once: as often as the
    state has it, after this."""

    def moved(rollout: Rollout) -> Rollout:
        table = Table(rollout.table.numbers, tuple(blocks[place] for place in rollout.table.blocks))
        pool.hold(table.blocks, holder)
        return replace(rollout, table=table)

    found = replace(
        parked,
        rollout=moved(parked.rollout),
        checkpoints={
            step: (moved(rollout), scene) for step, (rollout, scene) in parked.checkpoints.items()
        },
    )
    pool.drop(blocks, holder)
    return found
