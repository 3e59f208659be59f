"""A policy that steers the point of `tests.synthetic.point` by what it sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.synthetic.point import SIZE, SPEED
from workers.engines.vla import Batch, Inferred, Policy
from workers.engines.vla.policy import State

HORIZON = 8
PREFIX = 4
NOISE = 0.001


class Steering(Policy):
    """Straight to the goal. Where it sees no point or no goal it stays.

    Its actions are a little noisy; the noise is told by how many observations there were, which
    is its state. It takes a frozen prefix.
    """

    def load(self) -> dict[str, Any]:
        return {"action_prefix": [PREFIX, 2], "scale": np.float32(SPEED)}

    def initial_state(self, settings: dict[str, Any]) -> State:
        return {"count": np.zeros((), np.int64)}

    def infer(self, batch: Batch) -> Inferred:
        chunks = []
        seen = batch.observations
        for index in range(batch.size):
            frozen = np.zeros((0, 2), np.float32)
            if "action_prefix" in seen:
                length = seen["action_prefix_length"][index]
                frozen = seen["action_prefix"][index, :length]
            rng = np.random.default_rng(int(batch.states["count"][index]))
            chunk = plan(seen["observation/image"][index], frozen)
            noise = rng.normal(0, NOISE, chunk.shape).astype(np.float32)
            noise[: len(frozen)] = 0
            chunks.append(chunk + noise)
        return Inferred({"actions": np.stack(chunks)}, {"count": batch.states["count"] + 1})


def plan(image: npt.NDArray[Any], frozen: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A chunk that begins with the frozen actions."""
    chunk = np.zeros((HORIZON, 2), np.float32)
    chunk[: len(frozen)] = frozen
    point, goal = (np.argwhere(image[:, :, channel]) for channel in (0, 1))
    if len(point) == 0 or len(goal) == 0:
        return chunk
    left = (goal[0] - point[0]) / (SIZE / 2) - frozen.sum(axis=0)
    for step in range(len(frozen), HORIZON):
        distance = float(np.linalg.norm(left))
        chunk[step] = left * min(1.0, SPEED / max(distance, 1e-9))
        left = left - chunk[step]
    return chunk
