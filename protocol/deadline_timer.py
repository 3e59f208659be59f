"""One timer for the earliest of all deadlines of a machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """Calls `on_due` once the deadline has come that it was armed for.

    Deadlines are ms of `clock_ms`. The timer may look a moment too early, or for a deadline
    that was put off since: who finds nothing due arms it again. Make it on a running loop.
    """

    def __init__(self, on_due: Callable[[], None], clock_ms: Callable[[], float]) -> None:
        self._on_due = on_due
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._at_ms = 0.0

    def arm(self, at_ms: float | None) -> None:
        """Call `on_due` at `at_ms`, or before if it was armed for that; None: no need to."""
        if at_ms is None:
            return
        if self._handle is not None:
            if self._at_ms <= at_ms:
                return
            self._handle.cancel()
        # Kept here: uvloop's handle of a time that has passed does not know it.
        self._at_ms = at_ms
        # uvloop rounds to whole ms. Rounded down, `on_due` would be called in every loop turn
        # of the rest, and find nothing due.
        delay_ms = math.ceil(max(0.0, at_ms - self._clock_ms()))
        self._handle = self._loop.call_later(delay_ms / 1000.0, self._due)

    def arm_soon(self, at_ms: Callable[[], float | None]) -> None:
        """`arm` for what `at_ms` says at the end of the loop turn: once for all that changes it."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._arm_now, at_ms)

    def cancel(self) -> None:
        """Call nothing any more, until it is armed again."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm_now(self, at_ms: Callable[[], float | None]) -> None:
        self._soon = None
        self.arm(at_ms())

    def _due(self) -> None:
        self._handle = None
        self._on_due()
