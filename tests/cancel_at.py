"""Cancels a coroutine at each of its suspensions, one run after the other.

A task can be cancelled while what it waits for is still to come, and also after that has
come but before the task goes on with it. The two leave different things behind.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

_SETTLED_LOOPS = 50


class Moment(Enum):
    """When, at a suspension, the cancellation comes."""

    WAITING = "waiting"
    """What is waited for has not come."""
    ANSWERED = "answered"
    """It has come, in the same turn of the loop."""


class Cut:
    """Cancels what it runs at suspension number `at`, counted from 1."""

    def __init__(self, at: int, moment: Moment) -> None:
        self.made = False
        """Whether there was such a suspension."""
        self._at = at
        self.moment = moment

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """The result; None when the coroutine was cancelled.

        Raises what the coroutine raises, and AssertionError when it goes on although it was
        cancelled while it waited.
        """
        task = asyncio.create_task(self._watched(coroutine))
        await asyncio.wait([task])
        if task.cancelled():
            assert self.made
            return None
        assert not self.made, "the cancellation was swallowed"
        return task.result()

    def watch(
        self, coroutine: Coroutine[Any, Any, T], cancel: Callable[[], object] | None = None
    ) -> Awaitable[T]:
        """The coroutine, to be awaited by a task; `cancel` is how that task is cancelled."""
        return _Watched(coroutine, lambda number, future: self._suspended(number, future, cancel))

    async def _watched(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self.watch(coroutine)

    def _suspended(
        self,
        number: int,
        waited_for: asyncio.Future[Any] | None,
        cancel: Callable[[], object] | None,
    ) -> None:
        if number != self._at:
            return
        task = asyncio.current_task()
        assert task is not None
        cancel = cancel or task.cancel
        if self.moment is Moment.WAITING or waited_for is None:
            self._cancel(cancel)
        else:
            # Called before the task itself is woken: it has the answer, and is cancelled.
            waited_for.add_done_callback(lambda _: self._cancel(cancel))

    def _cancel(self, cancel: Callable[[], object]) -> None:
        self.made = True
        cancel()


class _Watched(Awaitable[T]):
    """A coroutine whose suspensions are told of, by number and by what is waited for."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        suspended: Callable[[int, asyncio.Future[Any] | None], None],
    ) -> None:
        self._coroutine = coroutine
        self._suspended = suspended

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        for number in itertools.count(1):
            try:
                waited_for = step()
            except StopIteration as stop:
                result: T = stop.value
                return result
            self._suspended(number, waited_for)
            try:
                sent = yield waited_for
            except BaseException as error:
                step = _thrower(self._coroutine, error)
            else:
                step = _sender(self._coroutine, sent)
        raise AssertionError("unreachable")


def _sender(coroutine: Coroutine[Any, Any, Any], value: Any) -> Callable[[], Any]:
    return lambda: coroutine.send(value)


def _thrower(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)


async def at_every_suspension(attempt: Callable[[Cut], Awaitable[None]]) -> int:
    """Call `attempt` with a cut at the first suspension, the second, ..., at either moment,
    until what it runs has no more; the number of points at which it was cancelled."""
    points = 0
    for moment in Moment:
        for at in itertools.count(1):
            cut = Cut(at, moment)
            await attempt(cut)
            if not cut.made:
                break
            points += 1
    return points


async def comes_to(expected: Any, measure: Callable[[], Any]) -> None:
    """Wait until what was already on its way has come in, a few turns of the loop; then compare.

    What crosses a socket of this process is there in the next turn.
    """
    for _ in range(_SETTLED_LOOPS):
        if measure() == expected:
            return
        await asyncio.sleep(0.002)
    assert measure() == expected


def process() -> dict[str, int]:
    """Tasks and files of this process."""
    return {"tasks": len(asyncio.all_tasks()), "files": len(os.listdir("/proc/self/fd"))}
