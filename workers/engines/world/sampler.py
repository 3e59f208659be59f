"""From noise to a frame in few steps: Euler's method along the straight line between them.

The schedule is that of the flow-matching Euler samplers, from noise 1 to 0. Those of
`diffusers` keep the position in their schedule inside and step a whole batch at once: here each
session of a call is at a place of its own, and a step is one line.
"""

from __future__ import annotations

import torch
from torch import Tensor


def noise_levels(steps: int) -> list[float]:
    """The level before each step, and 0 after the last."""
    return [1.0 - index / steps for index in range(steps + 1)]


def first_noise(seed: int, frame: int, shape: tuple[int, ...]) -> Tensor:
    """What a frame begins with: a function of its number and its rollout's seed."""
    random = torch.Generator().manual_seed((seed * 1_000_003 + frame) % 2**63)
    return torch.randn(shape, generator=random)


def euler_step(noisy: Tensor, frame: Tensor, level: Tensor, following: Tensor) -> Tensor:
    """The frames at the `following` levels, (sessions) as `level`, going towards `frame`."""
    kept = (following / level)[:, None, None, None]
    return kept * noisy + (1.0 - kept) * frame
