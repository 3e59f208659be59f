"""The step loop of a session, as its client counts it, free of I/O.

A session of kind `robot` or `world` moves from step to step, one in flight at a time. This
keeps the count right through failures, resets and connections that broke.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepCounter:
    """Which step is next, and which one is in flight."""

    def __init__(self) -> None:
        self.committed = 0
        """The state is the one after this step, as far as the gateway said."""
        self.in_flight: int | None = None
        """The step of this client that has no answer yet."""
        self.lost = False
        """Whether the state is lost: only a reset, or a restore, goes on."""
        self.resetting = False
        self._snapshot: Mapping[str, Any] = {"in_flight": None, "committed_step": 0}

    @property
    def ready(self) -> bool:
        """Whether a step can be sent now."""
        return self.in_flight is None and not self.lost and not self.resetting

    def begin(self) -> int:
        """The number of the step that is sent now."""
        if not self.ready:
            raise RuntimeError("a step is in flight, or the state is not there")
        self.in_flight = self.committed + 1
        return self.in_flight

    def attached(self, snapshot: Mapping[str, Any]) -> None:
        """A connection is there, and this is where the loop stands; what is told again follows."""
        self._snapshot = snapshot
        self.lost = bool(snapshot["lost"])
        if self.in_flight is None:
            self.committed = snapshot["committed_step"]

    def outputs_lost(self) -> bool:
        """Some of what was to be told again is gone. Returns whether the answer to the step in
        flight is: that step is over."""
        if self.in_flight is None or self._snapshot["in_flight"] == self.in_flight:
            return False
        self.committed = self._snapshot["committed_step"]
        self.in_flight = None
        return True

    def told(self, type: str, fields: Mapping[str, Any]) -> bool:
        """An output of the session. Returns whether it ends the step in flight."""
        if "committed_step" in fields:
            self.committed = fields["committed_step"]
        match type:
            case "step_done" | "step_failed":
                return self._ended(fields["step"])
            case "safe_action":
                # Without its output one that is in flight goes on, and fails in the end.
                return not fields["in_flight"] and self._ended(fields["step"])
            case "state_lost":
                self.lost = True
            case "was_reset" | "was_restored":
                self.lost = self.resetting = False
        return False

    def _ended(self, step: int) -> bool:
        if step != self.in_flight:
            return False
        self.in_flight = None
        return True

    def not_taken(self) -> None:
        """The step in flight was refused before it began."""
        self.in_flight = None
