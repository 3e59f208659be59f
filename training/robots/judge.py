"""How often the policy succeeds, in episodes that it was not trained on, with what it sees taken
away or not."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np

from training.robots.collect import Act
from training.robots.simulator import TASKS, Images, Simulation

FIRST_SEED = 1_000_000
EXECUTED = 4
"""Actions of each chunk that are carried out before the next one is asked for."""


def wilson(successes: int, of: int) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion (Wilson 1927)."""
    z, share = 1.959964, successes / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return middle - half, middle + half


def judge(act: Act, episodes: int, first_seed: int = FIRST_SEED) -> dict[str, Any]:
    """Successes by task and by what the images were, asked without any delay."""
    assert first_seed >= Simulation.training_seeds.stop
    judged: dict[str, Any] = {}
    for task in TASKS:
        for images in get_args(Images):
            simulation = Simulation(task, first_seed, images=images)
            successes = 0
            steps = []
            for seed in range(first_seed, first_seed + episodes):
                simulation.reset(seed)
                while not simulation.over:
                    for action in act(simulation.observe())[:EXECUTED]:
                        if not simulation.over:
                            simulation.step(action)
                successes += simulation.succeeded
                steps.append(simulation.steps)
            simulation.close()
            low, high = wilson(successes, episodes)
            judged[f"{task}, {images}"] = {
                "episodes": episodes,
                "successes": successes,
                "interval": [round(low, 3), round(high, 3)],
                "mean_steps": round(float(np.mean(steps)), 1),
            }
            print(task, images, judged[f"{task}, {images}"], flush=True)
    return judged
