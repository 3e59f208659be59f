from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.codec import phonemes
from workers.engines.codec.phonemes import ARPABET, to_ipa
from workers.models import locate


@pytest.mark.parametrize(
    ("sounds", "ipa"),
    [
        ("HH AH0 L OW1", "həlˈoʊ"),
        ("W AO1 T ER0", "wˈɔːɾɚ"),
        ("S IH1 T IY0", "sˈɪɾi"),
        ("B AH1 T AH0 N", "bˈʌʔn̩"),
        ("W AA1 N T IH0 D", "wˈɑːntᵻd"),
        ("R OW1 Z IH0 Z", "ɹˈoʊzᵻz"),
        ("T AH0 D EY1", "tədˈeɪ"),
        ("B ER1 D", "bˈɜːd"),
        ("HH ER1 IY0", "hˈɜːɹi"),
        ("F AO1 R", "fˈoːɹ"),
        ("M AO1 R N IH0 NG", "mˈɔːɹnɪŋ"),
        ("AH0 B AW1 T", "ɐbˈaʊt"),
        ("CH EY1 N JH", "tʃˈeɪndʒ"),
        ("IY2 K AH0 N AA1 M IH0 K S", "ˌiːkənˈɑːmɪks"),
    ],
)
def test_arpabet_becomes_the_ipa_of_the_voice(sounds: str, ipa: str) -> None:
    assert to_ipa(tuple(sounds.split())) == ipa


@given(st.lists(st.sampled_from(sorted(ARPABET)), max_size=12).map(tuple))
def test_every_sound_is_one_that_the_voice_knows(sounds: tuple[str, ...]) -> None:
    settings = next(locate("piper-joe").glob("*.onnx.json"))
    known = msgspec.json.decode(settings.read_bytes())["phoneme_id_map"]
    assert set(to_ipa(sounds)) <= set(known)


def test_a_symbol_that_is_no_sound_raises() -> None:
    with pytest.raises(KeyError):
        to_ipa(("XX",))


@pytest.mark.parametrize(
    ("stem", "plural", "past"),
    [
        ("K AE1 T", "K AE1 T S", "K AE1 T IH0 D"),
        ("D AO1 G", "D AO1 G Z", "D AO1 G D"),
        ("B AH1 S", "B AH1 S IH0 Z", "B AH1 S T"),
        ("P L EY1", "P L EY1 Z", "P L EY1 D"),
    ],
)
def test_endings_follow_the_last_sound(stem: str, plural: str, past: str) -> None:
    sounds = tuple(stem.split())
    assert phonemes.with_plural(sounds) == tuple(plural.split())
    assert phonemes.with_past(sounds) == tuple(past.split())
