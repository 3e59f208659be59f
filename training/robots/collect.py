"""Episodes to learn from: what was seen, and what the expert would do, at each step.

Who acts is the expert with some noise, or the policy as it is so far (DAgger): then what is
learned are the states that it gets itself into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.robots.expert import plan
from training.robots.simulator import TASKS, Simulation

HORIZON = 10
ACTIONS = 4
MOST_FROZEN = 6
"""Actions of a chunk that may be decided before it is asked for."""

Act = Callable[[Mapping[str, Any]], npt.NDArray[Any]]
"""A chunk of actions, (horizon, 4), from an observation."""


@dataclass
class Samples:
    """One entry a step, of as many episodes as there were.

    `front` and `wrist` are uint8 (n, 64, 64, 3), `state` float32 (n, 4), `task` int64 (n,) into
    TASKS, `chunk` float32 (n, horizon, 4) of the expert, and `places` float32 (n, 6): where block
    and ball are, from the hand, in metres. `bound` is like `chunk`, for an expert whose first
    int64 (n,) `length` actions were decided before, by a plan that is out of date.
    """

    front: npt.NDArray[np.uint8]
    wrist: npt.NDArray[np.uint8]
    state: npt.NDArray[np.float32]
    task: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.float32]
    places: npt.NDArray[np.float32]
    bound: npt.NDArray[np.float32]
    length: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.task)

    @staticmethod
    def joined(parts: Iterable[Samples]) -> Samples:
        """All of them."""
        parts = list(parts)
        names = Samples.__dataclass_fields__
        return Samples(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def collect(
    seeds: Iterable[int], random: np.random.Generator, act: Act | None = None, every: int = 1
) -> Samples:
    """Episodes of all tasks with these seeds, one sample in `every` steps.

    The expert acts, with noise, or `act` does, and plays a part of each of its chunks.
    """
    rows: list[tuple[Any, ...]] = []
    for task_number, task in enumerate(TASKS):
        simulation: Simulation | None = None
        for seed in seeds:
            if simulation is None:
                simulation = Simulation(task, seed)
            simulation.reset(seed)
            chunk: npt.NDArray[Any] = np.zeros((0, ACTIONS))
            drift = np.zeros(3)
            plans: deque[npt.NDArray[Any]] = deque(maxlen=HORIZON - MOST_FROZEN + 1)
            """What was planned last, each from its step on."""
            while not simulation.over:
                sampled = simulation.steps % every == 0
                asks = act is not None and len(chunk) == 0
                seen = simulation.observe() if sampled or asks else None
                wanted = plan(simulation, HORIZON)
                plans.append(wanted)
                if sampled:
                    decided = _decided(plans, random)
                    assert seen is not None
                    hand = simulation.hand
                    places = np.concatenate([simulation.block - hand, simulation.ball - hand])
                    rows.append(
                        (
                            seen["observation/image"],
                            seen["observation/wrist_image"],
                            seen["observation/state"],
                            task_number,
                            wanted,
                            places,
                            plan(simulation, HORIZON, decided),
                            len(decided),
                        )
                    )
                if act is None:
                    # Astray for a while, so that the way back is learned as well.
                    if random.random() < 0.08:
                        drift = random.normal(0.0, 0.5, 3) * (random.random() < 0.5)
                    noise = np.array([*(drift + random.normal(0.0, 0.15, 3)), 0.0])
                    simulation.step(wanted[0] + noise)
                    continue
                if len(chunk) == 0:
                    assert seen is not None
                    chunk = act(seen)
                    plans[-1] = chunk
                    chunk = chunk[: int(random.integers(1, 6))]
                simulation.step(chunk[0])
                chunk = chunk[1:]
        assert simulation is not None
        simulation.close()
    columns = list(zip(*rows, strict=True))
    return Samples(
        np.stack(columns[0]),
        np.stack(columns[1]),
        np.stack(columns[2]),
        np.array(columns[3], np.int64),
        np.stack(columns[4]).astype(np.float32),
        np.stack(columns[5]).astype(np.float32),
        np.stack(columns[6]).astype(np.float32),
        np.array(columns[7], np.int64),
    )


def _decided(
    plans: Sequence[npt.NDArray[Any]], random: np.random.Generator
) -> npt.NDArray[np.float32]:
    """1 to MOST_FROZEN actions from now on, of a plan that was made some steps ago."""
    ago = int(random.integers(0, len(plans)))
    length = int(random.integers(1, MOST_FROZEN + 1))
    decided = plans[-1 - ago][ago : ago + length].astype(np.float32)
    if random.random() < 0.5:
        decided[:, :3] += random.normal(0.0, 0.3, (length, 3))
    return decided.clip(-1.0, 1.0)
