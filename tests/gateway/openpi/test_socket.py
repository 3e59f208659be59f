"""The OpenPI surface over the real host and the real engine, with a policy that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.host import GatewayHost
from gateway.metrics import FrameCounts, GatewayMetrics
from gateway.surfaces.openpi.requests import MAX_PENDING
from protocol.config import GatewayConfig
from protocol.openpi import pack, unpack
from sessions.passed_on import MAX_INPUT_BYTES
from sessions.pipeline import Kind, Limits, Pipeline
from tests.gateway.openpi.robot import WAIT_S, robot
from tests.gateway.real_host import RealGateway, serving_kind
from tests.workers.vla.policies import DIMENSIONS, HORIZON, Counting
from workers.engines.vla import VlaEngine, VlaOptions
from workers.snapshots import SnapshotPlace

COUNTING = "tests.workers.vla.policies:Counting"


def pipeline(**limits: int) -> Pipeline:
    return Pipeline(
        "arm", ("act",), (), {"actions": "act"}, kind=Kind.ROBOT, limits=Limits(**limits)
    )


@asynccontextmanager
async def serving(
    config: GatewayConfig | None = None, spec: dict[str, Any] | None = None, **limits: int
) -> AsyncIterator[tuple[RealGateway, str, Counting]]:
    """A gateway, the address of its policy, and the policy."""
    engine = VlaEngine.create(VlaOptions(policy=COUNTING))
    policy = engine.policy
    assert isinstance(policy, Counting)
    async with serving_kind(pipeline(**limits), lambda _: engine, config, spec) as it:
        try:
            yield it, f"ws://127.0.0.1:{it.port}/v1/openpi/arm", policy
        finally:
            policy.gate.set()


async def until(host: GatewayHost, holds: Callable[[], object]) -> None:
    """Wait until it holds, looking whenever something of the sessions has changed."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            host.overview_changed.clear()
            await host.overview_changed.wait()


async def test_a_robot_gets_metadata_and_then_an_answer_for_each_observation() -> None:
    async with serving() as (_, url, _), robot(url) as arm:
        assert arm.metadata["horizon"] == HORIZON
        assert arm.metadata["low"].tolist() == [0.0] * DIMENSIONS
        assert arm.metadata["antiphon"]["committed_step"] == 0
        assert "secret" not in arm.metadata["antiphon"]
        for number in (1, 2, 3):
            answer = await arm.infer("go", state=0.5, also="told")
            assert answer["actions"].shape == (HORIZON, DIMENSIONS)
            assert answer["actions"][0, 0] == number + 0.5
            assert answer["also"] == "told"
            assert answer["antiphon"] == {"fresh": True, "step": number}
            timing = answer["server_timing"]
            assert all(type(value) is float for value in timing.values())
            assert ("prev_total_ms" in timing) == (number > 1)
            assert 0 <= answer["policy_timing"]["infer_ms"] <= timing["infer_ms"]


async def test_a_robot_may_ask_for_a_lower_priority() -> None:
    async with serving() as (it, url, _):
        async with robot(f"{url}?priority=-5"):
            (session,) = it.host._hosted.all()
            assert session.session.pipeline.priority == -5
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"{url}?priority=high"):
                pass
        assert refused.value.response.status_code == 400


async def test_f4_two_robots_that_send_no_id_never_meet() -> None:
    async with serving() as (_, url, _), robot(url) as one, robot(url) as other:
        assert one.metadata["antiphon"]["session"] != other.metadata["antiphon"]["session"]
        for number in (1, 2):
            assert (await one.infer())["actions"][0, 0] == number
        answer = await other.infer(session_id="the same")
        assert answer["actions"][0, 0] == 1
        assert (await one.infer(session_id="the same"))["actions"][0, 0] == 3


