"""The robot loops of the client against a gateway with a policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from antiphon_client import (
    Action,
    AntiphonError,
    AsyncRobotLoop,
    ControlOptions,
    Gateway,
    Refused,
    RobotLoop,
    SessionEnded,
    Source,
)
from tests.gateway.openpi.test_port import ARM
from tests.gateway.real_host import RealGateway, serving_kind
from tests.gateway.serving import WAIT_S
from tests.relay import relay
from tests.workers.vla.policies import DIMENSIONS, HORIZON, Counting
from workers.engines.vla import VlaEngine, VlaOptions

SAFE = [-1.0] * DIMENSIONS
# Ticks that wait as long as it takes, and ticks that do not wait.
PATIENT: dict[str, Any] = {"rate_hz": 0.02, "deadline_ms": WAIT_S * 1000}
HURRIED: dict[str, Any] = {"rate_hz": 100, "deadline_ms": 1}


def options(**given: Any) -> ControlOptions:
    return ControlOptions(**{"safe_action": SAFE, "max_age_ms": 600_000, **PATIENT, **given})


@asynccontextmanager
async def policy() -> AsyncIterator[tuple[RealGateway, Counting]]:
    """A gateway, and the policy that it serves."""
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    async with serving_kind(ARM, lambda _: engine) as it:
        counting = engine.policy
        assert isinstance(counting, Counting)
        yield it, counting
        await it.served.emptied()


def sensed(state: float = 0.0, prompt: str | None = None) -> dict[str, Any]:
    observation: dict[str, Any] = {"state": np.array([state])}
    if prompt is not None:
        observation["prompt"] = prompt
    return observation


def first(action: Action) -> float:
    """The number that the policy gave the observation."""
    assert action.fresh, action.reason
    assert action.values.shape == (DIMENSIONS,)
    return float(action.values[0])


async def until_fresh(robot: AsyncRobotLoop) -> Action:
    """Tick until the policy has decided on an action."""
    return await tick_until(robot, lambda action: action.fresh)


async def tick_until(robot: AsyncRobotLoop, holds: Callable[[Action], bool]) -> Action:
    """The first action after which `holds`."""
    async with asyncio.timeout(WAIT_S):
        while not holds(action := await robot.act(sensed())):
            pass
    return action


async def test_each_tick_gets_the_policys_action() -> None:
    async with policy() as (it, _):
        gateway = Gateway(it.http)
        async with await AsyncRobotLoop.open(gateway, "arm", options(execute=HORIZON)) as robot:
            assert first(await robot.act(sensed(0.5))) == 1.5
            for _ in range(HORIZON - 1):
                assert first(await robot.act(sensed())) == 1.5
            assert first(await robot.act(sensed())) == 2.0
            assert robot.counts.sent == 2


async def test_the_newest_observation_wins_while_the_policy_thinks() -> None:
    async with policy() as (it, counting):
        gateway = Gateway(it.http)
        async with await AsyncRobotLoop.open(gateway, "arm", options(**HURRIED)) as robot:
            action = await robot.act(sensed(prompt="wait"))
            assert (action.source, action.reason) == (Source.WATCHDOG, "not_started")
            await asyncio.to_thread(counting.begun.wait, WAIT_S)
            for number in range(5):
                await robot.act(sensed(prompt=f"number {number}"))
            counting.begun.clear()
            counting.gate.set()
            await asyncio.to_thread(counting.begun.wait, WAIT_S)
            assert counting.batches[:2] == [["wait"], ["number 4"]]
            assert robot.counts.superseded >= 4


async def test_a_partition_ends_in_the_safe_action_and_the_session_goes_on() -> None:
    async with policy() as (it, counting), relay(it.port) as line:
        gateway = Gateway(line.url, ping_s=0.2)
        quick = options(rate_hz=20, deadline_ms=50)
        async with await AsyncRobotLoop.open(gateway, "arm", quick) as robot:
            await until_fresh(robot)
            line.partition()
            action = await tick_until(robot, lambda action: action.reason == "late")
            assert (action.source, action.values.tolist()) == (Source.WATCHDOG, SAFE)
            action = await tick_until(robot, lambda action: action.reason == "disconnected")
            assert (action.source, action.values.tolist()) == (Source.WATCHDOG, SAFE)
            line.drop()
            line.heal()
            assert first(await until_fresh(robot)) >= 2
            assert robot.session.connections >= 2
            # Each observation was taken once: the policy has counted as many as were committed.
            await tick_until(robot, lambda _: robot.counts.answered >= 20)
            assert len(counting.batches) - robot.committed_step in (0, 1)


async def test_a_connection_that_breaks_costs_no_observation() -> None:
    async with policy() as (it, counting), relay(it.port) as line:
        robot = await AsyncRobotLoop.open(Gateway(line.url), "arm", options())
        async with robot:
            for number in range(1, 4):
                await tick_until(robot, lambda _: robot.session.connections == number)  # noqa: B023
                line.drop()
            await tick_until(robot, lambda _: robot.counts.answered >= 10)
            assert robot.counts.sent - robot.counts.answered in (0, 1)
            assert len(counting.batches) - robot.committed_step in (0, 1)


async def test_a_policy_that_fails_is_asked_again() -> None:
    async with policy() as (it, counting):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options(**HURRIED))
        async with robot:
            await robot.act(sensed(prompt="refuse"))
            await until_fresh(robot)
            assert counting.batches[0] == ["refuse"]
            assert robot.error is None


async def test_a_reset_begins_anew() -> None:
    async with policy() as (it, _):
        settings = {"start": 10}
        async with await AsyncRobotLoop.open(
            Gateway(it.http), "arm", options(execute=1), settings=settings
        ) as robot:
            assert first(await robot.act(sensed())) == 11
            await robot.reset()
            assert first(await robot.act(sensed())) == 11
            await robot.reset({"start": 20})
            assert first(await robot.act(sensed())) == 21
            with pytest.raises(Refused):
                await robot.reset({"nothing": 1})
            await until_fresh(robot)


def held(it: RealGateway, robot: AsyncRobotLoop) -> bool:
    """Whether the gateway holds the robot's session still."""
    return it.host.summary(robot.session.id, None).stopped


