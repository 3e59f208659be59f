"""The microphone as a source of 24 kHz PCM16 chunks, through the `sounddevice` extra."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import soxr

from antiphon.talk.errors import NoAudioDevice
from antiphon.talk.wav import RATE_HZ, Pcm, to_pcm

QUEUE_CHUNKS = 250


class Microphone:
    """Chunks of what the default input device hears.

    The queue holds 250 chunks; when it is full the oldest is dropped and counted in
    `dropped_chunks`.
    """

    def __init__(self) -> None:
        self.dropped_chunks = 0
        self._queue: asyncio.Queue[Pcm] = asyncio.Queue(QUEUE_CHUNKS)

    @classmethod
    @asynccontextmanager
    async def open(cls, chunk_ms: int) -> AsyncIterator[Microphone]:
        """Start to record; stops when the block ends. Raises NoAudioDevice."""
        sounddevice = _library()
        microphone = cls()
        loop = asyncio.get_running_loop()
        try:
            rate_hz = int(sounddevice.query_devices(kind="input")["default_samplerate"])
            resampler = soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="float32")

            def captured(block: Any, frames: int, when: Any, status: Any) -> None:
                samples = np.frombuffer(bytes(block), np.float32)
                loop.call_soon_threadsafe(
                    microphone._put, to_pcm(resampler.resample_chunk(samples))
                )

            stream = sounddevice.RawInputStream(
                samplerate=rate_hz,
                blocksize=rate_hz * chunk_ms // 1000,
                channels=1,
                dtype="float32",
                callback=captured,
            )
        except (sounddevice.PortAudioError, ValueError) as problem:
            raise NoAudioDevice(f"no audio device: {problem}") from problem
        with stream:
            yield microphone

    def _put(self, chunk: Pcm) -> None:
        if self._queue.full():
            self._queue.get_nowait()
            self.dropped_chunks += 1
        self._queue.put_nowait(chunk)

    async def read(self) -> Pcm:
        """The next chunk, mono int16 at 24 kHz."""
        return await self._queue.get()


def _library() -> Any:
    try:
        return importlib.import_module("sounddevice")
    except ImportError as problem:
        raise NoAudioDevice(
            "no audio device: the microphone needs the package `sounddevice`; "
            "give a WAV file with --in instead"
        ) from problem
    except OSError as problem:
        raise NoAudioDevice(
            f"no audio device: {problem} (Debian: libportaudio2); give a WAV file with --in instead"
        ) from problem
