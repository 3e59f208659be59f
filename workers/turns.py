"""A turn's input as its engine reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from protocol.payloads import Payload


class TurnInputs(AsyncIterator[Payload]):
    """The payloads of a turn in order, as they arrive; ends after the last.

    How much may lie here is the control side's to bound; `on_taken(size)` tells it of
    every payload of `size` bytes that left the queue.
    """

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        self._on_taken = on_taken
        self._payloads: deque[tuple[Payload, bool]] = deque()
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, payload: Payload, *, counted: bool) -> None:
        """Add a payload; only `counted` ones are told of when taken."""
        self._payloads.append((payload, counted))
        self._changed.set()

    def end(self) -> None:
        """No more follows."""
        self._ended = True
        self._changed.set()

    async def __anext__(self) -> Payload:
        while not self._payloads:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        payload, counted = self._payloads.popleft()
        if counted:
            self._on_taken(len(payload.data))
        return payload
