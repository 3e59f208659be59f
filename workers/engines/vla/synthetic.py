"""A synthetic policy: it takes any observation, and its actions steer nothing.

They are a function of the observation and of those before it, so that an answer which came
from another robot, was made twice or was made from half a state shows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pydantic

from workers.engines.vla.policy import Batch, Inferred, Policy, State

SAMPLES = 256
"""Of an array, that its checksum is taken from: a policy that costs nothing must not read all."""


class SyntheticOptions(pydantic.BaseModel):
    """The form of its chunks, what it costs, and how far it looks back."""

    model_config = pydantic.ConfigDict(extra="forbid")

    horizon: int = pydantic.Field(default=50, ge=1, le=10_000)
    dimensions: int = pydantic.Field(default=32, ge=1, le=10_000)
    infer_ms: float = pydantic.Field(default=0.0, ge=0)
    """How long a call takes, whatever the size of its batch."""
    history: int = pydantic.Field(default=4, ge=1, le=100_000)
    """How many observations an answer depends on."""


class SyntheticAny(Policy):
    """Registered as `synthetic-any`."""

    Options: ClassVar[type[pydantic.BaseModel]] = SyntheticOptions

    def __init__(self, options: SyntheticOptions) -> None:
        super().__init__(options)
        steps = np.arange(1, options.horizon * options.dimensions + 1, dtype=np.float32)
        self._ramp = steps.reshape(options.horizon, options.dimensions) / steps[-1]

    def load(self) -> dict[str, Any]:
        """That it is synthetic, and the form of its chunks."""
        return {
            "policy": "synthetic-any",
            "action_horizon": self.options.horizon,
            "action_dim": self.options.dimensions,
        }

    def initial_state(self, settings: dict[str, Any]) -> State:
        """The checksums of the observations before; there were none."""
        return {"history": np.zeros(self.options.history, np.uint32)}

    def infer(self, batch: Batch) -> Inferred:
        """A ramp whose height is told by the observations."""
        if self.options.infer_ms:
            time.sleep(self.options.infer_ms / 1000.0)
        history = np.roll(batch.states["history"], -1, axis=1)
        for index in range(batch.size):
            history[index, -1] = _checksum(batch.observations, index)
        heights = [zlib.crc32(row.tobytes()) / 2**32 for row in history]
        scale = np.array(heights, np.float32)[:, np.newaxis, np.newaxis]
        return Inferred({"actions": scale * self._ramp}, {"history": history})


def _checksum(observation: Mapping[Any, Any], index: int) -> int:
    """A checksum of one session's part of a batch, whatever the order of its keys."""
    total = 0
    for key, value in observation.items():
        if isinstance(value, dict):
            part = _checksum(value, index)
        elif isinstance(value, np.ndarray):
            part = zlib.crc32(_sample(value[index]).tobytes())
        else:
            part = zlib.crc32(repr(value[index]).encode())
        total ^= zlib.crc32(repr(key).encode(), part)
    return total


def _sample(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = values.reshape(-1)
    return flat[:: max(1, flat.size // SAMPLES)]
