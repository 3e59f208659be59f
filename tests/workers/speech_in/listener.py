"""Drives a speech-in session as a runtime does, and reads the recorded sentences."""

from __future__ import annotations

import asyncio
import json
import wave
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from protocol.payloads import Payload, audio_payload
from workers.engine import Turn, TurnResult
from workers.engines.speech_in import SpeechInEngine
from workers.engines.speech_in.ring import Samples

RATE_HZ = 24_000
CHUNK = RATE_HZ // 50
WAIT_S = 30

SPEECH = Path(__file__).parents[2] / "data" / "speech"

VAD = {"threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}


@dataclass(frozen=True)
class Sentence:
    """One entry of sentences.json."""

    text: str
    file: str
    synthesiser: str
    condition: str
    snr_db: int | None
    rate_hz: int
    channels: int
    judged: bool


def sentences() -> list[Sentence]:
    return [Sentence(**entry) for entry in json.loads((SPEECH / "sentences.json").read_text())]


def questions() -> list[Sentence]:
    """The spoken questions, as the sentences that they are."""
    entries = json.loads((SPEECH / "questions.json").read_text())
    return [
        Sentence(entry["text"], entry["file"], "piper", "clean", None, 22_050, 1, True)
        for entry in entries
    ]


def read_wav(file: str) -> Samples:
    """Mono int16 at 24 kHz."""
    with wave.open(str(SPEECH / file)) as source:
        data = np.frombuffer(source.readframes(source.getnframes()), "<i2")
        mono = data.reshape(-1, source.getnchannels()).mean(axis=1)
        resampled = soxr.resample(mono, source.getframerate(), RATE_HZ)
    samples: Samples = np.clip(resampled, -32768, 32767).astype(np.int16)
    return samples


def silence(ms: int) -> Samples:
    return np.zeros(RATE_HZ * ms // 1000, np.int16)


def loud_from_to_ms(samples: Samples) -> tuple[int, int]:
    """Where the first and the last 10 ms above -40 dB of the loudest lie."""
    step = RATE_HZ // 100
    blocks = samples[: len(samples) // step * step].reshape(-1, step).astype(float)
    level = np.sqrt((blocks**2).mean(axis=1))
    loud = np.flatnonzero(level > level.max() / 100)
    return int(loud[0]) * 10, int(loud[-1] + 1) * 10


@dataclass(frozen=True)
class Noticed:
    """An event of the engine, and how much audio had been fed when it came."""

    name: str
    arguments: dict[str, Any]
    fed_ms: int


class Listener:
    """One session of a speech-in engine."""

    def __init__(self, engine: SpeechInEngine, settings: dict[str, Any] | None = None) -> None:
        self.events: list[Noticed] = []
        self.fed_ms = 0
        self._turns = 0
        self._emitted = asyncio.Event()
        self.session = engine.open("session", settings or {"turn_detection": VAD}, self._emit)

    def _emit(self, name: str, arguments: dict[str, Any]) -> None:
        self.events.append(Noticed(name, arguments, self.fed_ms))
        self._emitted.set()

    def named(self, name: str) -> list[Noticed]:
        return [event for event in self.events if event.name == name]

    async def until(self, name: str) -> None:
        """Wait until an event `name` has come."""
        async with asyncio.timeout(WAIT_S):
            while not self.named(name):
                self._emitted.clear()
                await self._emitted.wait()

    async def feed(self, samples: Samples) -> None:
        """Stream `samples` in pieces of 20 ms; the loop runs in between."""
        for start in range(0, len(samples), CHUNK):
            chunk = samples[start : start + CHUNK]
            self.fed_ms += len(chunk) * 1000 // RATE_HZ
            self.session.update(audio_payload(chunk.tobytes(), RATE_HZ))
            await asyncio.sleep(0)

    async def run(
        self, parameters: dict[str, Any], *inputs: Payload
    ) -> tuple[str, TurnResult, list[Payload]]:
        """The transcript of a turn, its result and its output payloads."""
        outputs: list[Payload] = []
        self._turns += 1
        turn = Turn(self._turns, "default", parameters, _stream(inputs), outputs.append)
        async with asyncio.timeout(WAIT_S):
            result = await self.session.run(turn)
        return b"".join(payload.data for payload in outputs).decode(), result, outputs

    async def run_last_turn(self) -> tuple[str, TurnResult]:
        """The transcript of the newest turn that voice activity found."""
        stopped = self.named("speech_stopped")[-1].arguments
        text, result, _ = await self.run(
            {"start_ms": stopped["audio_start_ms"], "end_ms": stopped["audio_end_ms"]}
        )
        return text, result


async def _stream(payloads: tuple[Payload, ...]) -> AsyncIterator[Payload]:
    for payload in payloads:
        yield payload
