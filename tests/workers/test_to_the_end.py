"""Whoever is cancelled while it waits for such work waits on, and is cancelled then."""

from __future__ import annotations

import asyncio

import pytest

from workers.to_the_end import to_the_end


async def test_the_result_and_the_error_are_those_of_the_work() -> None:
    async def work(fails: bool) -> int:
        await asyncio.sleep(0)
        if fails:
            raise KeyError("work")
        return 7

    assert await to_the_end(work(False)) == 7
    with pytest.raises(KeyError, match="work"):
        await to_the_end(work(True))


@pytest.mark.parametrize("fails", [False, True])
async def test_being_cancelled_however_often_waits_for_the_end(fails: bool) -> None:
    may_end = asyncio.Event()
    ended = False

    async def work() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True
        if fails:
            raise KeyError("work")

    waiting = asyncio.ensure_future(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
    may_end.set()
    await asyncio.wait([waiting])
    assert ended
    assert waiting.cancelled()
