"""LeRobot by itself: what its own calls answer to observations of one robot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.utils import prepare_observation_for_inference

from tests.lerobot.tiny import HEIGHT, JOINTS, TOP, WIDTH, WRIST


class Reference:
    """A policy and its processors from `folder`, with random numbers from `seed` on."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        config = PreTrainedConfig.from_pretrained(folder)
        self._policy = get_policy_class(config.type).from_pretrained(folder, config=config)
        self._before, self._after = make_pre_post_processors(config, pretrained_path=str(folder))
        torch.manual_seed(seed)

    def chunk(self, observation: dict[str, Any]) -> npt.NDArray[np.float32]:
        """The chunk for the robot's next observation."""
        arrays = {name: values for name, values in observation.items() if name != "prompt"}
        frame = prepare_observation_for_inference(
            arrays, torch.device("cpu"), task=observation.get("prompt")
        )
        batch = self._before(frame)
        if self._policy.name == "diffusion":
            # It plans where its queue of actions is at its end.
            queue = self._policy._queues["action"]
            actions = [self._policy.select_action(batch), *queue]
            queue.clear()
        else:
            actions = self._policy.predict_action_chunk(batch).unbind(1)
        return np.stack([self._after(action)[0].numpy() for action in actions])


def observations(count: int, robot: int = 0) -> list[dict[str, Any]]:
    """What a robot senses, as cameras and joints give it."""
    random = np.random.default_rng(robot)
    return [
        {
            "observation.state": random.normal(size=JOINTS).astype(np.float32),
            TOP: random.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8),
            WRIST: random.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8),
            "prompt": "pick up the red cup" if robot % 2 == 0 else "put it down now",
        }
        for _ in range(count)
    ]
