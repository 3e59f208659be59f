"""Transcriptions of all sessions, one after the other on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from protocol.errors import CapacityExceeded

Job = Callable[[threading.Event], str]
"""Blocking work; it should give up soon after the event is set."""

_RETRY_AFTER_MS = 1000


class TranscriptionQueue:
    """A thread and those who wait for it, first come first served.

    At most `waiting` jobs wait; one more is refused. A job whose caller is cancelled
    leaves the queue at once, or gives the thread back as soon as it notices.
    """

    def __init__(self, waiting: int) -> None:
        self._limit = waiting
        self._waiting = 0
        self._thread_free = asyncio.Semaphore(1)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="transcriber")

    @property
    def idle(self) -> bool:
        """Whether a job would start at once."""
        return not self._thread_free.locked()

    @property
    def waiting(self) -> int:
        """How many jobs wait for the thread."""
        return self._waiting

    async def run(self, job: Job) -> str:
        """The result of `job`.

        Raises CapacityExceeded when too many wait, and what the job raises.
        """
        if self._waiting >= self._limit and not self.idle:
            raise CapacityExceeded(
                f"{self._waiting} transcriptions wait already", retry_after_ms=_RETRY_AFTER_MS
            )
        self._waiting += 1
        try:
            await self._thread_free.acquire()
        finally:
            self._waiting -= 1
        return await self._run_on_thread(job)

    async def shutdown(self) -> None:
        """Wait for the thread to end. No job may wait any more."""
        await asyncio.to_thread(self._executor.shutdown)

    async def _run_on_thread(self, job: Job) -> str:
        loop = asyncio.get_running_loop()
        abandoned = threading.Event()

        def release(_: Future[str]) -> None:
            loop.call_soon_threadsafe(self._thread_free.release)

        try:
            future = self._executor.submit(job, abandoned)
        except BaseException:
            self._thread_free.release()
            raise
        # The thread is free when the job has ended, not when its caller is gone.
        future.add_done_callback(release)
        try:
            return await asyncio.wrap_future(future)
        finally:
            abandoned.set()