async def test_an_emergency_stop_holds_until_a_release_or_a_reset() -> None:
    async with policy() as (it, counting):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options(**HURRIED))
        async with robot:
            await robot.act(sensed(prompt="wait"))
            await asyncio.to_thread(counting.begun.wait, WAIT_S)
            await robot.stop()
            assert held(it, robot), "it waits for no policy"
            counting.gate.set()
            for _ in range(20):
                action = await robot.act(sensed())
                assert (action.source, action.reason) == (Source.WATCHDOG, "stopped")
            committed = robot.committed_step
            await robot.release()
            await until_fresh(robot)
            assert not robot.stopped
            assert robot.committed_step > committed, "it goes on where it was"
            await robot.stop()
            await robot.reset()
            assert not robot.stopped
            await until_fresh(robot)


async def test_an_operators_stop_holds_until_its_release() -> None:
    async with policy() as (it, _):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options(**HURRIED))
        async with robot:
            await until_fresh(robot)
            it.host.stop_session(robot.session.id, True)
            await tick_until(robot, lambda action: action.reason == "stopped")
            await robot.reset()
            assert (await robot.act(sensed())).reason == "stopped"
            with pytest.raises(Refused) as refused:
                await robot.release()
            assert refused.value.code == "emergency_stopped"
            it.host.stop_session(robot.session.id, False)
            await until_fresh(robot)
            assert not robot.stopped


async def test_a_stop_that_the_stream_does_not_carry_is_said_by_a_request() -> None:
    async with policy() as (it, _), relay(it.port) as line:
        gateway = Gateway(line.url)
        gateway.requests = Gateway(it.http).requests
        robot = await AsyncRobotLoop.open(gateway, "arm", options(**HURRIED))
        async with robot:
            await until_fresh(robot)
            line.partition()
            await robot.stop()
            assert held(it, robot)


async def test_a_stop_that_nobody_hears_stops_the_robot() -> None:
    async with policy() as (it, _), relay(it.port) as line:
        robot = await AsyncRobotLoop.open(Gateway(line.url), "arm", options(**HURRIED))
        async with robot:
            await until_fresh(robot)
            line.partition()
            with pytest.raises(AntiphonError):
                await robot.stop(timeout_s=0.5)
            assert (await robot.act(sensed())).reason == "stopped"
            line.heal()
            # The signal is given up, and the stop holds here nevertheless.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await until_fresh(robot)
            await robot.stop()
            assert held(it, robot)


async def test_a_session_that_an_operator_ends_leaves_the_safe_action() -> None:
    async with policy() as (it, _):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options())
        async with robot:
            await robot.act(sensed())
            it.host.close_session(robot.session.id, "local")
            action = await tick_until(robot, lambda _: robot.error is not None)
            action = await tick_until(robot, lambda action: not action.fresh)
            assert (action.source, action.reason) == (Source.WATCHDOG, "session_ended")


async def test_who_takes_a_session_over_goes_on_and_the_other_stands_still() -> None:
    async with policy() as (it, counting):
        gateway = Gateway(it.http)
        one = await AsyncRobotLoop.open(gateway, "arm", options(**HURRIED))
        await one.act(sensed(prompt="wait"))
        await asyncio.to_thread(counting.begun.wait, WAIT_S)
        other = await AsyncRobotLoop.resume(gateway, one.session.token, options(**HURRIED))
        async with other:
            action = await tick_until(one, lambda action: action.reason == "replaced")
            assert (action.source, action.values.tolist()) == (Source.WATCHDOG, SAFE)
            with pytest.raises(AntiphonError) as lost:
                await one.stop()
            assert lost.value.code == "replaced" or held(it, other)
            await other.release()
            for _ in range(3):
                assert not (await other.act(sensed(0.5))).fresh, "the first one's step is not over"
            counting.gate.set()
            assert first(await until_fresh(other)) >= 2
            assert counting.batches[0] == ["wait"]
        await one.close()


