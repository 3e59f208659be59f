"""A policy of PyTorch: no copies, weights in the ledger, random numbers of each session's own."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from protocol.device_bytes import HOST
from protocol.errors import ConfigError, InvalidRequest
from tests.workers.vla.test_engine import loaded, opened, step
from tests.workers.vla.torch_policies import (
    DIMENSIONS,
    HORIZON,
    PARAMETERS_BYTES,
    SENSED,
    Drawing,
    Steering,
)
from workers.engines.vla.engine import StepParameters
from workers.engines.vla.policy import Batch
from workers.engines.vla.torch_policy import GENERATOR, TorchOptions

DRAWING = "tests.workers.vla.torch_policies:Drawing"
STILL = "tests.workers.vla.torch_policies:Still"


def sensed(number: float) -> dict[str, Any]:
    return {"state": np.full(SENSED, number, np.float32)}


def drawing(**options: Any) -> Drawing:
    policy = Drawing(TorchOptions(**options))
    policy.load()
    return policy


def infer(policy: Drawing, **observations: Any) -> Drawing:
    """A batch of one."""
    states = {name: values[np.newaxis] for name, values in policy.initial_state({}).items()}
    batch = {name: values[np.newaxis] for name, values in observations.items()}
    policy.infer(Batch(1, batch, states))
    return policy


async def test_a_module_answers_observations() -> None:
    async with loaded(DRAWING) as (engine, policy):
        session = opened(engine, seed=5)
        first, _ = await step(session, sensed(1.0))
        noise = torch.randn((1, HORIZON, DIMENSIONS), generator=torch.Generator().manual_seed(5))
        torch.manual_seed(3)
        with torch.no_grad():
            expected = Steering()(torch.ones(1, SENSED)) + noise
        np.testing.assert_array_equal(first["actions"], expected[0].numpy())
        assert first["half"].dtype == np.float32
        second, _ = await step(session, sensed(1.0))
        assert not np.array_equal(second["actions"], first["actions"])
        assert not policy.gradients
        assert not any(each.requires_grad for each in policy.module.parameters())
        assert not policy.module.training


async def test_a_policy_without_random_numbers_keeps_none() -> None:
    async with loaded(STILL) as (engine, _):
        answer, _ = await step(opened(engine), sensed(2.0))
        np.testing.assert_array_equal(answer["actions"], np.full((1, SENSED), 2.0))
        assert engine.declare({}) == {HOST: 0}


def test_tensors_are_the_arrays_memory_and_nobody_is_warned() -> None:
    received = np.frombuffer(bytes(range(12)), "<f4")
    assert not received.flags.writeable
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy = infer(drawing(), state=received)
    finally:
        torch.set_warn_always(False)
    tensor = policy.batch.observations["state"]
    assert tensor.data_ptr() == received.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "state",
    [
        np.arange(SENSED, dtype=">f4"),
        np.arange(SENSED, dtype=np.float32)[::-1],
        np.arange(2 * SENSED, dtype=np.float32)[::2],
        np.arange(SENSED, dtype=np.float16),
        np.arange(SENSED, dtype=np.uint16),
        np.array([True, False, True]),
        np.frombuffer(b"......" * SENSED, np.dtype({"names": ["a"], "formats": ["<f4"],
                      "itemsize": 6}))["a"],
    ],
    ids=["big-endian", "backwards", "strided", "half", "uint16", "bool", "packed"],
)  # fmt: skip
def test_whatever_the_layout_the_values_are_the_same(state: Any) -> None:
    tensor = infer(drawing(), state=state).batch.observations["state"]
    np.testing.assert_array_equal(tensor.numpy()[0], state)


def test_what_is_no_array_and_what_has_no_dtype_stays() -> None:
    policy = drawing()
    names = np.array(["a"])
    states = {name: values[np.newaxis] for name, values in policy.initial_state({}).items()}
    observations = {
        "state": np.ones((1, SENSED)),
        "names": names,
        "empty": np.zeros((1, 0)),
        "prompt": ["go"],
        "cameras": {"top": np.zeros((1, 2, 2, 3), np.uint8)},
    }
    policy.infer(Batch(1, observations, states))
    seen = policy.batch.observations
    assert seen["prompt"] == ["go"]
    assert seen["names"] is names
    assert seen["empty"].shape == (1, 0)
    assert seen["cameras"]["top"].dtype == torch.uint8


async def test_a_chunk_does_not_depend_on_who_else_is_in_the_batch() -> None:
    async with loaded(DRAWING, window_ms=1000.0) as (engine, _):
        sessions = [opened(engine, seed=seed) for seed in (1, 2, 1)]
        answers = await asyncio.gather(*(step(session, sensed(1.0)) for session in sessions))
        assert [result.usage["batch"] for _, result in answers] == [3, 3, 3]
        first, second, third = [answer["actions"] for answer, _ in answers]
        np.testing.assert_array_equal(first, third)
        assert not np.array_equal(first, second)
    async with loaded(DRAWING) as (engine, _):
        alone, _ = await step(opened(engine, seed=2), sensed(1.0))
        np.testing.assert_allclose(alone["actions"], second, rtol=1e-6)


async def test_random_numbers_go_on_where_a_parked_session_was(tmp_path: Path) -> None:
    async with loaded(DRAWING) as (engine, _), loaded(DRAWING) as (other, _):
        undisturbed, session = opened(engine), opened(engine)
        for number in range(3):
            await step(undisturbed, sensed(number))
            await step(session, sensed(number))
        await session.snapshot(tmp_path / "parked")
        session.close()
        assert engine.weights() == other.weights()
        back = await other.restore("s", {}, lambda event, arguments: None, tmp_path / "parked")
        for number in range(3):
            expected, _ = await step(undisturbed, sensed(number))
            answer, _ = await step(back, sensed(number))
            assert answer["actions"].tobytes() == expected["actions"].tobytes()


async def test_a_step_that_is_not_committed_draws_nothing() -> None:
    async with loaded(DRAWING) as (engine, _):
        session = opened(engine)
        before, _ = await step(session, sensed(0.0))
        state = engine.initial_state({})
        for _ in range(2):
            await engine.infer(session, sensed(0.0), state, StepParameters())
        session.signal("reset", {})
        again, _ = await step(session, sensed(0.0))
        assert again["actions"].tobytes() == before["actions"].tobytes()


def test_weights_are_declared_once_however_often_they_are_tied() -> None:
    use = drawing().devices()
    assert {device: each.model for device, each in use.items()} == {HOST: PARAMETERS_BYTES}


def test_a_session_is_declared_with_its_generator() -> None:
    state = drawing().initial_state({})
    assert state[GENERATOR].nbytes == torch.Generator().get_state().numel()


def test_other_weights_are_another_digest() -> None:
    policy, other = drawing(), drawing()
    assert policy.weights() == other.weights() != ""

    class Moved(Drawing):
        def build(self) -> Any:
            module = super().build()
            assert isinstance(module, Steering)
            module.scale += 1
            return module

    moved = Moved(TorchOptions())
    moved.load()
    assert moved.weights() != policy.weights()


@pytest.mark.parametrize("seed", [-1, 1 << 63, "1", True, 1.0])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        drawing().initial_state({"seed": seed})
    assert refused.value.field == "settings.seed"


def test_threads_are_what_is_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        drawing(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_is_no_device_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(pydantic.ValidationError, match="device"):
        TorchOptions(device="gpu-one")


def test_a_device_that_is_not_there_is_said() -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=rf"options.device: {device}: "):
        drawing(device=device)
