"""The worker process with a synthetic engine, commanded over the real link."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protocol.connectors import InlineDescriptor
from protocol.exit_status import ExitStatus
from protocol.link_events import LinkSettings
from protocol.messages import (
    Close,
    Configure,
    Feed,
    Open,
    RaiseFloor,
    ReceivedThrough,
    Run,
    StageEvent,
    TurnStatus,
    Update,
)
from protocol.payloads import text_payload
from protocol.stream import StreamLimits
from tests.workers.process import SYNTHETIC, Gateway, WorkerProcess
from workers.spec import WorkerStarted

Pair = tuple[WorkerProcess, Gateway]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path short enough for a socket, mode 0700."""
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as name:
        yield Path(name)


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[Pair]:
    with WorkerProcess(directory, {}) as worker:
        gateway = await Gateway(worker.endpoint).linked()
        assert (await gateway.open()).error is None
        yield worker, gateway
        gateway.link.close()


def text(value: str) -> InlineDescriptor:
    return InlineDescriptor(text_payload(value))


async def test_a_turn_runs_from_its_inputs_to_its_end(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "echo", "one", "two")
    assert [await gateway.output(), await gateway.output()] == ["one", "two"]
    ended = await gateway.ended(1)
    assert (ended.status, ended.error, ended.usage) == (TurnStatus.COMPLETED, None, {"pieces": 2})
    times = [ended.timeline[hop] for hop in ("received", "started", "first_output", "done")]
    assert times == sorted(times)


async def test_a_streamed_turn_gets_its_inputs_one_by_one(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "echo", last=False)
    for word in ("one", "two"):
        gateway.send(Feed(gateway.fence(), 1, text(word)))
        assert await gateway.output() == word
    gateway.send(Feed(gateway.fence(), 1, None, last=True))
    assert (await gateway.ended(1)).usage == {"pieces": 2}


async def test_an_engine_exception_fails_that_turn_alone(pair: Pair) -> None:
    worker, gateway = pair
    gateway.run(1, "wait")
    assert await gateway.output() == "waiting"
    gateway.run(2, "fail")
    failed = await gateway.ended(2)
    assert failed.status is TurnStatus.FAILED
    assert failed.error is not None
    assert failed.error.code == "engine_failed"
    # What went wrong inside is for the log.
    assert "on purpose" not in failed.error.message
    await gateway.signal("release")
    assert (await gateway.ended(1)).status is TurnStatus.COMPLETED
    worker.process.terminate()
    status, log = await worker.ended()
    assert status == ExitStatus.OK
    (line,) = [
        entry for entry in map(json.loads, log.splitlines()) if entry["event"] == "engine_failed"
    ]
    assert {"session": "s", "epoch": 1, "turn": 2, "stage": "think"}.items() <= line.items()
    assert "on purpose" in line["exception"]


async def test_the_log_of_a_turn_has_the_epoch_that_started_it(pair: Pair) -> None:
    worker, gateway = pair
    gateway.send(Run(gateway.fence(epoch=2), 1, "default", {"do": "fail"}))
    await gateway.ended(1)
    worker.process.terminate()
    _, log = await worker.ended()
    (failed,) = [line for line in map(json.loads, log.splitlines()) if "turn" in line]
    assert (failed["event"], failed["epoch"]) == ("engine_failed", 2)


async def test_a_refusal_of_the_engine_keeps_its_code_and_field(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "refuse")
    ended = await gateway.ended(1)
    assert ended.error is not None
    assert (ended.error.code, ended.error.field) == ("invalid_value", "do")


async def test_raising_the_floor_cancels_a_running_turn(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "block")
    assert await gateway.output() == "blocked"
    gateway.send(RaiseFloor(gateway.fence(), "default", 2))
    assert (await gateway.ended(1)).status is TurnStatus.CANCELLED
    assert (await gateway.signal("state")).result["cancelled"] == 1


async def test_a_turn_cancelled_before_its_first_step_ends_too(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "block")
    gateway.send(RaiseFloor(gateway.fence(), "default", 2))
    assert (await gateway.ended(1)).status is TurnStatus.CANCELLED


