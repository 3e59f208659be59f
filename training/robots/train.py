"""Train the table-top policy: `python -m training.robots.train --out FOLDER`.

Learns from the scripted experts, first in their own states, then, in rounds, in the states that
the policy so far gets itself into. Writes the policy as ONNX, and a record of how it was made.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from training.robots.collect import ACTIONS, HORIZON, MOST_FROZEN, Act, Samples, collect
from training.robots.export import export
from training.robots.judge import judge
from training.robots.network import TabletopPolicy
from training.robots.simulator import TASKS, Simulation

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """How much of what. Episodes are of each task."""

    seed: int = 0
    expert_episodes: int = 150
    expert_steps: int = 2000
    rounds: int = 4
    round_episodes: int = 60
    round_steps: int = 4000
    last_steps: int = 1500
    batch: int = 64
    learning_rate: float = 1e-3
    judged_episodes: int = 100
    threads: int = 2


def train(
    policy: TabletopPolicy,
    samples: Samples,
    steps: int,
    recipe: Recipe,
    random: np.random.Generator,
    learning_rate: float,
    scenes: Tensor | None = None,
) -> list[float]:
    """Minimise the distance from the expert's chunks. The loss, averaged over each 100 steps.

    With `scenes`, what the eyes make of the samples, only what is behind the eyes learns, which
    is a hundred times as fast.
    """
    policy.train()
    learning = policy.parameters() if scenes is None else policy.body.parameters()
    optimizer = torch.optim.AdamW(learning, lr=learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=min(0.1, 100 / steps)
    )
    distance = nn.SmoothL1Loss(beta=0.1, reduction="none")
    # What is done next counts more than what is done at last.
    weight = torch.linspace(1.0, 0.5, HORIZON)[:, None]
    losses: list[float] = []
    total = 0.0
    for step in range(1, steps + 1):
        rows = random.integers(0, len(samples), recipe.batch)
        task = torch.from_numpy(samples.task[rows])
        frozen = random.random(len(rows)) < 0.5
        length = torch.from_numpy(samples.length[rows] * frozen)
        bound = samples.bound[rows]
        chunk = torch.from_numpy(np.where(frozen[:, None, None], bound, samples.chunk[rows]))
        prefix = torch.from_numpy(bound[:, :MOST_FROZEN])
        scene = _look(policy, samples, rows) if scenes is None else scenes[rows]
        made = policy.decide(scene, task, prefix, length)
        free = (torch.arange(HORIZON) >= length[:, None])[..., None]
        wrong = (distance(made, chunk) * weight * free).sum() / (free.sum() * ACTIONS)
        loss = wrong
        if scenes is None:
            places = torch.from_numpy(samples.places[rows])
            loss = wrong + 0.1 * nn.functional.mse_loss(policy.places(scene), places / 0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += wrong.item()
        if step % 100 == 0 or step == steps:
            losses.append(round(total / ((step - 1) % 100 + 1), 5))
            total = 0.0
            if scenes is None or step % 1000 == 0:
                print(f"step {step}/{steps}: loss {losses[-1]}, {loss.item():.4f}", flush=True)
    return losses


def _look(policy: TabletopPolicy, samples: Samples, rows: Rows) -> Tensor:
    front, wrist = (torch.from_numpy(each[rows]) for each in (samples.front, samples.wrist))
    return policy.look(front, wrist, torch.from_numpy(samples.state[rows]))


def scenes_of(policy: TabletopPolicy, samples: Samples) -> Tensor:
    """What the eyes make of all samples."""
    policy.eval()
    with torch.no_grad():
        parts = np.array_split(np.arange(len(samples)), max(1, len(samples) // 256))
        return torch.cat([_look(policy, samples, rows) for rows in parts])


def acting(policy: TabletopPolicy) -> Act:
    """The policy as one that acts."""
    prompts = [task.prompt for task in TASKS.values()]
    no_prefix = torch.zeros(1, MOST_FROZEN, ACTIONS)
    none = torch.zeros(1, dtype=torch.int64)

    def act(seen: Any) -> npt.NDArray[Any]:
        with torch.inference_mode():
            chunk = policy(
                torch.from_numpy(seen["observation/image"])[None],
                torch.from_numpy(seen["observation/wrist_image"])[None],
                torch.from_numpy(seen["observation/state"])[None],
                torch.tensor([prompts.index(seen["prompt"])]),
                no_prefix,
                none,
            )
        acted: npt.NDArray[Any] = chunk[0].numpy()
        return acted

    return act


def make(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Carry the recipe out; the record."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    random = np.random.default_rng(recipe.seed)
    policy = TabletopPolicy()
    began = time.monotonic()
    seconds: dict[str, float] = {}
    losses = []

    def took(what: str, since: float) -> None:
        seconds[what] = round(seconds.get(what, 0.0) + time.monotonic() - since, 1)
        print(f"{what}: {seconds[what]} s, {time.monotonic() - began:.0f} s in all", flush=True)

    since = time.monotonic()
    samples = collect(range(recipe.expert_episodes), random)
    took("collect", since)
    print(f"{len(samples)} samples", flush=True)
    since = time.monotonic()
    rate = recipe.learning_rate
    losses.append(train(policy, samples, recipe.expert_steps, recipe, random, rate))
    scenes = scenes_of(policy, samples)
    took("train", since)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(1, recipe.rounds + 1):
        torch.save(policy.state_dict(), out / "checkpoint.pt")
        since = time.monotonic()
        first = recipe.expert_episodes + (number - 1) * recipe.round_episodes
        assert first + recipe.round_episodes <= Simulation.training_seeds.stop
        policy.eval()
        seeds = range(first, first + recipe.round_episodes)
        more = collect(seeds, random, acting(policy), every=2)
        samples = Samples.joined([samples, more])
        took("collect", since)
        print(f"{len(samples)} samples", flush=True)
        since = time.monotonic()
        scenes = torch.cat([scenes, scenes_of(policy, more)])
        losses.append(train(policy, samples, recipe.round_steps, recipe, random, rate, scenes))
        took("train", since)
    since = time.monotonic()
    losses.append(train(policy, samples, recipe.last_steps, recipe, random, rate / 2))
    took("train", since)
    policy.eval()
    torch.save(policy.state_dict(), out / "checkpoint.pt")
    exported = export(policy, out / "tabletop.onnx")
    since = time.monotonic()
    judged = judge(acting(policy), recipe.judged_episodes)
    took("judge", since)
    record = {
        "command": "python -m training.robots.train " + " ".join(sys.argv[1:]),
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mujoco": mujoco.__version__,
            "numpy": np.__version__,
        },
        "parameters": sum(p.numel() for p in policy.parameters()),
        "samples": len(samples),
        "seconds": {**seconds, "all": round(time.monotonic() - began, 1)},
        "losses": losses,
        "exported": exported,
        "judged": judged,
    }
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is made")
    for name, value in asdict(Recipe()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value)
    options = vars(parser.parse_args())
    out = options.pop("out")
    print(json.dumps(make(Recipe(**options), out)["judged"], indent=1))


if __name__ == "__main__":
    main()
