"""The table-top world and its experts, and twenty steps of the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from training.robots.expert import plan
from training.robots.judge import FIRST_SEED, wilson
from training.robots.simulator import TASKS, Images, Simulation

ROOT = Path(__file__).parents[2]
PLAYED = 4


@pytest.fixture(params=list(TASKS))
def world(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    simulation = Simulation(request.param, FIRST_SEED)
    yield simulation
    simulation.close()


def test_the_expert_succeeds_also_where_it_plays_its_chunks(world: Simulation) -> None:
    for seed in range(5):
        world.reset(FIRST_SEED + seed)
        while not world.over:
            for action in plan(world, 10)[:PLAYED]:
                if not world.over:
                    world.step(action)
        assert world.succeeded
        assert world.displaced_at is not None


def test_who_does_nothing_does_not_succeed(world: Simulation) -> None:
    last = None
    while not world.over:
        last = world.hold(last)
        world.step(last)
    assert not world.succeeded
    assert world.steps == world.max_steps


def test_a_seed_is_a_world(world: Simulation) -> None:
    def told() -> list[float]:
        world.reset(FIRST_SEED + 7)
        for _ in range(50):
            world.step([0.3, -0.2, 0.1, 1.0])
        return [*world.hand, world.opening, *world.block, *world.ball]

    first = told()
    assert told() == first
    world.reset(FIRST_SEED + 8)
    assert not np.allclose([*world.block, *world.ball], first[4:], atol=1e-3)


def test_what_is_seen_is_told_without_what_is_to_be_found(world: Simulation) -> None:
    seen = world.observe()
    assert seen["observation/image"].shape == (64, 64, 3)
    assert seen["observation/image"].dtype == np.uint8
    assert seen["observation/wrist_image"].std() > 10
    assert seen["observation/state"].tolist() == pytest.approx([*world.hand, world.opening])
    assert seen["prompt"] == world.task.prompt
    before = seen["observation/image"]
    for _ in range(10):
        world.step([1.0, 1.0, -1.0, -1.0])
    assert (world.observe()["observation/image"] != before).any()


@pytest.mark.parametrize("images", ["blank", "frozen"])
def test_what_is_seen_can_be_taken_away(images: Images) -> None:
    world = Simulation("follow", FIRST_SEED, images=images)
    before = world.observe()
    for _ in range(10):
        world.step([1.0, 1.0, -1.0, -1.0])
    seen = world.observe()
    for name in ("observation/image", "observation/wrist_image"):
        np.testing.assert_array_equal(seen[name], before[name])
        assert seen[name].any() == (images == "frozen")
    assert (seen["observation/state"] != before["observation/state"]).any()
    world.close()


@pytest.mark.parametrize("action", [[0.0] * 3, [0.0, 0.0, 0.0, np.nan], 1.0])
def test_what_is_no_action_is_refused(action: object) -> None:
    with pytest.raises(ValueError, match="four finite numbers"):
        Simulation("pick", 0).step(action)  # type: ignore[arg-type]


def test_intervals_are_wilsons() -> None:
    assert wilson(100, 100) == pytest.approx((0.963, 1.0), abs=5e-4)
    assert wilson(50, 100) == pytest.approx((0.404, 0.596), abs=5e-4)


def test_the_weights_are_those_of_the_record() -> None:
    """The committed policy: what it was made of, and that it looks."""
    import hashlib

    folder = ROOT / "training/robots"
    record = json.loads((folder / "record.json").read_text())
    content = (folder / "tabletop.onnx").read_bytes()
    assert hashlib.sha256(content).hexdigest() == record["exported"]["sha256"]
    assert len(content) < 10_000_000
    assert record["seconds"]["all"] < 3600
    assert record["exported"]["largest_difference"] < 1e-5
    for task in TASKS:
        judged = {
            images: record["judged"][f"{task}, {images}"] for images in ("live", "blank", "frozen")
        }
        assert all(each["episodes"] >= 100 for each in judged.values())
        assert judged["live"]["successes"] > 0.9 * judged["live"]["episodes"]
        for images in ("blank", "frozen"):
            assert judged[images]["successes"] < 0.5 * judged[images]["episodes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_steps_of_the_recipe_make_a_policy(tmp_path: Path) -> None:
    from training.robots.train import Recipe, make
    from workers.engines.vla.onnx_policy import OnnxOptions, OnnxPolicy

    few = Recipe(
        expert_episodes=2,
        expert_steps=20,
        rounds=1,
        round_episodes=1,
        round_steps=20,
        last_steps=2,
        judged_episodes=1,
    )
    record = make(few, tmp_path)
    first, again, last = record["losses"]
    assert len(first) == len(again) == len(last) == 1
    assert again[0] < first[0]
    assert record["exported"]["largest_difference"] < 1e-5
    assert json.loads((tmp_path / "record.json").read_text()) == record
    metadata = OnnxPolicy(OnnxOptions(model=tmp_path / "tabletop.onnx")).load()
    assert metadata["policy"] == "tabletop"
