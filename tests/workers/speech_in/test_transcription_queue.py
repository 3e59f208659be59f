"""Who gets the thread, who is refused, and what cancellation gives back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from protocol.errors import CapacityExceeded
from workers.engines.speech_in.transcription_queue import TranscriptionQueue

WAIT_S = 10


class Gate:
    """A job that tells when it runs, and ends when it may or when it is abandoned."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.running = threading.Event()
        self.may_end = threading.Event()
        self.ended = threading.Event()

    def __call__(self, abandoned: threading.Event) -> str:
        self.running.set()
        assert self.may_end.wait(WAIT_S)
        self.ended.set()
        return "abandoned" if abandoned.is_set() else self.text

    async def started(self) -> None:
        assert await asyncio.to_thread(self.running.wait, WAIT_S)


@pytest.fixture
async def queue() -> AsyncIterator[TranscriptionQueue]:
    queue = TranscriptionQueue(waiting=2)
    yield queue
    await queue.shutdown()


def at_once(text: str) -> Callable[[threading.Event], str]:
    return lambda abandoned: text


async def test_jobs_run_in_the_order_in_which_they_came(queue: TranscriptionQueue) -> None:
    gate = Gate("first")
    order: list[str] = []

    async def run(job: Callable[[threading.Event], str]) -> None:
        order.append(await queue.run(job))

    async with asyncio.TaskGroup() as group:
        group.create_task(run(gate))
        await gate.started()
        group.create_task(run(at_once("second")))
        group.create_task(run(at_once("third")))
        gate.may_end.set()
    assert order == ["first", "second", "third"]
    assert queue.waiting == 0


async def test_one_more_than_may_wait_is_refused(queue: TranscriptionQueue) -> None:
    gate = Gate("first")
    async with asyncio.TaskGroup() as group:
        group.create_task(queue.run(gate))
        await gate.started()
        waiting = [group.create_task(queue.run(at_once(name))) for name in ("second", "third")]
        await asyncio.sleep(0)
        assert queue.waiting == 2
        with pytest.raises(CapacityExceeded) as refused:
            await queue.run(at_once("fourth"))
        assert refused.value.retry_after_ms
        gate.may_end.set()
    assert [task.result() for task in waiting] == ["second", "third"]
    assert await queue.run(at_once("fifth")) == "fifth"


async def test_who_is_cancelled_while_waiting_leaves_room(queue: TranscriptionQueue) -> None:
    gate = Gate("first")
    never = Gate("never")
    async with asyncio.TaskGroup() as group:
        group.create_task(queue.run(gate))
        await gate.started()
        cancelled = group.create_task(queue.run(never))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert queue.waiting == 0
        gate.may_end.set()
    assert await queue.run(at_once("next")) == "next"
    assert not never.running.is_set()


async def test_who_is_cancelled_while_running_gives_the_thread_back_when_it_ends(
    queue: TranscriptionQueue,
) -> None:
    gate = Gate("unwanted")
    running = asyncio.create_task(queue.run(gate))
    await gate.started()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not queue.idle
    following = asyncio.create_task(queue.run(lambda _: str(gate.ended.is_set())))
    gate.may_end.set()
    assert await following == "True"


async def test_a_failing_job_fails_its_caller_only(queue: TranscriptionQueue) -> None:
    def fail(_: threading.Event) -> str:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await queue.run(fail)
    assert await queue.run(at_once("next")) == "next"