async def test_an_engine_that_ends_a_cancelled_turn_normally_has_it_cancelled(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "stubborn")
    assert await gateway.output() == "blocked"
    gateway.send(RaiseFloor(gateway.fence(), "default", 2))
    assert (await gateway.ended(1)).status is TurnStatus.CANCELLED
    gateway.run(2, "echo", "next")
    assert await gateway.output() == "next"


async def test_input_settings_and_signals_are_applied_in_order(pair: Pair) -> None:
    _, gateway = pair
    gateway.send(Update(gateway.fence(), 1, text("one")))
    gateway.send(Update(gateway.fence(), 2, text("bad")))
    gateway.send(Configure(gateway.fence(), "set", {"tag": "new"}))
    gateway.send(Update(gateway.fence(), 3, text("three")))
    state = (await gateway.signal("state")).result
    assert state["inputs"] == ["one", "three"]
    assert state["settings"] == {"tag": "new"}
    while (await gateway.next(ReceivedThrough)).sequence < 3:
        pass
    events = [await gateway.next(StageEvent) for _ in range(3)]
    assert [event.name for event in events] == ["heard", "input_failed", "heard"]


async def test_what_the_engine_refuses_is_answered(pair: Pair) -> None:
    _, gateway = pair
    gateway.send(Configure(gateway.fence(), "set", {"bad": 1}))
    refused = await gateway.answer("set")
    assert refused.error is not None
    assert refused.error.field == "bad"
    for fault in ("break", "lack"):
        broken = await gateway.signal(fault)
        assert broken.error is not None
        assert broken.error.code == "engine_failed"
    unopened = await gateway.open("other", bad=1)
    assert unopened.error is not None
    assert unopened.error.field == "bad"
    assert (await gateway.signal("state")).result["open_sessions"] == 1


async def test_closing_cancels_and_frees(pair: Pair) -> None:
    _, gateway = pair
    await gateway.open("other")
    gateway.run(1, "block")
    await gateway.output()
    gateway.send(Close(gateway.fence(), "close", "client"))
    assert (await gateway.answer("close")).error is None
    assert (await gateway.ended(1)).status is TurnStatus.CANCELLED
    assert (await gateway.signal("state", "other")).result["open_sessions"] == 1


async def test_a_gateway_that_returns_finds_its_sessions_freed(pair: Pair) -> None:
    worker, gateway = pair
    other = await Gateway(worker.endpoint, "gateway-2").linked()
    await other.open("other")
    # The same incarnation on a new link: what it had here was given up with the old one.
    gateway.link.close()
    again = await Gateway(worker.endpoint, gateway.incarnation).linked()
    state = await other.signal("state", "other")
    assert state.result["open_sessions"] == 1
    lost = await again.signal("state")
    assert lost.error is not None
    assert lost.error.code == "session_state_lost"
    other.link.close()
    again.link.close()


async def test_sessions_of_a_gateway_that_has_gone_are_freed_at_once(directory: Path) -> None:
    with WorkerProcess(directory, {"sessions": 1}) as worker:
        gone = await Gateway(worker.endpoint, "gateway-1").linked()
        await gone.open()
        stayed = await Gateway(worker.endpoint, "gateway-2").linked()
        async with asyncio.timeout(20):
            while not (await stayed.statuses.get()).sessions:
                pass
            gone.link.close()
            while (await stayed.statuses.get()).sessions:
                pass
        assert (await stayed.open("another")).error is None
        stayed.link.close()


async def test_a_turn_that_outruns_the_link_fails_and_the_link_stays(pair: Pair) -> None:
    _, gateway = pair
    gateway.run(1, "flood", count=40, size=1024 * 1024)
    ended = await gateway.ended(1)
    assert ended.error is not None
    assert ended.error.code == "capacity_exceeded"
    gateway.run(2, "echo", "still here")
    while await gateway.output() != "still here":
        pass
    assert gateway.downs.empty()


