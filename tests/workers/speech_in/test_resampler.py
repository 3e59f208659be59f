"""The clock of the 16 kHz audio is the clock of the input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.speech_in.resampler import InputResampler
from workers.engines.speech_in.ring import Samples

RATES = [8_000, 16_000, 22_050, 24_000, 44_100, 48_000]


def click(rate_hz: int, at_ms: int, length_ms: int) -> Samples:
    """A smooth click of 4 ms whose middle lies at `at_ms`."""
    audio = np.zeros(rate_hz * length_ms // 1000, np.float64)
    half = rate_hz // 500
    middle = rate_hz * at_ms // 1000
    audio[middle - half : middle + half + 1] = np.hanning(2 * half + 1) * 20_000
    return audio.astype(np.int16)


@pytest.mark.parametrize("rate_hz", RATES)
def test_a_click_keeps_its_time(rate_hz: int) -> None:
    resampler = InputResampler(rate_hz)
    audio = click(rate_hz, 700, 1500)
    step = rate_hz // 50
    output = [resampler.feed(audio[i : i + step]) for i in range(0, len(audio), step)]
    output.append(resampler.flush())
    position = int(np.argmax(np.concatenate(output)))
    assert position == pytest.approx(700 * 16, abs=8)


@pytest.mark.parametrize("rate_hz", RATES)
def test_the_output_lags_by_less_than_an_eighth_of_a_second(rate_hz: int) -> None:
    resampler = InputResampler(rate_hz)
    produced = 0
    for _ in range(100):
        produced += len(resampler.feed(np.zeros(rate_hz // 50, np.int16)))
        assert 0 <= resampler.received_position - produced <= 2000


@given(
    st.sampled_from(RATES),
    st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=20),
)
@settings(deadline=None)
def test_flushing_brings_out_all_and_the_clock_stays_right(
    rate_hz: int, steps: list[tuple[int, bool]]
) -> None:
    resampler = InputResampler(rate_hz)
    received = produced = 0
    for length, flush in steps:
        produced += len(resampler.feed(np.ones(length, np.int16)))
        received += length
        if flush:
            produced += len(resampler.flush())
            assert produced == resampler.received_position
    produced += len(resampler.flush())
    assert produced == resampler.received_position == round(received * 16_000 / rate_hz)
    assert resampler.received_ms == pytest.approx(received * 1000 / rate_hz)


def test_a_click_after_a_flush_keeps_its_time() -> None:
    resampler = InputResampler(24_000)
    before = np.zeros(24_001, np.int16)
    output = [resampler.feed(before), resampler.flush()]
    output += [resampler.feed(click(24_000, 500, 1000)), resampler.flush()]
    position = int(np.argmax(np.concatenate(output)))
    assert position == pytest.approx(1500 * 16, abs=8)


def test_dropped_audio_does_not_come_out_later() -> None:
    resampler = InputResampler(24_000)
    resampler.feed(np.full(24_000, 20_000, np.int16))
    resampler.drop()
    silence = [resampler.feed(np.zeros(24_000, np.int16)), resampler.flush()]
    output = np.concatenate(silence)
    assert len(output) == 16_000
    assert np.abs(output).max() <= 1


def test_chunks_of_any_size_give_the_same_audio() -> None:
    generator = np.random.default_rng(3)
    audio = (generator.standard_normal(48_000) * 3000).astype(np.int16)
    whole = InputResampler(24_000)
    expected = np.concatenate([whole.feed(audio), whole.flush()]).astype(int)
    pieces = InputResampler(24_000)
    borders = [0, 1, 2, 500, 501, 12_000, 12_480, 30_000, 48_000]
    output = [pieces.feed(audio[a:b]) for a, b in itertools.pairwise(borders)]
    output.append(pieces.flush())
    assert np.abs(np.concatenate(output).astype(int) - expected).max() <= 2
