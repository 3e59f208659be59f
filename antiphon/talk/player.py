"""A player that is only reckoned: it starts at the first packet and plays in real time."""

from __future__ import annotations

from antiphon.talk.wav import RATE_HZ


class Player:
    """What a listener would have heard of one answer, without a sound card.

    It starts with the first packet and plays on in real time; a packet that comes
    too late makes it wait. Times are monotonic seconds, sounds counted in samples
    at 24 kHz.
    """

    def __init__(self) -> None:
        self.received = 0
        self.started_at: float | None = None
        self.underrun_s = 0.0
        """The longest deficit: how long after its due time, counted from the first
        packet, a packet came."""
        self._stopped_at: float | None = None
        self._runs: list[tuple[float, int]] = []
        """Where playing began anew: (time, samples played before it)."""

    def add(self, samples: int, now: float) -> None:
        """A packet of `samples` has come. Packets after `stop` are not played."""
        if self._stopped_at is not None or samples <= 0:
            return
        if self.started_at is None:
            self.started_at = now
            self._runs.append((now, 0))
        else:
            due = self.started_at + self.received / RATE_HZ
            self.underrun_s = max(self.underrun_s, now - due)
            begun, before = self._runs[-1]
            if now > begun + (self.received - before) / RATE_HZ:
                self._runs.append((now, self.received))
        self.received += samples

    def played(self, now: float) -> int:
        """How many samples have been played by `now`."""
        if not self._runs:
            return 0
        now = now if self._stopped_at is None else min(now, self._stopped_at)
        begun, before = self._runs[-1]
        return min(self.received, before + max(0, int((now - begun) * RATE_HZ)))

    def playing(self, now: float) -> bool:
        """Whether there is sound left to play."""
        return self._stopped_at is None and self.played(now) < self.received

    def due(self, sample: int) -> float | None:
        """When sample number `sample` is or was played; None: not received."""
        if not 0 <= sample < self.received:
            return None
        begun, before = next(run for run in reversed(self._runs) if run[1] <= sample)
        return begun + (sample - before) / RATE_HZ

    def stop(self, now: float) -> int:
        """Stop for good; the number of samples that were played."""
        if self._stopped_at is None:
            self._stopped_at = now
        return self.played(now)
