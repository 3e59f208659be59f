"""A session's steps on one worker: which is committed, which runs, whether the state is lost."""

from __future__ import annotations

from protocol.errors import AntiphonError
from sessions.steps.refusals import misplaced, state_lost


class StepOrder:
    """Steps count from 1 without gaps, one at a time.

    `committed` is the last one whose state the session has. `running` is the turn of the
    step that runs. Once the state is `lost` nothing works on it until it begins anew.
    """

    def __init__(self) -> None:
        self.committed = 0
        self.lost = False
        self.running: int | None = None

    def begin(self, step: int, turn: int) -> None:
        """Step `step` runs as `turn`. Raises ValueError when it is not its time."""
        if self.lost or self.running is not None or step != self.committed + 1:
            raise ValueError(f"step {step} cannot run after step {self.committed}")
        self.running = turn

    def end(self, turn: int) -> None:
        """The turn does not run any more; that it was a step need not be known."""
        if self.running == turn:
            self.running = None

    def commit(self) -> None:
        """The step that ran is committed."""
        self.committed += 1

    def restore(self, step: int) -> None:
        """The state is the one after `step`."""
        self.committed = step

    def go_back(self, step: int) -> None:
        """The state is the one after `step` again, and whole."""
        self.committed = step
        self.lost = False

    def unusable(self) -> AntiphonError | None:
        """Why nothing can work on the state; None when it is whole."""
        return state_lost(self.committed) if self.lost else None

    def refusal(self, step: int) -> AntiphonError:
        """Why `step` does not run: it is committed already, or ahead."""
        return misplaced(step, self.committed)

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (self.committed, self.lost, self.running)
