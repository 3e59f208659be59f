from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.codec import number_words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (101, "one hundred one"),
        (1_000_000, "one million"),
        (2_000_015, "two million fifteen"),
    ],
)
def test_cardinals(number: int, words: str) -> None:
    assert number_words.cardinal(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "first"),
        (12, "twelfth"),
        (20, "twentieth"),
        (31, "thirty first"),
        (1000, "one thousandth"),
    ],
)
def test_ordinals(number: int, words: str) -> None:
    assert number_words.ordinal(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1066, "ten sixty six"),
        (1900, "nineteen hundred"),
        (1905, "nineteen oh five"),
        (2000, "two thousand"),
        (2009, "two thousand nine"),
        (2026, "twenty twenty six"),
    ],
)
def test_years(number: int, words: str) -> None:
    assert number_words.year(number) == words


@given(st.integers(0, number_words.LARGEST), st.integers(0, number_words.LARGEST))
def test_different_numbers_have_different_names(first: int, second: int) -> None:
    same = number_words.cardinal(first) == number_words.cardinal(second)
    assert same == (first == second)


@pytest.mark.parametrize("number", [-1, number_words.LARGEST + 1])
def test_a_number_without_a_name_raises(number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        number_words.cardinal(number)