class Frames(FrameCounts):
    """Tells how many frames were read."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._changed.set()

    async def until(self, received: int) -> None:
        """Wait for so many."""
        async with asyncio.timeout(WAIT_S):
            while self.received < received:
                self._changed.clear()
                await self._changed.wait()


async def test_f23_f40_the_newest_observation_wins_and_each_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = Frames()
    monkeypatch.setattr(GatewayMetrics, "frames", lambda metrics, surface: frames)
    async with serving() as (it, url, policy), robot(url) as arm:
        await arm.observe("wait", state=100)
        await asyncio.to_thread(policy.begun.wait, WAIT_S)
        for state in (200, 300, 400):
            await arm.observe("go", state=state)
        await frames.until(4)
        policy.gate.set()
        answers = [await arm.answer() for _ in range(4)]
        assert [answer["actions"][0, 0] for answer in answers] == [101, 402, 402, 402]
        assert [answer["antiphon"]["fresh"] for answer in answers] == [True, False, False, True]
        assert answers[1]["antiphon"]["reason"] == "superseded"
        assert policy.batches == [["wait"], ["go"]]
        async with httpx.AsyncClient(base_url=it.http) as http:
            text = (await http.get("/metrics")).text
        assert 'antiphon_observations_superseded_total{pipeline="arm"} 2.0' in text


async def test_more_than_may_wait_are_answered_all_the_same() -> None:
    async with serving() as (_, url, policy), robot(url) as arm:
        await arm.observe("wait")
        await asyncio.to_thread(policy.begun.wait, WAIT_S)
        many = 3 * MAX_PENDING
        for _ in range(many):
            await arm.observe("go")
        policy.gate.set()
        answers = [await arm.answer() for _ in range(1 + many)]
        steps = [answer["antiphon"]["step"] for answer in answers]
        assert steps == sorted(steps)
        assert answers[-1]["antiphon"]["fresh"]
        assert len(policy.batches) < many


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("fail", "engine_failed: "),
        ("refuse", "no_such_task: the policy refused on purpose"),
        ("bare", "engine_failed: "),
    ],
)
async def test_f41_an_error_is_one_text_frame_and_then_a_close(prompt: str, said: str) -> None:
    async with serving() as (it, url, _), robot(url) as other:
        async with robot(url) as arm:
            await arm.infer("go")
            await arm.observe(prompt)
            text, code = await arm.failure()
            assert text.startswith(said)
            assert code == 1011
        assert (await other.infer("go"))["actions"][0, 0] == 1
        await until(it.host, lambda: len(it.host.sessions()) == 1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("text", "invalid_message: "),
        (b"\xc1", "invalid_message: "),
        (pack([1, 2]), "invalid_message: "),
        (
            pack({"a": {b"__ndarray__": True, b"data": b"", b"dtype": "<c8", b"shape": [0]}}),
            "unsupported_dtype: ",
        ),
        (pack({"a": bytes(MAX_INPUT_BYTES)}), "payload_too_large: "),
    ],
)
async def test_what_is_no_observation_ends_the_connection(message: bytes | str, said: str) -> None:
    async with serving() as (_, url, policy), robot(url) as arm:
        await arm.socket.send(message)
        text, code = await arm.failure()
        assert text.startswith(said)
        assert code == 1011
        assert policy.batches == []


async def test_odd_arrays_arrive_as_they_are() -> None:
    odd: dict[str, Any] = {
        "zero_d": np.array(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "bool": np.array([True, False]),
        "half": np.array([1.5], np.float16),
        "big": np.array([1, 2], ">i4"),
        "strided": np.arange(6)[::2],
        "text": np.array(["ä", "bc"]),
        "scalar": np.float32(2.5),
        "words": "Straße 日本",
        "nested": {"list": [1, None, 2.5, True, b"\x00"], "array": np.ones(2)},
    }
    async with serving() as (_, url, _), robot(url) as arm:
        answer = await arm.infer(also=[odd])
        (back,) = answer["also"]
        assert back["zero_d"].shape == ()
        assert back["big"].dtype.str == ">i4"
        assert back["strided"].tolist() == [0, 2, 4]
        assert back["text"].tolist() == ["ä", "bc"]
        assert type(back["scalar"]) is np.float32
        assert back["nested"]["list"] == odd["nested"]["list"]
        top = await arm.infer(**odd)
        assert top["actions"].shape == (HORIZON, DIMENSIONS)


async def test_a_reset_begins_anew_and_gives_no_action() -> None:
    async with serving() as (_, url, _), robot(url) as arm:
        for _ in range(2):
            await arm.infer()
        answer = await arm.infer(endpoint="reset")
        assert answer["actions"].size == 0
        assert answer["antiphon"]["reason"] == "reset"
        answer = await arm.infer(endpoint="infer")
        assert answer["actions"][0, 0] == 1


async def test_a_session_is_resumed_by_who_has_its_secret() -> None:
    async with serving() as (it, url, _):
        async with robot(f"{url}?resume=1") as arm:
            told = arm.metadata["antiphon"]
            await arm.infer()
            arm.socket.transport.abort()
        address = f"{url}?session={told['session']}"
        async with robot(address, told["secret"]) as arm:
            again = arm.metadata["antiphon"]
            assert (again["session"], again["resumed"]) == (told["session"], True)
            assert again["committed_step"] == 1
            assert again["secret"] != told["secret"]
            assert (await arm.infer())["actions"][0, 0] == 2
        await until(it.host, lambda: not it.host.sessions())


async def test_an_answer_nobody_waits_for_is_given_to_nobody() -> None:
    async with serving() as (_, url, policy):
        async with robot(f"{url}?resume=1") as arm:
            told = arm.metadata["antiphon"]
            await arm.observe("wait", state=100)
            await asyncio.to_thread(policy.begun.wait, WAIT_S)
            arm.socket.transport.abort()
        async with robot(f"{url}?session={told['session']}", told["secret"]) as arm:
            assert arm.metadata["antiphon"]["committed_step"] == 0
            await arm.observe("go", state=200)
            policy.gate.set()
            answer = await arm.answer()
            assert (answer["actions"][0, 0], answer["antiphon"]["step"]) == (202, 2)


async def test_a_robot_that_resumed_may_send_ahead_while_the_policy_is_busy() -> None:
    async with serving() as (_, url, policy):
        async with robot(f"{url}?resume=1") as arm:
            told = arm.metadata["antiphon"]
            await arm.observe("wait")
            await asyncio.to_thread(policy.begun.wait, WAIT_S)
            arm.socket.transport.abort()
        async with robot(f"{url}?session={told['session']}", told["secret"]) as arm:
            for state in (10, 20, 30):
                await arm.observe("go", state=state)
            # What came before a ping has been read when its answer comes.
            await (await arm.socket.ping())
            policy.gate.set()
            answers = [await arm.answer() for _ in range(3)]
            assert {answer["actions"][0, 0] for answer in answers} == {32.0}
            said = [answer["antiphon"] for answer in answers]
            older = {"fresh": False, "step": 2, "reason": "superseded"}
            assert said == [older, older, {"fresh": True, "step": 2}]


async def test_a_session_that_is_another_s_is_not_resumed() -> None:
    async with serving() as (_, url, _), robot(f"{url}?resume=1") as arm:
        session = arm.metadata["antiphon"]["session"]
        with pytest.raises(AssertionError, match="resume_refused"):
            async with robot(f"{url}?session={session}", "secret_of_somebody"):
                pass
        with pytest.raises(AssertionError, match="session_not_found"):
            async with robot(f"{url}?session=sess_x", "secret_of_somebody"):
                pass
        for query in (f"session={session}", "resume=maybe"):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}?{query}")
            assert refused.value.response.status_code == 400
        assert (await arm.infer())["actions"][0, 0] == 1


async def test_who_finds_no_place_waits_and_is_served_when_there_is_one() -> None:
    async with (
        serving(sessions=1, waiting=4) as (it, url, _),
        robot(url) as first,
        connect(url, compression=None) as second,
    ):
        # It speaks before it is let in; its metadata still comes first.
        await second.send(pack({"state": np.array([7.0])}))
        await until(it.host, lambda: it.host.waiting())
        await first.socket.close()
        async with asyncio.timeout(WAIT_S):
            frames = [await second.recv(decode=False) for _ in range(2)]
        metadata, answer = map(unpack, frames)
        assert metadata["horizon"] == HORIZON
        assert answer["actions"][0, 0] == 8


async def test_who_leaves_while_it_waits_is_forgotten() -> None:
    async with serving(sessions=1, waiting=4) as (it, url, _), robot(url):
        async with connect(url):
            await until(it.host, lambda: it.host.waiting())
        await until(it.host, lambda: not it.host.waiting())


async def test_a_full_pipeline_says_so_in_a_text_frame() -> None:
    async with serving(sessions=1) as (_, url, _), robot(url):
        with pytest.raises(AssertionError, match="capacity_exceeded"):
            async with robot(url):
                pass


async def test_keys_are_asked_for_at_the_upgrade() -> None:
    config = GatewayConfig(keys=("a-key-for-robots",))
    async with serving(config) as (_, url, _):
        for headers in ({}, {"Authorization": "Api-Key another-key"}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=headers)
            assert refused.value.response.status_code == 401
        async with robot(url, headers={"Authorization": "Api-Key a-key-for-robots"}) as arm:
            await arm.infer()


async def test_only_robots_pipelines_are_served() -> None:
    async with serving() as (_, url, _):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url.replace("/arm", "/leg"))
        assert refused.value.response.status_code == 404


async def test_the_end_of_the_gateway_is_an_error_for_who_waits_for_an_answer() -> None:
    async with serving() as (it, url, policy), robot(url) as busy, robot(url) as idle:
        await busy.observe("wait")
        await asyncio.to_thread(policy.begun.wait, WAIT_S)
        it.host.drain()
        text, code = await busy.failure()
        assert text.startswith(("session_closed: ", "step_cancelled: "))
        assert code == 1011
        assert await idle.closed() == 1001


async def test_f39_a_call_of_the_policy_holds_nobody_else_up() -> None:
    async with serving() as (it, url, policy), robot(url) as arm:
        await arm.observe("wait")
        await asyncio.to_thread(policy.begun.wait, WAIT_S)
        async with robot(url) as other:
            assert other.metadata["horizon"] == HORIZON
            pong = await other.socket.ping()
            await asyncio.wait_for(pong, WAIT_S)
        pong = await arm.socket.ping()
        await asyncio.wait_for(pong, WAIT_S)
        async with httpx.AsyncClient(base_url=it.http) as http:
            assert (await http.get("/healthz")).status_code == 200
        policy.gate.set()
        assert (await arm.answer())["actions"][0, 0] == 1


async def test_an_answer_may_be_long() -> None:
    picture = np.arange(3_000_000, dtype=np.uint8)
    async with serving() as (_, url, _), robot(url) as arm:
        for _ in range(2):
            answer = await arm.infer(also=picture)
            assert np.array_equal(answer["also"], picture)


async def test_a_parked_policy_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = {"snapshots": [SnapshotPlace(str(tmp_path), 1024 * 1024)]}
    async with serving(spec=spec) as (it, url, _), robot(url) as arm, robot(url) as other:
        session = arm.metadata["antiphon"]["session"]
        for number in (1, 2):
            assert (await arm.infer())["actions"][0, 0] == number
        assert await it.host.park_session(session) == (("act",), {})
        assert (await other.infer())["actions"][0, 0] == 1
        assert (await arm.infer())["actions"][0, 0] == 3
        assert happened(it.host, session)[-3:-1] == ["restoring", "restored"]


def happened(host: GatewayHost, session: str) -> list[str]:
    """The events of a session's timeline."""
    return [entry["event"] for entry in host.history(session).timeline["entries"]]


