"""A turn's input as its engine reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from protocol.connectors import Descriptor
from protocol.payloads import Payload


class TurnInputs(AsyncIterator[Payload]):
    """The payloads of a turn in order, as they arrive; ends after the last.

    What an engine is given stays readable until it asks for the next, or the turn ends.
    `receive` fetches a descriptor's payload, `release` gives it back, `discard` one that
    was never fetched. How much may lie here is the control side's to bound;
    `on_taken(size)` tells it of every payload of `size` bytes that left the queue.
    """

    def __init__(
        self,
        receive: Callable[[Descriptor], Awaitable[Payload]],
        release: Callable[[Descriptor], None],
        discard: Callable[[Descriptor], None],
        on_taken: Callable[[int], None],
    ) -> None:
        self._receive = receive
        self._release = release
        self._discard = discard
        self._on_taken = on_taken
        self._waiting: deque[tuple[Descriptor, bool]] = deque()
        self._reading: Descriptor | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, descriptor: Descriptor, *, counted: bool) -> None:
        """Add a payload; only `counted` ones are told of when taken."""
        self._waiting.append((descriptor, counted))
        self._changed.set()

    def end(self) -> None:
        """No more follows."""
        self._ended = True
        self._changed.set()

    def close(self) -> None:
        """The turn is over: give back what is being read and what never will be."""
        self._give_back()
        while self._waiting:
            self._discard(self._waiting.popleft()[0])

    async def __anext__(self) -> Payload:
        self._give_back()
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        payload = await self._receive(self._waiting[0][0])
        self._reading, counted = self._waiting.popleft()
        if counted:
            self._on_taken(self._reading.size_bytes)
        return payload

    def _give_back(self) -> None:
        if self._reading is not None:
            self._release(self._reading)
            self._reading = None
