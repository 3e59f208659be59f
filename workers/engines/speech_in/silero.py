"""The Silero voice activity model on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import ModelFileError
from workers.engines.speech_in.resampler import RATE_HZ
from workers.engines.speech_in.ring import Samples
from workers.engines.speech_in.voice_activity import FRAME_SAMPLES

_CONTEXT_SAMPLES = 64
_STATE_SHAPE = (2, 1, 128)


class SileroModel:
    """The weights, shared by all streams; one thread, for a frame is too small for more."""

    def __init__(self, path: Path) -> None:
        # Not above: a config is checked without the libraries of its engines.
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ModelFileError(f"{path} is not a voice activity model: {error}") from error
        names = {value.name for value in self._session.get_inputs()}
        if names != {"input", "state", "sr"}:
            raise ModelFileError(f"{path} is not a Silero voice activity model: inputs {names}")

    def run(
        self, window: npt.NDArray[np.float32], state: npt.NDArray[np.float32]
    ) -> tuple[float, npt.NDArray[np.float32]]:
        """Probability of speech in `window` ([1, 64 + 512]) and the next state."""
        rate = np.array(RATE_HZ, np.int64)
        output, next_state = self._session.run(None, {"input": window, "state": state, "sr": rate})
        return float(output[0, 0]), next_state


class SileroStream:
    """One listener: the recurrent state between frames."""

    def __init__(self, model: SileroModel) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        """Begin as if nothing had been heard."""
        self._state = np.zeros(_STATE_SHAPE, np.float32)
        self._window = np.zeros((1, _CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)

    def probability(self, frame: Samples) -> float:
        """The probability (0 to 1) that the next FRAME_SAMPLES int16 samples are speech."""
        self._window[0, :_CONTEXT_SAMPLES] = self._window[0, -_CONTEXT_SAMPLES:]
        self._window[0, _CONTEXT_SAMPLES:] = frame
        self._window[0, _CONTEXT_SAMPLES:] /= 32768
        probability, self._state = self._model.run(self._window, self._state)
        return probability


def contains_speech(
    model: SileroModel, samples: Samples, threshold: float, minimum_ms: int
) -> bool:
    """Whether `samples` (16 kHz int16) hold `minimum_ms` of speech in all."""
    stream = SileroStream(model)
    frames_needed = max(1, -(-minimum_ms * RATE_HZ // (1000 * FRAME_SAMPLES)))
    found = 0
    for start in range(0, len(samples), FRAME_SAMPLES):
        frame = samples[start : start + FRAME_SAMPLES]
        frame = np.pad(frame, (0, FRAME_SAMPLES - len(frame)))
        found += stream.probability(frame) >= threshold
        if found >= frames_needed:
            return True
    return False