async def test_two_loops_do_not_share_a_session() -> None:
    async with policy() as (it, _):
        gateway = Gateway(it.http)
        async with await AsyncRobotLoop.open(gateway, "arm", options()) as robot:
            second = AsyncRobotLoop(gateway, robot.session, options(**HURRIED))
            await tick_until(second, lambda _: second.error is not None)
            assert "has a reader already" in str(second.error)
            assert first(await robot.act(sensed())) == 1.0


async def test_a_reset_that_is_under_way_at_the_end_is_over() -> None:
    async with policy() as (it, _), relay(it.port) as line:
        robot = await AsyncRobotLoop.open(Gateway(line.url), "arm", options(**HURRIED))
        line.partition()
        resetting = asyncio.create_task(robot.reset())
        await robot.act(sensed())
        line.drop()
        line.heal()
        await robot.close()
        with pytest.raises(AntiphonError):
            async with asyncio.timeout(WAIT_S):
                await resetting


async def test_an_observation_that_cannot_be_sent_is_said_so() -> None:
    async with policy() as (it, _):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options())
        async with robot:
            with pytest.raises(TypeError):
                await robot.act({"state": np.array([object()])})
            assert first(await robot.act(sensed())) == 1.0


async def test_a_loop_that_waits_lives_in_a_thread() -> None:
    async with policy() as (it, counting):

        def play() -> list[float]:
            with RobotLoop.open(
                it.http, "arm", safe_action=SAFE, max_age_ms=600_000, execute=HORIZON, **PATIENT
            ) as robot:
                played = [first(robot.act(sensed(0.5))) for _ in range(HORIZON + 1)]
                robot.stop()
                assert robot.act(sensed()).reason == "stopped"
                robot.release()
                robot.reset()
                played.append(first(robot.act(sensed(0.5))))
                return played

        assert await asyncio.to_thread(play) == [1.5] * HORIZON + [2.5, 1.5]
        assert len(counting.batches) >= 3


async def test_a_loop_that_is_closed_gives_safe_actions_and_says_why() -> None:
    async with policy() as (it, _):
        robot = await AsyncRobotLoop.open(Gateway(it.http), "arm", options())
        await robot.act(sensed())
        await robot.close()
        assert (await robot.act(sensed())).reason == "session_ended"
        assert isinstance(robot.error, SessionEnded)

        def play() -> Action:
            robot = RobotLoop.open(it.http, "arm", safe_action=SAFE, max_age_ms=1e5, **PATIENT)
            first(robot.act(sensed()))
            robot.close()
            for ended in (robot.stop, robot.release, robot.reset):
                with pytest.raises(SessionEnded):
                    ended()
            assert isinstance(robot.error, SessionEnded)
            with pytest.raises(TypeError):
                robot.act({"state": object()})
            return robot.act(sensed())

        action = await asyncio.to_thread(play)
        assert (action.source, action.reason, action.values.tolist()) == (
            Source.WATCHDOG,
            "session_ended",
            SAFE,
        )


async def test_a_stop_gets_through_although_the_sessions_thread_is_stuck() -> None:
    async with policy() as (it, _):
        stuck, may_go_on = threading.Event(), threading.Event()

        def block() -> None:
            stuck.set()
            may_go_on.wait(WAIT_S)

        def play() -> tuple[bool, str | None, str | None]:
            quick: dict[str, Any] = {"safe_action": SAFE, "max_age_ms": 600_000, **HURRIED}
            with RobotLoop.open(it.http, "arm", **quick) as robot:
                robot._loop.call_soon_threadsafe(block)
                stuck.wait(WAIT_S)
                try:
                    robot.stop()
                    held = it.host.summary(robot.token.session, None).stopped
                    first = robot.act(sensed()).reason
                finally:
                    may_go_on.set()
                robot.stop()  # Behind what waited for the thread.
                return held, first, robot.act(sensed()).reason

        assert await asyncio.to_thread(play) == (True, "loop_stuck", "stopped")


async def test_an_open_that_fails_leaves_no_thread() -> None:
    async with policy() as (it, _):
        with pytest.raises(Refused):
            await asyncio.to_thread(
                RobotLoop.open, it.http, "nobody", safe_action=SAFE, max_age_ms=1e5, **PATIENT
            )


async def test_a_paced_loop_goes_on() -> None:
    async with policy() as (it, _):
        quick = options(rate_hz=200, deadline_ms=5)
        async with await AsyncRobotLoop.open(Gateway(it.http), "arm", quick) as robot:
            for _ in range(5):
                await robot.act(sensed())
                await robot.pace()
            assert robot.counts.ticks == 5
