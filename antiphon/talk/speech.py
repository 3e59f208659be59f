"""Where speech lies in a sound, by level.

The end of a user's turn has to be known without asking the server that is being
measured, so it is taken from the sound itself: a window of 20 ms, every 10 ms,
is speech when its level is above a threshold that fits the sound:

    threshold = max(loud - 30 dB, floor + 8 dB), at most loud - 10 dB, at least -60 dBFS

`loud` is the 95th percentile and `floor` the 5th percentile of the levels of all
windows that are not digital silence. Noise up to about 15 dB below the voice is
therefore not taken for speech.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.talk.wav import RATE_HZ, Pcm

HOP = RATE_HZ // 100
WINDOW = 2 * HOP
AUDIBLE_DBFS = -50.0
"""A sound whose loudest 20 ms lie below this was not heard."""


@dataclass(frozen=True)
class Speech:
    """Which samples of a sound are speech, as the starts of the windows that are."""

    starts: npt.NDArray[np.int64]

    def first(self, at_or_after: int = 0) -> int | None:
        """The first sample of speech at or after a sample; None: there is none."""
        index = int(np.searchsorted(self.starts, at_or_after))
        return int(self.starts[index]) if index < len(self.starts) else None

    def last(self, before: int | None = None) -> int | None:
        """The last sample of speech before a sample (or of all); None: there is none."""
        ends = self.starts + (WINDOW - 1)
        count = len(ends) if before is None else int(np.searchsorted(ends, before))
        return int(ends[count - 1]) if count else None


def find_speech(pcm: Pcm) -> Speech:
    """The speech in mono int16 samples at 24 kHz."""
    levels = window_levels_dbfs(pcm)
    heard = levels[np.isfinite(levels)]
    if not heard.size:
        return Speech(np.zeros(0, np.int64))
    floor, loud = np.percentile(heard, [5, 95])
    threshold = max(min(max(loud - 30.0, floor + 8.0), loud - 10.0), -60.0)
    return Speech(np.flatnonzero(levels >= threshold).astype(np.int64) * HOP)


def first_audible(pcm: Pcm) -> int | None:
    """The first sample of the first 20 ms window that can be heard; None: silence."""
    audible = np.flatnonzero(window_levels_dbfs(pcm) >= AUDIBLE_DBFS)
    return int(audible[0]) * HOP if audible.size else None


def window_levels_dbfs(pcm: Pcm) -> npt.NDArray[np.float64]:
    """The level (RMS, dB of full scale) of each 20 ms window, one every 10 ms.

    Digital silence is minus infinity; the last windows are filled up with silence.
    """
    hops = -(-len(pcm) // HOP)
    padded = np.zeros((hops + 1) * HOP, np.float64)
    padded[: len(pcm)] = pcm
    squares = np.square(padded / 32768.0).reshape(-1, HOP).sum(axis=1)
    with np.errstate(divide="ignore"):
        levels: npt.NDArray[np.float64] = 10.0 * np.log10((squares[:-1] + squares[1:]) / WINDOW)
    return levels


def level_dbfs(pcm: Pcm) -> float:
    """The level (RMS) of a whole sound in dB of full scale; silence is -100."""
    if not len(pcm):
        return -100.0
    mean_square = float(np.mean(np.square(pcm.astype(np.float64) / 32768.0)))
    return 10.0 * float(np.log10(max(mean_square, 1e-10)))
