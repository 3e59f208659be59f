"""One session's ear: its clock, its audio, its turns and their transcripts."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from protocol.errors import InvalidRequest, SessionStateLost
from protocol.payloads import Payload, PayloadType, text_payload
from workers.engine import EmitEvent, EngineSession, Turn, TurnResult
from workers.engines.speech_in.resampler import RATE_HZ, SAMPLES_PER_MS, InputResampler
from workers.engines.speech_in.ring import AudioRing, Samples
from workers.engines.speech_in.settings import SpeechInSettings, read_settings
from workers.engines.speech_in.silero import SileroModel, SileroStream, contains_speech
from workers.engines.speech_in.transcriber import WhisperTranscriber
from workers.engines.speech_in.transcription_queue import TranscriptionQueue
from workers.engines.speech_in.voice_activity import (
    FRAME_SAMPLES,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
    VoiceActivity,
    VoiceEvent,
)

_FRAMES_AT_ONCE = 32
"""Frames between two returns to the event loop: about 5 ms of work."""

_UNREAD_TURNS = 8
"""How many detected turns nobody has asked for yet are kept account of."""

_REPORT_LOSS_EVERY = RATE_HZ
"""Samples of further loss before the client is told again."""

_DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class EngineParts:
    """What all sessions of the engine share."""

    silero: SileroModel
    transcriber: WhisperTranscriber
    queue: TranscriptionQueue
    ring_s: int
    minimum_speech_ms: int


@dataclass(frozen=True)
class Stretch:
    """A part of the input clock in ms; the end is not in it."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True)
class Transcript:
    """The text of a stretch; `lost_ms` at its beginning were no longer there."""

    text: str
    audio_ms: int
    lost_ms: int = 0
    reused: bool = False


@dataclass(frozen=True)
class Speculation:
    """A transcription begun before it is sure that the turn ends there."""

    stretch: Stretch
    transcript: asyncio.Task[str]


