"""Realtime head-room: what one more session would take of the processor, and what is left.

The processor time of a worker is measured, and shared out over its sessions: what they took
in the last seconds, divided by how long they were open meanwhile, is the share of one. One more
is let in while all of them together, at that share, find room in the cores that they may have.
Older measures count for less: half after `HALF_LIFE_MS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.compute_use import ComputeUse

HALF_LIFE_MS = 10_000.0
LEAST_SESSION_S = 2.0
"""So long sessions must have been open, all together, before their share is known."""


@dataclass(frozen=True)
class ComputeSample:
    """Processor time since some moment, in s: of this process, and of all others on the machine;
    and how many cores its sessions and all others share; None: any number."""

    own_s: float
    others_s: float
    cores: float | None


class Compute:
    """The measures of one worker. Times are monotonic ms.

    `head_room` is the share (0 to 1) of its cores that no session is let in for.
    """

    def __init__(self, head_room: float = 0.0) -> None:
        self._head_room = head_room
        self._last: tuple[ComputeSample, float] | None = None
        self._cores: float | None = None
        self._open = 0
        self._since_ms = 0.0
        self._open_s = 0.0
        """How long sessions have been open since the last sample, all together."""
        self._ended = 0
        # All of these fade.
        self._own_s = self._others_s = self._passed_s = self._session_s = self._turns = 0.0

    def sessions(self, count: int, now_ms: float) -> None:
        """So many sessions are open from now on."""
        self._open_s += self._open * (now_ms - self._since_ms) / 1000
        self._open, self._since_ms = count, now_ms

    def turn_ended(self) -> None:
        """A turn is over."""
        self._ended += 1

    def sampled(self, sample: ComputeSample, now_ms: float) -> None:
        """So much processor time has been used by now."""
        self.sessions(self._open, now_ms)
        if self._last is not None and now_ms > self._last[1]:
            last, last_ms = self._last
            passed_ms = now_ms - last_ms
            fading = 0.5 ** (passed_ms / HALF_LIFE_MS)
            self._own_s = fading * self._own_s + sample.own_s - last.own_s
            self._others_s = fading * self._others_s + max(0.0, sample.others_s - last.others_s)
            self._passed_s = fading * self._passed_s + passed_ms / 1000
            self._session_s = fading * self._session_s + self._open_s
            self._turns = fading * self._turns + self._ended
        self._last, self._cores = (sample, now_ms), sample.cores
        self._open_s, self._ended = 0.0, 0

    def refusal(self) -> str | None:
        """Why one more session would have too little; None where it would have enough.

        The first one is never refused: nothing is known of it.
        """
        share, left = self._share(), self._left()
        if share is None or left is None or not self._open:
            return None
        if share * (self._open + 1) <= left:
            return None
        return (
            f"a session takes {share:.2g} of a core, and the {self._open} that are open leave "
            f"{max(0.0, left - share * self._open):.2g} of {left:.3g} cores"
        )

    def use(self) -> ComputeUse:
        """What is told of it."""
        return ComputeUse(
            self._left(),
            self._own_s / self._passed_s if self._passed_s else 0.0,
            self._share() or 0.0,
            1000 * self._own_s / self._turns if self._turns >= 1 else 0.0,
        )

    def _share(self) -> float | None:
        """What one session takes on average, in cores; None before that is known."""
        return self._own_s / self._session_s if self._session_s >= LEAST_SESSION_S else None

    def _left(self) -> float | None:
        """The cores that all its sessions together can count on; None: any number."""
        if self._cores is None:
            return None
        others = self._others_s / self._passed_s if self._passed_s else 0.0
        return max(0.0, self._cores * (1 - self._head_room) - others)
