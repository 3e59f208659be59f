"""Pronunciations of words that no dictionary has: letters in, ARPAbet out.

A small recurrent network reads the letters of a word and writes its sounds one
by one. It was trained on CMUdict and comes as one NumPy archive of matrices.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import ModelFileError
from workers.engines.codec.phonemes import ARPABET, Pronunciation

Matrix = npt.NDArray[np.float32]

_END_OF_WORD = 2
_FIRST_LETTER = 3
_BEGIN = 2
_END = 3
_FIRST_SOUND = 4
_SOUNDS = tuple(sorted(ARPABET | {"UW"}))
_LONGEST_WORD = 24
_LONGEST_PRONUNCIATION = 32


class LetterReader:
    """The network: pronounces words of the letters a to z."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when `path` does not hold the network's matrices."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                self._weights: dict[str, Matrix] = {
                    name: np.ascontiguousarray(archive[name], np.float32) for name in archive.files
                }
            sounds = self._weights["fc_w"].shape[0]
            letters = self._weights["enc_emb"].shape[0]
        except (OSError, ValueError, KeyError) as error:
            raise ModelFileError(f"{path}: not the letter-to-sound network ({error})") from error
        if sounds != _FIRST_SOUND + len(_SOUNDS) or letters != _FIRST_LETTER + 26:
            raise ModelFileError(f"{path}: a letter-to-sound network of other symbols")

    def pronounce(self, word: str) -> Pronunciation:
        """The sounds of `word` (letters a to z; a longer word than 24 is read in parts)."""
        if len(word) > _LONGEST_WORD:
            return self.pronounce(word[:_LONGEST_WORD]) + self.pronounce(word[_LONGEST_WORD:])
        letters = [_FIRST_LETTER + ord(letter) - ord("a") for letter in word]
        state = np.zeros(self._weights["enc_w_hh"].shape[1], np.float32)
        for letter in (*letters, _END_OF_WORD):
            state = self._step("enc", letter, state)
        sounds: list[str] = []
        symbol = _BEGIN
        while len(sounds) < _LONGEST_PRONUNCIATION:
            state = self._step("dec", symbol, state)
            symbol = int(np.argmax(self._weights["fc_w"] @ state + self._weights["fc_b"]))
            if symbol == _END:
                break
            if symbol >= _FIRST_SOUND:
                sound = _SOUNDS[symbol - _FIRST_SOUND]
                sounds.append(sound if sound in ARPABET else sound + "1")
        return tuple(sounds)

    def _step(self, part: str, symbol: int, state: Matrix) -> Matrix:
        """One step of the gated recurrent unit of `part`: reset, update, candidate."""
        weights = self._weights
        size = state.shape[0]
        given = weights[f"{part}_w_ih"] @ weights[f"{part}_emb"][symbol] + weights[f"{part}_b_ih"]
        kept = weights[f"{part}_w_hh"] @ state + weights[f"{part}_b_hh"]
        gates = 1 / (1 + np.exp(-(given[: 2 * size] + kept[: 2 * size])))
        candidate = np.tanh(given[2 * size :] + gates[:size] * kept[2 * size :])
        update = gates[size:]
        new: Matrix = ((1 - update) * candidate + update * state).astype(np.float32)
        return new
