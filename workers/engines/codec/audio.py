"""Waveforms on their way out: edges, pauses, rate, pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import soxr

Samples = npt.NDArray[np.float32]

FIRST_PIECE_MS = 40
PIECE_MS = 120
SHORTEST_PIECE_MS = 20

PAUSES_MS = {".": 320, "!": 320, "?": 340, ";": 220, ":": 220, ",": 130, "": 20}
"""Silence after a segment by the mark it ends with, at speed 1."""

_SILENCE_LEVEL = 0.006
_EDGE_MS = 12
_FADE_MS = 5


def trimmed(samples: Samples, rate_hz: int) -> Samples:
    """`samples` without the silence at both ends, faded so that neither edge clicks."""
    loud = np.flatnonzero(np.abs(samples) > _SILENCE_LEVEL)
    if not loud.size:
        return samples[:0]
    edge = rate_hz * _EDGE_MS // 1000
    kept = samples[max(0, loud[0] - edge) : loud[-1] + 1 + edge].copy()
    fade = min(rate_hz * _FADE_MS // 1000, kept.size // 2)
    ramp = np.linspace(0.0, 1.0, fade, dtype=np.float32)
    kept[:fade] *= ramp
    kept[kept.size - fade :] *= ramp[::-1]
    return kept


def pcm16(samples: Samples, from_hz: int, to_hz: int, pause_ms: float) -> bytes:
    """`pause_ms` of silence, then `samples` resampled to `to_hz`, as little-endian PCM16.

    What is shorter than one piece gets silence behind it up to a piece's length.
    """
    if from_hz != to_hz:
        samples = soxr.resample(samples, from_hz, to_hz, quality="HQ")
    silence = np.zeros(round(to_hz * pause_ms / 1000), np.float32)
    missing = to_hz * SHORTEST_PIECE_MS // 1000 - silence.size - samples.size
    whole = np.concatenate([silence, samples, np.zeros(max(0, missing), np.float32)])
    pcm: npt.NDArray[np.int16] = (np.clip(whole, -1.0, 1.0) * 32767.0).round().astype("<i2")
    return pcm.tobytes()


def pieces(pcm: bytes, rate_hz: int, first_ms: int = PIECE_MS) -> Iterator[bytes]:
    """`pcm` cut into pieces of 20 to 200 ms, the first of about `first_ms`.

    A remainder too short for a piece of its own goes with the piece before it.
    """
    shortest = 2 * (rate_hz * SHORTEST_PIECE_MS // 1000)
    start, size = 0, 2 * (rate_hz * first_ms // 1000)
    while start < len(pcm):
        if len(pcm) - start - size < shortest:
            size = len(pcm) - start
        yield pcm[start : start + size]
        start, size = start + size, 2 * (rate_hz * PIECE_MS // 1000)
