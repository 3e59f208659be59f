"""The mailbox of one session on its worker: commands that are carried out one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from protocol.messages import Configure, Feed, Open, Park, Run, Signal
from workers.turn_control import Totals

InOrder = Open | Configure | Signal | Run | Feed | Park
"""The commands that are carried out in their order."""


class Waiting(msgspec.Struct, frozen=True):
    """A command in the mailbox; it is carried out once input through `barrier` is."""

    command: InOrder
    barrier: int
    received_ms: float


class Mailbox:
    """What waits, in order; `totals` counts it with that of all other sessions."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> Waiting | None:
        """What is carried out next."""
        return self._waiting[0] if self._waiting else None

    def put(self, waiting: Waiting) -> None:
        """One more command, behind the others."""
        self._waiting.append(waiting)
        self._totals.waiting += 1

    def take(self) -> Waiting:
        """The head, which waits no longer."""
        self._totals.waiting -= 1
        return self._waiting.popleft()

    def take_all(self) -> list[InOrder]:
        """Every command, in order."""
        return self._take(lambda _: True)

    def take_turn(self, turn: int) -> list[InOrder]:
        """The start of a turn, and what was fed to it."""
        return self._take(lambda command: isinstance(command, Run | Feed) and command.turn == turn)

    def take_feeds(self, runs: Callable[[int], bool]) -> list[Feed]:
        """What is fed to turns that run already."""
        taken = self._take(lambda command: isinstance(command, Feed) and runs(command.turn))
        return [command for command in taken if isinstance(command, Feed)]

    def holds(self, turn: int) -> bool:
        """Whether the start of this turn waits."""
        return any(isinstance(w.command, Run) and w.command.turn == turn for w in self._waiting)

    def turns_below(self, lane: str, floor: int) -> list[int]:
        """The turns of a lane below `floor` whose start waits."""
        commands = (waiting.command for waiting in self._waiting)
        runs = (command for command in commands if isinstance(command, Run))
        return [run.turn for run in runs if run.lane == lane and run.turn < floor]

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple((waiting.barrier, waiting.command) for waiting in self._waiting)

    def _take(self, wanted: Callable[[InOrder], bool]) -> list[InOrder]:
        taken = [waiting.command for waiting in self._waiting if wanted(waiting.command)]
        if taken:
            self._waiting = deque(w for w in self._waiting if not wanted(w.command))
            self._totals.waiting -= len(taken)
        return taken
