from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.ar.tokens import Token, TokenMemory, align


def split(text: str, cuts: list[int]) -> list[Token]:
    """`text` as tokens whose bytes end at `cuts`, also within characters."""
    data = text.encode()
    bounds = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [Token(end, data[begin:end]) for begin, end in itertools.pairwise(bounds)]


texts = st.text(alphabet="ab é🦖\n", max_size=12)
cuts = st.lists(st.integers(0, 60), max_size=12)


@given(texts, cuts, texts, texts)
def test_exactly_the_tokens_that_the_new_text_begins_with_are_kept(
    shared: str, at: list[int], old_end: str, new_end: str
) -> None:
    tokens = split(shared + old_end, at)
    memory = TokenMemory()
    memory.extend(tokens)
    new = shared + new_end
    rest = memory.keep_prefix_of(new)

    assert memory.ids() == [token.id for token in tokens[: len(memory)]]
    kept = b"".join(token.data for token in tokens[: len(memory)])
    assert kept + rest.encode() == new.encode()
    if len(memory) < len(tokens):
        following = kept + tokens[len(memory)].data
        split_character = not _is_text(following)
        assert split_character or not new.encode().startswith(following)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(texts, cuts)
def test_pieces_that_add_up_are_taken_as_they_are(text: str, at: list[int]) -> None:
    pieces = [(token.id, token.data) for token in split(text, at)]
    assert align(text, pieces) == [Token(id_, data) for id_, data in pieces]


@given(st.text(min_size=1, max_size=10), st.lists(st.binary(max_size=4), min_size=1, max_size=5))
def test_tokens_always_stand_for_the_whole_text(text: str, data: list[bytes]) -> None:
    tokens = align(text, list(enumerate(data)))
    assert [token.id for token in tokens] == list(range(len(data)))
    assert b"".join(token.data for token in tokens) == text.encode()


def test_a_space_that_the_tokeniser_puts_in_front_is_not_text() -> None:
    assert align("hi you", [(1, b" hi"), (2, b" you")]) == [Token(1, b"hi"), Token(2, b" you")]
