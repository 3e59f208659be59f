"""The bounded memory of a session's 16 kHz audio."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int16]

SAMPLE_BYTES = np.dtype(np.int16).itemsize


class AudioLost(Exception):
    """A stretch was asked for whose beginning is no longer in the ring.

    `available_from` is the first position that is still there.
    """

    def __init__(self, available_from: int) -> None:
        super().__init__(f"audio before sample {available_from} is gone")
        self.available_from = available_from


class AudioRing:
    """The last `capacity` samples of a stream, addressed by absolute position.

    Appending costs time in proportion to what is appended, however long the
    stream has run; the oldest samples give way.
    """

    def __init__(self, capacity: int, position: int = 0) -> None:
        if capacity <= 0:
            raise ValueError("a ring holds at least one sample")
        self._buffer: Samples = np.zeros(capacity, np.int16)
        self._start = position
        self._end = position

    @property
    def capacity(self) -> int:
        """The most samples that the ring holds."""
        return len(self._buffer)

    @property
    def start(self) -> int:
        """The position of the oldest sample."""
        return self._start

    @property
    def end(self) -> int:
        """The position after the newest sample."""
        return self._end

    def append(self, samples: Samples) -> None:
        """Put int16 `samples` after the newest one."""
        end = self._end + len(samples)
        kept = samples[-self.capacity :]
        offset = (end - len(kept)) % self.capacity
        head = min(len(kept), self.capacity - offset)
        self._buffer[offset : offset + head] = kept[:head]
        self._buffer[: len(kept) - head] = kept[head:]
        self._end = end
        self._start = max(self._start, end - self.capacity)

    def read(self, start: int, end: int) -> Samples:
        """A copy of the samples at positions `start` to `end`.

        Raises AudioLost when the beginning is gone and ValueError when the end has
        not come yet or lies before the start.
        """
        if end > self._end or end < start:
            raise ValueError(f"no stretch from {start} to {end} in audio that ends at {self._end}")
        if start < self._start:
            raise AudioLost(self._start)
        offset = start % self.capacity
        head = min(end - start, self.capacity - offset)
        return np.concatenate(
            (self._buffer[offset : offset + head], self._buffer[: end - start - head])
        )

    def restart(self, position: int) -> None:
        """Forget everything; the next sample has `position`."""
        self._start = self._end = position
