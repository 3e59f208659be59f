"""LeRobot's policies in the engine: batches, state, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import InvalidRequest, ModelFileError
from protocol.openpi import unpack
from tests.lerobot.reference import Reference, observations
from tests.lerobot.tiny import ACT, ACTIONS, HEIGHT, JOINTS, TOP, WIDTH, WRIST
from tests.workers.vla.test_engine import loaded, opened, step

LEROBOT = "lerobot"
KINDS = ["act", "diffusion", "smolvla"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", KINDS)
async def test_robots_in_a_batch_get_what_lerobot_gives_each_alone(
    checkpoints: dict[str, Path], kind: str
) -> None:
    robots = range(3)
    sensed = [observations(3, robot) for robot in robots]
    expected = [
        [reference.chunk(observation) for observation in sensed[robot]]
        for robot in robots
        for reference in [Reference(checkpoints[kind], seed=robot)]
    ]
    options = {"path": str(checkpoints[kind])}
    async with loaded(LEROBOT, window_ms=1000.0, options=options) as (engine, _):
        sessions = [opened(engine, seed=robot) for robot in robots]
        for number in range(3):
            answers = await asyncio.gather(
                *(step(sessions[robot], sensed[robot][number]) for robot in robots)
            )
            assert [result.usage["batch"] for _, result in answers] == [3, 3, 3]
            for robot, (answer, _) in enumerate(answers):
                np.testing.assert_allclose(
                    answer["actions"], expected[robot][number], rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_parked_robot_goes_on_to_the_last_bit(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    options = {"path": str(checkpoints[kind])}
    async with (
        loaded(LEROBOT, options=options) as (engine, _),
        loaded(LEROBOT, options=options) as (other, _),
    ):
        assert engine.weights() == other.weights()
        sensed = observations(6)
        undisturbed, session = opened(engine), opened(engine)
        for observation in sensed[:3]:
            await step(undisturbed, observation)
            await step(session, observation)
        await session.snapshot(tmp_path / "parked")
        session.close()
        back = await other.restore("s", {}, lambda event, arguments: None, tmp_path / "parked")
        for observation in sensed[3:]:
            expected, _ = await step(undisturbed, observation)
            answer, _ = await step(back, observation)
            assert answer["actions"].tobytes() == expected["actions"].tobytes()


async def test_a_config_has_random_weights_which_are_the_same_each_time() -> None:
    async with (
        loaded(LEROBOT, options={"config": ACT}) as (engine, _),
        loaded(LEROBOT, options={"config": ACT}) as (same, _),
        loaded(LEROBOT, options={"config": ACT, "seed": 1}) as (other, _),
    ):
        assert engine.policy.weights() == same.policy.weights() != other.policy.weights()
        (observation,) = observations(1)
        answer, _ = await step(opened(engine), observation)
        again, _ = await step(opened(same), observation)
        assert answer["actions"].tobytes() == again["actions"].tobytes()


async def test_clients_are_told_what_it_senses(checkpoints: dict[str, Path]) -> None:
    async with loaded(LEROBOT, options={"path": str(checkpoints["act"])}) as (engine, _):
        assert unpack(memoryview(engine.about["metadata"])) == {
            "policy": "lerobot/act",
            "action_horizon": 8,
            "n_action_steps": 6,
            "action_dim": ACTIONS,
            "observation": {
                "observation.state": [JOINTS],
                TOP: [3, HEIGHT, WIDTH],
                WRIST: [3, HEIGHT, WIDTH],
            },
        }


async def test_clients_may_call_things_otherwise_and_send_floats(
    checkpoints: dict[str, Path],
) -> None:
    (observation,) = observations(1)
    rename = {
        "observation/state": "observation.state",
        "observation/image": TOP,
        "observation/wrist_image": WRIST,
    }
    ours = {theirs: name for name, theirs in rename.items()}
    renamed = {ours.get(name, name): values for name, values in observation.items()}
    image = renamed["observation/image"]
    renamed["observation/image"] = image.transpose(2, 0, 1).astype(np.float32) / 255
    options = {"path": str(checkpoints["smolvla"]), "rename": rename}
    async with loaded(LEROBOT, options=options) as (engine, _):
        answer, _ = await step(opened(engine), renamed)
    expected = Reference(checkpoints["smolvla"]).chunk(observation)
    np.testing.assert_allclose(answer["actions"], expected, rtol=1e-5, atol=1e-5)


async def test_a_prompt_changes_what_smolvla_does(checkpoints: dict[str, Path]) -> None:
    (observation,) = observations(1)
    async with loaded(LEROBOT, options={"path": str(checkpoints["smolvla"])}) as (engine, _):
        one, _ = await step(opened(engine), observation)
        other, _ = await step(opened(engine), {**observation, "prompt": "put it down"})
        assert not np.array_equal(one["actions"], other["actions"])


async def test_smolvla_makes_do_with_one_camera_and_needs_one(
    checkpoints: dict[str, Path],
) -> None:
    (observation,) = observations(1)
    async with loaded(LEROBOT, options={"path": str(checkpoints["smolvla"])}) as (engine, _):
        del observation[WRIST]
        answer, _ = await step(opened(engine), observation)
        np.testing.assert_allclose(
            answer["actions"],
            Reference(checkpoints["smolvla"]).chunk(observation),
            rtol=1e-5,
            atol=1e-5,
        )
        del observation[TOP]
        with pytest.raises(InvalidRequest, match=f"none of {TOP}, {WRIST}"):
            await step(opened(engine), observation)


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({WRIST: None}, WRIST, "the observation has no observation.images.wrist"),
        ({"observation.state": None}, "observation.state", "has no observation.state"),
        ({"observation.state": np.zeros(JOINTS + 1)}, "observation.state", "of shape (6,)"),
        ({TOP: np.zeros((3, HEIGHT, WIDTH), np.uint8)}, TOP, "height x width x 3 bytes"),
        ({TOP: np.zeros((HEIGHT, WIDTH, 3))}, TOP, "3 x height x width floats"),
        ({TOP: "a picture"}, TOP, "is an image"),
        ({"prompt": 7}, "task", "is a text"),
    ],
)
async def test_what_it_cannot_sense_is_said(
    checkpoints: dict[str, Path], changed: dict[str, Any], field: str, words: str
) -> None:
    (observation,) = observations(1)
    for name, values in changed.items():
        if values is None:
            del observation[name]
        else:
            observation[name] = values
    async with loaded(LEROBOT, options={"path": str(checkpoints["act"])}) as (engine, _):
        with pytest.raises(InvalidRequest) as refused:
            await step(opened(engine), observation)
        assert refused.value.field == field
        assert words in refused.value.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs either a path or a config"),
        ({"path": "a", "config": ACT}, "needs either a path or a config"),
        ({"config": ACT, "revision": "main"}, "a revision is of a path"),
        ({"path": "a", "sead": 1}, "options.sead: Extra inputs are not permitted"),
    ],
)
async def test_wrong_options_are_said_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        async with loaded(LEROBOT, options=options):
            raise AssertionError("it was loaded")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"type": "act-3"}, "act-3"),
        ({**ACT, "chunk_sice": 8}, "chunk_sice"),
        ({"type": "vqbet"}, "a policy of type vqbet is not served; served are act, diffusion"),
        ({"type": "pi0_fast", "temperature": 0.5}, "a temperature above 0 is not served"),
    ],
)
async def test_a_config_that_cannot_be_served_is_said(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        async with loaded(LEROBOT, options={"config": config}):
            raise AssertionError("it was loaded")


async def test_a_folder_without_a_policy_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"^{tmp_path}: "):
        async with loaded(LEROBOT, options={"path": str(tmp_path)}):
            raise AssertionError("it was loaded")
