"""The engine behind the stage that listens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
import pydantic

from protocol.device_bytes import HOST
from protocol.payloads import PayloadType
from workers.engine import EmitEvent, Engine
from workers.engines.speech_in.resampler import RATE_HZ
from workers.engines.speech_in.ring import SAMPLE_BYTES
from workers.engines.speech_in.session import EngineParts, SpeechInSession
from workers.engines.speech_in.settings import read_settings
from workers.engines.speech_in.silero import SileroModel, contains_speech
from workers.engines.speech_in.transcriber import WhisperTranscriber
from workers.engines.speech_in.transcription_queue import TranscriptionQueue
from workers.models import ModelReference, resolve


class SpeechInOptions(pydantic.BaseModel):
    """Options of a stage with this engine."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    vad: ModelReference = "silero-vad"
    """Name of a model, or the path of a Silero ONNX file."""
    transcriber: ModelReference = "whisper-base"
    """Name of a model, or the path of a folder with Whisper for CTranslate2."""
    ring_s: int = pydantic.Field(120, ge=1, le=3600)
    """Seconds of audio kept for a session (32 kB each)."""
    minimum_speech_ms: int = pydantic.Field(64, ge=0, le=5000)
    """Speech shorter than this never starts a turn."""
    threads: int = pydantic.Field(2, ge=1, le=64)
    """Threads of one transcription."""
    waiting: int = pydantic.Field(8, ge=1, le=1000)
    """Transcriptions that may wait; the next is refused."""


class SpeechInEngine(Engine):
    """Voice activity by Silero, text by Whisper."""

    Options = SpeechInOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.AUDIO})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})

    def __init__(self, options: SpeechInOptions) -> None:
        self._options = options
        self._parts: EngineParts | None = None

    @classmethod
    def create(cls, options: Any) -> SpeechInEngine:
        """An engine from validated `SpeechInOptions`."""
        return cls(options)

    async def load(self) -> None:
        """Load both models and run each once. Raises ModelFileError."""
        options = self._options
        silero, transcriber = await asyncio.to_thread(_load, options)
        queue = TranscriptionQueue(options.waiting)
        self._parts = EngineParts(
            silero, transcriber, queue, options.ring_s, options.minimum_speech_ms
        )

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """The ring of a session's audio, and as much again for what is read from it to be
        transcribed. Raises InvalidRequest for settings that are none."""
        read_settings(settings)
        return {HOST: 2 * self._options.ring_s * RATE_HZ * SAMPLE_BYTES}

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> SpeechInSession:
        """A session's ear; `settings` as in `SpeechInSettings`. Raises InvalidRequest."""
        return SpeechInSession(self._loaded(), read_settings(settings), emit)

    @property
    def queue(self) -> TranscriptionQueue:
        """The transcriptions that run and wait. Raises RuntimeError before `load`."""
        return self._loaded().queue

    async def shutdown(self) -> None:
        """Wait for a transcription that still runs, then free the models."""
        if self._parts is not None:
            await self._parts.queue.shutdown()
            self._parts = None

    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise RuntimeError("the engine is not loaded")
        return self._parts


def _load(options: SpeechInOptions) -> tuple[SileroModel, WhisperTranscriber]:
    silero = SileroModel(resolve(options.vad))
    transcriber = WhisperTranscriber(resolve(options.transcriber), options.threads)
    silence = np.zeros(RATE_HZ, np.int16)
    contains_speech(silero, silence, 1.0, 1)
    transcriber.transcribe(silence, None, threading.Event())
    return silero, transcriber
