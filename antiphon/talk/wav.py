"""WAV files in, whatever their format; 24 kHz mono PCM16 out.

The reader is our own because the standard library's refuses float samples and
the extensible header, and trusts the sizes that a pipe could not know.
"""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

from antiphon.talk.errors import UnusableSound

RATE_HZ = 24_000
MAX_FILE_BYTES = 512 * 1024 * 1024

_PCM = 0x0001
_FLOAT = 0x0003
_EXTENSIBLE = 0xFFFE

Pcm = npt.NDArray[np.int16]
Samples = npt.NDArray[np.float32]


def read_wav(path: Path) -> Pcm:
    """The sound in `path` as mono int16 samples at 24 kHz.

    Any rate, any number of channels (they are averaged), integer samples of
    8, 16, 24 or 32 bits and float samples of 32 or 64 bits.
    Raises UnusableSound with a message that names the file and what is wrong.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnusableSound(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
        content = path.read_bytes()
    except OSError as problem:
        raise UnusableSound(f"{path}: {problem.strerror or problem}") from problem
    try:
        samples, rate_hz = _decode(content)
    except ValueError as problem:
        raise UnusableSound(f"{path}: {problem}") from problem
    if not samples.size:
        raise UnusableSound(f"{path}: holds no samples")
    if rate_hz != RATE_HZ:
        samples = soxr.resample(samples, rate_hz, RATE_HZ, quality="HQ")
    return to_pcm(samples)


def write_wav(path: Path, pcm: bytes) -> None:
    """Write 24 kHz mono PCM16 to `path`. Raises UnusableSound when that fails."""
    try:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            file.writeframes(pcm)
    except OSError as problem:
        raise UnusableSound(f"{path}: {problem.strerror or problem}") from problem


def to_pcm(samples: npt.NDArray[np.floating[Any]]) -> Pcm:
    """Samples of -1 .. 1 as int16; louder ones are clipped."""
    pcm: Pcm = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype(np.int16)
    return pcm


def _decode(content: bytes) -> tuple[Samples, int]:
    """The samples (mono, -1 .. 1) and their rate. Raises ValueError saying what is wrong."""
    if len(content) < 12 or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("not a WAV file")
    header: bytes | None = None
    data: bytes | None = None
    position = 12
    while position + 8 <= len(content) and data is None:
        name = content[position : position + 4]
        (size,) = struct.unpack_from("<I", content, position + 4)
        # A writer that could not seek back leaves a size past the end: what is there counts.
        body = content[position + 8 : position + 8 + size]
        if name == b"fmt ":
            header = body
        elif name == b"data":
            data = body
        position += 8 + size + (size & 1)
    if header is None or len(header) < 16:
        raise ValueError("a WAV file without a format")
    if data is None:
        raise ValueError("a WAV file without samples")
    coding, channels, rate_hz, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", header)
    if coding == _EXTENSIBLE:
        if len(header) < 26:
            raise ValueError("a WAV file with a broken extensible format")
        (coding,) = struct.unpack_from("<H", header, 24)
    if not channels or frame_bytes < channels or not 1_000 <= rate_hz <= 768_000:
        raise ValueError(f"{channels} channels at {rate_hz} Hz")
    width = frame_bytes // channels
    interleaved = _samples(data[: len(data) // frame_bytes * frame_bytes], coding, bits, width)
    mono = interleaved.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise ValueError("samples that are not numbers")
    return mono, rate_hz


def _samples(data: bytes, coding: int, bits: int, width: int) -> Samples:
    if coding == _PCM and width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128.0) / 128.0
    if coding == _PCM and width == 2:
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
    if coding == _PCM and width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return padded.view("<i4").reshape(-1).astype(np.float32) / 2147483648.0
    if coding == _PCM and width == 4:
        return np.frombuffer(data, "<i4").astype(np.float32) / 2147483648.0
    if coding == _FLOAT and width == 4:
        return np.frombuffer(data, "<f4").astype(np.float32)
    if coding == _FLOAT and width == 8:
        return np.frombuffer(data, "<f8").astype(np.float32)
    raise ValueError(f"samples of coding {coding} with {bits} bits are not supported")
