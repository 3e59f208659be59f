"""The spectrogram against its definition, and the cutting of long audio."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.speech_in.features import fit, log_mel, mel_filters, split_at_quiet_points
from workers.engines.speech_in.ring import Samples


def tone(frequency_hz: float, length_s: float = 1.0) -> Samples:
    time = np.arange(int(16_000 * length_s)) / 16_000
    return (np.sin(2 * np.pi * frequency_hz * time) * 10_000).astype(np.int16)


@pytest.mark.parametrize("bands", [80, 128])
def test_filters_are_triangles_of_equal_area(bands: int) -> None:
    filters = mel_filters(bands)
    assert filters.shape == (bands, 201)
    assert filters.min() == 0
    # Sampled every 40 Hz, only the wide ones show their area of 1.
    wide = filters[bands * 3 // 4 :]
    assert (wide * 40).sum(axis=1) == pytest.approx(np.ones(len(wide)), abs=0.05)


@pytest.mark.parametrize(("frequency_hz", "band"), [(200.0, 4), (1000.0, 26), (4000.0, 62)])
def test_a_tone_lies_in_its_band(frequency_hz: float, band: int) -> None:
    # Centres of 80 bands on Slaney's scale: 37.2 Hz apart below 1 kHz, then a geometric row.
    spectrogram = log_mel(tone(frequency_hz), mel_filters(80))
    assert int(np.argmax(spectrogram[:, 50])) == pytest.approx(band, abs=1)


def test_a_frame_is_the_discrete_fourier_transform_of_its_samples() -> None:
    generator = np.random.default_rng(5)
    audio = (generator.standard_normal(16_000) * 2000).astype(np.int16)
    filters = mel_filters(80)
    spectrogram = log_mel(audio, filters)
    frame = 40
    window = audio[frame * 160 - 200 : frame * 160 + 200] / 32768
    n = np.arange(400)
    weighted = window * (0.5 - 0.5 * np.cos(2 * np.pi * n / 400))
    power = np.abs(np.exp(-2j * np.pi * np.outer(np.arange(201), n) / 400) @ weighted) ** 2
    expected = (np.log10(filters @ power) + 4) / 4
    assert spectrogram[:, frame] == pytest.approx(expected, abs=1e-3)


def test_the_quiet_is_eight_decades_below_the_loudest() -> None:
    audio = np.concatenate([tone(1000), np.zeros(16_000, np.int16)])
    spectrogram = log_mel(audio, mel_filters(80))
    assert spectrogram.shape == (80, 200)
    assert spectrogram.max() - spectrogram.min() == pytest.approx(2.0, abs=1e-5)


def test_fitting_pads_with_the_minimum_and_cuts() -> None:
    spectrogram = log_mel(tone(440), mel_filters(80))
    longer = fit(spectrogram, 800)
    assert longer.shape == (80, 800)
    assert (longer[:, 100:] == spectrogram.min()).all()
    assert (longer[:, :100] == spectrogram).all()
    assert (fit(spectrogram, 60) == spectrogram[:, :60]).all()


@given(st.integers(0, 100), st.integers(0, 5))
def test_pieces_are_short_enough_and_together_the_whole(length_s: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    audio = generator.integers(-3000, 3000, length_s * 16_000 + seed).astype(np.int16)
    pieces = split_at_quiet_points(audio, 28.0, 8.0)
    assert all(len(piece) <= 28 * 16_000 for piece in pieces)
    assert all(len(piece) >= 20 * 16_000 for piece in pieces[:-1])
    assert (np.concatenate(pieces) == audio).all()


def test_the_cut_falls_into_the_pause() -> None:
    generator = np.random.default_rng(1)
    audio = generator.integers(-9000, 9000, 40 * 16_000).astype(np.int16)
    audio[24 * 16_000 : 24 * 16_000 + 4800] = 0
    first, _ = split_at_quiet_points(audio, 28.0, 8.0)
    assert 24 * 16_000 < len(first) < 24 * 16_000 + 4800
