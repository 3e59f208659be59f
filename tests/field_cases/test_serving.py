"""Field cases of a gateway with its workers: over the real link, with a synthetic engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.health import readiness
from gateway.http_errors import error_response
from protocol import errors
from protocol.errors import AntiphonError, ErrorKind, NotFound
from sessions.client import Restored, Restoring, Role, SessionEnded
from sessions.duplex.events import CreateResponse, ResponseDone, ResponseStatus
from sessions.session import Session
from tests.gateway.serving import WAIT_S, Client, Served, VoiceEngine, served
from tests.sessions.harness import voice_pipeline

PLACES = 4
SECRET = "a secret"
TEXT = CreateResponse(output_modalities=("text",))


def engine(it: Served, stage: str) -> VoiceEngine:
    """The engine of a stage's worker."""
    found = it.engines[stage]
    assert isinstance(found, VoiceEngine)
    return found


async def test_f01_dropping_more_sessions_than_there_are_places_goes_on_for_ever() -> None:
    # A server kept what finished sessions held; soon every request failed, and its health was 200.
    async with served({"voice": voice_pipeline(sessions=PLACES)}) as it:
        for cycle in range(6 * PLACES):
            client = Client()
            attachment = await it.host.open(
                pipeline="voice", tenant="local", secret=SECRET, on_output=client.on_output
            )
            assert readiness(it.host).ready
            attachment.send(TEXT)
            done = await client.until(ResponseDone)
            assert done.response.status is ResponseStatus.COMPLETED
            attachment.detach()
            held = min(cycle + 1, PLACES)
            assert len(engine(it, "think").open_sessions) <= PLACES
            told = readiness(it.host, "voice", capacity=True)
            assert told.body["pipelines"]["voice"]["sessions"] == held
            # Whoever comes next takes a free place, or that of one who left.
            assert (told.ready, told.body["capacity"]) == (True, "free")
        await it.kill("think")
        async with asyncio.timeout(WAIT_S):
            while readiness(it.host).ready:
                it.host._changed.clear()
                await it.host._changed.wait()
        it.start("think")
        await it.ready()
        assert readiness(it.host).ready


async def test_f03_cancelled_and_failed_opens_leave_no_place_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # After so many cancelled opens every open was refused.
    def faulty(session: Session, patch: dict[str, object]) -> None:
        raise RuntimeError("synthetic fault")

    async with served({"voice": voice_pipeline(sessions=PLACES)}) as it:
        for _ in range(3 * PLACES):
            opening = asyncio.create_task(it.host.open(pipeline="voice", tenant="local"))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()
            await it.emptied()
        for _ in range(PLACES + 1):
            with pytest.raises(errors.InvalidRequest):
                await it.host.open(pipeline="voice", tenant="local", settings_patch={"no": 1})
        with monkeypatch.context() as patch:
            patch.setattr(Session, "prepare", faulty)
            for _ in range(PLACES + 1):
                with pytest.raises(AntiphonError) as failed:
                    await it.host.open(pipeline="voice", tenant="local", settings_patch={"no": 1})
                # The fault is for the log; what is told is that it is no fault of the client's.
                assert failed.value.code == "internal_error"
                assert "synthetic" not in failed.value.message
        assert it.host.health()[0].sessions == 0
        for _ in range(PLACES):
            await it.host.open(pipeline="voice", tenant="local", on_output=Client().on_output)


async def test_f04_two_clients_never_meet_in_one_session() -> None:
    # Two clients that named the same id, or none, shared their state.
    async with served() as it:
        clients = Client(), Client()
        one, two = [
            await it.host.open(
                pipeline="voice", tenant=tenant, secret=SECRET, on_output=client.on_output
            )
            for tenant, client in zip(("a", "b"), clients, strict=True)
        ]
        assert one.session != two.session
        assert len(one.session) > 20
        # A command id is a session's own, and another tenant's session is as one not there.
        await it.host.command(one.session, "a", TEXT, "command-1")
        await it.host.command(two.session, "b", TEXT, "command-1")
        for client in clients:
            await client.until(ResponseDone)
        assert sorted(set(engine(it, "think").runs)) == sorted([one.session, two.session])
        foreign = []
        for session in (one.session, "sess_of_nobody"):
            with pytest.raises(NotFound) as refusal:
                await it.host.attach(
                    session,
                    tenant="b",
                    role=Role.OBSERVER,
                    secret=None,
                    cursor=None,
                    on_output=clients[1].on_output,
                )
            foreign.append(refusal.value.message.replace(session, "?"))
        assert foreign[0] == foreign[1]


