"""From the rate of the input to the 16 kHz of the models, with a clock that stays right."""

from __future__ import annotations

import numpy as np
import soxr

from workers.engines.speech_in.ring import Samples

RATE_HZ = 16_000
"""The rate of everything behind the resampler."""

SAMPLES_PER_MS = RATE_HZ // 1000


class InputResampler:
    """Streaming resampler whose output sample k lies k/16 ms after the input began.

    The library compensates the delay of its filter: the output is complete up to
    some tens of milliseconds before the newest input, and is never shifted.
    `flush` brings out the rest.
    """

    def __init__(self, rate_hz: int) -> None:
        self.rate_hz = rate_hz
        self._stream = soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="int16")
        self._received = 0
        self._produced = 0

    @property
    def received_ms(self) -> float:
        """Milliseconds of input since the beginning."""
        return self._received * 1000 / self.rate_hz

    @property
    def received_position(self) -> int:
        """The output position that belongs to the end of the input."""
        return round(self._received * RATE_HZ / self.rate_hz)

    def feed(self, samples: Samples) -> Samples:
        """What `samples` (int16 at the input rate) bring out at 16 kHz."""
        self._received += len(samples)
        output: Samples = self._stream.resample_chunk(samples)
        self._produced += len(output)
        return output

    def flush(self) -> Samples:
        """The samples that were still inside the filter.

        The stream goes on after it, with a seam where it was flushed: for the border
        of a stretch that somebody takes now.
        """
        missing = self.received_position - self._produced
        tail: Samples = self._stream.resample_chunk(np.zeros(0, np.int16), last=True)
        self._stream.clear()
        self._produced += missing
        if missing <= len(tail):
            return tail[: max(missing, 0)]
        return np.pad(tail, (0, missing - len(tail)))

    def drop(self) -> None:
        """Throw away what is inside the filter; the clock goes on."""
        self._stream.clear()
        self._produced = self.received_position
