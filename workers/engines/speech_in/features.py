"""Log-mel spectrograms as Whisper was trained on them, and where to cut long audio."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.engines.speech_in.resampler import RATE_HZ
from workers.engines.speech_in.ring import Samples

Spectrogram = npt.NDArray[np.float32]

HOP_SAMPLES = 160
FRAMES_PER_S = RATE_HZ // HOP_SAMPLES

_WINDOW_SAMPLES = 400
_QUIET_WINDOW_SAMPLES = RATE_HZ // 10
_LINEAR_HZ_PER_MEL = 200 / 3
_LOG_START_HZ = 1000.0
_LOG_STEP = np.log(6.4) / 27


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Slaney's scale: linear up to 1 kHz, logarithmic above."""
    log_start_mel = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
    above = _LOG_START_HZ * np.exp(_LOG_STEP * (mel - log_start_mel))
    return np.where(mel < log_start_mel, mel * _LINEAR_HZ_PER_MEL, above)


def mel_filters(bands: int) -> Spectrogram:
    """Triangular filters of equal area, float32 [bands, 201], from 0 to 8 kHz."""
    top_hz = RATE_HZ / 2
    top_mel = _LOG_START_HZ / _LINEAR_HZ_PER_MEL + np.log(top_hz / _LOG_START_HZ) / _LOG_STEP
    edges = _mel_to_hz(np.linspace(0.0, top_mel, bands + 2))
    frequencies = np.linspace(0.0, top_hz, _WINDOW_SAMPLES // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters: Spectrogram = (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)
    return filters


def log_mel(samples: Samples, filters: Spectrogram) -> Spectrogram:
    """The spectrogram of 16 kHz int16 `samples`, float32 [bands, len(samples) // 160].

    The range below the loudest point is 8 decades of power; values lie around -1 to 2.
    Needs more than 200 samples.
    """
    signal = samples.astype(np.float32) / 32768
    padded = np.pad(signal, _WINDOW_SAMPLES // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW_SAMPLES)[::HOP_SAMPLES]
    hann = np.hanning(_WINDOW_SAMPLES + 1)[:-1].astype(np.float32)
    count = len(samples) // HOP_SAMPLES
    power = np.abs(np.fft.rfft(windows[:count] * hann)) ** 2
    logarithm = np.log10(np.maximum(filters @ power.T.astype(np.float32), 1e-10))
    logarithm = np.maximum(logarithm, logarithm.max() - 8)
    spectrogram: Spectrogram = ((logarithm + 4) / 4).astype(np.float32)
    return spectrogram


def fit(spectrogram: Spectrogram, frames: int) -> Spectrogram:
    """`spectrogram` on exactly `frames` frames, padded with its own minimum."""
    missing = frames - spectrogram.shape[1]
    if missing <= 0:
        return np.ascontiguousarray(spectrogram[:, :frames])
    return np.pad(spectrogram, ((0, 0), (0, missing)), constant_values=spectrogram.min())


def split_at_quiet_points(samples: Samples, longest_s: float, search_s: float) -> list[Samples]:
    """Pieces of at most `longest_s`, cut where the last `search_s` of each is quietest."""
    longest = int(longest_s * RATE_HZ)
    search = int(search_s * RATE_HZ)
    pieces = []
    while len(samples) > longest:
        energy = np.square(samples[longest - search : longest].astype(np.float64))
        total = np.concatenate(([0.0], np.cumsum(energy)))
        loudness = total[_QUIET_WINDOW_SAMPLES:] - total[:-_QUIET_WINDOW_SAMPLES]
        cut = longest - search + int(np.argmin(loudness)) + _QUIET_WINDOW_SAMPLES // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    pieces.append(samples)
    return pieces
