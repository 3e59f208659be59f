"""What is asked of a loop's state between two steps: to begin anew, be kept, go back, let go.

One change is under way at a time. It waits until the step in flight is over and a worker has
the state; what became of it is the worker's answer to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.errors import CapacityExceeded, EngineLost, ErrorInfo
from protocol.messages import CHECKPOINT, RELEASE, RESET, REWIND, Answer
from sessions.bindings import Binding
from sessions.client import Refused
from sessions.steps.events import Checkpoint, ReleaseActions, Reset, Rewind, StepOutput

StateVerb = Reset | Checkpoint | Rewind | ReleaseActions

_NAMES = {
    Reset: "a reset",
    Checkpoint: "a checkpoint",
    Rewind: "a rewind",
    ReleaseActions: "a release of actions",
}


class Changes:
    """The change under way, if any. `binding` is that of the stage that keeps the state.

    Without a worker it is waited for one for `restore_ms`.
    """

    def __init__(
        self,
        binding: Callable[[], Binding],
        restore_ms: float,
        emit: Callable[[StepOutput], None],
    ) -> None:
        self.verb: StateVerb | None = None
        """What is under way."""
        self.wait_until_ms: float | None = None
        """When it is refused, where it waits for a worker."""
        self.told = False
        """Whether the client of a reset was answered before it was done."""
        self.releases = True
        """Whether a reset lets its client's stop go: not one that came after it."""
        self._binding = binding
        self._restore_ms = restore_ms
        self._emit = emit
        self._command: str | None = None
        """The signal's id once a worker has been asked."""

    def check(self) -> None:
        """Raise CapacityExceeded while a change is under way."""
        verb = self.verb
        if verb is None:
            return
        why = f"{_NAMES[type(verb)]} is under way: wait for it"
        if self.resetting:
            raise CapacityExceeded(why, code="reset_in_progress")
        raise CapacityExceeded(why, code="change_in_progress")

    @property
    def resetting(self) -> bool:
        """Whether the state is to begin anew, whatever it is now."""
        return isinstance(self.verb, Reset)

    @property
    def moving(self) -> bool:
        """Whether the worker may have put another state in the place of this one by now."""
        return self._command is not None and isinstance(self.verb, Reset | Rewind)

    @property
    def unanswered(self) -> Reset | None:
        """The reset under way, where its client is to have an answer in time and had none."""
        verb = self.verb
        owed = isinstance(verb, Reset) and verb.since_ms is not None and not self.told
        return verb if owed and isinstance(verb, Reset) else None

    def begin(self, verb: StateVerb) -> None:
        """Take it up. Raises CapacityExceeded while another is under way.

        A reset takes the place of one of which its client was told already: nothing is done
        between them.
        """
        if not (self.told and isinstance(verb, Reset) and self._same(verb)):
            self.check()
        self.verb, self.told, self.releases = verb, False, True

    def _same(self, reset: Reset) -> bool:
        return isinstance(self.verb, Reset) and self.verb.parameters == reset.parameters

    def go_on(self, now_ms: float) -> None:
        """No step is in flight: ask the worker, or wait for one."""
        if self.verb is None or self._command is not None:
            return
        binding = self._binding()
        if binding.ready:
            self.wait_until_ms = None
            self._command = binding.signal(*_signal(self.verb))
        elif self.wait_until_ms is None:
            self.wait_until_ms = now_ms + self._restore_ms
            binding.wake()

    def worker_lost(self) -> None:
        """The worker is gone, and has not answered: the next one is asked."""
        self._command = None

    def answered(self, answer: Answer) -> StateVerb | None:
        """The change that the worker has made; None: it is refused, or this was not asked."""
        verb = self.verb
        if verb is None or self._command != answer.command:
            return None
        if answer.error is not None:
            self.refuse(answer.error)
            return None
        self._over()
        return verb

    def refuse(self, error: ErrorInfo) -> None:
        """Nothing comes of what is under way, if anything is."""
        verb = self.verb
        if verb is not None:
            self._over()
            self._emit(Refused(error, verb.ref))

    def tick(self, now_ms: float) -> bool:
        """Refuse what has waited too long for a worker; whether anything has."""
        if self.wait_until_ms is None or self.wait_until_ms > now_ms:
            return False
        reason = f"no worker came for stage {self._binding().stage}"
        self.refuse(EngineLost(reason).info())
        return True

    def _over(self) -> None:
        self.verb = self._command = self.wait_until_ms = None
        self.told, self.releases = False, True

    def freeze(self) -> tuple[object, ...] | None:
        """The canonical value of this state."""
        if self.verb is None:
            return None
        asked = (type(self.verb).__name__, self._command, self.wait_until_ms)
        return (*asked, self.unanswered and self.unanswered.since_ms, self.told, self.releases)


def _signal(verb: StateVerb) -> tuple[str, dict[str, Any]]:
    """The signal that asks the worker for it: name and arguments."""
    match verb:
        case Reset(parameters=parameters):
            return RESET, parameters
        case Checkpoint():
            return CHECKPOINT, {}
        case Rewind(step=step):
            return REWIND, {"step": step}
        case ReleaseActions():
            return RELEASE, {}
