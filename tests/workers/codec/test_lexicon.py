from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ModelFileError
from workers.engines.codec.letters import LetterReader
from workers.engines.codec.lexicon import OVERRIDES, Lexicon, read_dictionary
from workers.engines.codec.phonemes import ARPABET, is_vowel


@pytest.mark.parametrize(
    ("word", "sounds"),
    [
        ("today", "T AH0 D EY1"),
        ("wednesday", "W EH1 N Z D IY0"),
        ("live", "L IH1 V"),
        ("chatbots", "CH AE1 T B AA2 T S"),
        ("googled", "G UW1 G AH0 L D"),
        ("vlogging", "V L AA1 G IH0 NG"),
        ("alexa's", "AH0 L EH1 K S AH0 Z"),
        ("moonbase", "M UW1 N B EY2 S"),
        ("xyz", "EH1 K S W AY1 Z IY1"),
    ],
)
def test_words_are_found_whole_or_by_their_parts(word: str, sounds: str, lexicon: Lexicon) -> None:
    assert lexicon.pronounce(word) == tuple(sounds.split())


@pytest.mark.parametrize("word", ["zelensky", "kubernetes", "blorptastic", "snorfle"])
def test_unknown_words_are_read_by_their_letters(word: str, lexicon: Lexicon) -> None:
    assert not lexicon.knows(word)
    sounds = lexicon.pronounce(word)
    assert sum(map(is_vowel, sounds)) >= 2
    assert any(sound.endswith("1") for sound in sounds)


@given(st.text(string.ascii_lowercase + "'", max_size=60))
def test_any_word_has_known_sounds_only(lexicon: Lexicon, word: str) -> None:
    sounds = lexicon.pronounce(word)
    assert ARPABET.issuperset(sounds)
    assert bool(sounds) or not word.strip("'")


def test_overrides_hold_known_sounds_only() -> None:
    for word, sounds in OVERRIDES.items():
        assert ARPABET.issuperset(sounds), word


def test_function_words_are_weak_before_words_and_strong_at_the_end(lexicon: Lexicon) -> None:
    assert lexicon.phrase(["the", "cat", "is", "for", "you"]) == [
        "ðə",
        "kˈæt",
        "ɪz",
        "fɔːɹ",
        "jˈuː",
    ]
    assert lexicon.phrase(["the", "apple"])[0] == "ðɪ"
    assert lexicon.phrase(["yes", "it", "is"])[-1] == "ˈɪz"


def test_a_word_with_two_readings_follows_its_neighbours(lexicon: Lexicon) -> None:
    assert lexicon.phrase(["to", "record"])[1] == "ɹɪkˈɔːɹd"
    assert lexicon.phrase(["the", "record"])[1] == "ɹˈɛkɚd"
    assert lexicon.phrase(["have", "read"])[1] == "ɹˈɛd"
    assert lexicon.phrase(["please", "read"])[1] == "ɹˈiːd"


def test_a_dictionary_without_stress_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.dict"
    path.write_text("hello HH AH L OW\n")
    with pytest.raises(ModelFileError, match="stress"):
        read_dictionary(path)


def test_other_matrices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, fc_w=np.zeros((3, 3)), enc_emb=np.zeros((3, 3)))
    with pytest.raises(ModelFileError, match="other symbols"):
        LetterReader(path)
    with pytest.raises(ModelFileError, match="not the letter-to-sound network"):
        LetterReader(tmp_path / "missing.npz")
