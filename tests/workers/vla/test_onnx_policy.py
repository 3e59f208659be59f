"""The policy of examples/robots.yaml, and what an ONNX file must be to be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import InvalidRequest, ModelFileError
from workers.engines.vla.onnx_policy import OnnxOptions, OnnxPolicy
from workers.engines.vla.stacking import stack, unstack

ROOT = Path(__file__).parents[3]
WEIGHTS = ROOT / "training/robots/tabletop.onnx"
PICK, FOLLOW = "pick up the green block", "follow the red ball"


@pytest.fixture(scope="module")
def policy() -> OnnxPolicy:
    loaded = OnnxPolicy(OnnxOptions(model=WEIGHTS))
    loaded.load()
    return loaded


def observation(seed: int, prompt: str = PICK, **also: Any) -> dict[str, Any]:
    """Of no world, but of the right form."""
    random = np.random.default_rng(seed)
    return {
        "observation/image": random.integers(0, 256, (64, 64, 3), np.uint8),
        "observation/wrist_image": random.integers(0, 256, (64, 64, 3), np.uint8),
        "observation/state": random.random(4, np.float32),
        "prompt": prompt,
        **also,
    }


def chunks(policy: OnnxPolicy, *observations: dict[str, Any]) -> list[Any]:
    inferred = policy.infer(stack(observations, [{}] * len(observations)))
    return [answer["actions"] for answer, _ in unstack(inferred, len(observations), {})]


def test_clients_are_told_what_it_takes_and_gives() -> None:
    metadata = OnnxPolicy(OnnxOptions(model=WEIGHTS)).load()
    assert metadata == {
        "policy": "tabletop",
        "action_horizon": 10,
        "action_dim": 4,
        "rate_hz": 20,
        "prompts": [PICK, FOLLOW],
        "action_prefix": [6, 4],
    }


def test_a_batch_gives_what_each_gives_alone(policy: OnnxPolicy) -> None:
    observations = [observation(seed, (PICK, FOLLOW)[seed % 2]) for seed in range(5)]
    together = chunks(policy, *observations)
    alone = [chunks(policy, each)[0] for each in observations]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert together[0].shape == (10, 4)
    assert not np.allclose(together[0], together[1], atol=0.05)


@pytest.mark.parametrize("name", ["image", "wrist_image"])
def test_it_looks(policy: OnnxPolicy, name: str) -> None:
    seen = observation(1)
    blank = {**seen, f"observation/{name}": np.zeros((64, 64, 3), np.uint8)}
    with_it, without = chunks(policy, seen, blank)
    assert not np.allclose(with_it, without, atol=0.01)


def test_a_chunk_begins_with_what_is_already_decided_and_goes_on_from_there(
    policy: OnnxPolicy,
) -> None:
    prefix = np.zeros((6, 4), np.float32)
    prefix[:3] = [[0.5, -0.25, 1.0, -1.0]] * 3
    (free,) = chunks(policy, observation(2))
    none, bound = chunks(
        policy,
        observation(2, action_prefix=prefix, action_prefix_length=0),
        observation(2, action_prefix=prefix, action_prefix_length=3),
    )
    for three in (np.array(3), np.int64(3), np.array(3, np.uint8)):
        said = observation(2, action_prefix=prefix, action_prefix_length=three)
        np.testing.assert_allclose(chunks(policy, said)[0], bound, atol=1e-5)
    np.testing.assert_allclose(none, free, atol=1e-6)
    np.testing.assert_array_equal(bound[:3], prefix[:3])
    assert not np.allclose(bound[3:], free[3:], atol=1e-3)


@pytest.mark.parametrize(
    ("also", "field"),
    [
        ({"prompt": "sing"}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"observation/state": np.zeros(5, np.float32)}, "observation/state"),
        ({"observation/state": np.zeros(4)}, "observation/state"),
        ({"observation/state": [0.0] * 4}, "observation/state"),
        ({"observation/image": np.zeros((3, 64, 64), np.uint8)}, "observation/image"),
        ({"action_prefix": np.zeros((7, 4), np.float32)}, "action_prefix"),
        ({"action_prefix_length": 7}, "action_prefix_length"),
        ({"action_prefix_length": True}, "action_prefix_length"),
        ({"action_prefix_length": np.array(7)}, "action_prefix_length"),
        ({"action_prefix_length": np.array(-1)}, "action_prefix_length"),
        ({"action_prefix_length": np.array([1])}, "action_prefix_length"),
        ({"action_prefix_length": np.array(1.0)}, "action_prefix_length"),
        ({"action_prefix_length": np.array(True)}, "action_prefix_length"),
        ({"action_prefix_length": np.int64(7)}, "action_prefix_length"),
        ({"action_prefix_length": 3}, "action_prefix"),
        ({"observation/depth": np.zeros(4, np.float32)}, "observation/depth"),
        ({"state": 1}, "state"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(
    policy: OnnxPolicy, also: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chunks(policy, observation(3, **also))
    assert refused.value.field == field


@pytest.mark.parametrize("missing", ["prompt", "observation/image", "observation/state"])
def test_what_is_missing_is_refused_by_name(policy: OnnxPolicy, missing: str) -> None:
    seen = observation(4)
    del seen[missing]
    with pytest.raises(InvalidRequest) as refused:
        chunks(policy, seen)
    assert refused.value.field == missing


def test_a_file_that_is_no_policy_is_told_by_its_name(tmp_path: Path) -> None:
    nothing, other = tmp_path / "nothing.onnx", tmp_path / "other.onnx"
    other.write_bytes(b"not a model")
    for path, problem in ((nothing, "cannot be read"), (other, "is no policy")):
        with pytest.raises(ModelFileError, match=problem) as refused:
            OnnxPolicy(OnnxOptions(model=path)).load()
        assert str(path) in str(refused.value)


def test_its_digest_is_that_of_its_file(policy: OnnxPolicy) -> None:
    assert len(policy.weights()) == 64
