"""The one thread in which a policy is loaded and called."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class PolicyThread:
    """Carries out calls one after the other, beside the event loop.

    An executor makes two futures, a lock and a condition of each call; here a call is a place in
    a queue and a callback. It begins with its first call.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Call `function`, which raises nothing, in the thread, and `then` with its result on the
        loop."""
        loop = asyncio.get_running_loop()

        def carry_out() -> None:
            result = function()
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
                loop.call_soon_threadsafe(then, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
            self._thread.start()
        self._calls.put(carry_out)

    async def result(self, function: Callable[[], Result]) -> Result:
        """What `function` returns, or raises, in the thread. Cancelled it goes on there."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def attempt() -> tuple[Any, BaseException | None]:
            try:
                return function(), None
            except BaseException as error:
                return None, error

        def answered(outcome: tuple[Any, BaseException | None]) -> None:
            if answer.done():
                return
            if outcome[1] is not None:
                answer.set_exception(outcome[1])
            else:
                answer.set_result(outcome[0])

        self.call(attempt, answered)
        return await answer

    async def shutdown(self) -> None:
        """End after the call that it is at, without those that wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        # No name here keeps what a call was about until the next one comes.
        while self._next():
            pass

    def _next(self) -> bool:
        carry_out = self._calls.get()
        if carry_out is None:
            return False
        carry_out()
        return True
