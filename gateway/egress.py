"""What waits to be sent to one client.

The queue is bounded in bytes. Its rule is to pace the producer: above the high mark
the producer is told to stop, below the low mark to go on. What it still says in
between (closing events, answers to commands) fits between the high mark and the
limit; a client that lets even that fill up is cut off, never fed with gaps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LIMIT_BYTES = 4 * 1024 * 1024
HIGH_BYTES = 1024 * 1024
LOW_BYTES = 256 * 1024

Frame = str | bytes
Send = Callable[[Frame], Awaitable[None]]


@dataclass(frozen=True)
class EgressLimits:
    """Bounds of a queue in bytes: `low` < `high` < `limit`."""

    low: int = LOW_BYTES
    high: int = HIGH_BYTES
    limit: int = LIMIT_BYTES


class EgressOverflow(Exception):
    """The client has not read what was sent for so long that the queue is full."""


class Egress:
    """The frames of one connection on their way out. The size of a text frame is in characters,
    which for mostly ASCII JSON are bytes.

    `on_blocked(True)` is called when the queue passes its high mark and
    `on_blocked(False)` when it has fallen below the low one.
    """

    def __init__(
        self,
        on_blocked: Callable[[bool], None] = lambda blocked: None,
        limits: EgressLimits | None = None,
    ) -> None:
        self._on_blocked = on_blocked
        self._limits = limits or EgressLimits()
        self._limit_bytes = self._limits.limit
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._blocked = False
        self._finished = False
        self._overflowed = False
        self._drainer: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued_bytes(self) -> int:
        """What waits, the frame that is being sent included."""
        return self._bytes

    @property
    def blocked(self) -> bool:
        """Whether the producer was told to stop, and not yet to go on."""
        return self._blocked

    def tell(self, on_blocked: Callable[[bool], None]) -> None:
        """From now on this is called, and at once where the producer has to stop."""
        self._on_blocked = on_blocked
        if self._blocked:
            on_blocked(True)

    def close(self) -> None:
        """The client is gone: drop what waits, and tell nobody any more."""
        self._on_blocked = lambda blocked: None
        self.finish()
        self._frames.clear()
        self._bytes = 0

    def put(self, frame: Frame, *, told_again: bool = False) -> None:
        """Queue a frame. After `finish` or an overflow it is dropped: nobody will read it.

        What is `told_again` comes at once, as much as was kept for this client, and is
        bounded there: it has room beyond the limit. So does one frame that is longer than
        that, for a client that keeps up.
        """
        if self._finished or self._overflowed:
            return
        size = len(frame)
        if told_again:
            self._limit_bytes += size
        keeps_up = size > self._limit_bytes and self._bytes <= self._limits.high
        if self._bytes + size > self._limit_bytes and not keeps_up:
            self._overflowed = True
            self._frames.clear()
            self._wake.set()
            self._room.set()
            if self._drainer is not None:
                # It may wait in `send` for a client that will never take the frame.
                self._drainer.cancel()
            return
        self._frames.append(frame)
        self._bytes += size
        self._idle.clear()
        self._wake.set()
        if not self._blocked and self._bytes > self._limits.high:
            self._blocked = True
            self._room.clear()
            self._on_blocked(True)

    def finish(self) -> None:
        """Nothing more will be put; `drain` ends when all is sent."""
        self._finished = True
        self._wake.set()
        self._room.set()

    async def room(self) -> None:
        """Wait until the queue is not blocked: who makes a client's answers asks first."""
        await self._room.wait()

    async def idle(self) -> None:
        """Wait until nothing waits to be sent: for who would rather send something newer."""
        await self._idle.wait()

    async def drain(self, send: Send) -> None:
        """Send frames in order until `finish`. Raises EgressOverflow, also out of `send`."""
        task = asyncio.current_task()
        assert task is not None
        cancellations = task.cancelling()
        self._drainer = task
        try:
            await self._drain(send)
        except asyncio.CancelledError:
            if self._overflowed and task.uncancel() <= cancellations:
                raise EgressOverflow from None
            raise
        finally:
            self._drainer = None
            # The error that ends a task holds this frame.
            del task

    async def _drain(self, send: Send) -> None:
        while True:
            while self._frames:
                frame = self._frames.popleft()
                await send(frame)
                self._sent(len(frame))
            if self._overflowed:
                raise EgressOverflow
            if self._finished:
                return
            self._wake.clear()
            await self._wake.wait()

    def _sent(self, size: int) -> None:
        self._bytes -= size
        if not self._bytes:
            self._idle.set()
        if self._blocked and self._bytes < self._limits.low:
            self._blocked = False
            self._room.set()
            if not self._finished:
                self._on_blocked(False)
