"""The measure itself: what counts as the same words and how errors are counted."""

from __future__ import annotations

import pytest

from tests.word_errors import normalise, word_errors


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The train leaves at 7:45.", "the train leaves at 7.45"),
        ("at 7:45", "at 745"),
        ("costs 89 dollars", "costs $89"),
        ("costs 1200 dollars", "costs $1,200"),
        ("three eggs", "3 eggs"),
        ("twenty-five degrees", "25 degrees"),
        ("six hundred fifty", "650"),
        ("March 14th", "march 14"),
        ("Dr. Miller", "Doctor Miller"),
        ("two thousand twelve", "2012"),
    ],
)
def test_the_same_spoken_words_are_the_same(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"), [("at 7:45", "at 7:54"), ("3 eggs", "2 eggs"), ("nine one", "91")]
)
def test_other_words_are_others(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize(
    ("heard", "errors"),
    [
        ("the cat sat down", 0),
        ("the cat sat", 1),
        ("the big cat sat down", 1),
        ("the hat sat down", 1),
        ("", 4),
        ("a dog ran off", 4),
    ],
)
def test_errors_are_substitutions_deletions_and_insertions(heard: str, errors: int) -> None:
    assert word_errors("The cat sat down.", heard) == (errors, 4)
