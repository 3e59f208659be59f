from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.codec.audio import pcm16, pieces, trimmed

RATE_HZ = 24_000


def tone(seconds: float, rate_hz: int = RATE_HZ) -> npt.NDArray[np.float32]:
    phase = np.arange(int(seconds * rate_hz)) * (2 * np.pi * 440 / rate_hz)
    return np.asarray(np.sin(phase), np.float32)


@given(st.integers(480, 200_000), st.sampled_from([40, 120]))
def test_pieces_joined_are_the_whole_and_last_20_to_200_ms(samples: int, first_ms: int) -> None:
    pcm = np.arange(samples).astype("<i2").tobytes()
    cut = list(pieces(pcm, RATE_HZ, first_ms))
    assert b"".join(cut) == pcm
    assert all(20 <= 1000 * len(piece) / 2 / RATE_HZ <= 200 for piece in cut)


def test_no_audio_has_no_pieces() -> None:
    assert list(pieces(b"", RATE_HZ)) == []


def test_trimming_leaves_the_sound_and_silent_edges() -> None:
    quiet = np.zeros(RATE_HZ, np.float32)
    kept = trimmed(np.concatenate([quiet, tone(0.5), quiet]), RATE_HZ)
    assert 0.5 <= kept.size / RATE_HZ <= 0.53
    assert abs(kept[0]) < 0.01
    assert abs(kept[-1]) < 0.01


def test_a_loud_edge_is_faded() -> None:
    kept = trimmed(np.ones(RATE_HZ, np.float32), RATE_HZ)
    assert kept[0] == 0
    assert kept[-1] == 0
    assert np.max(np.abs(np.diff(kept))) < 0.02


def test_silence_trims_to_nothing() -> None:
    assert trimmed(np.zeros(1000, np.float32), RATE_HZ).size == 0


def test_pcm_has_the_pause_and_the_duration_of_the_sound() -> None:
    pcm = np.frombuffer(pcm16(tone(1.0, 22_050), 22_050, RATE_HZ, 100), "<i2")
    assert pcm.size == RATE_HZ + RATE_HZ // 10
    assert not pcm[: RATE_HZ // 10].any()
    spectrum = np.abs(np.fft.rfft(pcm[RATE_HZ // 10 :]))
    assert int(spectrum.argmax()) == 440


def test_the_shortest_sound_fills_one_piece() -> None:
    assert len(pcm16(tone(0.001), RATE_HZ, RATE_HZ, 0)) == 2 * 480
