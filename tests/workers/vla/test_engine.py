"""The VLA engine by itself: batches, isolation, state, its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest

from protocol.device_bytes import HOST
from protocol.errors import DeadlineMissed, EngineFailed, InvalidRequest, SessionStateLost
from protocol.openpi import from_parts, to_parts, unpack
from protocol.payloads import Payload, PayloadType
from tests.workers.vla.policies import DIMENSIONS, HORIZON, Counting
from workers.engine import EngineSession, ParkableSession, Turn, TurnResult
from workers.engines.vla import Batch, Inferred, VlaEngine, VlaOptions
from workers.engines.vla.synthetic import SyntheticAny

COUNTING = "tests.workers.vla.policies:Counting"
SYNTHETIC = "workers.engines.vla.synthetic:SyntheticAny"
FOREVER_MS = 1000.0


@asynccontextmanager
async def loaded(policy: str = COUNTING, **options: Any) -> AsyncIterator[tuple[VlaEngine, Any]]:
    """An engine and its policy."""
    engine = VlaEngine.create(VlaOptions(policy=policy, **options))
    await engine.load()
    try:
        yield engine, engine.policy
    finally:
        await engine.shutdown()


def opened(engine: VlaEngine, **settings: Any) -> ParkableSession:
    session = engine.open("s", settings, lambda event, arguments: None)
    assert isinstance(session, ParkableSession)
    return session


async def step(
    session: EngineSession, observation: dict[str, Any], **parameters: Any
) -> tuple[dict[str, Any], TurnResult]:
    """One step, committed; the answer."""

    async def inputs() -> AsyncIterator[Payload]:
        for part in to_parts(PayloadType.OBSERVATION, observation):
            yield part

    pieces: list[Payload] = []
    result = await session.run(Turn(1, "default", parameters, inputs(), pieces.append, step=1))
    assert result.commit is not None
    result.commit()
    return from_parts(pieces), result


@pytest.mark.parametrize("number", [np.nan, np.inf])
async def test_actions_that_are_no_numbers_are_told_to_no_robot(number: float) -> None:
    async with loaded() as (engine, _):
        session, other = opened(engine), opened(engine)
        with pytest.raises(InvalidRequest, match="not finite") as refused:
            await step(session, {"state": np.array([number]), "camera": {"on": True}})
        assert refused.value.field == "state", "it is what the robot has sensed"
        for robot in (session, other):
            answer, _ = await step(robot, {"state": np.array([0.5])})
            assert answer["actions"][0, 0] == 1.5


async def test_a_policy_that_makes_them_of_good_observations_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loaded() as (engine, policy):

        def infer(batch: Batch) -> Inferred:
            actions = np.full((batch.size, HORIZON, DIMENSIONS), np.nan)
            return Inferred({"actions": actions}, {"count": batch.states["count"]})

        monkeypatch.setattr(policy, "infer", infer)
        with pytest.raises(EngineFailed, match="not finite"):
            await step(opened(engine), {"camera": {"state": np.array([0.5])}, "prompt": "go"})
        with pytest.raises(InvalidRequest) as refused:
            await step(opened(engine), {"camera": {"state": np.array([np.nan])}})
        assert refused.value.field == "camera.state"


async def test_what_is_no_observation_is_refused() -> None:
    async with loaded() as (engine, _):

        async def inputs() -> AsyncIterator[Payload]:
            for part in to_parts(PayloadType.ACTIONS, {"state": np.array([0.5])}):
                yield part

        with pytest.raises(InvalidRequest) as refused:
            await opened(engine).run(Turn(1, "default", {}, inputs(), lambda _: None, step=1))
        assert refused.value.field == "inputs"


async def test_an_observation_is_answered_with_a_chunk() -> None:
    async with loaded() as (engine, _):
        session = opened(engine, start=10)
        answer, result = await step(session, {"state": np.array([0.5]), "also": "told"})
        assert answer["actions"].shape == (HORIZON, DIMENSIONS)
        assert answer["actions"].dtype == np.float32
        assert answer["actions"][0, 0] == 11.5
        assert answer["also"] == "told"
        assert result.usage["batch"] == 1
        answer, _ = await step(session, {"state": np.array([0.5])})
        assert answer["actions"][0, 0] == 12.5
        session.signal("reset", {})
        answer, _ = await step(session, {})
        assert answer["actions"][0, 0] == 11
        session.signal("reset", {"start": 100})
        answer, _ = await step(session, {})
        assert answer["actions"][0, 0] == 101


async def test_its_metadata_is_told_to_sessions() -> None:
    async with loaded() as (engine, _):
        metadata = unpack(opened(engine).describe()["metadata"])
        assert metadata["horizon"] == HORIZON
        assert metadata["low"].tolist() == [0.0] * DIMENSIONS


async def test_robots_that_ask_at_once_share_one_call() -> None:
    async with loaded(window_ms=FOREVER_MS) as (engine, policy):
        sessions = [opened(engine, start=10 * number) for number in range(5)]
        steps = [step(session, {"prompt": "go"}) for session in sessions]
        answers = await asyncio.gather(*steps)
        assert [len(batch) for batch in policy.batches] == [5]
        assert [answer["actions"][0, 0] for answer, _ in answers] == [1, 11, 21, 31, 41]
        assert all(result.usage["batch"] == 5 for _, result in answers)
        assert policy.threads.isdisjoint({threading.get_ident()})
        assert len(policy.threads) == 1


async def test_a_window_ends_although_somebody_is_silent() -> None:
    async with loaded(window_ms=1.0) as (engine, policy):
        _silent, speaks = opened(engine), opened(engine)
        await step(speaks, {"prompt": "go"})
        assert policy.batches == [["go"]]


async def test_observations_of_different_form_do_not_meet() -> None:
    async with loaded(window_ms=FOREVER_MS) as (engine, policy):
        one, other = opened(engine), opened(engine)
        await asyncio.gather(
            step(one, {"prompt": "one", "state": np.zeros(2)}),
            step(other, {"prompt": "other", "state": np.zeros(3)}),
        )
        assert sorted(policy.batches) == [["one"], ["other"]]


async def test_the_earliest_deadline_goes_first() -> None:
    async with loaded(batch=1) as (engine, policy):
        sessions = [opened(engine) for _ in range(4)]
        first = asyncio.create_task(step(sessions[0], {"prompt": "wait"}))
        await asyncio.to_thread(policy.begun.wait, 30)
        later = [
            asyncio.create_task(step(session, {"prompt": name}, **parameters))
            for session, name, parameters in (
                (sessions[1], "calm", {}),
                (sessions[2], "hurried", {"deadline_ms": 50}),
                (sessions[3], "urgent", {"deadline_ms": 10.5}),
            )
        ]
        await asyncio.sleep(0)
        assert engine.waiting == 3
        policy.gate.set()
        await asyncio.gather(first, *later)
        assert policy.batches == [["wait"], ["urgent"], ["hurried"], ["calm"]]


@pytest.mark.parametrize("deadline", [-1, float("inf"), float("nan"), "soon"])
async def test_a_deadline_that_is_none_is_refused(deadline: Any) -> None:
    async with loaded() as (engine, policy):
        with pytest.raises(InvalidRequest):
            await step(opened(engine), {}, deadline_ms=deadline)
        assert policy.batches == []


async def test_what_one_robot_sends_fails_no_other() -> None:
    async with loaded(window_ms=FOREVER_MS) as (engine, _):
        prompts = ["go", "fail", "go", "refuse", "bare"]
        sessions = [opened(engine) for _ in prompts]
        steps = [step(s, {"prompt": p}) for s, p in zip(sessions, prompts, strict=True)]
        first, failed, third, refused, bare = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(first, tuple)
        assert isinstance(third, tuple)
        assert isinstance(failed, RuntimeError)
        assert isinstance(refused, InvalidRequest)
        assert refused.code == "no_such_task"
        assert "'actions' must be an array" in str(bare)
        # Its state is as it was before.
        answer, _ = await step(sessions[1], {})
        assert answer["actions"][0, 0] == 1


async def test_a_step_that_is_cancelled_changes_nothing() -> None:
    async with loaded() as (engine, policy):
        session, other = opened(engine), opened(engine)
        running = asyncio.create_task(step(session, {"prompt": "wait"}))
        await asyncio.to_thread(policy.begun.wait, 30)
        waiting = asyncio.create_task(step(other, {"prompt": "never"}))
        await asyncio.sleep(0)
        assert engine.waiting == 1
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting})
        assert running.cancelled()
        assert waiting.cancelled()
        policy.gate.set()
        answer, _ = await step(session, {})
        assert answer["actions"][0, 0] == 1
        assert policy.batches == [["wait"], [None]]


async def test_a_session_that_ends_keeps_nobody_waiting() -> None:
    async with loaded(window_ms=FOREVER_MS) as (engine, policy):
        silent, speaks = opened(engine), opened(engine)
        asked = asyncio.create_task(step(speaks, {"prompt": "go"}))
        await asyncio.sleep(0)
        assert engine.waiting == 1
        silent.close()
        await asyncio.to_thread(policy.begun.wait, 30)
        await asked


@pytest.mark.parametrize("steps", [0, 3])
async def test_a_parked_state_goes_on_to_the_last_bit(tmp_path: Path, steps: int) -> None:
    async with (
        loaded(SYNTHETIC, options={"history": 3}) as (engine, _),
        loaded(SYNTHETIC, options={"history": 3}) as (other, _),
    ):
        observations = [{"state": np.array([number])} for number in range(steps + 3)]
        undisturbed, session = opened(engine), opened(engine)
        for observation in observations[:steps]:
            await asyncio.gather(step(undisturbed, observation), step(session, observation))
        path = tmp_path / "parked"
        await session.snapshot(path)
        session.close()
        assert engine.weights() == other.weights() != ""
        again = await other.restore("s", {}, lambda event, arguments: None, path)
        assert again.measure() == {HOST: 12}
        for observation in observations[steps:]:
            expected, _ = await step(undisturbed, observation)
            answer, _ = await step(again, observation)
            assert answer["actions"].tobytes() == expected["actions"].tobytes()


async def test_half_a_state_is_no_state(tmp_path: Path) -> None:
    async with loaded() as (engine, _):
        path = tmp_path / "parked"
        await opened(engine).snapshot(path)
        whole = path.read_bytes()
        for damaged in (b"", whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
            path.write_bytes(damaged)
            with pytest.raises(SessionStateLost):
                await engine.restore("s", {}, lambda event, arguments: None, path)
        path.unlink()
        with pytest.raises(SessionStateLost):
            await engine.restore("s", {}, lambda event, arguments: None, path)
        async with loaded(SYNTHETIC) as (other, _):
            path.write_bytes(whole)
            with pytest.raises(SessionStateLost, match="not this policy's"):
                await other.restore("s", {}, lambda event, arguments: None, path)
            assert other.weights() != engine.weights()


async def test_a_session_is_declared_with_two_states() -> None:
    async with loaded(SYNTHETIC, options={"history": 1000}) as (engine, _):
        assert engine.declare({}) == {HOST: 8000}
        assert opened(engine).measure() == {HOST: 4000}


async def test_settings_are_the_policys_to_refuse() -> None:
    async with loaded() as (engine, _):
        for refused in (engine.declare, lambda settings: opened(engine, **settings)):
            with pytest.raises(InvalidRequest):
                refused({"strat": 1})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "nobody"}, "there is no policy nobody"),
        ({"policy": "no.such:Thing"}, "cannot be loaded"),
        ({"policy": "tests.workers.vla.policies:HORIZON"}, "is not a Policy"),
        ({"policy": SYNTHETIC, "options": {"horizon": 0, "size": 1}}, "options.horizon"),
        ({"policy": COUNTING, "options": {"x": 1}}, "options.x"),
    ],
)
def test_a_policy_that_cannot_be_had_is_found_with_the_config(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=reason):
        VlaOptions.model_validate(options)


def test_the_registered_policy_is_found() -> None:
    assert isinstance(VlaEngine.create(VlaOptions(policy="synthetic-any")).policy, SyntheticAny)


def test_a_policy_of_tests_is_one() -> None:
    assert isinstance(VlaEngine.create(VlaOptions(policy=COUNTING)).policy, Counting)


async def test_what_has_waited_too_long_is_not_computed() -> None:
    async with loaded() as (engine, policy):
        one, other = opened(engine), opened(engine)
        busy = asyncio.create_task(step(one, {"prompt": "wait"}))
        await asyncio.to_thread(policy.begun.wait, 30)
        # It is told at once, and not when the policy has time for it.
        with pytest.raises(DeadlineMissed):
            await step(other, {"prompt": "go"}, stale_ms=1)
        policy.gate.set()
        await busy
        answer, _ = await step(other, {"prompt": "go"}, stale_ms=60_000)
        assert answer["actions"][0, 0] == 1
        assert policy.batches == [["wait"], ["go"]]
