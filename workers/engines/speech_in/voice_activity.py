"""When speech begins and ends, from the speech probability of each frame. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.engines.speech_in.resampler import SAMPLES_PER_MS

FRAME_SAMPLES = 512
"""One frame: 32 ms at 16 kHz."""

HYSTERESIS = 0.15
"""Speech ends below the threshold minus this."""

TAIL_MS = 96
"""How much of the silence belongs to the end of a turn: quiet final consonants."""


@dataclass(frozen=True)
class TurnDetection:
    """What makes a turn; times in ms. `threshold` is a probability."""

    threshold: float
    prefix_padding_ms: int
    silence_duration_ms: int
    minimum_speech_ms: int


@dataclass(frozen=True)
class SpeechStarted:
    """Speech begins at position `start`, padding included."""

    start: int


@dataclass(frozen=True)
class SpeechPaused:
    """Half of the silence that ends the turn has passed; it would be `start` to `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class SpeechResumed:
    """The pause was no end."""


@dataclass(frozen=True)
class SpeechStopped:
    """The turn is the stretch from `start` to `end`."""

    start: int
    end: int


VoiceEvent = SpeechStarted | SpeechPaused | SpeechResumed | SpeechStopped


class _State(Enum):
    QUIET = "quiet"
    SPEECH = "speech"
    PAUSE = "pause"
    LONG_PAUSE = "long_pause"


class VoiceActivity:
    """Turns as a state machine over frames; positions are 16 kHz samples.

    Quiet becomes speech after `minimum_speech_ms` at or above the threshold that no
    frame below the lower threshold interrupts. Speech becomes a pause with a frame
    below the lower threshold and speech again with one at the threshold; a pause of
    `silence_duration_ms` is the end. Frames in between change nothing.
    """

    def __init__(self, detection: TurnDetection, position: int) -> None:
        self.detection = detection
        self.position = position
        self._floor = position
        self._state = _State.QUIET
        self._candidate = position
        self._speech_samples = 0
        self._start = position
        self._silence_start = position

    @property
    def wanted_from(self) -> int:
        """The first position that a turn which is open or still to come can contain."""
        if self._state is not _State.QUIET:
            return self._start
        first = self._candidate if self._speech_samples else self.position
        return self._padded(first)

    def step(self, probability: float) -> list[VoiceEvent]:
        """Take the next frame of FRAME_SAMPLES samples in; what follows from it."""
        frame_start = self.position
        self.position += FRAME_SAMPLES
        if self.position <= self._floor:
            return []
        if self._state is _State.QUIET:
            return self._step_quiet(probability, frame_start)
        return self._step_speech(probability, frame_start)

    def cut(self, end: int) -> None:
        """What lies before `end` is taken: no later turn contains it."""
        self._floor = max(self._floor, end)
        self._state = _State.QUIET
        self._speech_samples = 0

    def restart(self, position: int) -> None:
        """Forget everything; the next frame begins at `position`."""
        self.position = self._floor = position
        self._state = _State.QUIET
        self._speech_samples = 0

    def skip(self, position: int) -> None:
        """Frames before `position` were lost; the next one begins there.

        What was lost counts neither as speech nor as silence.
        """
        lost = max(0, position - self.position)
        self.position += lost
        self._silence_start += lost
        self._candidate += lost

    def _padded(self, position: int) -> int:
        return max(self._floor, position - self.detection.prefix_padding_ms * SAMPLES_PER_MS)

    def _step_quiet(self, probability: float, frame_start: int) -> list[VoiceEvent]:
        if probability >= self.detection.threshold:
            if not self._speech_samples:
                self._candidate = frame_start
            self._speech_samples += FRAME_SAMPLES
        elif probability < self.detection.threshold - HYSTERESIS:
            self._speech_samples = 0
        enough = max(self.detection.minimum_speech_ms * SAMPLES_PER_MS, 1)
        if self._speech_samples < enough:
            return []
        self._speech_samples = 0
        self._state = _State.SPEECH
        self._start = self._padded(self._candidate)
        return [SpeechStarted(self._start)]

    def _step_speech(self, probability: float, frame_start: int) -> list[VoiceEvent]:
        if probability >= self.detection.threshold:
            resumed = self._state is _State.LONG_PAUSE
            self._state = _State.SPEECH
            return [SpeechResumed()] if resumed else []
        if self._state is _State.SPEECH:
            if probability >= self.detection.threshold - HYSTERESIS:
                return []
            self._state = _State.PAUSE
            self._silence_start = frame_start
        events: list[VoiceEvent] = []
        silence_ms = (self.position - self._silence_start) / SAMPLES_PER_MS
        half_ms = self.detection.silence_duration_ms / 2
        tail_ms = min(TAIL_MS, int(half_ms))
        end = self._silence_start + tail_ms * SAMPLES_PER_MS
        if self._state is _State.PAUSE and silence_ms >= half_ms:
            self._state = _State.LONG_PAUSE
            events.append(SpeechPaused(self._start, end))
        if silence_ms >= self.detection.silence_duration_ms:
            self._state = _State.QUIET
            self._floor = end
            events.append(SpeechStopped(self._start, end))
        return events
