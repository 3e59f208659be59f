from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.codec.lexicon import Lexicon
from workers.engines.codec.normalise import MARKS
from workers.engines.codec.segments import LONGEST_SEGMENT, segments_of, split

WORDS = st.text("abc", min_size=1, max_size=14)
MARKED = st.builds(str.__add__, WORDS, st.sampled_from(["", "", "", ",", ".", "?"]))


@given(st.lists(MARKED, max_size=60), st.booleans())
def test_a_split_loses_nothing_and_no_stretch_is_too_long(words: list[str], soon: bool) -> None:
    stretches = split(" ".join(words), soon=soon)
    assert " ".join(stretches).split() == words
    assert all(0 < len(stretch) <= LONGEST_SEGMENT for stretch in stretches)


@given(st.text("abc", min_size=1, max_size=900))
def test_a_word_without_end_is_split_too(word: str) -> None:
    stretches = split(word)
    assert "".join(stretches).replace(" ", "") == word
    assert all(len(stretch) <= LONGEST_SEGMENT for stretch in stretches)


def test_sentences_stand_alone() -> None:
    assert split("one two. three four? five") == ["one two.", "three four?", "five"]


def test_a_long_sentence_is_cut_behind_its_last_mark_that_fits() -> None:
    first, second = ("word " * 15).strip() + ",", ("word " * 15).strip() + "."
    assert split(f"{first} {second}") == [first, second]


def test_the_first_stretch_is_short_when_speech_has_to_start_soon() -> None:
    text = "this is the opening, and this is everything else, with more."
    assert split(text, soon=True) == [
        "this is the opening,",
        "and this is everything else, with more.",
    ]
    assert split(text) == [text]


def test_a_segment_knows_the_mark_it_ends_with(lexicon: Lexicon) -> None:
    assert [segment.mark for segment in segments_of("Yes. Is it? well", lexicon)] == [".", "?", ""]


@given(st.text(max_size=80))
def test_any_text_gives_segments_that_hold_sounds(lexicon: Lexicon, text: str) -> None:
    for segment in segments_of(text, lexicon):
        assert segment.ipa.strip(MARKS + " ")
