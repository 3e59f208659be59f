"""A robot's control loop through the real host, link and engine: deadlines and stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.egress import Egress
from gateway.hosting import SessionDescription
from gateway.metrics import GatewayMetrics
from gateway.surfaces.openpi.requests import MAX_PENDING
from gateway.surfaces.reading_on import READ_ON_MESSAGES, ReadingOn
from protocol.errors import CapacityExceeded, EngineFailed
from protocol.openpi import pack, to_parts
from protocol.payloads import PayloadType
from sessions.client import Refused
from sessions.pipeline import Control, Kind, Pipeline
from sessions.steps.events import (
    Reason,
    Restore,
    SafeAction,
    StateLost,
    Step,
    StepFailed,
    WasReset,
    WasRestored,
)
from tests.gateway.conftest import listening
from tests.gateway.native_client import bearer, opened, requests, stream
from tests.gateway.openpi.robot import WAIT_S, Robot, robot
from tests.gateway.openpi.test_socket import COUNTING, Frames, until
from tests.gateway.real_host import RealGateway, serving_kind
from tests.gateway.scripted_host import ScriptedHost
from tests.workers.vla.policies import DIMENSIONS, HORIZON, Counting
from workers.engine import Turn, TurnResult
from workers.engines.vla import VlaEngine, VlaOptions
from workers.engines.vla.engine import RobotSession

KNOWN = "resume=1&priority=0&rate_hz=20"
HURRIED = Control(deadline_ms=50.0, safe_action="hold")
PATIENT = Control(deadline_ms=3_600_000.0, safe_action="zero")


@asynccontextmanager
async def serving(control: Control) -> AsyncIterator[tuple[RealGateway, str, Counting]]:
    """A gateway, the address of its policy, and the policy."""
    pipeline = Pipeline("arm", ("act",), (), {"actions": "act"}, kind=Kind.ROBOT, control=control)
    engine = VlaEngine.create(VlaOptions(policy=COUNTING))
    policy = engine.policy
    assert isinstance(policy, Counting)
    async with serving_kind(pipeline, lambda _: engine) as it:
        try:
            yield it, f"ws://127.0.0.1:{it.port}/v1/openpi/arm", policy
        finally:
            policy.gate.set()


async def busy(arm: Robot, policy: Counting) -> None:
    """The policy is at an observation of this robot, and goes on when it is let."""
    policy.begun.clear()
    await arm.observe("wait")
    await asyncio.to_thread(policy.begun.wait, WAIT_S)


def not_fresh(answer: dict[str, Any]) -> str:
    """Why an answer is not fresh, which has the form of one that is."""
    assert answer["actions"].shape == (HORIZON, DIMENSIONS)
    assert answer["actions"].dtype == "<f4"
    assert set(answer) == {"actions", "antiphon", "policy_timing", "server_timing"}
    assert answer["antiphon"].keys() == {"fresh", "step", "reason"}
    assert answer["antiphon"]["fresh"] is False
    reason: str = answer["antiphon"]["reason"]
    return reason


async def admin(it: RealGateway, method: str, path: str) -> Any:
    async with httpx.AsyncClient(base_url=it.http) as http:
        answer = await http.request(method, f"/v1/admin/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_f23_a_busy_policy_makes_no_robot_miss_its_deadline() -> None:
    async with serving(HURRIED) as (it, url, policy), robot(url) as arm:
        assert (await arm.infer(state=5))["actions"][0, 0] == 6
        await busy(arm, policy)
        late = [await arm.answer(), await arm.infer(), await arm.infer()]
        assert [not_fresh(answer) for answer in late] == ["late"] * 3
        assert all((answer["actions"] == 6).all() for answer in late)
        policy.gate.set()
        fresh, observed = late[-1], 4
        while not fresh["antiphon"]["fresh"]:
            fresh, observed = await arm.infer(), observed + 1
        # What was late was committed, and is no later one's answer; what waited was not computed.
        step = fresh["antiphon"]["step"]
        assert fresh["actions"][0, 0] == step == len(policy.batches) < observed
        async with httpx.AsyncClient(base_url=it.http) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        counted = dict(line.rsplit(" ", 1) for line in lines if line.startswith("antiphon_"))
        missed = float(counted['antiphon_deadlines_missed_total{pipeline="arm"}'])
        safe = 'antiphon_safe_answers_total{answer="safe_action",pipeline="arm",reason="late"}'
        assert missed == float(counted[safe]) >= 3
        assert float(counted['antiphon_turns_total{pipeline="arm",status="late"}']) >= 1


async def test_a_robot_chooses_its_own_loop() -> None:
    async with (
        serving(Control()) as (_, url, policy),
        robot(f"{url}?deadline_ms=50&safe_action=zero") as hurried,
        robot(url) as patient,
    ):
        await hurried.infer()
        await patient.infer()
        await busy(patient, policy)
        answer = await hurried.infer()
        assert not_fresh(answer) == "late"
        assert not answer["actions"].any()
        policy.gate.set()
        assert (await patient.answer())["antiphon"]["fresh"]


async def test_a_loop_that_cannot_be_had_is_refused() -> None:
    async with serving(Control()) as (_, url, _):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}?deadline_ms=soon")
        assert refused.value.response.status_code == 400
        for query in ("deadline_ms=0", "safe_action=jump"):
            async with connect(f"{url}?{query}") as socket:
                text, code = await Robot(socket).failure()
                assert (text.partition(":")[0], code) == ("invalid_value", 1011)


async def test_the_text_of_an_error_names_the_field() -> None:
    async with serving(Control()) as (_, url, _), robot(url) as arm:
        nothing = {b"__ndarray__": True, b"data": b"", b"dtype": "<c8", b"shape": [0]}
        await arm.socket.send(pack({"camera": {"wrist": nothing}}))
        text, _ = await arm.failure()
        assert text.startswith("unsupported_dtype: ")
        assert text.endswith(" (camera.wrist)")


async def test_a_parameter_that_nobody_knows_is_refused_by_its_name() -> None:
    async with serving(Control()) as (_, url, _), robot(f"{url}?{KNOWN}") as arm:
        told = arm.metadata["antiphon"]
        back = f"{url}?session={told['session']}"
        for address, name, code in (
            (f"{url}?deadline=50", "deadline", "unknown_parameter"),
            (f"{url}?cursor=1", "cursor", "unknown_parameter"),
            (f"{url}?deadline_ms=5&deadline_ms=100", "deadline_ms", "invalid_value"),
            (f"{back}&api_key=x", "api_key", "unknown_parameter"),
            # These are said once, and a robot must not think that they changed.
            (f"{back}&deadline_ms=50", "deadline_ms", "invalid_value"),
            (f"{back}&priority=1", "priority", "invalid_value"),
        ):
            with pytest.raises(InvalidStatus) as refused:
                await connect(address)
            answer = refused.value.response
            error = json.loads(answer.body)["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, name)
        async with robot(f"{back}&resume=1", told["secret"]) as again:
            assert again.metadata["antiphon"]["resumed"] is True


@pytest.mark.parametrize("safe_action", ["hold", "zero", (0.5, -0.5)])
async def test_a_robot_that_is_stopped_before_it_was_given_anything(safe_action: Any) -> None:
    async with (
        serving(Control(deadline_ms=50.0, safe_action=safe_action)) as (it, url, _),
        robot(url) as arm,
    ):
        await admin(it, "POST", "robots/stop")
        await arm.observe()
        if isinstance(safe_action, str):
            # There is nothing whose form it could have: it is told why it cannot move.
            text, code = await arm.failure()
            assert (text.partition(":")[0], code) == ("emergency_stopped", 1011)
            return
        answer = await arm.answer()
        assert answer["antiphon"] == {"fresh": False, "step": 1, "reason": "stopped"}
        assert answer["actions"].tolist() == [[0.5, -0.5]]


async def test_without_a_safe_action_a_missed_deadline_ends_the_connection() -> None:
    async with serving(Control(deadline_ms=50.0)) as (_, url, policy), robot(url) as arm:
        await arm.infer()
        await busy(arm, policy)
        text, code = await arm.failure()
        assert (text.partition(":")[0], code) == ("deadline_missed", 1011)


async def test_the_first_answer_may_take_its_time() -> None:
    async with serving(HURRIED) as (_, url, policy), robot(url) as arm:
        await arm.observe("slow")
        assert (await arm.answer())["antiphon"]["fresh"]
        assert policy.batches == [["slow"]]


async def test_an_operator_stops_a_busy_robot_at_once_and_lets_it_go_on() -> None:
    async with serving(PATIENT) as (it, url, policy), robot(f"{url}?resume=1") as arm:
        await arm.infer()
        session = arm.metadata["antiphon"]["session"]
        await busy(arm, policy)
        stopped = await admin(it, "POST", f"sessions/{session}/stop")
        assert stopped == {"session": session, "stopped": True}
        # The policy is busy still.
        assert not policy.gate.is_set()
        assert not_fresh(await arm.answer()) == "stopped"
        policy.gate.set()
        assert not_fresh(await arm.infer()) == "stopped"
        (listed,) = (await admin(it, "GET", "sessions"))["sessions"]
        assert listed["stopped"] is True
        # A reset by its client begins anew, and an operator's stop stays; so it does if the
        # client comes back.
        assert (await arm.infer(endpoint="reset"))["antiphon"]["reason"] == "reset"
        assert not_fresh(await arm.infer()) == "stopped"
        secret = arm.metadata["antiphon"]["secret"]
        arm.socket.transport.abort()
        await until(it.host, lambda: it.host.sessions()[0].state == "detached")
        async with robot(f"{url}?session={session}", secret) as again:
            assert not_fresh(await again.infer()) == "stopped"
            released = await admin(it, "POST", f"sessions/{session}/release")
            assert released == {"session": session, "stopped": False}
            assert (await again.infer())["actions"][0, 0] == 1
        history = await admin(it, "GET", f"sessions/{session}")
        events = [entry["event"] for entry in history["timeline"]["entries"]]
        assert "stopped" in events
        assert "released" in events


async def test_a_stop_of_a_pipeline_holds_those_that_come_later_too() -> None:
    async with serving(PATIENT) as (it, url, _), robot(url) as arm:
        await arm.infer()
        session = arm.metadata["antiphon"]["session"]
        stopped = await admin(it, "POST", "pipelines/arm/stop")
        assert stopped == {"stopped": True, "pipelines": {"arm": [session]}}
        assert not_fresh(await arm.infer()) == "stopped"
        overview = await admin(it, "GET", "overview")
        assert overview["pipelines"]["arm"]["stopped"] is True
        async with robot(url) as later:
            await later.observe()
            # It was given nothing yet whose form a safe action could have.
            text, code = await later.failure()
            assert (text.partition(":")[0], code) == ("emergency_stopped", 1011)
        await admin(it, "POST", "pipelines/arm/release")
        assert (await arm.infer())["antiphon"]["fresh"]
        async with httpx.AsyncClient(base_url=it.http) as http:
            for path in ("sessions/none/stop", "pipelines/none/stop"):
                assert (await http.post(f"/v1/admin/{path}")).status_code == 404


@pytest.mark.parametrize("first", ["pipelines/arm", "robots", "sessions/{session}"])
@pytest.mark.parametrize("second", ["pipelines/arm", "robots", "sessions/{session}"])
async def test_a_robot_stands_still_until_each_stop_is_released(first: str, second: str) -> None:
    async with serving(PATIENT) as (it, url, _), robot(url) as arm:
        await arm.infer()
        session = arm.metadata["antiphon"]["session"]
        held, other = first.format(session=session), second.format(session=session)
        await admin(it, "POST", f"{held}/stop")
        if held != other:
            await admin(it, "POST", f"{other}/stop")
            told = await admin(it, "POST", f"{other}/release")
            assert told["stopped"] is (other == f"sessions/{session}")
            assert not_fresh(await arm.infer()) == "stopped"
            (listed,) = (await admin(it, "GET", "sessions"))["sessions"]
            assert listed["stopped"] is True
            whole = (await admin(it, "GET", "overview"))["pipelines"]["arm"]["stopped"]
            assert whole is (held != f"sessions/{session}")
        await admin(it, "POST", f"{held}/release")
        assert (await arm.infer())["antiphon"]["fresh"]


async def test_a_client_stops_its_robot_by_the_native_stream_and_releases_it_by_a_reset() -> None:
    async with serving(Control()) as (it, _, policy), requests(it.http) as http:
        session = await opened(http, control={"deadline_ms": 3_600_000, "safe_action": "hold"})
        async with stream(
            it.stream(session["id"]), role="controller", secret=session["secret"]
        ) as client:
            step = {"type": "step", "inputs": [{"type": "observation", "data": "gA=="}]}
            await client.say("update", input=step)
            assert (await client.until("step_done"))["step"] == 1
            # {"prompt": "wait"}
            wait = {"type": "observation", "data": "gaZwcm9tcHSkd2FpdA=="}
            policy.begun.clear()
            await client.say("update", input={**step, "inputs": [wait]}, ref="o")
            await asyncio.to_thread(policy.begun.wait, WAIT_S)
            await client.say("signal", signal={"type": "stop"}, id="stop")
            assert (await client.until("emergency_stopped"))["by"] == "client"
            safe = await client.until("safe_action")
            assert (safe["step"], safe["reason"], safe["in_flight"]) == (2, "stopped", True)
            assert (await client.until("answer"))["result"]["stopped"] is True
            policy.gate.set()
            # Whether the policy was stopped in time or not, its output is nobody's.
            assert (await client.until("step_failed"))["step"] == 2
            assert len([kind for kind in client.kinds if kind == "step_done"]) == 1
            await client.say("signal", signal={"type": "reset"}, id="reset")
            await client.until("was_reset")
            await client.until("stop_released")
            # Who has the tenant's key needs no stream for it.
            path = f"/v1/sessions/{session['id']}/signal"
            answer = await http.post(path, json={"signal": {"type": "stop"}}, headers=bearer(None))
            assert answer.json()["result"] == {"committed_step": 0, "stopped": True}


@pytest.mark.parametrize(
    "control", [{"deadline_ms": 1e12}, {"safe_action": ["a"]}, {"safe_action": {"gripper": "hold"}}]
)
async def test_an_open_with_a_loop_that_cannot_be_had_is_refused(control: Any) -> None:
    async with serving(Control()) as (it, _, _), requests(it.http) as http:
        answer = await http.post("/v1/sessions", json={"control": control})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("control.")


class Losing(ScriptedHost):
    """Its one session loses its state at the first step, but for that after step 3."""

    def __init__(self, control: Control, *, resetting: bool = False) -> None:
        super().__init__(self._said)
        self._resetting = resetting
        self.pipelines = {
            "voice": Pipeline(
                "voice", ("act",), (), {"actions": "act"}, kind=Kind.ROBOT, control=control
            )
        }
        self.verbs: list[Any] = []

    def describe(self, session: str, tenant: str) -> SessionDescription:
        known = super().describe(session, tenant)
        return replace(known, control=self.pipelines["voice"].control)

    def _said(self, attachment: Any, verb: Any) -> None:
        self.verbs.append(verb)
        match verb:
            case Step(step=1):
                parts = to_parts(PayloadType.ACTIONS, {"actions": np.zeros((2, 1), "<f4")})
                safe = SafeAction(1, 4, Reason.WORKER_LOST, {"actions": parts})
                attachment.put_out(safe)
                attachment.put_out(StateLost(4, 3))
            case Step(step=step):
                error = EngineFailed("so far").info()
                attachment.put_out(StepFailed(step, step - 1, error, None))
            case Restore(ref=ref) if self._resetting:
                under_way = CapacityExceeded("a reset is under way", code="reset_in_progress")
                attachment.put_out(Refused(under_way.info(), ref))
                attachment.put_out(WasReset(0))
            case Restore():
                attachment.put_out(WasRestored(3))


@pytest.mark.parametrize(("safe_action", "goes_on_with"), [("hold", 4), (None, 5)])
async def test_a_robot_that_is_covered_goes_on_from_what_is_stored(
    safe_action: str | None, goes_on_with: int
) -> None:
    host = Losing(Control(deadline_ms=50.0, safe_action=safe_action))
    async with (
        listening(host, GatewayMetrics()) as (_, port),
        robot(f"ws://127.0.0.1:{port}/v1/openpi/voice") as arm,
    ):
        assert (await arm.infer())["antiphon"]["reason"] == "worker_lost"
        await arm.observe()
        await arm.failure()
    restored = [verb for verb in host.verbs if isinstance(verb, Restore)]
    assert len(restored) == (1 if safe_action else 0)
    assert [verb.step for verb in host.verbs if isinstance(verb, Step)] == [1, goes_on_with]


async def test_a_robot_whose_state_begins_anew_anyway_needs_nothing_restored() -> None:
    host = Losing(Control(deadline_ms=50.0, safe_action="hold"), resetting=True)
    async with (
        listening(host, GatewayMetrics()) as (_, port),
        robot(f"ws://127.0.0.1:{port}/v1/openpi/voice") as arm,
    ):
        assert (await arm.infer())["antiphon"]["reason"] == "worker_lost"
        assert (await arm.infer())["antiphon"]["reason"] == "worker_lost"
    assert [verb.step for verb in host.verbs if isinstance(verb, Step)] == [1, 1]


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """A worker cannot let go of a step that is stopped before this is set."""
    may_go_on, run = asyncio.Event(), RobotSession.run

    async def stubborn(session: RobotSession, turn: Turn) -> TurnResult:
        try:
            return await run(session, turn)
        except asyncio.CancelledError:
            await may_go_on.wait()
            raise

    monkeypatch.setattr(RobotSession, "run", stubborn)
    return may_go_on


async def test_a_reset_of_a_stalled_worker_is_answered_in_time_and_all_that_comes_behind_it(
    stalled: asyncio.Event,
) -> None:
    async with serving(HURRIED) as (_, url, policy), robot(f"{url}?resume=1") as arm:
        await arm.infer(state=5)
        await busy(arm, policy)
        assert not_fresh(await arm.answer()) == "late"
        for _ in range(2):
            await arm.observe(endpoint="reset")
            await arm.observe()
        late = [await arm.answer() for _ in range(4)]
        assert [not_fresh(answer) for answer in late] == ["late"] * 4
        assert all((answer["actions"] == 6).all() for answer in late)
        # Who comes back meanwhile is answered in time as well.
        session, secret = (arm.metadata["antiphon"][name] for name in ("session", "secret"))
        async with robot(f"{url}?session={session}", secret) as again:
            assert not_fresh(await again.infer()) == "late"
            policy.gate.set()
            stalled.set()
            fresh = late[-1]
            while not fresh["antiphon"]["fresh"]:
                fresh = await again.infer()
            # The reset has been done: the loop begins with step 1 again.
            assert fresh["antiphon"]["step"] <= len(policy.batches) - 2
            assert fresh["actions"][0, 0] == fresh["antiphon"]["step"]


async def client_stops(http: httpx.AsyncClient, session: str) -> None:
    answer = await http.post(f"/v1/sessions/{session}/signal", json={"signal": {"type": "stop"}})
    assert answer.json()["result"]["stopped"] is True


async def test_a_stop_answers_what_waits_for_a_reset_at_once_and_no_reset_before_it_ends_it(
    monkeypatch: pytest.MonkeyPatch, stalled: asyncio.Event
) -> None:
    frames = Frames()
    monkeypatch.setattr(GatewayMetrics, "frames", lambda metrics, surface: frames)
    async with (
        serving(PATIENT) as (it, url, policy),
        robot(url) as arm,
        requests(it.http) as http,
    ):
        await arm.infer()
        session = arm.metadata["antiphon"]["session"]
        # One reset waits for what is in flight.
        await busy(arm, policy)
        await arm.observe(endpoint="reset")
        await arm.observe()
        await frames.until(4)
        await client_stops(http, session)
        assert [not_fresh(await arm.answer()) for _ in range(3)] == ["stopped"] * 3
        assert not policy.gate.is_set()
        released = await http.post(
            f"/v1/sessions/{session}/signal", json={"signal": {"type": "release"}}
        )
        assert released.status_code == 200
        # Another is under way, and waits for the step that was stopped.
        await arm.observe(endpoint="reset")
        await arm.observe()
        await frames.until(6)
        await client_stops(http, session)
        assert [not_fresh(await arm.answer()) for _ in range(2)] == ["stopped"] * 2
        assert not policy.gate.is_set()
        policy.gate.set()
        stalled.set()
        while it.host.sessions()[0].facts["committed_step"]:
            assert not_fresh(await arm.infer()) == "stopped"
        # The reset has been done.
        assert not_fresh(await arm.infer()) == "stopped"
        assert (await arm.infer(endpoint="reset"))["antiphon"]["reason"] == "reset"
        assert (await arm.infer())["antiphon"] == {"fresh": True, "step": 1}


async def test_a_reset_behind_more_than_is_read_does_not_release_a_later_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, take = asyncio.Event(), ReadingOn._take

    def noting(reading: ReadingOn[Any], message: Any) -> None:
        take(reading, message)
        if not reading._has_place:
            full.set()

    monkeypatch.setattr(ReadingOn, "_take", noting)
    async with (
        serving(PATIENT) as (it, url, policy),
        robot(url) as arm,
        requests(it.http) as http,
    ):
        await arm.infer()
        session = arm.metadata["antiphon"]["session"]
        await busy(arm, policy)
        behind = MAX_PENDING + READ_ON_MESSAGES + 20
        for _ in range(behind):
            await arm.observe()
        await arm.observe(endpoint="reset")
        await full.wait()
        await client_stops(http, session)
        policy.gate.set()
        answers = [await arm.answer() for _ in range(behind + 2)]
        assert {not_fresh(answer) for answer in answers} == {"stopped"}
        assert not_fresh(await arm.infer()) == "stopped"
        released = {"signal": {"type": "release"}}
        answer = await http.post(f"/v1/sessions/{session}/signal", json=released)
        assert answer.status_code == 200
        assert (await arm.infer())["antiphon"]["fresh"]


async def test_a_reset_of_who_does_not_read_its_answers_does_not_release_a_later_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deaf, reads, read_on, take = False, asyncio.Event(), asyncio.Event(), ReadingOn._take

    def noting(reading: ReadingOn[Any], message: Any) -> None:
        take(reading, message)
        if deaf and len(reading._kept) == 1:
            read_on.set()

    monkeypatch.setattr(ReadingOn, "_take", noting)
    monkeypatch.setattr(Egress, "blocked", property(lambda _: deaf))
    monkeypatch.setattr(Egress, "room", lambda _: reads.wait())
    async with (
        serving(PATIENT) as (it, url, _),
        robot(url) as arm,
        requests(it.http) as http,
    ):
        await arm.infer()
        deaf = True
        await arm.infer()
        await arm.observe(endpoint="reset")
        await read_on.wait()
        await client_stops(http, arm.metadata["antiphon"]["session"])
        deaf = False
        reads.set()
        assert not_fresh(await arm.answer()) == "stopped"
        assert not_fresh(await arm.infer()) == "stopped"
