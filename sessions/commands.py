"""The command ids of a session's clients: one that is repeated is not carried out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from protocol.errors import ErrorInfo
from sessions.client import Answered

REMEMBERED = 256
"""Answers that are remembered, the latest ones: an older id counts as new."""


class Commands:
    """Answers by command id. `emit` tells the clients."""

    def __init__(self, emit: Callable[[Answered], None]) -> None:
        self._emit = emit
        self._answers: OrderedDict[str, Answered] = OrderedDict()

    def repeated(self, command: str) -> bool:
        """Whether this id was answered already; then it is answered so again."""
        answer = self._answers.get(command)
        if answer is None:
            return False
        self._emit(answer)
        return True

    def answer(self, command: str, error: ErrorInfo | None, result: dict[str, Any]) -> None:
        """Answer a command for the first time."""
        answer = Answered(command, error, result)
        self._answers[command] = answer
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        self._emit(answer)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple(self._answers)
