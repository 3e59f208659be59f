"""How the kinds of LeRobot's policies are asked for a chunk.

Some draw random numbers and some look at observations before the last. LeRobot keeps both in
the policy, for one robot; here they belong to a session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from workers.engines.vla.policy import State
from workers.engines.vla.torch_policy import TorchBatch

OBSERVED = "observed"
"""The name in a session's state of how many observations it has had."""


class Head(ABC):
    """What is particular to a kind of policy."""

    draws = False
    """Whether it needs random numbers of a session's own."""
    all_images = False
    """Whether every image has to be there."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def horizon(self) -> int:
        """How many actions a chunk has."""
        horizon: int = self._config.chunk_size
        return horizon

    def initial_state(self) -> State:
        """What it keeps of a session beside random numbers."""
        return {}

    @abstractmethod
    def act(
        self, policy: Any, prepared: dict[str, Any], batch: TorchBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Chunks, still normalised, and states, for what LeRobot's processor has prepared."""


class Deterministic(Head):
    """The same observation has the same chunk."""

    def act(
        self, policy: Any, prepared: dict[str, Any], batch: TorchBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`predict_action_chunk`."""
        return policy.predict_action_chunk(prepared), {}


class Act(Deterministic):
    """ACT draws nothing when it infers."""

    all_images = True


class Pi0Fast(Deterministic):
    """Decodes tokens, here always the likeliest."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.temperature > 0:
            raise ValueError("a temperature above 0 is not served: it draws for all robots at once")

    @property
    def horizon(self) -> int:
        """How many actions a chunk has."""
        horizon: int = self._config.n_action_steps
        return horizon


class FlowMatching(Head):
    """SmolVLA, pi0 and pi0.5 begin with noise."""

    draws = True

    def act(
        self, policy: Any, prepared: dict[str, Any], batch: TorchBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`predict_action_chunk` with each session's own noise."""
        noise = batch.normal(self._config.chunk_size, self._config.max_action_dim)
        return policy.predict_action_chunk(prepared, noise=noise), {}


class Diffusion(Head):
    """Diffusion policies look at the last observations, and draw in each denoising step."""

    draws = True
    all_images = True

    @property
    def horizon(self) -> int:
        """How many actions a chunk has."""
        horizon: int = self._config.n_action_steps
        return horizon

    def initial_state(self) -> State:
        """The last observations by the names that the model has for them; there were none."""
        config = self._config
        shapes = {"observation.state": config.robot_state_feature.shape}
        if config.image_features:
            first, *_ = config.image_features.values()
            shapes["observation.images"] = (len(config.image_features), *first.shape)
        if config.env_state_feature:
            shapes["observation.environment_state"] = config.env_state_feature.shape
        histories = {
            name: np.zeros((config.n_obs_steps, *shape), np.float32)
            for name, shape in shapes.items()
        }
        return {OBSERVED: np.array(0, np.int64), **histories}

    def act(
        self, policy: Any, prepared: dict[str, Any], batch: TorchBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As `select_action` does at the end of its queue."""
        config, model = self._config, policy.diffusion
        if config.image_features:
            images = [prepared[name] for name in config.image_features]
            prepared = {**prepared, "observation.images": torch.stack(images, dim=1)}
        observed = batch.states[OBSERVED]
        seen = {
            name: _seen(history, prepared[name], observed == 0)
            for name, history in batch.states.items()
            if name != OBSERVED
        }
        noise = batch.normal(config.horizon, config.action_feature.shape[0])
        # `generate_actions` takes no generators, and the policy draws again in each step.
        chunks = model.conditional_sample(
            batch.size,
            global_cond=model._prepare_global_conditioning(seen),
            generator=batch.generators,
            noise=noise,
        )
        first = config.n_obs_steps - 1
        return chunks[:, first : first + self.horizon], {OBSERVED: observed + 1, **seen}


def _seen(history: torch.Tensor, newest: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The last observations with the newest; of a session that begins they are all that."""
    newest = newest.unsqueeze(1)
    moved = torch.cat([history[:, 1:], newest], dim=1)
    begins = begins.reshape(-1, *[1] * (moved.ndim - 1))
    return torch.where(begins, newest.expand_as(moved), moved)


_HEADS: dict[str, type[Head]] = {
    "act": Act,
    "diffusion": Diffusion,
    "pi0": FlowMatching,
    "pi05": FlowMatching,
    "pi0_fast": Pi0Fast,
    "smolvla": FlowMatching,
}


def head_of(config: Any) -> Head:
    """The head for a policy's config. Raises ValueError for a kind that is not served."""
    if config.type not in _HEADS:
        served = ", ".join(_HEADS)
        raise ValueError(f"a policy of type {config.type} is not served; served are {served}")
    return _HEADS[config.type](config)
