"""The small parts of the session core, each by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import CapacityExceeded
from sessions.admission import Admission
from sessions.clauses import CLAUSE_WORDS, FIRST_CLAUSE_WORDS, Clauses
from sessions.deadlines import Deadlines
from sessions.duplex.playback import Playback
from sessions.duplex.settings import merge
from sessions.forecast import Holder
from sessions.lanes import DEFAULT_LANE, Lanes
from tests.sessions.harness import voice_pipeline


def cut_all(pieces: list[str], buffered: bool) -> Iterator[str]:
    clauses = Clauses()
    for piece in pieces:
        clauses.push(piece)
        while (clause := clauses.cut(buffered)) is not None:
            yield clause
    while (clause := clauses.cut(buffered)) is not None:
        yield clause
    if (rest := clauses.rest()) is not None:
        yield rest


@given(st.lists(st.text("abc ,.!?;:\n-7", max_size=12), max_size=20), st.booleans())
def test_clauses_add_up_to_the_text(pieces: list[str], buffered: bool) -> None:
    clauses = list(cut_all(pieces, buffered))
    assert "".join(clauses) == "".join(pieces)
    assert all(clauses)


@given(st.lists(st.text("ab ", max_size=12), max_size=200))
def test_clauses_are_bounded_without_punctuation(pieces: list[str]) -> None:
    for clause in cut_all(pieces, buffered=False):
        assert len(clause.split()) <= max(CLAUSE_WORDS, FIRST_CLAUSE_WORDS) + 1


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Of course, I can. Sure.", "Of course, "),
        ("Well, let me see, now.", "Well, let me see, "),
        ("Dr. Smith is here. He waits.", "Dr. Smith is here. "),
        ("It costs 1,000 or 3.5 dollars. Yes.", "It costs 1,000 or 3.5 dollars. "),
        ("At 3:45 p.m. we go. Then home.", "At 3:45 p.m. we go. "),
        ("Line one\nline two", "Line one\n"),
    ],
)
def test_clauses_end_where_a_voice_would_breathe(text: str, first: str) -> None:
    assert next(cut_all([text], buffered=False)) == first


def test_a_buffered_voice_gets_whole_sentences() -> None:
    assert next(cut_all(["Of course, I can do that. Sure."], buffered=True)) == (
        "Of course, I can do that. "
    )


@pytest.mark.timeout(20)
def test_a_word_without_an_end_does_not_hold_up_who_waits_for_clauses() -> None:
    clauses = Clauses()
    clauses.push("a" * 200_000)
    assert clauses.cut(buffered=False) is None
    clauses.push(" and")
    assert clauses.rest() == "a" * 200_000 + " and"


def test_starting_a_turn_does_not_raise_the_floor() -> None:
    lanes = Lanes()
    first, second = lanes.start(), lanes.start()
    assert lanes.wanted(DEFAULT_LANE, first)
    assert lanes.raise_floor(DEFAULT_LANE) == second + 1
    assert not lanes.wanted(DEFAULT_LANE, second)
    assert lanes.wanted("other", first)
    assert lanes.wanted(DEFAULT_LANE, lanes.start())


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, 50), st.booleans()),
        max_size=60,
    )
)
def test_deadlines_come_due_as_a_plain_map_says(
    calls: list[tuple[str, int | None, bool]],
) -> None:
    deadlines = Deadlines()
    model: dict[str, int] = {}
    for now, (key, at, asked) in enumerate(calls):
        if asked:
            deadlines.ask(key, lambda at=at: at)  # type: ignore[misc]
        else:
            deadlines.set(key, at)
        if at is None:
            model.pop(key, None)
        else:
            model[key] = at
        assert deadlines.next_ms() == min(model.values(), default=None)
        due = [k for k, _ in sorted(model.items(), key=lambda entry: entry[1]) if model[k] <= now]
        assert sorted(deadlines.due(now)) == sorted(due)
        for k in due:
            del model[k]
        assert len(deadlines) == len(model)


def test_admission_counts_until_given_back() -> None:
    admission = Admission()
    pipeline = voice_pipeline(sessions=2)
    admission.take(pipeline, "one", "a", 0.0)
    admission.take(pipeline, "one", "b", 0.0)
    with pytest.raises(CapacityExceeded):
        admission.take(pipeline, "two", "c", 0.0)
    admission.give_back("voice", "a", 5.0, opened=True)
    admission.take(pipeline, "two", "c", 5.0)
    assert admission.lacking(pipeline, "one") == (
        "pipeline voice serves 2 sessions and all are taken"
    )
    assert admission.holders(7.0, pipeline="voice") == [Holder("voice", 7.0), Holder("voice", 2.0)]
    assert admission.holders(7.0, tenant="two", stage="think") == [Holder("voice", 2.0)]
    assert admission.holders(7.0, stage="other") == []


def test_admission_learns_how_long_sessions_last_that_were_opened() -> None:
    admission = Admission()
    pipeline = voice_pipeline(sessions=2)
    for session, opened in (("a", True), ("b", False)):
        admission.take(pipeline, "one", session, 10.0)
        admission.give_back("voice", session, 40.0, opened=opened)
    assert admission.forecast.freeze() == (("voice", (30.0,)),)


def test_a_tenant_gets_no_more_places_than_one_may_have() -> None:
    admission = Admission()
    pipeline = voice_pipeline(sessions=3, sessions_per_tenant=2)
    admission.take(pipeline, "one", "a", 0.0)
    admission.take(pipeline, "one", "b", 0.0)
    assert admission.tenant_full(pipeline, "one")
    assert admission.lacking(pipeline, "two") is None
    with pytest.raises(CapacityExceeded, match="serves 2 sessions of one tenant"):
        admission.take(pipeline, "one", "c", 0.0)
    admission.take(pipeline, "two", "c", 0.0)
    admission.give_back("voice", "a", 1.0, opened=True)
    admission.take(pipeline, "one", "d", 1.0)
    assert admission.held("voice") == 3


def test_play_out_waits_when_it_has_nothing() -> None:
    playback = Playback()
    playback.clause("a ")
    playback.sent(0, 24_000, now_ms=1_000)
    assert playback.may_send_at_ms(500) == 1_500
    playback.sent(0, 24_000, now_ms=9_000)
    assert playback.may_send_at_ms(500) == 9_500
    assert playback.sent_ms == 2_000


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, ""),
        (499, "one"),
        (500, "one two"),
        (1_000, "one two three"),
        (1_500, "one two three four"),
    ],
)
def test_spoken_text_is_what_the_time_allows(ms: int, text: str) -> None:
    playback = Playback()
    playback.clause("one two ")
    playback.clause("three four")
    playback.sent(0, 12_000, 0)
    playback.sent(1, 24_000, 0)
    assert playback.spoken_text(ms) == text


def test_merge_is_deep_and_none_replaces() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None}}) == {
        "a": {"b": None, "c": 2},
        "d": 3,
    }
