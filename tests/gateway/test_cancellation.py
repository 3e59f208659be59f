"""Every verb of the host's shell, cancelled at each of its suspensions: nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from gateway.access import Access
from gateway.clients import HostedAttachment
from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from gateway.surfaces.native import NativeStream
from gateway.surfaces.realtime.socket import RealtimeSocket
from protocol.config import GatewayConfig
from protocol.errors import AntiphonError
from protocol.messages import Close, Command, Open
from protocol.worker_link import WorkerLink
from sessions.actions import Action, AskDirectory, ClientSaid, DirectoryAnswered, Event, Tick
from sessions.backlog import COMMANDS
from sessions.client import Attached, Restored, Restoring, Role, Verb
from sessions.directory import Request
from sessions.duplex.events import (
    AppendAudio,
    ClearInput,
    CreateResponse,
    PatchSettings,
    ResponseDone,
    ResponseStatus,
)
from sessions.session import Session
from tests.cancel_at import Cut, Moment, at_every_suspension, comes_to, process
from tests.gateway.serving import WAIT_S, Client, Served, by_arena, served
from tests.sessions.harness import PCM_MS, voice_pipeline

SESSIONS = 2
SECRET = "a secret"


@asynccontextmanager
async def counted(**limits: int) -> AsyncIterator[Served]:
    """A served pipeline for SESSIONS sessions, whose counters stand where they must return to."""
    pipeline = by_arena(voice_pipeline(sessions=SESSIONS, **limits))
    async with served({"voice": pipeline}) as it:
        yield it


def held(it: Served) -> dict[str, Any]:
    """All that is held of any session, where nothing may be. Workers' counts by stage."""
    host = it.host
    counts: dict[str, Any] = {
        "sessions": len(host._hosted),
        "places": host.health()[0].sessions,
        "records": len(host._hosted.directory),
        "deadlines": len(host._hosted.deadlines),
        "timelines": len(host._books.timelines._running),
        "waiting for a worker": sum(map(len, host._placement._waiting.values())),
        "inputs": len(host._transfers._inputs),
        "bound": sum(len(replica.sessions) for replica in host._placement.all()),
    }
    assert host._transfers._shm is not None
    _add_arena(counts, "gateway", host._transfers._shm)
    for stage, worker in it.workers.items():
        control, transfers = worker._control, worker._transfers
        counts[f"{stage} sessions"] = control.sessions
        counts[f"{stage} waiting"] = control.waiting
        counts[f"{stage} kept bytes"] = control.kept_bytes
        counts[f"{stage} engine sessions"] = len(it.engines[stage].open_sessions)
        counts[f"{stage} shell"] = len(worker._sessions) + len(worker._turns._running)
        counts[f"{stage} output"] = (
            len(transfers._streams) + len(transfers._readers) + len(transfers._outlets)
        )
        _add_arena(counts, stage, transfers._shm)
    return {name: count for name, count in counts.items() if count}


def _add_arena(counts: dict[str, Any], name: str, shm: Any) -> None:
    health = shm.health()
    counts[f"{name} arena"] = health.reserved_bytes + health.waiting
    counts[f"{name} payloads held"] = health.held + health.lingering


async def full_turn(it: Served) -> None:
    """An ordinary session, opened, used and closed."""
    client = Client()
    attachment = await it.host.open(
        pipeline="voice", tenant="local", secret=SECRET, on_output=client.on_output
    )
    attachment.send(AppendAudio(PCM_MS * 200))
    attachment.send(CreateResponse())
    done = await client.until(ResponseDone)
    assert done.response.status is ResponseStatus.COMPLETED
    attachment.close("client")
    await it.emptied()


async def every_suspension(verb: str, it: Served, attempt: Callable[[Cut], Awaitable[None]]) -> int:
    """Run `attempt` at every cut; after each all counters are back, and a session works."""
    await full_turn(it)
    before = process()

    async def checked(cut: Cut) -> None:
        await attempt(cut)
        await it.emptied()
        await it.ready()
        await full_turn(it)
        await comes_to({}, lambda: held(it))
        await comes_to(before, process)

    points = await at_every_suspension(checked)
    print(f"{verb}: cancelled at {points} points")
    assert points >= 1
    return points


def open_one(it: Served, client: Client | None = None, **options: Any) -> Any:
    """The coroutine of an open."""
    client = client or Client()
    options = {"pipeline": "voice", "tenant": "local", "on_output": client.on_output, **options}
    return it.host.open(**options)


def end(it: Served) -> None:
    """Close whatever is open."""
    for summary in it.host.sessions():
        with suppress(AntiphonError):
            it.host.close_session(summary.id)


Rule = Callable[[WorkerLink, Command], bool]


