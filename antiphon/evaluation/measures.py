"""The figures of an evaluation and their definitions. All are taken at the robots.

success         share of the episodes in which the task was done within its steps, with the
                interval of 95 % that Wilson's score gives
step_time_ms    observation sent -> actions received, what is injected on the way included
jitter_ms       how much each period between two steps was off: the absolute deviation
misses          steps without a fresh action: there was none, or it was no answer of the policy
                to what the robot saw (`antiphon.fresh` is false)
chunks          fresh answers; of all answers `unused` came when the episode was over
not_fresh       answers that are not fresh, by the reason that the gateway gave
clock           steps taken / (rate x wall time x slow motion), of each robot over all its
                episodes: the world went on as it should if that is 1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Z95 = 1.959963984540054
CLOCK_TOLERANCE = 0.02


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % for a share."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    weight = Z95**2 / trials
    middle = (share + weight / 2) / (1 + weight)
    half = Z95 / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 99th percentile and the largest; None where there is no value."""
    if not values:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(np.asarray(values), [50, 99])
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "max": round(float(max(values)), 3),
    }


def task_figures(task: str, episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the episodes of one task under one condition."""
    steps = sum(episode["steps"] for episode in episodes)
    misses = sum(episode["misses"] for episode in episodes)
    success: dict[str, Any] = dict.fromkeys(("succeeded", "success", "success_95"))
    if all(episode["succeeded"] is not None for episode in episodes):
        succeeded = sum(episode["succeeded"] for episode in episodes)
        success = {
            "succeeded": succeeded,
            "success": succeeded / len(episodes),
            "success_95": wilson(succeeded, len(episodes)),
        }
    return {
        "task": task,
        "episodes": len(episodes),
        **success,
        "steps": steps,
        "step_time_ms": percentiles([each for one in episodes for each in one["took_ms"]]),
        "jitter_ms": percentiles([abs(each) for one in episodes for each in one["late_ms"]]),
        "misses": misses,
        "miss_share": misses / steps if steps else 0.0,
        "chunks": sum(episode["fresh"] for episode in episodes),
        "not_fresh": sum((Counter(episode["not_fresh"]) for episode in episodes), Counter()),
        "unused": sum(episode["unused"] for episode in episodes),
    }


def clocks(episodes: Sequence[dict[str, Any]]) -> list[float]:
    """The clock of each robot that played, by its number."""
    measured = []
    for robot in sorted({episode["robot"] for episode in episodes}):
        own = [episode for episode in episodes if episode["robot"] == robot]
        due_s = sum(episode["steps"] * episode["period_s"] for episode in own)
        elapsed_s = sum(episode["elapsed_s"] for episode in own)
        measured.append(round(due_s / elapsed_s, 4) if elapsed_s else 1.0)
    return measured


def keeps_time(clock: float) -> bool:
    """Whether a world went on as it should."""
    return abs(clock - 1.0) <= CLOCK_TOLERANCE
