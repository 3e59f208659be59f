"""What a session asks of the machine of its kind."""

from __future__ import annotations

from typing import Any, Protocol

from protocol.errors import ErrorInfo
from protocol.messages import Report
from sessions.actions import StageProduced
from sessions.lifecycle import CloseReason


class Machine(Protocol):
    """The machine of one session's kind. Times are monotonic ms."""

    @property
    def settings(self) -> Any:
        """The effective settings."""

    @property
    def working(self) -> bool:
        """Whether a turn is in flight."""

    @property
    def finished(self) -> bool:
        """Whether the session has done all that it was opened for, and may close."""

    def stage_settings(self, stage: str) -> dict[str, Any]:
        """The settings with which `stage` opens its part of this session."""

    def prepare(self, patch: dict[str, Any]) -> None:
        """Settings given with the open. Raises InvalidRequest."""

    def client(self, verb: Any, now_ms: float) -> dict[str, Any]:
        """Carry a verb of this kind out; what its answer says beside the facts.

        Raises AntiphonError, and then everything is as it was.
        """

    def refusal(self, verb: Any, error: ErrorInfo) -> Any:
        """How a verb that was not carried out is answered."""

    def facts(self) -> dict[str, Any]:
        """What every answer to a command says beside its outcome."""

    def snapshot(self) -> Any:
        """The state as a client that comes back has to know it."""

    def report(self, stage: str, report: Report, now_ms: float) -> None:
        """A worker's report about a turn or an event of this session."""

    def produced(self, piece: StageProduced, now_ms: float) -> None:
        """A stage made a piece of a turn's output."""

    def settings_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> bool:
        """The stage cannot do what the last settings ask of it; whether the session can go on
        without."""

    def stage_lost(
        self,
        stage: str,
        unapplied_bytes: int,
        now_ms: float,
        *,
        restorable: bool = False,
        reason: str | None = None,
    ) -> None:
        """The worker of `stage` is gone, with `unapplied_bytes` of input that it was sent.

        Where its state is `restorable`, `stage_restored` says to which step. `reason` is why
        a state that was in the store did not come back.
        """

    def stage_restored(self, stage: str, step: int, now_ms: float) -> None:
        """A worker of `stage` is about to go on from the state in the store, after `step`."""

    def stage_forked(self, stage: str, step: int, now_ms: float) -> None:
        """`stage` opens with the state of another session, after `step`."""

    def stage_ready(self, stage: str, now_ms: float) -> None:
        """A worker of `stage` holds this session."""

    def rebuilt(self, stage: str) -> bool:
        """Whether the new worker of `stage` was told all that the session is to go on from."""

    def stage_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> None:
        """A new worker of `stage` refused the session."""

    def blocked(self, blocked: bool, now_ms: float) -> None:
        """Output is not taken, or is taken again."""

    def stalled(self, now_ms: float) -> bool:
        """Whether output has not been taken for too long."""

    def give_up(self, reason: str, now_ms: float) -> None:
        """Nobody takes what is made: what runs ends incomplete."""

    def deadline(self) -> float | None:
        """When `tick` has something to do."""

    def tick(self, now_ms: float) -> None:
        """A deadline has come."""

    def end(self, reason: CloseReason, error: ErrorInfo | None, now_ms: float) -> None:
        """The session closes: whatever runs gets its last word."""

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
