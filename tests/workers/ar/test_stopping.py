from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.ar.stopping import ReplyCutter

STOPS = ("User:", "Assistant:", "<end>")


def cut(
    text: str,
    splits: list[int] | None = None,
    *,
    line_break_ends: bool = True,
    sentences: int | None = None,
) -> tuple[str, bool]:
    """The reply that comes out when `text` is fed in pieces cut at `splits`."""
    cutter = ReplyCutter(stops=STOPS, line_break_ends=line_break_ends, sentences=sentences)
    bounds = [0, *sorted(splits or []), len(text)]
    said = ""
    for begin, end in itertools.pairwise(bounds):
        said += cutter.feed(text[begin:end])
    return said + cutter.finish(), cutter.ended


@pytest.mark.parametrize(
    ("text", "sentences", "reply"),
    [
        (" Paris.\n\nUser: And now?", None, "Paris."),
        ("\n\nUser: What", None, ""),
        (" One. Two. Three.", 2, "One. Two."),
        (" One. Two.", 2, "One. Two."),
        (
            " Dr. No met Mr. Bond at 3.15. He left. She stayed.",
            2,
            "Dr. No met Mr. Bond at 3.15. He left.",
        ),
        (' "Stop!" she said. "Why?" he asked. End.', 2, '"Stop!" she said.'),
        (
            " The U.S. has states. J. K. Rowling writes. More.",
            2,
            "The U.S. has states. J. K. Rowling writes.",
        ),
        (" Two plus two is 4. Yes. No.", 2, "Two plus two is 4. Yes."),
        (" Really?! Yes... And no.", 2, "Really?! Yes..."),
        (" はい。そうです。でも。", 2, "はい。そうです。"),
        (" A user: me. User: you", None, "A user: me."),
        (" It ends here <end> not there", None, "It ends here"),
        (" It ends in Use", None, "It ends in Use"),
        (" no end   ", None, "no end"),
    ],
)
def test_a_reply_ends_by_rule(text: str, sentences: int | None, reply: str) -> None:
    assert cut(text, sentences=sentences)[0] == reply


def test_line_breaks_are_kept_where_they_do_not_end_a_reply() -> None:
    assert cut("\nOne\n\nTwo\n", line_break_ends=False) == ("One\n\nTwo", False)


pieces = st.lists(
    st.text(alphabet='ab .!?\n"é🦖', max_size=8)
    | st.sampled_from(["User:", "User", ":", "Us", "er:", "<end>", "<e", "nd>", "Dr.", ". "]),
    max_size=12,
)


@given(
    pieces, st.lists(st.integers(0, 80), max_size=10), st.booleans(), st.integers(1, 4) | st.none()
)
def test_how_text_is_cut_into_pieces_changes_nothing(
    parts: list[str], splits: list[int], line_break_ends: bool, sentences: int | None
) -> None:
    text = "".join(parts)
    splits = [min(at, len(text)) for at in splits]
    one_by_one = list(range(1, len(text)))
    whole = cut(text, line_break_ends=line_break_ends, sentences=sentences)
    for way in (splits, one_by_one):
        assert cut(text, way, line_break_ends=line_break_ends, sentences=sentences) == whole


@given(pieces, st.integers(1, 4) | st.none())
def test_a_reply_holds_no_stop_no_outer_space_and_is_a_part_of_the_text(
    parts: list[str], sentences: int | None
) -> None:
    text = "".join(parts)
    reply, _ = cut(text, list(range(1, len(text))), sentences=sentences)
    assert reply == reply.strip()
    assert text.lstrip().startswith(reply)
    assert "\n" not in reply
    assert not any(stop in reply for stop in STOPS)


@given(st.lists(st.text(alphabet="abU:s ", min_size=1, max_size=6), max_size=10))
def test_only_what_could_be_cut_off_is_held_back(parts: list[str]) -> None:
    cutter = ReplyCutter(stops=STOPS, line_break_ends=True)
    said = ""
    for index, part in enumerate(parts):
        said += cutter.feed(part)
        if cutter.ended:
            return
        held = "".join(parts[: index + 1]).lstrip()[len(said) :]
        core = held.strip()
        assert not core or any(stop.startswith(core) for stop in STOPS)