async def test_many_turns_at_once_wait_for_the_link_that_they_share(directory: Path) -> None:
    sessions = [f"s{number}" for number in range(24)]
    with WorkerProcess(directory, {"sessions": len(sessions)}) as worker:
        slow = LinkSettings(ordered=StreamLimits(window_messages=32), acknowledge_messages=16)
        gateway = await Gateway(worker.endpoint, settings=slow).linked()
        for session in sessions:
            assert (await gateway.open(session)).error is None
        for turn, session in enumerate(sessions, 1):
            gateway.run(turn, "pour", session=session, count=400, size=10)
            gateway.run(100 + turn, "pour", session=session, count=20, size=50_000)
        # More than the link's queue holds, in pieces and in bytes; less than retention does.
        for turn, _ in enumerate(sessions, 1):
            assert (await gateway.ended(turn)).error is None
            assert (await gateway.ended(100 + turn)).error is None
        assert gateway.downs.empty()
        gateway.link.close()


async def test_a_worker_that_loads_answers_and_then_becomes_ready(directory: Path) -> None:
    gate = directory / "gate"
    os.mkfifo(gate)
    with WorkerProcess(directory, {"load_gate": str(gate)}) as worker:
        gateway = Gateway(worker.endpoint)
        info = await gateway.ups.get()
        assert (info.stage, info.engine, info.ready) == ("think", SYNTHETIC, False)
        refused = await gateway.open()
        assert refused.error is not None
        assert refused.error.code == "not_ready"
        gate.open("wb").close()
        assert await worker.started() == WorkerStarted(True)
        while not (await gateway.statuses.get()).ready:
            pass
        assert (await gateway.open()).error is None
        gateway.link.close()


async def test_terminate_ends_turns_sessions_and_engine(pair: Pair) -> None:
    worker, gateway = pair
    gateway.run(1, "block")
    await gateway.output()
    worker.process.terminate()
    status, log = await worker.ended()
    # The engine raises in its shutdown if a session is left.
    assert status == ExitStatus.OK, log
    assert await gateway.downs.get()


async def test_a_thread_that_never_ends_does_not_keep_the_process(pair: Pair) -> None:
    worker, gateway = pair
    gateway.run(1, "sleep_forever_in_thread")
    await gateway.output()
    worker.process.terminate()
    status, _ = await worker.ended()
    assert status == ExitStatus.OK


async def test_the_supervisors_end_ends_the_worker_at_once(pair: Pair) -> None:
    worker, gateway = pair
    gateway.run(1, "sleep_forever_in_thread")
    await gateway.output()
    worker.end_supervisor()
    await worker.ended()
    assert await gateway.downs.get()


async def test_a_killed_worker_is_noticed_at_once(pair: Pair) -> None:
    worker, gateway = pair
    worker.process.send_signal(signal.SIGKILL)
    assert await gateway.downs.get() == "the connection to the worker ended"


@pytest.mark.parametrize(
    ("options", "engine", "status", "message"),
    [
        ({"load": "no_model"}, SYNTHETIC, ExitStatus.MODEL, "the synthetic model is missing"),
        ({"no_such": 1}, SYNTHETIC, ExitStatus.CONFIG, "no_such"),
        ({}, "no-such-engine", ExitStatus.CONFIG, "no-such-engine"),
        ({}, "no.such.module:Engine", ExitStatus.CONFIG, "no.such.module"),
        ({}, "tests.synthetic_engine:SyntheticSession", ExitStatus.CONFIG, "is not an Engine"),
    ],
)
async def test_a_worker_that_cannot_ever_start_says_why(
    directory: Path, options: dict[str, object], engine: str, status: ExitStatus, message: str
) -> None:
    with WorkerProcess(directory, options, engine) as worker:
        started = await worker.started()
        assert started is not None
        assert not started.ready
        assert message in (started.error or "")
        code, log = await worker.ended()
        assert code == status
        assert "Traceback" not in log


async def test_a_crash_while_loading_is_not_final(directory: Path) -> None:
    with WorkerProcess(directory, {"load": "crash"}) as worker:
        assert await worker.started() is None
        code, log = await worker.ended()
        assert code == ExitStatus.FAILED
        assert "crashed while loading" in log


async def test_open_is_refused_when_the_engine_is_full(directory: Path) -> None:
    with WorkerProcess(directory, {"sessions": 1}) as worker:
        gateway = await Gateway(worker.endpoint).linked()
        await gateway.open("a")
        gateway.send(Open(gateway.fence("b"), "open-b"))
        refused = await gateway.answer("open-b")
        assert refused.error is not None
        assert refused.error.code == "capacity_exceeded"
        gateway.link.close()