class SpeechInSession(EngineSession):
    """Stream input in, events and transcripts out. Used on the event loop only."""

    def __init__(self, parts: EngineParts, settings: SpeechInSettings, emit: EmitEvent) -> None:
        self._parts = parts
        self._emit = emit
        self._clock_ms = settings.clock_ms
        self._resampler = InputResampler(settings.input_rate_hz)
        self._ring = AudioRing(parts.ring_s * RATE_HZ)
        self._stream = SileroStream(parts.silero)
        self._activity: VoiceActivity | None = None
        self._language: str | None = None
        self._floor = 0
        self._unread: deque[Stretch] = deque(maxlen=_UNREAD_TURNS)
        self._speculation: Speculation | None = None
        self._speculations_wasted = 0
        self._lost_samples = 0
        self._loss_reported = False
        self._listening: asyncio.Handle | None = None
        self._apply(settings)

    def configure(self, settings: dict[str, Any]) -> None:
        """Replace turn detection and language from here on.

        Raises InvalidRequest for a setting out of range, a language that the model
        does not know, and a change of `input_rate_hz`.
        """
        read = read_settings(settings)
        if read.input_rate_hz != self._resampler.rate_hz:
            raise InvalidRequest("the input rate is fixed at open", field="input_rate_hz")
        self._apply(read)

    def update(self, payload: Payload) -> None:
        """Take in mono int16 audio at the input rate.

        Raises InvalidRequest for anything else.
        """
        rate_hz = payload.attributes.get("rate_hz", self._resampler.rate_hz)
        if rate_hz != self._resampler.rate_hz:
            raise InvalidRequest(
                f"audio at {rate_hz} Hz, where {self._resampler.rate_hz} Hz was agreed",
                field="rate_hz",
            )
        self._append(self._resampler.feed(_samples(payload)))
        if self._listening is None:
            self._listen()

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`clear` forgets the audio; `cut` {"end_ms"} takes what lies before it."""
        if name == "clear":
            self._clear()
        elif name == "cut":
            self._cut(_milliseconds(arguments, "end_ms"))
        else:
            raise InvalidRequest(f"no signal {name!r} here", field="name")
        return {"clock_ms": self._clock_ms + int(self._resampler.received_ms)}

    async def run(self, turn: Turn) -> TurnResult:
        """Transcribe a stretch of the input, or the one audio payload of the turn.

        Emits one text payload, empty when nothing was said. When the beginning of the
        stretch has left the ring, the rest is transcribed, and `lost_ms` in usage and
        attributes says how much is missing. Raises SessionStateLost when all of it is
        gone, InvalidRequest for a stretch that is none, and CapacityExceeded when too
        many transcriptions wait.
        """
        if "start_ms" in turn.parameters or "end_ms" in turn.parameters:
            stretch = Stretch(
                _milliseconds(turn.parameters, "start_ms"),
                _milliseconds(turn.parameters, "end_ms"),
            )
            transcript = await self._transcript_of(stretch)
        else:
            payload = await anext(turn.inputs, None)
            if payload is None:
                raise InvalidRequest("neither a stretch nor audio to transcribe")
            transcript = await self._transcript_of_payload(payload)
        usage = {"audio_ms": transcript.audio_ms}
        if transcript.lost_ms:
            usage["lost_ms"] = transcript.lost_ms
        turn.emit(text_payload(transcript.text, **usage))
        wasted, self._speculations_wasted = self._speculations_wasted, 0
        usage["speculations_reused"] = int(transcript.reused)
        usage["speculations_wasted"] = wasted
        return TurnResult(usage)

    def close(self) -> None:
        """Stop listening and speculating; the audio goes with the session."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        self._activity = None
        self._drop_speculation()
        self._ring = AudioRing(1, self._ring.end)

    def _apply(self, settings: SpeechInSettings) -> None:
        language = settings.language and settings.language.lower().partition("-")[0]
        if language is not None and not self._parts.transcriber.knows_language(language):
            raise InvalidRequest(f"the model knows no language {language!r}", field="language")
        if language != self._language:
            self._drop_speculation()
        self._language = language
        wanted = settings.turn_detection
        if wanted is None:
            self._activity = None
            self._drop_speculation()
            return
        minimum_ms = wanted.minimum_speech_ms
        if minimum_ms is None:
            minimum_ms = self._parts.minimum_speech_ms
        detection = TurnDetection(
            wanted.threshold, wanted.prefix_padding_ms, wanted.silence_duration_ms, minimum_ms
        )
        if self._activity is None:
            self._stream.reset()
            self._activity = VoiceActivity(detection, self._ring.end)
        else:
            self._activity.detection = detection

    def _append(self, samples: Samples) -> None:
        """Into the ring, with account of what it loses that somebody could still want."""
        before = self._ring.start
        wanted_from = self._floor
        if self._activity is not None:
            unread = [self._position(stretch.start_ms) for stretch in self._unread]
            wanted_from = min([self._activity.wanted_from, *unread])
        self._ring.append(samples)
        start = self._ring.start
        if start == before:
            return
        while self._unread and self._position(self._unread[0].end_ms) <= start:
            self._unread.popleft()
        self._lost_samples += max(0, start - max(wanted_from, before))
        if self._lost_samples >= (_REPORT_LOSS_EVERY if self._loss_reported else 1):
            self._report_loss()

    def _report_loss(self) -> None:
        lost_ms = self._lost_samples // SAMPLES_PER_MS
        if lost_ms:
            self._lost_samples -= lost_ms * SAMPLES_PER_MS
            self._loss_reported = True
            self._emit("input_dropped", {"ms": lost_ms})

    def _listen(self) -> None:
        """Look at the frames that have come; the rest of many after the loop's next turn."""
        self._listening = None
        for _ in range(_FRAMES_AT_ONCE):
            activity = self._activity
            if activity is None:
                return
            if activity.position < self._ring.start:
                activity.skip(self._ring.start)
                self._stream.reset()
            end = activity.position + FRAME_SAMPLES
            if end > self._ring.end:
                return
            probability = self._stream.probability(self._ring.read(activity.position, end))
            for event in activity.step(probability):
                self._notice(event)
        self._listening = asyncio.get_running_loop().call_soon(self._listen)

    def _notice(self, event: VoiceEvent) -> None:
        match event:
            case SpeechStarted(start):
                self._emit("speech_started", {"audio_start_ms": self._ms(start)})
            case SpeechPaused(start, end):
                self._speculate(Stretch(self._ms(start), self._ms(end)))
            case SpeechResumed():
                self._drop_speculation()
            case SpeechStopped(start, end):
                self._floor = end
                stretch = Stretch(self._ms(start), self._ms(end))
                self._unread.append(stretch)
                self._emit(
                    "speech_stopped",
                    {"audio_start_ms": stretch.start_ms, "audio_end_ms": stretch.end_ms},
                )

    def _clear(self) -> None:
        self._resampler.drop()
        self._floor = self._resampler.received_position
        self._ring.restart(self._floor)
        self._unread.clear()
        self._lost_samples = 0
        self._loss_reported = False
        self._drop_speculation()
        if self._activity is not None:
            self._stream.reset()
            self._activity.restart(self._floor)

    def _cut(self, end_ms: int) -> None:
        self._report_loss()
        self._loss_reported = False
        self._floor = max(self._floor, self._position(end_ms))
        if self._speculation is not None and self._speculation.stretch.end_ms > end_ms:
            self._drop_speculation()
        if self._activity is not None:
            self._activity.cut(self._floor)

    def _speculate(self, stretch: Stretch) -> None:
        self._drop_speculation()
        whole = self._position(stretch.start_ms) >= self._ring.start
        if not whole or not self._parts.queue.idle:
            return
        samples, _ = self._read(stretch)
        task = asyncio.get_running_loop().create_task(self._transcribe(samples, heard=True))
        task.add_done_callback(_look_at_failure)
        self._speculation = Speculation(stretch, task)

    def _drop_speculation(self) -> None:
        if self._speculation is not None:
            self._speculation.transcript.cancel()
            self._speculation = None
            self._speculations_wasted += 1

    async def _transcript_of(self, stretch: Stretch) -> Transcript:
        """The transcript of `stretch`, taken over from the speculation on just that."""
        self._report_loss()
        heard = stretch in self._unread
        samples, lost_ms = self._read(stretch)
        audio_ms = stretch.end_ms - stretch.start_ms
        speculation = self._speculation
        text: str | None = None
        if speculation is not None and speculation.stretch == stretch:
            self._speculation = None
            try:
                text = await speculation.transcript
            except Exception:
                self._speculations_wasted += 1
        reused = text is not None
        if text is None:
            text = await self._transcribe(samples, heard=heard)
        if stretch in self._unread:
            self._unread.remove(stretch)
        return Transcript(text, audio_ms, lost_ms, reused)

    async def _transcript_of_payload(self, payload: Payload) -> Transcript:
        rate_hz = payload.attributes.get("rate_hz", self._resampler.rate_hz)
        if type(rate_hz) is not int or not 8_000 <= rate_hz <= 192_000:
            raise InvalidRequest(f"audio at {rate_hz} Hz cannot be heard", field="rate_hz")
        samples = _samples(payload)
        audio_ms = len(samples) * 1000 // rate_hz
        if audio_ms > self._parts.ring_s * 1000:
            raise InvalidRequest(f"more than {self._parts.ring_s} s of audio in one turn")
        text = await self._transcribe(samples, heard=False, rate_hz=rate_hz)
        return Transcript(text, audio_ms)

    async def _transcribe(self, samples: Samples, *, heard: bool, rate_hz: int = RATE_HZ) -> str:
        """The text of `samples`; without `heard` first look whether there is speech."""
        parts = self._parts
        language = self._language
        # A client that asks for a transcript itself is not held to a stricter threshold.
        threshold = _DEFAULT_THRESHOLD
        if self._activity is not None:
            threshold = min(threshold, self._activity.detection.threshold)

        def work(abandoned: threading.Event) -> str:
            speech = samples if rate_hz == RATE_HZ else soxr.resample(samples, rate_hz, RATE_HZ)
            if not heard and not contains_speech(
                parts.silero, speech, threshold, parts.minimum_speech_ms
            ):
                return ""
            return parts.transcriber.transcribe(speech, language, abandoned)

        return await parts.queue.run(work)

    def _read(self, stretch: Stretch) -> tuple[Samples, int]:
        """A copy of what is left of `stretch`, and how many ms at its beginning are lost."""
        start, end = self._position(stretch.start_ms), self._position(stretch.end_ms)
        if end < start:
            raise InvalidRequest("the stretch ends before it starts", field="end_ms")
        if end > self._resampler.received_position + SAMPLES_PER_MS:
            raise InvalidRequest("the stretch ends after the audio", field="end_ms")
        if end > self._ring.end:
            self._append(self._resampler.flush())
            end = min(end, self._ring.end)
        kept_from = max(start, self._ring.start)
        if kept_from > end or (kept_from == end and start < end):
            raise SessionStateLost("the audio of this stretch is gone")
        lost_ms = -(-(kept_from - start) // SAMPLES_PER_MS)
        return self._ring.read(kept_from, end), lost_ms

    def _position(self, ms: int) -> int:
        return (ms - self._clock_ms) * SAMPLES_PER_MS

    def _ms(self, position: int) -> int:
        return self._clock_ms + position // SAMPLES_PER_MS


def _samples(payload: Payload) -> Samples:
    if payload.type is not PayloadType.AUDIO or payload.dtype not in ("", "<i2"):
        raise InvalidRequest("stream input of this engine is int16 audio", field="payload")
    if len(payload.data) % 2:
        raise InvalidRequest("int16 audio has an even number of bytes", field="payload")
    return np.frombuffer(payload.data, "<i2").astype(np.int16, copy=False)


def _milliseconds(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name)
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"{name} is a whole number of milliseconds", field=name)
    return value


def _look_at_failure(task: asyncio.Task[str]) -> None:
    """A failed speculation is no news: the turn itself will meet the cause."""
    if not task.cancelled():
        task.exception()
