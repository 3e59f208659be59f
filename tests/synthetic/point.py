"""A synthetic simulation: a point on a square that has to come to rest at a goal.

It runs in the robots' environment: numpy is all that it needs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 64
SPEED = 0.06
"""How far it comes in one step, at most."""
NEAR = 0.1
REST = 10
"""Steps that it has to stay near the goal: to pass by is not to arrive."""


def pixel(position: npt.NDArray[Any]) -> tuple[int, int]:
    """Where on the image a position of the square (-1 to 1) is seen."""
    x, y = np.clip((position + 1) / 2 * SIZE, 0, SIZE - 1).astype(int)
    return int(x), int(y)


class Point:
    """`near`: the goal may be anywhere; `corner`: it is in a corner."""

    tasks = ("near", "corner")
    rate_hz = 50.0
    max_steps = 60
    training_seeds = range(0, 1000)

    def __init__(self, task: str, seed: int) -> None:
        self._corner = task == "corner"
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Begin at least 0.8 away from the goal."""
        rng = np.random.default_rng(seed)
        self._near = 0
        while True:
            self._position = rng.uniform(-0.9, 0.9, 2)
            self._goal = rng.uniform(-0.9, 0.9, 2)
            if self._corner:
                self._goal = np.sign(self._goal) * 0.8
            if np.linalg.norm(self._goal - self._position) > 0.8:
                return

    def observe(self) -> dict[str, Any]:
        """An image: the point in its first channel, the goal in its second."""
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        image[(*pixel(self._position), 0)] = 255
        image[(*pixel(self._goal), 1)] = 255
        return {"observation/image": image, "prompt": "go there"}

    def hold(self, last: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """It stays where it is."""
        return np.zeros(2, np.float32)

    def step(self, action: npt.NDArray[Any]) -> None:
        """Move."""
        length = float(np.linalg.norm(action))
        self._position = self._position + action * min(1.0, SPEED / max(length, 1e-9))
        near = float(np.linalg.norm(self._goal - self._position)) < NEAR
        self._near = self._near + 1 if near else 0

    @property
    def succeeded(self) -> bool:
        """Whether it is at rest at its goal."""
        return self._near >= REST


class Stuck(Point):
    """It takes longer for a step than the clock gives it."""

    def step(self, action: npt.NDArray[Any]) -> None:
        """Move late."""
        time.sleep(1.5 / self.rate_hz)
        super().step(action)
