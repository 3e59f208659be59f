"""The last answers of a step loop, kept for who asks again."""

from __future__ import annotations

from collections import OrderedDict

from sessions.steps.events import StepDone, StepFailed

REMEMBERED_ANSWERS = 8
REMEMBERED_BYTES = 32 * 1024 * 1024
"""Output bytes of all remembered answers; the last one is remembered whatever its size."""


class Answers:
    """Answers to committed steps; the oldest go when there are too many or too much."""

    def __init__(self) -> None:
        self._answers: OrderedDict[int, StepDone | StepFailed] = OrderedDict()
        self._bytes = 0

    def remember(self, answer: StepDone | StepFailed) -> None:
        """Keep the answer to the next committed step."""
        self._answers[answer.step] = answer
        self._bytes += _size(answer)
        while len(self._answers) > REMEMBERED_ANSWERS or (
            self._bytes > REMEMBERED_BYTES and len(self._answers) > 1
        ):
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= _size(oldest)

    def get(self, step: int) -> StepDone | StepFailed | None:
        """The answer to `step`, while it is remembered."""
        return self._answers.get(step)

    def forget_after(self, step: int) -> None:
        """No step after `step` ever was."""
        for later in [known for known in self._answers if known > step]:
            self._bytes -= _size(self._answers.pop(later))

    def clear(self) -> None:
        """Forget everything: the steps begin anew."""
        self._answers.clear()
        self._bytes = 0

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (tuple(self._answers), self._bytes)


def _size(answer: StepDone | StepFailed) -> int:
    if isinstance(answer, StepFailed):
        return 0
    return sum(len(piece.data) for pieces in answer.outputs.values() for piece in pieces)
