"""The turns of one session that are over, remembered so that they can be told again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocol.messages import TurnEnded


@dataclass
class EndedTurn:
    """A turn that is over. `void`: none of its content is wanted, or there is none.

    `step` is set while the turn is the answer to that committed step.
    """

    report: TurnEnded
    lane: str
    void: bool
    step: int | None = None


class EndedTurns:
    """The last `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[int, EndedTurn] = OrderedDict()

    def __contains__(self, turn: int) -> bool:
        return turn in self._turns

    def remember(self, ended: EndedTurn) -> int | None:
        """One more; the turn that is forgotten for it."""
        self._turns[ended.report.turn] = ended
        if len(self._turns) <= self._limit:
            return None
        oldest, _ = self._turns.popitem(last=False)
        return oldest

    def report(self, turn: int) -> TurnEnded | None:
        """The last word about a turn."""
        ended = self._turns.get(turn)
        return None if ended is None else ended.report

    def answer_to(self, step: int) -> EndedTurn | None:
        """The turn that is the answer to a committed step."""
        return next((ended for ended in self._turns.values() if ended.step == step), None)

    def go_back(self, step: int) -> None:
        """The session's state is the one after `step`: no turn is the answer to a later one."""
        for ended in self._turns.values():
            if ended.step is not None and ended.step > step:
                ended.step = None

    def void_below(self, lane: str, floor: int) -> list[int]:
        """No content of the lane's turns below `floor` is wanted; those that had any."""
        void = []
        for turn, ended in self._turns.items():
            if ended.lane == lane and turn < floor and not ended.void:
                ended.void = True
                void.append(turn)
        return void

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple(
            (turn, ended.report.status.value, ended.report.error, ended.void, ended.step)
            for turn, ended in self._turns.items()
        )
