"""When a robot asks, and which action it takes: three ways to play chunks.

Free of I/O and of clocks. Steps of an episode count from 0: the observation of step n is what is
seen before it, and an action for step n is of use if it is there when that step is due.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Actions = npt.NDArray[Any]
"""Horizon by dimensions."""

REMEMBERED_DELAYS = 10


@dataclass(frozen=True)
class Playing:
    """Actions that are played one a step from step `start` on; `fresh` if the policy made them
    of the observation that they answer."""

    actions: Actions
    start: int
    fresh: bool

    @property
    def end(self) -> int:
        """The first step that it has no action for."""
        return self.start + len(self.actions)

    def at(self, step: int) -> Actions | None:
        """The action of a step; None: it has none."""
        return self.actions[step - self.start] if self.start <= step < self.end else None


NOTHING = Playing(np.zeros((0, 0)), 0, False)


class Control(Protocol):
    """One episode's way of playing chunks."""

    def wants(self, step: int) -> bool:
        """Whether the observation of `step` is to be sent."""

    def prefix(self, step: int, longest: int) -> Actions:
        """What the answer to the observation of `step` cannot change any more: actions from
        that step on, at most `longest`, that will be taken before it is there."""

    def asked(self, step: int) -> None:
        """The observation of `step` was sent."""

    def answered(self, chunk: Actions, step: int, fresh: bool) -> None:
        """The answer is there, in time for `step`."""

    def action(self, step: int) -> tuple[Actions | None, bool]:
        """The action of `step`, and whether it is fresh; None: there is none."""


class Chunks:
    """What the three ways have in common: one question at a time, one chunk that is played."""

    def __init__(self, actions: int | None, ask_ahead: int | None) -> None:
        """Of a chunk the first `actions` are played (None: all); the next is asked for when
        `ask_ahead` of them are left (None: as the way has it)."""
        self._most = actions
        self._ask_ahead = ask_ahead
        self._playing = NOTHING
        self._asked: int | None = None

    def prefix(self, step: int, longest: int) -> Actions:
        """None: whoever plays whole chunks has committed to nothing of the next."""
        return NOTHING.actions

    def asked(self, step: int) -> None:
        """Wait for the answer."""
        self._asked = step

    def action(self, step: int) -> tuple[Actions | None, bool]:
        """From the chunk that is played."""
        return self._playing.at(step), self._playing.fresh


class Synchronous(Chunks):
    """Ask, wait, act: nothing is done meanwhile. Plays one action of a chunk, if not told more."""

    def wants(self, step: int) -> bool:
        """When the actions are used up."""
        return self._asked is None and step >= self._playing.end

    def answered(self, chunk: Actions, step: int, fresh: bool) -> None:
        """Begin with the first action, however old it is."""
        self._asked = None
        self._playing = Playing(chunk[: self._most or 1], step, fresh)


class Chunked(Chunks):
    """Plays whole chunks, one behind the other, and asks for the next one before the end."""

    def __init__(self, actions: int | None, ask_ahead: int | None) -> None:
        super().__init__(actions, ask_ahead)
        self._next: Playing | None = None

    def wants(self, step: int) -> bool:
        """When one action is left, or as many as it was told."""
        ahead = 1 if self._ask_ahead is None else self._ask_ahead
        left = self._playing.end - step
        return self._asked is None and self._next is None and left <= ahead

    def answered(self, chunk: Actions, step: int, fresh: bool) -> None:
        """It is played from its beginning, behind the one before it."""
        self._asked = None
        self._next = Playing(chunk[: self._most], max(step, self._playing.end), fresh)

    def action(self, step: int) -> tuple[Actions | None, bool]:
        """From the next chunk, once this one is used up."""
        if self._next is not None and step >= self._next.start:
            self._playing, self._next = self._next, None
        return super().action(step)


class RealTimeChunking(Chunks):
    """Asks while it acts. A chunk begins with the step of its observation, so of one that is
    there the actions for the steps that are over are left out.

    Real-Time Execution of Action Chunking Flow Policies (arXiv 2506.07339), with the frozen part
    given to the policy.
    """

    def __init__(self, actions: int | None, ask_ahead: int | None) -> None:
        super().__init__(actions, ask_ahead)
        self._delays: deque[int] = deque([0], REMEMBERED_DELAYS)

    def wants(self, step: int) -> bool:
        """When half of the actions are left, or as many as it was told."""
        length = len(self._playing.actions)
        ahead = length // 2 if self._ask_ahead is None else self._ask_ahead
        return self._asked is None and self._playing.end - step <= ahead

    def prefix(self, step: int, longest: int) -> Actions:
        """As many of the current chunk as the slowest of the last answers took steps."""
        begin = step - self._playing.start
        length = min(max(self._delays), longest)
        return self._playing.actions[begin : begin + length]

    def answered(self, chunk: Actions, step: int, fresh: bool) -> None:
        """Go on in the new chunk where this step is; what is not fresh is of no step."""
        assert self._asked is not None, "an answer that nobody asked for"
        self._delays.append(step - self._asked)
        self._playing = Playing(chunk[: self._most], self._asked if fresh else step, fresh)
        self._asked = None


WAYS: dict[str, type[Synchronous] | type[Chunked] | type[RealTimeChunking]] = {
    "synchronous": Synchronous,
    "chunked": Chunked,
    "real-time-chunking": RealTimeChunking,
}
