"""Whether a client takes what is put out for it, and since when it does not."""

from __future__ import annotations


class ClientPace:
    """The pace of who takes the output; a client that takes nothing for `stall_ms` is stalled.

    Times are monotonic ms.
    """

    def __init__(self, stall_ms: float) -> None:
        self._stall_ms = stall_ms
        self.blocked_since_ms: float | None = None

    @property
    def blocked(self) -> bool:
        """Whether nothing may be put out now."""
        return self.blocked_since_ms is not None

    def set(self, blocked: bool, now_ms: float) -> None:
        """The client's egress queue is full, or has room again."""
        if not blocked:
            self.blocked_since_ms = None
        elif self.blocked_since_ms is None:
            self.blocked_since_ms = now_ms

    @property
    def stalled_at_ms(self) -> float | None:
        """When the client will be stalled, if it takes nothing until then."""
        return None if self.blocked_since_ms is None else self.blocked_since_ms + self._stall_ms

    def stalled(self, now_ms: float) -> bool:
        """Whether the client has taken nothing for too long."""
        at_ms = self.stalled_at_ms
        return at_ms is not None and at_ms <= now_ms
