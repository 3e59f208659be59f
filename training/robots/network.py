"""The policy: two images, the hand, the task and what is already decided, to a chunk of actions.

Convolutions find points of interest (spatial soft-argmax), and a perceptron makes actions of
where they are. While it is trained it is also asked where block and ball are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.robots.collect import ACTIONS, HORIZON, MOST_FROZEN
from training.robots.simulator import TASKS

POINTS = 32
WIDTH = 256
PLACES = 6


class Eyes(nn.Module):
    """Where things are in an image, (n, 3, 64, 64) from 0 to 1, and how much they are there."""

    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, POINTS, 1),
        )
        self.sharpness = nn.Parameter(torch.ones(()))
        steps = torch.linspace(-1.0, 1.0, 32)
        self.register_buffer("grid", torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images).flatten(2)
        weights = torch.softmax(self.sharpness * maps, dim=-1)
        points = weights @ self.grid.reshape(-1, 2)
        there = torch.tanh(maps.amax(dim=-1) / 4.0)
        return torch.cat([points.flatten(1), there], dim=-1)


class TabletopPolicy(nn.Module):
    """About 0.2 M parameters."""

    centre: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.front = Eyes()
        self.wrist = Eyes()
        seen = 2 * 3 * POINTS
        self.places = nn.Sequential(
            nn.Linear(seen + ACTIONS, 128), nn.ReLU(), nn.Linear(128, PLACES)
        )
        given = seen + ACTIONS + len(TASKS) + HORIZON * (ACTIONS + 1)
        self.body = nn.Sequential(
            nn.Linear(given, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, HORIZON * ACTIONS),
        )
        self.register_buffer("centre", torch.tensor([0.0, 0.0, 0.15, 0.5]))
        self.register_buffer("spread", torch.tensor([0.2, 0.12, 0.1, 0.5]))

    def look(self, front: Tensor, wrist: Tensor, state: Tensor) -> Tensor:
        """What is known of the scene: points in both images, and the hand."""
        images = [
            eyes(image.permute(0, 3, 1, 2).to(torch.float32) / 255.0)
            for eyes, image in ((self.front, front), (self.wrist, wrist))
        ]
        return torch.cat([*images, (state - self.centre) / self.spread], dim=-1)

    def decide(self, scene: Tensor, task: Tensor, prefix: Tensor, length: Tensor) -> Tensor:
        """A chunk, (n, horizon, 4), that begins with the first `length` actions of `prefix`,
        (n, MOST_FROZEN, 4)."""
        prefix = nn.functional.pad(prefix, (0, 0, 0, HORIZON - MOST_FROZEN))
        index = torch.arange(HORIZON, device=scene.device)
        frozen = (index < length[:, None])[..., None]
        given = torch.where(frozen, prefix, torch.zeros_like(prefix))
        tasks = torch.eye(len(TASKS), device=scene.device)[task]
        told = torch.cat([given, frozen.to(given.dtype)], dim=-1).flatten(1)
        chunk = self.body(torch.cat([scene, tasks, told], dim=-1))
        return torch.where(frozen, prefix, chunk.reshape(-1, HORIZON, ACTIONS))

    def forward(
        self,
        front: Tensor,
        wrist: Tensor,
        state: Tensor,
        task: Tensor,
        prefix: Tensor,
        length: Tensor,
    ) -> Tensor:
        """`front`, `wrist`: uint8 (n, 64, 64, 3); `state`: float32 (n, 4); `task`: int64 (n,);
        `prefix`: float32 (n, MOST_FROZEN, 4), of which int64 (n,) `length` count."""
        chunk = self.decide(self.look(front, wrist, state), task, prefix, length)
        return chunk.clamp(-1.0, 1.0)
