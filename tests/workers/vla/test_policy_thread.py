"""The thread that a policy is called in."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from workers.engines.vla.policy_thread import PolicyThread

WAIT_S = 10


class Thing:
    """Something that can be seen to go."""


async def test_calls_are_carried_out_one_after_the_other_in_one_thread() -> None:
    thread, done = PolicyThread(), asyncio.Event()
    names: list[str] = []
    results: list[int] = []

    def call(number: int) -> int:
        names.append(threading.current_thread().name)
        return number

    def then(number: int) -> None:
        results.append(number)
        if number == 9:
            done.set()

    for number in range(10):
        thread.call(lambda number=number: call(number), then)  # type: ignore[misc]
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    assert results == list(range(10))
    assert set(names) == {"policy"}
    await thread.shutdown()


async def test_what_a_call_raises_is_raised() -> None:
    thread = PolicyThread()

    def fails() -> None:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        await thread.result(fails)
    assert await thread.result(lambda: 1) == 1
    await thread.shutdown()


async def test_nothing_of_a_call_is_kept_until_the_next() -> None:
    thread = PolicyThread()
    thing = Thing()
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(thing, lambda: loop.call_soon_threadsafe(gone.set))

    def call(held: Thing = thing) -> None:
        assert held

    await thread.result(call)
    del thing, call
    async with asyncio.timeout(WAIT_S):
        await gone.wait()
    await thread.shutdown()


async def test_what_waits_when_it_is_shut_down_is_not_carried_out() -> None:
    thread = PolicyThread()
    begun, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        begun.set()
        go_on.wait(WAIT_S)

    thread.call(first, lambda _: None)
    await asyncio.to_thread(begun.wait, WAIT_S)
    thread.call(lambda: calls.append("second"), lambda _: None)
    ending = asyncio.ensure_future(thread.shutdown())
    await asyncio.sleep(0)
    go_on.set()
    await ending
    assert calls == ["first"]


async def test_one_that_was_never_called_is_shut_down() -> None:
    await PolicyThread().shutdown()
