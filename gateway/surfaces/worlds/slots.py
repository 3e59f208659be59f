"""The pictures that wait for one viewer. The rule when it is full: the oldest goes, counted."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

SLOTS = 4

Shown = TypeVar("Shown")


class Slots(Generic[Shown]):
    """At most SLOTS frames that a viewer has not been sent yet."""

    def __init__(self) -> None:
        self.dropped = 0
        """How many were left out so far."""
        self._shots: deque[Shown] = deque()
        self._filled = asyncio.Event()

    def put(self, shot: Shown) -> bool:
        """A frame is to be shown; whether an older one went for it."""
        full = len(self._shots) >= SLOTS
        if full:
            self._shots.popleft()
            self.dropped += 1
        self._shots.append(shot)
        self._filled.set()
        return full

    @property
    def waiting(self) -> int:
        """How many there are."""
        return len(self._shots)

    async def filled(self) -> None:
        """Wait until there is one."""
        while not self._shots:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> Shown:
        """The next one to be sent; there must be one."""
        return self._shots.popleft()

    def clear(self) -> None:
        """What waits is of a world that has begun anew, or is gone."""
        self._shots.clear()