async def test_f07_the_idle_time_that_was_chosen_is_the_one_that_counts() -> None:
    # A client's idle timeout was accepted, echoed and ignored.
    async with served() as it:
        client, other = Client(), Client()
        await it.host.open(
            pipeline="voice", tenant="local", limits={"idle_s": 0.2}, on_output=client.on_output
        )
        await it.host.open(pipeline="voice", tenant="local", on_output=other.on_output)
        assert (await client.until(SessionEnded)).reason == "idle"
        assert not [output for output in other.outputs if isinstance(output, SessionEnded)]


async def test_f17_one_exception_ends_its_turn_and_nothing_else() -> None:
    # One exception in one request's output ended the engine for every session.
    async with served() as it:
        think = engine(it, "think")
        clients = Client(), Client()
        one, two = [
            await it.host.open(pipeline="voice", tenant="local", on_output=client.on_output)
            for client in clients
        ]
        think.fault = RuntimeError("synthetic fault")
        one.send(TEXT)
        failed = (await clients[0].until(ResponseDone)).response
        assert failed.status is ResponseStatus.FAILED
        assert failed.error is not None
        assert failed.error.code == "engine_failed"
        think.fault = None
        clients[0].outputs.clear()
        for attachment, client in zip((one, two), clients, strict=True):
            attachment.send(TEXT)
            done = await client.until(ResponseDone)
            assert done.response.status is ResponseStatus.COMPLETED
        assert think.open_sessions == {one.session, two.session}


async def test_f18_a_session_is_told_that_its_worker_is_another() -> None:
    # Requests went on, on a replica without their state, and nobody was told.
    async with served() as it:
        client = Client()
        attachment = await it.host.open(
            pipeline="voice", tenant="local", on_output=client.on_output
        )
        before = it.host._clients[attachment.session].session.workers()
        engine(it, "think").gate.clear()
        attachment.send(TEXT)
        await it.replace("think")
        await client.until(Restored)
        told = [o for o in client.outputs if isinstance(o, Restoring | Restored | ResponseDone)]
        assert [type(output) for output in told] == [Restoring, ResponseDone, Restored]
        assert isinstance(told[1], ResponseDone)
        assert told[1].response.status is ResponseStatus.FAILED
        after = it.host._clients[attachment.session].session.workers()
        assert {stage for stage in after if after[stage] != before[stage]} == {"think"}


async def test_f19_nobody_queues_behind_a_request_that_has_no_replica() -> None:
    # A request to a stage without a replica stalled all others for ten seconds.
    other = replace(
        voice_pipeline(),
        name="other",
        stages=("listen", "muse", "speak"),
        edges=tuple(
            replace(
                edge,
                source=edge.source.replace("think", "muse"),
                target=edge.target.replace("think", "muse"),
            )
            for edge in voice_pipeline().edges
        ),
        outputs={"text": "muse", "audio": "speak"},
    )
    async with served({"voice": voice_pipeline(), "other": other}) as it:
        waiting, client = Client(), Client()
        stuck = await it.host.open(pipeline="other", tenant="local", on_output=waiting.on_output)
        await it.kill("muse")
        await waiting.until(Restoring)
        stuck.send(TEXT)
        with pytest.raises(AntiphonError) as refusal:
            await it.host.open(pipeline="other", tenant="local")
        assert refusal.value.code == "engine_unavailable"
        attachment = await it.host.open(
            pipeline="voice", tenant="local", on_output=client.on_output
        )
        attachment.send(TEXT)
        assert (await client.until(ResponseDone)).response.status is ResponseStatus.COMPLETED
        assert not [output for output in waiting.outputs if isinstance(output, ResponseDone)]
        it.start("muse")
        assert (await waiting.until(ResponseDone)).response.status is ResponseStatus.COMPLETED


KINDS = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AntiphonError)
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
def test_f20_a_status_says_whose_fault_it_is(kind: type[AntiphonError]) -> None:
    # A model's failure was answered as 200; the server's faults were called the client's.
    error = kind("it went wrong")
    response = error_response(error)
    status = response.status_code
    described = json.loads(bytes(response.body))["error"]["type"]
    if error.kind is ErrorKind.CLIENT:
        assert 400 <= status < 500
        assert described == "invalid_request_error"
    elif error.kind is ErrorKind.SERVER:
        assert 500 <= status < 600
        assert described == "server_error"
    else:
        assert status in (409, 410, 429, 502, 503)
        assert described != "invalid_request_error"
