"""WAV files of every common format become the same 24 kHz mono sound."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.talk.errors import UnusableSound
from antiphon.talk.wav import RATE_HZ, read_wav, write_wav

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def wav(coding: int, channels: int, rate_hz: int, bits: int, data: bytes) -> bytes:
    frame = channels * bits // 8
    plain = EXTENSIBLE if coding == EXTENSIBLE else coding
    header = struct.pack("<HHIIHH", plain, channels, rate_hz, rate_hz * frame, frame, bits)
    if coding == EXTENSIBLE:
        header += struct.pack("<HHIH14x", 22, bits, 0, PCM)
    chunks = b"LIST" + struct.pack("<I", 3) + b"odd\0" + b"fmt " + struct.pack("<I", len(header))
    chunks += header + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def tone(rate_hz: int, seconds: float = 0.5) -> npt.NDArray[np.float64]:
    times = np.arange(int(rate_hz * seconds)) / rate_hz
    wave: npt.NDArray[np.float64] = 0.5 * np.sin(2 * np.pi * 440.0 * times)
    return wave


def encoded(samples: npt.NDArray[np.float64], coding: int, bits: int) -> bytes:
    if coding == FLOAT:
        return bytes(samples.astype(f"<f{bits // 8}").tobytes())
    if bits == 8:
        return np.rint(samples * 127 + 128).astype(np.uint8).tobytes()
    whole = np.rint(samples * (2 ** (bits - 1) - 1)).astype("<i4")
    if bits == 24:
        return bytes(whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes())
    return bytes(whole.astype(f"<i{bits // 8}").tobytes())


@pytest.mark.parametrize(
    ("coding", "bits"),
    [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64), (EXTENSIBLE, 24)],
)
@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_format_gives_the_same_sound(
    tmp_path: Path, coding: int, bits: int, rate_hz: int, channels: int
) -> None:
    frames = np.repeat(tone(rate_hz)[:, None], channels, axis=1).reshape(-1)
    path = tmp_path / "tone.wav"
    path.write_bytes(wav(coding, channels, rate_hz, bits, encoded(frames, coding, bits)))
    pcm = read_wav(path)
    expected = tone(RATE_HZ) * 32767
    assert abs(len(pcm) - len(expected)) <= 2
    middle = slice(2_000, 10_000)
    error = pcm[middle] - expected[middle]
    assert np.sqrt(np.mean(error**2)) < (300 if bits == 8 else 60)


def test_a_size_that_the_writer_never_knew_means_all_there_is(tmp_path: Path) -> None:
    content = bytearray(wav(PCM, 1, RATE_HZ, 16, encoded(tone(RATE_HZ), PCM, 16)))
    position = content.index(b"data") + 4
    content[position : position + 4] = b"\xff\xff\xff\xff"
    path = tmp_path / "piped.wav"
    path.write_bytes(content)
    assert len(read_wav(path)) == RATE_HZ // 2


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    pcm = np.arange(-3000, 3000, dtype=np.int16)
    write_wav(tmp_path / "out.wav", pcm.astype("<i2").tobytes())
    assert np.abs(read_wav(tmp_path / "out.wav").astype(int) - pcm).max() <= 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a WAV file"),
        (b"ID3 this is music", "not a WAV file"),
        (wav(PCM, 1, RATE_HZ, 16, b""), "holds no samples"),
        (wav(PCM, 0, RATE_HZ, 16, b"1234"), "0 channels"),
        (wav(85, 1, RATE_HZ, 16, b"1234"), "coding 85"),
        (wav(FLOAT, 1, RATE_HZ, 32, struct.pack("<f", float("nan"))), "not numbers"),
    ],
)
def test_what_is_no_usable_wav_is_said_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    with pytest.raises(UnusableSound, match=words) as raised:
        read_wav(path)
    assert str(path) in raised.value.message


@given(st.binary(max_size=120), st.integers(0, 60))
def test_broken_bytes_never_escape_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    content = bytearray(wav(PCM, 2, 44_100, 16, bytes(64)))
    content[at : at + len(noise)] = noise
    path = tmp_path_factory.mktemp("wav") / "noise.wav"
    path.write_bytes(content)
    with suppress(UnusableSound):
        assert read_wav(path).dtype == np.int16
