"""Kept output: complete until acknowledged, bounded, and honest about what is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.retention import Retention, RetentionLimits


def filled(pieces: int, limits: RetentionLimits | None = None) -> Retention[str]:
    retention: Retention[str] = Retention(limits or RetentionLimits())
    for sequence in range(1, pieces + 1):
        retention.keep(1, sequence, 10, f"p{sequence}", float(sequence))
    return retention


def test_a_replay_gives_everything_after_the_cursor() -> None:
    retention = filled(5)
    replayed = retention.replay(1, 2)
    assert (replayed.pieces, replayed.lost) == (["p3", "p4", "p5"], 0)


def test_what_is_acknowledged_goes_and_the_rest_stays() -> None:
    retention = filled(5)
    assert retention.acknowledge(1, 3) == ["p1", "p2", "p3"]
    assert retention.acknowledge(1, 2) == []
    assert (retention.bytes, retention.pieces) == (20, 2)
    assert retention.replay(1, 3).pieces == ["p4", "p5"]


def test_past_the_bound_the_gap_is_stated_by_number() -> None:
    retention = filled(5, RetentionLimits(age_ms=100))
    assert retention.deadline_ms == 101
    assert retention.expire(102.0) == ["p1", "p2"]
    replayed = retention.replay(1, 1)
    assert (replayed.pieces, replayed.lost) == (["p3", "p4", "p5"], 1)
    retention.expire(1_000.0)
    replayed = retention.replay(1, 3)
    assert (replayed.pieces, replayed.lost) == ([], 2)


def test_what_is_due_goes_at_any_time_of_the_clock() -> None:
    retention: Retention[str] = Retention(RetentionLimits(age_ms=120_000.0))
    # The sum of the two times rounds down: their difference is less than 120,000.
    retention.keep(1, 1, 10, "p1", 11_703.491968556813)
    due_ms = retention.deadline_ms
    assert due_ms is not None
    assert retention.expire(due_ms) == ["p1"]


def test_a_full_session_paces_its_producers_until_something_is_taken() -> None:
    retention = filled(4, RetentionLimits(bytes=40))
    assert retention.full
    retention.acknowledge(1, 1)
    assert not retention.full


def test_a_turn_that_nobody_wants_leaves_nothing() -> None:
    retention = filled(3)
    retention.keep(2, 1, 7, "other", 9.0)
    assert retention.forget(1) == ["p1", "p2", "p3"]
    assert (retention.bytes, retention.pieces) == (7, 1)
    assert retention.replay(1, 0).pieces == []


calls = st.one_of(
    st.tuples(st.just("keep"), st.integers(1, 3), st.integers(0, 50)),
    st.tuples(st.just("acknowledge"), st.integers(1, 3), st.integers(0, 12)),
    st.tuples(st.just("forget"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("expire"), st.just(0), st.integers(0, 40)),
)


@given(st.lists(calls, max_size=80))
def test_bytes_and_deadline_are_those_of_what_a_replay_would_give(
    script: list[tuple[str, int, int]],
) -> None:
    retention: Retention[tuple[int, int]] = Retention(RetentionLimits(age_ms=20))
    last = {1: 0, 2: 0, 3: 0}
    sizes: dict[tuple[int, int], int] = {}
    kept_ms: dict[tuple[int, int], float] = {}
    for now, (call, turn, number) in enumerate(script):
        match call:
            case "keep":
                last[turn] += 1
                sizes[turn, last[turn]] = number
                kept_ms[turn, last[turn]] = float(now)
                retention.keep(turn, last[turn], number, (turn, last[turn]), float(now))
            case "acknowledge":
                retention.acknowledge(turn, number)
            case "forget":
                retention.forget(turn)
                last[turn] = 0
            case "expire":
                retention.expire(float(now + number))
        there = [piece for t in (1, 2, 3) for piece in retention.replay(t, 0).pieces]
        assert retention.pieces == len(there)
        assert retention.bytes == sum(sizes[piece] for piece in there)
        oldest = min((kept_ms[piece] for piece in there), default=None)
        assert retention.deadline_ms == (None if oldest is None else oldest + 20)
        for t in (1, 2, 3):
            pieces = retention.replay(t, 0)
            numbers = [sequence for _, sequence in pieces.pieces]
            assert numbers == list(range(pieces.lost + 1, pieces.lost + 1 + len(numbers)))
