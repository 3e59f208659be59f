"""Text from a stretch of speech: Whisper on CTranslate2, one blocking call."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protocol.errors import ModelFileError
from workers.engines.speech_in.features import (
    FRAMES_PER_S,
    fit,
    log_mel,
    mel_filters,
    split_at_quiet_points,
)

if TYPE_CHECKING:
    import ctranslate2
from workers.engines.speech_in.resampler import RATE_HZ
from workers.engines.speech_in.ring import Samples

# The encoder was trained on 30 s. A shorter window costs less; below about 8 s, or
# with less than 2 s of silence at its end, the decoder is prone to loop.
_FULL_WINDOW_S = 30.0
_SHORTEST_WINDOW_S = 8.0
_WINDOW_MARGIN_S = 2.0
_LONGEST_PIECE_S = 28.0
_CUT_SEARCH_S = 8.0
_SHORTEST_AUDIO_S = 0.1

_TOKENS_PER_S = 8
_TOKENS_BESIDE = 24
_TIMESTAMPS_PER_S = 50

# The limits of Whisper's own long-form decoding (Radford et al. 2022, section 4.5).
_LOOP_COMPRESSION = 2.4
_NO_SPEECH_PROBABILITY = 0.6
_NO_SPEECH_SCORE = -1.0

_SURE_OF_LANGUAGE = 0.5
_FALLBACK_LANGUAGE = "en"


class Abandoned(Exception):
    """Nobody wants the transcript any more."""


class WhisperTranscriber:
    """Whisper weights and their tokenizer. Calls may come from any one thread at a time."""

    def __init__(self, folder: Path, threads: int) -> None:
        # Not above: a config is checked without the libraries of its engines.
        import ctranslate2
        from tokenizers import Tokenizer

        self._to_storage = ctranslate2.StorageView.from_array
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._model = ctranslate2.models.Whisper(
                str(folder),
                device="cpu",
                compute_type="int8",
                inter_threads=1,
                intra_threads=threads,
            )
        except Exception as error:
            raise ModelFileError(f"{folder} holds no Whisper model: {error}") from error
        self._filters = mel_filters(self._model.n_mels)
        self._start = self._token("<|startoftranscript|>")
        self._transcribe = self._token("<|transcribe|>")
        self._first_special = self._token("<|endoftext|>")
        self._first_timestamp = self._token("<|notimestamps|>") + 1

    def knows_language(self, language: str) -> bool:
        """Whether `language` (a code such as "en") can be asked for."""
        return self._tokenizer.token_to_id(f"<|{language}|>") is not None

    def transcribe(self, samples: Samples, language: str | None, abandoned: threading.Event) -> str:
        """What is said in 16 kHz int16 `samples`; without `language` it is detected.

        Raises Abandoned soon after `abandoned` is set.
        """
        texts = []
        for piece in split_at_quiet_points(samples, _LONGEST_PIECE_S, _CUT_SEARCH_S):
            text, language = self._transcribe_piece(piece, language, abandoned)
            texts.append(text)
        return " ".join(text for text in texts if text)

    def _transcribe_piece(
        self, samples: Samples, language: str | None, abandoned: threading.Event
    ) -> tuple[str, str]:
        length_s = len(samples) / RATE_HZ
        missing = int(_SHORTEST_AUDIO_S * RATE_HZ) - len(samples)
        spectrogram = log_mel(np.pad(samples, (0, max(missing, 0))), self._filters)
        text = ""
        for window_s in (max(_SHORTEST_WINDOW_S, length_s + _WINDOW_MARGIN_S), _FULL_WINDOW_S):
            if abandoned.is_set():
                raise Abandoned
            # The encoder halves the number of frames.
            frames = min(int(window_s * FRAMES_PER_S / 2) * 2, int(_FULL_WINDOW_S * FRAMES_PER_S))
            window = fit(spectrogram, frames)
            encoded = self._model.encode(self._to_storage(window[None]))
            if language is None:
                language = self._detect_language(encoded)
            if abandoned.is_set():
                raise Abandoned
            text = self._decode(encoded, language, length_s)
            if not _loops(text):
                break
        return text, language or _FALLBACK_LANGUAGE

    def _detect_language(self, encoded: ctranslate2.StorageView) -> str:
        token, probability = self._model.detect_language(encoded)[0][0]
        return token.strip("<|>") if probability >= _SURE_OF_LANGUAGE else _FALLBACK_LANGUAGE

    def _decode(self, encoded: ctranslate2.StorageView, language: str, length_s: float) -> str:
        prompt = [self._start, self._token(f"<|{language}|>"), self._transcribe]
        result = self._model.generate(
            encoded,
            [prompt],
            beam_size=1,
            max_length=_TOKENS_BESIDE + int(length_s * _TOKENS_PER_S),
            return_scores=True,
            return_no_speech_prob=True,
        )[0]
        if result.no_speech_prob > _NO_SPEECH_PROBABILITY and result.scores[0] < _NO_SPEECH_SCORE:
            return ""
        return self._text_within(result.sequences_ids[0], length_s)

    def _text_within(self, tokens: list[int], length_s: float) -> str:
        """The text of the segments that begin before the audio ends."""
        kept: list[int] = []
        opens_segment = True
        wanted = True
        for token in tokens:
            if token >= self._first_timestamp:
                if opens_segment:
                    begin_s = (token - self._first_timestamp) / _TIMESTAMPS_PER_S
                    wanted = begin_s < length_s
                opens_segment = not opens_segment
            elif token < self._first_special:
                if wanted:
                    kept.append(token)
                opens_segment = False
        text: str = self._tokenizer.decode(kept)
        return text.strip()

    def _token(self, name: str) -> int:
        token: int | None = self._tokenizer.token_to_id(name)
        if token is None:
            raise ModelFileError(f"the tokenizer of the Whisper model does not know {name}")
        return token


def _loops(text: str) -> bool:
    """Whether `text` repeats itself so much that the decoder must have looped."""
    data = text.encode()
    return bool(data) and len(data) / len(zlib.compress(data)) > _LOOP_COMPRESSION
