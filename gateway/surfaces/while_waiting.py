"""What a connection does while it waits for its session to be opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def while_waiting(
    opening: Coroutine[Any, Any, Result],
    *beside: Coroutine[Any, Any, None],
    undo: Callable[[Result], None],
) -> Result:
    """The result of `opening`, if that is there before one of `beside` ends.

    Raises what `opening` raises, and where something else ended first what that raised, or
    ConnectionAbortedError: then `opening` is cancelled. Where it is too late for that `undo` is
    called with its result.
    """
    task = asyncio.create_task(opening)
    others = [asyncio.create_task(each) for each in beside]
    taken = False
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            _raise_of(others)
            raise ConnectionAbortedError
        taken = True
        return task.result()
    finally:
        # Without waiting for them: a cancellation meanwhile would lose the result.
        _cancel(task, *others)
        if not taken and task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        # An error that leaves here holds this frame, and its task the error.
        del task, others


def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()


def _raise_of(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what one of them has raised."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            try:
                raise error
            finally:
                del error, task, tasks
