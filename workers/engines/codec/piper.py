"""A Piper voice: IPA in, waveform out, through ONNX Runtime.

The input layout is that of Piper's voice files (VITS exported to ONNX, with a
JSON beside it that maps each IPA character to the ids of the model).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import ModelFileError

Samples = npt.NDArray[np.float32]

_PAD, _BEGIN, _END = "_", "^", "$"


class _Audio(msgspec.Struct):
    sample_rate: int


class _Speech(msgspec.Struct):
    noise_scale: float = 0.667
    length_scale: float = 1.0
    noise_w: float = 0.8


class _Espeak(msgspec.Struct):
    voice: str


class _Settings(msgspec.Struct):
    """The part of a voice's JSON that is used here."""

    audio: _Audio
    espeak: _Espeak
    phoneme_id_map: dict[str, list[int]]
    inference: _Speech = msgspec.field(default_factory=_Speech)
    phoneme_type: str = "espeak"


class PiperVoice:
    """One loaded voice. Synthesis is not reentrant: use it from one thread."""

    def __init__(
        self,
        model: Path,
        *,
        threads: int,
        noise_scale: float | None = None,
        noise_w: float | None = None,
    ) -> None:
        """Load `model` (an .onnx file with its settings in `model`.json).

        The noise scales vary melody and length of the sounds; None takes the
        voice's own, 0 makes it deterministic. Raises ModelFileError when a file is
        missing or is no English Piper voice.
        """
        # Not above: a config is checked without the libraries of its engines.
        import onnxruntime

        settings = _read_settings(model.with_name(model.name + ".json"))
        self.rate_hz = settings.audio.sample_rate
        self._ids = settings.phoneme_id_map
        self._length_scale = settings.inference.length_scale
        speech = settings.inference
        self._noise_scale = speech.noise_scale if noise_scale is None else noise_scale
        self._noise_w = speech.noise_w if noise_w is None else noise_w
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime has no common base class of its own
            raise ModelFileError(f"{model}: cannot load the voice ({error})") from error
        # Gives the working memory of a long stretch back to the system after it.
        self._run_options = onnxruntime.RunOptions()
        self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._has_speakers = any(given.name == "sid" for given in self._session.get_inputs())

    def synthesise(self, ipa: str, speed: float = 1.0) -> Samples:
        """The waveform of `ipa` at `rate_hz`, mono, within -1..1.

        `speed` 2.0 is twice as fast. Characters that the voice does not know are left out.
        """
        ids = [*self._ids[_BEGIN], *self._ids[_PAD]]
        for character in ipa:
            if character in self._ids:
                ids += self._ids[character]
                ids += self._ids[_PAD]
        ids += self._ids[_END]
        scales = (self._noise_scale, self._length_scale / speed, self._noise_w)
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array(scales, np.float32),
        }
        if self._has_speakers:
            inputs["sid"] = np.zeros(1, np.int64)
        samples = np.asarray(
            self._session.run(None, inputs, self._run_options)[0], np.float32
        ).reshape(-1)
        return np.clip(np.nan_to_num(samples), -1.0, 1.0)


def _read_settings(path: Path) -> _Settings:
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=_Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelFileError(f"{path}: cannot read the voice's settings ({error})") from error
    if settings.phoneme_type != "espeak" or not settings.espeak.voice.startswith("en"):
        raise ModelFileError(f"{path}: only English voices with espeak phonemes can be spoken")
    if not {_PAD, _BEGIN, _END}.issubset(settings.phoneme_id_map):
        raise ModelFileError(f"{path}: the voice has no ids for pad, begin and end")
    return settings
