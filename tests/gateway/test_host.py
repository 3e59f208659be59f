"""The gateway's host over the real link, with workers whose engine is synthetic."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from protocol.errors import CapacityExceeded, InvalidRequest
from protocol.messages import Close, Command, Fence, Update
from protocol.worker_link import WorkerLink
from sessions.actions import Action, Event, Tick
from sessions.backlog import COMMANDS
from sessions.client import Refused, Restored, SessionCreated, SessionEnded
from sessions.duplex.events import (
    AppendAudio,
    ClientOutput,
    InputTranscribed,
    PatchSettings,
)
from sessions.session import Session
from tests.gateway.serving import WAIT_S, Client, opened, served, serving, spoken_item
from tests.sessions.harness import PCM_MS

MANUAL = PatchSettings({"audio": {"input": {"turn_detection": None, "transcription": {}}}})


async def test_a_flood_of_small_appends_waits_for_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fullest = 0
    send = WorkerLink.send

    def watched(link: WorkerLink, command: Command) -> None:
        nonlocal fullest
        send(link, command)
        fullest = max(fullest, link.unacknowledged)

    monkeypatch.setattr(WorkerLink, "send", watched)
    async with serving() as (host, _):
        client = Client()
        attachment = await opened(host, client)
        attachment.send(MANUAL)
        for _ in range(12_000):
            await attachment.room()
            attachment.send(AppendAudio(b"\0\0"))
        attachment.send(spoken_item("after"))
        assert (await client.until(InputTranscribed)).transcript == "words"
    assert not [output for output in client.outputs if isinstance(output, Refused)]
    # What the worker has applied it tells a moment before the link's acknowledgement.
    assert fullest < 4 * COMMANDS


async def test_a_link_that_takes_no_more_is_opened_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    full = False
    send, start_afresh = WorkerLink.send, WorkerLink.start_afresh

    def refusing(link: WorkerLink, command: Command) -> None:
        if full and link.endpoint.endswith("listen"):
            raise CapacityExceeded("the queue to it is full")
        send(link, command)

    def emptied(link: WorkerLink) -> None:
        nonlocal full
        full = False
        start_afresh(link)

    monkeypatch.setattr(WorkerLink, "send", refusing)
    monkeypatch.setattr(WorkerLink, "start_afresh", emptied)
    async with serving() as (host, engines):
        client, other = Client(), Client()
        attachment, neighbour = await opened(host, client), await opened(host, other)
        attachment.send(MANUAL)
        neighbour.send(MANUAL)
        attachment.send(AppendAudio(PCM_MS * 200))
        full = True
        attachment.send(AppendAudio(PCM_MS))
        assert (await client.until(Refused)).error.code == "session_state_lost"
        attachment.send(spoken_item("mine"))
        assert (await client.until(InputTranscribed)).item_id == "mine"
        neighbour.send(spoken_item("theirs"))
        assert (await other.until(InputTranscribed)).item_id == "theirs"
        assert engines["listen"].open_sessions == {attachment.session, neighbour.session}
    assert not any(engine.open_sessions for engine in engines.values())


async def test_a_worker_that_has_lost_a_session_unsaid_gets_it_again() -> None:
    async with serving() as (host, engines):
        client = Client()
        attachment = await opened(host, client)
        session = attachment.session
        (replica,) = host._placement.of("listen")
        replica.link.send(Close(Fence(session, 1, host.incarnation), "unsaid", "test"))
        attachment.send(MANUAL)
        await client.until(Restored)
        attachment.send(spoken_item("heard"))
        assert (await client.until(InputTranscribed)).item_id == "heard"
        assert engines["listen"].open_sessions == {session}
        assert replica.sessions == {session}
    assert not any(engine.open_sessions for engine in engines.values())


async def test_a_command_that_is_refused_costs_its_session_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = WorkerLink.send
    refused: list[str] = []
    afresh: list[str] = []

    def refusing(link: WorkerLink, command: Command) -> None:
        if isinstance(command, Update) and command.fence.session in refused:
            refused.remove(command.fence.session)
            raise InvalidRequest("the message is too long", code="payload_too_large")
        send(link, command)

    monkeypatch.setattr(WorkerLink, "send", refusing)
    monkeypatch.setattr(WorkerLink, "start_afresh", lambda link: afresh.append(link.endpoint))
    async with serving() as (host, engines):
        client, other = Client(), Client()
        attachment, neighbour = await opened(host, client), await opened(host, other)
        attachment.send(MANUAL)
        neighbour.send(MANUAL)
        attachment.send(AppendAudio(PCM_MS * 200))
        refused.append(attachment.session)
        attachment.send(AppendAudio(PCM_MS))
        assert (await client.until(Refused)).error.code == "session_state_lost"
        attachment.send(spoken_item("mine"))
        assert (await client.until(InputTranscribed)).item_id == "mine"
        neighbour.send(spoken_item("theirs"))
        assert (await other.until(InputTranscribed)).item_id == "theirs"
        assert engines["listen"].open_sessions == {attachment.session, neighbour.session}
    assert afresh == []
    assert not any(engine.open_sessions for engine in engines.values())


async def test_a_session_that_fails_at_its_deadline_ends_and_the_others_meet_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Session.handle
    faulty: set[str] = set()

    def failing(session: Session, event: Event, now_ms: float) -> list[Action]:
        if isinstance(event, Tick) and session.identity.session in faulty:
            raise RuntimeError("synthetic fault")
        return handle(session, event, now_ms)

    monkeypatch.setattr(Session, "handle", failing)
    async with serving(idle_ms=200) as (host, engines):
        client, other = Client(), Client()
        failing_one = (await opened(host, client)).session
        faulty.add(failing_one)
        idle_one = (await opened(host, other)).session
        with capture_logs() as logs:
            assert (await client.until(SessionEnded)).reason == "error"
            assert (await other.until(SessionEnded)).reason == "idle"
            async with asyncio.timeout(WAIT_S):
                await host.drained()
    assert not any(engine.open_sessions for engine in engines.values())
    ends = [log for log in logs if log["event"] == "session_released"]
    assert {log["session"]: (log["log_level"], log["error"]) for log in ends} == {
        failing_one: ("warning", "internal_error"),
        idle_one: ("info", None),
    }


async def test_a_session_whose_output_cannot_be_told_is_ended_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Untold(Client):
        def on_output(self, sequence: int, output: ClientOutput) -> None:
            if not isinstance(output, SessionCreated):
                raise RuntimeError("synthetic fault")
            super().on_output(sequence, output)

    async with serving() as (host, engines):
        attachment = await opened(host, Untold())
        attachment.send(MANUAL)
        async with asyncio.timeout(WAIT_S):
            await host.drained()
        assert host.sessions() == []
        # The next open is answered after the worker has freed the session that failed.
        other = await opened(host, Client())
        assert {s for engine in engines.values() for s in engine.open_sessions} == {other.session}


async def test_a_client_that_fails_at_the_end_leaves_nothing_at_the_workers() -> None:
    def fails(sequence: int, output: object) -> None:
        if isinstance(output, SessionEnded):
            raise RuntimeError("the listener's fault")

    async with served() as it:
        attachment = await it.host.open(pipeline="voice", tenant="local", on_output=fails)
        attachment.close("client")
        await it.emptied()
        assert {name: worker._control.sessions for name, worker in it.workers.items()} == {
            "listen": 0,
            "think": 0,
            "speak": 0,
        }
        entries = it.host.history(attachment.session).timeline["entries"]
    assert [e["reason"] for e in entries if e["event"] == "closing"] == ["client"]
