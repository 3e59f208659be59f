"""The step loop of a session, as its client counts it, free of I/O.

A session of kind `robot` or `world` moves from step to step, one in flight at a time. This
keeps the count right through failures, resets and connections that broke.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from antiphon_client.told import whole, yes_or_no


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
        self._others: int | None = None
        """A step in flight that somebody else asked for, such as the process that had the session
        before: the next one has to wait for it, and its answer is no answer to what is seen now."""
        self._as_of = 0
        """As of this output the last snapshot tells where the loop stands."""
        self._snapshot: Mapping[str, Any] = {"in_flight": None, "committed_step": 0}

    @property
    def ready(self) -> bool:
        """Whether a step can be sent now."""
        free = self.in_flight is None and self._others is None
        return free and not self.lost and not self.resetting

    def begin(self) -> int:
        """The number of the step that is sent now."""
        if not self.ready:
            raise RuntimeError("a step is in flight, or the state is not there")
        self.in_flight = self.committed + 1
        return self.in_flight

    def attached(self, snapshot: Mapping[str, Any], sequence: int) -> None:
        """A connection is there, and this is where the loop stood as of output `sequence`; what is
        told again follows. Raises ProtocolError for a snapshot that is none."""
        under_way = snapshot["in_flight"]
        if under_way is not None:
            whole(under_way, "in_flight")
        self.lost = yes_or_no(snapshot["lost"], "lost")
        self.committed = whole(snapshot["committed_step"], "committed_step")
        self._snapshot, self._as_of = snapshot, sequence
        self._others = under_way if under_way != self.in_flight else None

    def outputs_lost(self) -> bool:
        """Some of what was to be told again is gone. Returns whether the answer to the step in
        flight is: that step is over."""
        if self.in_flight is None or self._snapshot["in_flight"] == self.in_flight:
            return False
        self.in_flight = None
        return True

    def told(self, type: str, sequence: int, fields: Mapping[str, Any]) -> bool:
        """Output number `sequence` of the session. Returns whether it ends the step in flight.
        Raises ProtocolError for one whose steps are no numbers."""
        news = sequence > self._as_of
        if news and "committed_step" in fields:
            self.committed = whole(fields["committed_step"], "committed_step")
        match type:
            case "step_done" | "step_failed":
                return self._ended(whole(fields["step"], "step"))
            case "safe_action":
                # Without its output one that is in flight goes on, and fails in the end.
                in_flight = yes_or_no(fields["in_flight"], "in_flight")
                return not in_flight and self._ended(whole(fields["step"], "step"))
            case "state_lost" if news:
                self.lost = True
            case "was_reset" | "was_restored":
                self.resetting = False
                if news:
                    self.lost = False
                    self._others = None
        return False

    def _ended(self, step: int) -> bool:
        if step == self._others:
            self._others = None
            return False
        if step != self.in_flight:
            return False
        self.in_flight = None
        return True

    def not_taken(self) -> None:
        """The step in flight was refused before it began."""
        self.in_flight = None