@pytest.fixture
def late_directory(monkeypatch: pytest.MonkeyPatch) -> Callable[[GatewayHost], None]:
    """Makes a host's directory one that answers some turns of the loop later, as a remote one."""

    def late(host: GatewayHost) -> None:
        handle = Session.handle
        loop = asyncio.get_running_loop()

        def answered(session: str, request: Request) -> None:
            host.handle(session, DirectoryAnswered(host._hosted.directory.call(request)))

        def withheld(session: Session, event: Event, now_ms: float) -> list[Action]:
            others: list[Action] = []
            for action in handle(session, event, now_ms):
                if isinstance(action, AskDirectory):
                    name = session.identity.session
                    loop.call_soon(loop.call_soon, answered, name, action.request)
                else:
                    others.append(action)
            return others

        monkeypatch.setattr(Session, "handle", withheld)

    return late


@pytest.fixture
def late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands with an id are answered some turns of the loop later."""
    handle = GatewayHost.handle

    def later(host: GatewayHost, session: str, event: Event) -> None:
        if isinstance(event, ClientSaid) and event.command is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, handle, host, session, event)
        else:
            handle(host, session, event)

    monkeypatch.setattr(GatewayHost, "handle", later)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    """By stage: what becomes of the commands to its worker; False: they do not go out."""
    send = WorkerLink.send
    rules: dict[str, Rule] = {}

    def ruled(link: WorkerLink, command: Command) -> None:
        rule = rules.get(link.endpoint.rpartition("/")[2])
        if rule is None or rule(link, command):
            send(link, command)

    monkeypatch.setattr(WorkerLink, "send", ruled)
    return rules


# Open


async def test_open() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            attachment = await cut.run(open_one(it))
            if attachment is not None:
                attachment.close("client")

        await every_suspension("open", it, attempt)


async def test_open_with_a_directory_elsewhere(
    late_directory: Callable[[GatewayHost], None],
) -> None:
    async with counted() as it:
        late_directory(it.host)

        async def attempt(cut: Cut) -> None:
            await cut.run(open_one(it, secret=SECRET))
            end(it)

        await every_suspension("open, directory elsewhere", it, attempt)


async def test_open_that_makes_room() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            for _ in range(SESSIONS):
                (await open_one(it, secret=SECRET)).detach()
            await cut.run(open_one(it))
            assert it.host.health()[0].sessions <= SESSIONS
            end(it)

        assert await every_suspension("open, a session makes room", it, attempt) >= 2


async def test_open_at_a_worker_that_answers_late(rules: dict[str, Rule]) -> None:
    async with counted() as it:
        send = WorkerLink.send
        passing = False

        def later(link: WorkerLink, command: Command) -> bool:
            if passing:
                return True
            asyncio.get_running_loop().call_later(0.01, pass_on, link, command)
            return False

        def pass_on(link: WorkerLink, command: Command) -> None:
            nonlocal passing
            passing = True
            send(link, command)
            passing = False

        async def attempt(cut: Cut) -> None:
            rules["think"] = later
            await cut.run(open_one(it))
            end(it)
            await it.emptied()
            del rules["think"]

        await every_suspension("open, a late worker", it, attempt)


@pytest.mark.parametrize("silent", [Open, Open | Close], ids=["to the open", "to anything"])
async def test_open_at_a_worker_that_never_answers(
    rules: dict[str, Rule], silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with counted() as it:
        patient = it.host.pipelines["voice"]
        hasty = replace(patient, limits=replace(patient.limits, open_ms=50, close_ms=50))

        async def attempt(cut: Cut) -> None:
            rules["think"] = lambda _, command: not isinstance(command, silent)
            # Whom the worker does answer, on a busy machine too late for this, has its time.
            with monkeypatch.context() as patch, suppress(AntiphonError):
                patch.setitem(it.host.pipelines, "voice", hasty)
                assert await cut.run(open_one(it)) is None
            await it.emptied()
            del rules["think"]
            if silent is not Open:
                # What it has of the session is nobody's to know, until its link is gone.
                for replica in it.host._placement.of("think"):
                    replica.link.start_afresh()
                await it.ready()

        await every_suspension("open, a silent worker", it, attempt)


async def test_open_at_a_worker_that_refuses(rules: dict[str, Rule]) -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            it.engines["think"].options.sessions = 0
            with suppress(AntiphonError):
                assert await cut.run(open_one(it)) is None
            await it.emptied()
            it.engines["think"].options.sessions = 8

        await every_suspension("open, refused", it, attempt)


async def test_open_while_the_worker_is_lost(rules: dict[str, Rule]) -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            losses: list[asyncio.Task[None]] = []

            def lose(link: WorkerLink, command: Command) -> bool:
                if isinstance(command, Open) and not losses:
                    losses.append(asyncio.create_task(it.replace("think")))
                    return False
                return True

            rules["think"] = lose
            with suppress(AntiphonError):
                assert await cut.run(open_one(it)) is None
            del rules["think"]
            await asyncio.gather(*losses)

        await every_suspension("open, the worker is lost", it, attempt)


# Attach


async def attach(
    it: Served, session: str, secret: str | None, role: Role = Role.CONTROLLER
) -> tuple[HostedAttachment, Attached]:
    """A client comes to a session."""
    on_output = Client().on_output
    return await it.host.attach(
        session, tenant="local", role=role, secret=secret, cursor=0, on_output=on_output
    )


async def everyone_told(it: Served, session: str) -> None:
    """Nobody waits for anything at a session that is open."""
    clients = it.host._clients[session]

    def waiting() -> list[object]:
        arriving = clients.session._attachments._arriving
        return [*clients.arrivals, *clients.answers, *arriving]

    await comes_to([], waiting)


async def test_resume(late_directory: Callable[[GatewayHost], None]) -> None:
    async with counted() as it:
        late_directory(it.host)

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            first.detach()
            came = await cut.run(attach(it, first.session, SECRET))
            await everyone_told(it, first.session)
            if came is None:
                assert not it.host._clients[first.session].listeners
                # The secret that it came with is as good as it was.
                await attach(it, first.session, SECRET)
            assert len(it.host._clients[first.session].listeners) == 1
            end(it)

        await every_suspension("attach, resume", it, attempt)


async def test_take_over(late_directory: Callable[[GatewayHost], None]) -> None:
    async with counted() as it:
        late_directory(it.host)

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            await cut.run(attach(it, first.session, None))
            await everyone_told(it, first.session)
            assert len(it.host._clients[first.session].listeners) <= 1
            end(it)

        await every_suspension("attach, takeover", it, attempt)


async def test_take_over_while_the_worker_is_lost(
    late_directory: Callable[[GatewayHost], None],
) -> None:
    async with counted() as it:
        late_directory(it.host)

        async def attempt(cut: Cut) -> None:
            client = Client()
            first = await open_one(it, client, secret=SECRET)
            it.engines["think"].gate.clear()
            first.send(CreateResponse())
            loss = asyncio.create_task(it.replace("think"))
            await cut.run(attach(it, first.session, None))
            await loss
            await it.ready()
            await everyone_told(it, first.session)
            end(it)

        await every_suspension("attach, the worker is lost", it, attempt)


async def test_an_observer_is_let_in_without_a_suspension(
    late_directory: Callable[[GatewayHost], None],
) -> None:
    async with counted() as it:
        late_directory(it.host)
        first = await open_one(it, secret=SECRET)
        cut = Cut(1, Moment.WAITING)
        came = await cut.run(attach(it, first.session, None, Role.OBSERVER))
        assert came is not None
        assert not cut.made
        assert len(it.host._clients[first.session].listeners) == 2
        came[0].detach()
        end(it)
        await it.emptied()
        await comes_to({}, lambda: held(it))


# Commands without an attachment


def held_up(it: Served, session: str) -> None:
    """Hand over so much that the session takes no more verbs for a while."""
    for _ in range(COMMANDS + 1):
        it.host.handle(session, ClientSaid(AppendAudio(PCM_MS)))
    assert not it.host._clients[session].room.is_set()


@pytest.mark.parametrize(
    "verb",
    [PatchSettings({"instructions": "Be long."}), ClearInput()],
    ids=["update", "signal"],
)
async def test_command(verb: Verb, late_answers: None) -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            held_up(it, first.session)
            retry = asyncio.create_task(it.host.command(first.session, "local", verb, "c-1"))
            answered = await cut.run(it.host.command(first.session, "local", verb, "c-1"))
            # Who asks again is answered, whatever became of who asked first.
            async with asyncio.timeout(WAIT_S):
                assert (await retry).error is None
            assert answered is None or answered.error is None
            await everyone_told(it, first.session)
            end(it)

        assert await every_suspension(f"command, {type(verb).__name__}", it, attempt) >= 4


async def test_command_of_a_session_that_ends_meanwhile(late_answers: None) -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            held_up(it, first.session)
            it.host.close_session(first.session)
            with suppress(AntiphonError):
                async with asyncio.timeout(WAIT_S):
                    await cut.run(it.host.command(first.session, "local", ClearInput(), "c-1"))

        await every_suspension("command, the session ends", it, attempt)


async def test_command_of_a_session_that_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(session: Session, event: Event, now_ms: float) -> list[Action]:
        raise RuntimeError("synthetic fault")

    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            held_up(it, first.session)
            with monkeypatch.context() as patch:
                patch.setattr(Session, "handle", faulty)
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.call_soon, it.host.handle, first.session, Tick())
                with suppress(AntiphonError):
                    async with asyncio.timeout(WAIT_S):
                        await cut.run(it.host.command(first.session, "local", ClearInput(), "c-1"))

        await every_suspension("command, the session fails", it, attempt)


async def test_command_while_the_worker_is_lost(late_answers: None) -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it, secret=SECRET)
            held_up(it, first.session)
            loss = asyncio.create_task(it.replace("listen"))
            verb = PatchSettings({"audio": {"input": {"turn_detection": None}}})
            await cut.run(it.host.command(first.session, "local", verb, "c-1"))
            await loss
            await it.ready()
            end(it)

        await every_suspension("command, the worker is lost", it, attempt)


async def test_room() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it)
            held_up(it, first.session)
            await cut.run(first.room())
            first.close("client")

        await every_suspension("room", it, attempt)


# Close, drain, loss


async def test_close_with_a_turn_in_flight() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            first = await open_one(it)
            first.send(AppendAudio(PCM_MS * 200))
            first.send(CreateResponse())
            it.host.close_session(first.session)
            await cut.run(it.host.drained())

        await every_suspension("close", it, attempt)


async def test_drain() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            await open_one(it)
            await open_one(it)
            it.host.drain()
            await cut.run(it.host.drained())
            await it.emptied()
            it.host._hosted.openings.over = None  # As if it had never been.

        await every_suspension("drain", it, attempt)


async def test_readiness_while_a_worker_is_replaced() -> None:
    async with counted() as it:

        async def attempt(cut: Cut) -> None:
            client = Client()
            first = await open_one(it, client)
            await it.kill("speak")
            await client.until(Restoring)
            it.start("speak")
            await cut.run(it.host.ready())
            await client.until(Restored)
            first.close("client")

        await every_suspension("ready", it, attempt)


@pytest.mark.parametrize("stage", ["listen", "speak"])
async def test_an_arena_that_is_being_attached(stage: str) -> None:
    async with counted() as it:
        attach = it.host._pools._attach

        async def attempt(cut: Cut) -> None:
            tried = asyncio.Event()

            async def cut_off(endpoint: str) -> str | None:
                it.host._pools._attach = attach
                name = await cut.run(attach_one(endpoint))
                tried.set()
                return await attach(endpoint) if cut.made else name

            async def attach_one(endpoint: str) -> str | None:
                return await attach(endpoint)

            it.host._pools._attach = cut_off
            await it.replace(stage)
            async with asyncio.timeout(WAIT_S):
                await tried.wait()

        await every_suspension("attach of an arena", it, attempt)


# A surface on top


def connection(texts: list[str], *, until: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """ASGI's `receive` and `send`, for a client that sends `texts` and goes once `until` came.

    Either suspends at each call, as a server's may, so that it can be cancelled there.
    """
    frames: list[dict[str, Any]] = [{"type": "websocket.connect"}]
    frames += [{"type": "websocket.receive", "text": text} for text in texts]
    frames.append({"type": "websocket.disconnect", "code": 1000})
    ended = asyncio.Event()

    async def receive() -> Any:
        await asyncio.sleep(0)
        if len(frames) == 1:
            await ended.wait()
        return frames.pop(0)

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if until in message.get("text", ""):
            ended.set()

    return receive, send


async def test_a_connection() -> None:
    async with counted() as it:
        socket = RealtimeSocket(it.host, Access(GatewayConfig()), GatewayMetrics())
        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "query_string": b"",
            "headers": [],
            "subprotocols": [],
            "extensions": {},
            "client": ("127.0.0.1", 1),
        }

        async def attempt(cut: Cut) -> None:
            create = '{"type":"response.create"}'
            receive, send = connection([create], until="response.done")
            await cut.run(socket(scope, receive, send))

        assert await every_suspension("connection", it, attempt) >= 8


async def test_a_native_stream() -> None:
    async with counted(grace_ms=60_000) as it:
        stream = NativeStream(it.host, Access(GatewayConfig()), GatewayMetrics())

        async def attempt(cut: Cut) -> None:
            opened = await it.host.open(pipeline="voice", tenant="local", secret=SECRET)
            attach = f'{{"type":"attach","role":"controller","secret":"{SECRET}"}}'
            respond = '{"type":"signal","id":"c","signal":{"type":"respond"}}'
            receive, send = connection([attach, respond], until='"response_done"')
            scope = {
                "type": "websocket",
                "path_params": {"session": opened.session},
                "headers": [],
                "subprotocols": [],
                "extensions": {},
            }
            await cut.run(stream(scope, receive, send))
            # The session is without a client now, and waits for one.
            assert it.host.summary(opened.session, "local").state == "detached"
            it.host.close_session(opened.session, "local")

        assert await every_suspension("native stream", it, attempt) >= 8
