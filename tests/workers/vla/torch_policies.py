"""Policies of PyTorch for tests; nothing here can be imported without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workers.engines.vla.policy import State
from workers.engines.vla.torch_policy import TorchBatch, TorchInferred, TorchPolicy

HORIZON, DIMENSIONS, SENSED = 4, 2, 3


class Steering(torch.nn.Module):
    """A linear layer whose weights are tied to a second, and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SENSED, HORIZON * DIMENSIONS)
        self.again = torch.nn.Linear(SENSED, HORIZON * DIMENSIONS)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, sensed: torch.Tensor) -> torch.Tensor:
        actions: torch.Tensor = self.scale * (self.first(sensed) + self.again(sensed))
        return actions.reshape(-1, HORIZON, DIMENSIONS)


PARAMETERS_BYTES = 4 * (HORIZON * DIMENSIONS * (SENSED + 2) + 1)


class Drawing(TorchPolicy):
    """Adds noise to what its module says, and what it has said before to that.

    Remembers the last batch in `batch`, and whether gradients were on in `gradients`.
    """

    batch: TorchBatch
    gradients: bool

    def build(self) -> torch.nn.Module:
        torch.manual_seed(3)
        return Steering()

    def metadata(self) -> dict[str, Any]:
        return {"horizon": HORIZON}

    def initial_state(self, settings: dict[str, Any]) -> State:
        return {"sum": np.zeros((HORIZON, DIMENSIONS), np.float32), **self.random_state(settings)}

    def act(self, batch: TorchBatch) -> TorchInferred:
        self.batch = batch
        self.gradients = torch.is_grad_enabled()
        steered = self.module(batch.observations["state"].float())
        total = batch.states["sum"] + steered + batch.normal(HORIZON, DIMENSIONS)
        return TorchInferred(
            {"actions": total, "half": total.to(torch.bfloat16)[:, 0]}, {"sum": total}
        )


class Still(TorchPolicy):
    """Draws nothing and keeps nothing."""

    def build(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def act(self, batch: TorchBatch) -> TorchInferred:
        assert batch.generators == []
        return TorchInferred(
            {"actions": batch.observations["state"].reshape(batch.size, 1, -1)}, {}
        )
