"""The step in flight: what has come of it so far, and when it is over."""

from __future__ import annotations

import msgspec

from protocol.errors import EngineFailed, ErrorInfo, InvalidRequest
from protocol.messages import TurnEnded, TurnStatus
from protocol.payloads import Payload
from sessions.actions import TurnMeasured
from sessions.flow import FlowEnded, Produced
from sessions.lanes import DEFAULT_LANE
from sessions.steps.events import Step

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Of all outputs of one step, which are held here until it is committed."""


class Flight:
    """One step, as turn `turn`. Its output is held until the step is known to be committed.

    `state` is the stage that keeps the state. What the turn came to is known when the turn
    has ended and that stage, if it began, has said its last word or is gone.
    """

    def __init__(self, verb: Step, turn: int, state: str, due_ms: float | None = None) -> None:
        self.verb = verb
        self.turn = turn
        self.outputs: dict[str, list[Payload]] = {}
        self.interrupted = False
        self._due_ms = due_ms
        self.answered = False
        """Whether it was answered without its output, which is dropped then."""
        self.given_up: ErrorInfo | None = None
        """Why it was stopped, where the client did not ask for that."""
        self.last_word: TurnEnded | None = None
        self.flow: FlowEnded | None = None
        self._state = state
        self._state_gone = False
        self._size_bytes = 0

    def take(self, produced: Produced) -> bool:
        """Hold a piece, whose bytes are only lent; False when there are too many."""
        if self.given_up is not None:
            return True
        piece = produced.payload
        self._size_bytes += len(piece.data)
        if self._size_bytes > MAX_OUTPUT_BYTES:
            self.outputs.clear()
            self.given_up = EngineFailed(
                f"the step made more than {MAX_OUTPUT_BYTES} bytes of output",
                code="step_output_too_large",
            ).info()
            return False
        if not isinstance(piece.data, bytes):
            piece = msgspec.structs.replace(piece, data=bytes(piece.data))
        self.outputs.setdefault(produced.port, []).append(piece)
        return True

    @property
    def unanswered_at_ms(self) -> float | None:
        """When it is too late for its answer; None: it has been answered, or may take its time."""
        return None if self.answered else self._due_ms

    def late(self, now_ms: float) -> bool:
        """Whether its answer is due without it."""
        due_ms = self.unanswered_at_ms
        return due_ms is not None and due_ms <= now_ms

    def state_lost(self) -> None:
        """The worker that kept the state will say nothing more."""
        self._state_gone = True

    @property
    def over(self) -> bool:
        """Whether everything has been said about it."""
        if self.flow is None:
            return False
        owing = self._state in self.flow.unsettled and self.last_word is None
        return self._state_gone or not owing

    def failure(self) -> ErrorInfo | None:
        """Why the step has no output to answer with; None when it has."""
        assert self.flow is not None
        if self.given_up is not None or self.flow.error is None:
            return self.given_up
        word = self.last_word
        if self.interrupted and (word is None or word.status is TurnStatus.CANCELLED):
            return cancelled("the step was interrupted")
        return self.flow.error

    def measured(self, error: ErrorInfo | None) -> TurnMeasured:
        """What it took; `error` is what the client was told."""
        status = "completed" if error is None else "failed"
        if error is not None and error.code == "step_cancelled":
            status = "cancelled"
        elif error is not None and error.code == "step_late":
            status = "late"
        return TurnMeasured(
            turn=self.turn,
            lane=DEFAULT_LANE,
            status=status,
            reason=None,
            error=error.code if error is not None else None,
            ttft_ms=None,
            ttfp_ms=None,
            rtf=None,
            audio_ms=0,
            prefill_tokens=None,
            timelines=self.flow.timelines if self.flow is not None else {},
        )

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.verb.step,
            self.turn,
            self._size_bytes,
            self.interrupted,
            (self._due_ms, self.answered),
            self.given_up,
            self.last_word is not None,
            self.flow is not None,
            self._state_gone,
        )


def dropped(step: int) -> ErrorInfo:
    """The end of a step that was answered before, and was committed all the same."""
    reason = f"step {step} was committed after it had been answered: its output is dropped"
    return EngineFailed(reason, code="step_late").info()


def cancelled(reason: str) -> ErrorInfo:
    """The error of a step that was cancelled before it was committed."""
    return InvalidRequest(reason, code="step_cancelled").info()