async def test_robots_that_vanish_in_mid_episode_leave_nothing() -> None:
    spec = {"sessions": 64}
    async with serving(spec=spec, sessions=64) as (it, url, policy), AsyncExitStack() as gone:
        robots = [await gone.enter_async_context(robot(url)) for _ in range(50)]
        await asyncio.gather(*(each.infer() for each in robots))
        policy.begun.clear()
        await robots[0].observe("wait")
        await asyncio.to_thread(policy.begun.wait, WAIT_S)
        for each in robots[1:]:
            await each.observe("go")
        for each in robots:
            each.socket.transport.abort()
        await until(it.host, lambda: not it.host.sessions())
        policy.gate.set()
        engine = it.engines["act"]
        assert isinstance(engine, VlaEngine)
        assert engine.waiting == 0
        async with robot(url) as arm:
            assert (await arm.infer())["actions"][0, 0] == 1


async def test_what_is_parked_outlives_its_worker(tmp_path: Path) -> None:
    spec = {"snapshots": [SnapshotPlace(str(tmp_path), 1024 * 1024)]}
    make = lambda _: VlaEngine.create(VlaOptions(policy=COUNTING))  # noqa: E731
    async with (
        serving_kind(pipeline(), make, spec=spec) as it,
        robot(f"ws://127.0.0.1:{it.port}/v1/openpi/arm") as arm,
    ):
        session = arm.metadata["antiphon"]["session"]
        for number in (1, 2):
            assert (await arm.infer())["actions"][0, 0] == number
        assert await it.host.park_session(session) == (("act",), {})
        await it.served.replace("act")
        assert (await arm.infer())["actions"][0, 0] == 3


async def test_a_robot_that_vanishes_is_seen_to_while_its_policy_is_busy() -> None:
    async with serving() as (it, url, policy):
        async with robot(url) as arm:
            policy.begun.clear()
            for _ in range(MAX_PENDING + 4):
                await arm.observe("wait")
            await asyncio.to_thread(policy.begun.wait, WAIT_S)
            arm.socket.transport.abort()
            await until(it.host, lambda: not it.host.sessions() or ended(it.host))
        assert not policy.gate.is_set()
        policy.gate.set()


def ended(host: GatewayHost) -> bool:
    return all(session.state not in ("active", "detached") for session in host.sessions())
