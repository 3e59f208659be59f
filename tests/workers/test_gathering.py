"""Which sessions go to the model together, and when."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.gathering import UNHURRIED_MS, Gathering, Waiting


def waiting(
    at_ms: float, within_ms: float = UNHURRIED_MS, kind: Any = None, session: object = None
) -> Waiting[None]:
    return Waiting(session or object(), None, kind, at_ms, at_ms + within_ms)


def test_who_is_alone_does_not_wait_for_company() -> None:
    gathering = Gathering[None](window_ms=5, batch=8)
    assert gathering.due_ms(1) is None
    gathering.add(waiting(100))
    assert gathering.due_ms(1) == 100
    assert gathering.due_ms(2) == 105
    gathering.add(waiting(103))
    assert gathering.due_ms(2) == 100
    assert gathering.due_ms(3) == 105


def test_those_that_come_one_upon_the_other_are_waited_for_up_to_a_bound() -> None:
    gathering = Gathering[None](window_ms=5, batch=8)
    gathering.answered([], infer_ms=30, now_ms=50)
    for at_ms, due_ms in ((100, 105), (104, 109), (108, 113), (127, 130)):
        gathering.add(waiting(at_ms))
        assert gathering.due_ms(9) == due_ms


def test_a_fast_policy_is_not_waited_for_longer_than_it_takes() -> None:
    gathering = Gathering[None](window_ms=5, batch=8)
    gathering.answered([], infer_ms=2, now_ms=50)
    gathering.add(waiting(100))
    assert gathering.due_ms(9) == 100.5
    gathering.answered([], infer_ms=60_000, now_ms=50)
    gathering.add(waiting(104.5))
    assert gathering.due_ms(9) == 109.5
    gathering.add(waiting(149))
    assert gathering.due_ms(9) == 150


def test_who_waited_for_a_call_meets_those_whom_it_answered() -> None:
    gathering = Gathering[None](window_ms=5, batch=8)
    waited = waiting(10)
    gathering.add(waited)
    gathering.answered([], infer_ms=30, now_ms=40)
    assert gathering.due_ms(3) == 45
    answered = waiting(43)
    gathering.add(answered)
    assert gathering.due_ms(3) == 48
    assert gathering.take() == [waited, answered]


def loop(gathering: Gathering[None], robots: str, at_ms: float, back_ms: float) -> None:
    """A call of 30 ms that ends at `at_ms` and answers `robots`, who were there in time before
    it; and what they sense next, `back_ms` later."""
    gathering.answered(robots, infer_ms=30, now_ms=at_ms)
    for robot in robots:
        gathering.add(waiting(at_ms + back_ms, session=robot))


def of_punctual(robots: str) -> Gathering[None]:
    """`robots` came back at once after their last call; another has answered them at 200."""
    gathering = Gathering[None](window_ms=5, batch=8)
    loop(gathering, robots, 100, back_ms=12)
    gathering.take()
    gathering.answered(robots, infer_ms=30, now_ms=200)
    return gathering


def test_who_always_comes_back_at_once_is_waited_for() -> None:
    gathering = of_punctual("ab")
    gathering.add(waiting(180, session="c"))
    assert gathering.due_ms(9) == 230
    gathering.add(waiting(220, session="a"))
    assert gathering.due_ms(9) == 230
    gathering.add(waiting(222, session="b"))
    assert gathering.due_ms(9) == 227


def test_who_came_late_is_not_waited_for() -> None:
    gathering = Gathering[None](window_ms=5, batch=8)
    loop(gathering, "ab", 100, back_ms=12)
    gathering.take()
    loop(gathering, "ab", 200, back_ms=31)
    gathering.take()
    gathering.answered("ab", infer_ms=30, now_ms=300)
    gathering.add(waiting(290, session="c"))
    assert gathering.due_ms(9) == 305


def test_who_has_gone_is_not_waited_for() -> None:
    gathering = of_punctual("a")
    gathering.add(waiting(190, session="c"))
    assert gathering.due_ms(9) == 230
    gathering.forget("a")
    assert gathering.due_ms(9) == 205


def test_who_stays_away_is_waited_for_once() -> None:
    gathering = of_punctual("a")
    gathering.add(waiting(240, session="c"))
    assert gathering.due_ms(9) == 245


def test_a_deadline_that_can_be_met_ends_the_waiting() -> None:
    gathering = of_punctual("a")
    gathering.add(waiting(201, within_ms=50, session="c"))
    assert gathering.due_ms(9) == 221
    gathering.add(waiting(202, within_ms=10, session="d"))
    assert gathering.due_ms(9) == 221


def test_a_full_batch_does_not_wait() -> None:
    gathering = Gathering[None](window_ms=5, batch=2)
    first, second, third = waiting(1), waiting(2), waiting(3)
    for one in (first, second, third):
        gathering.add(one)
    assert gathering.due_ms(10) == 1
    assert gathering.take() == [first, second]
    assert gathering.due_ms(10) == 8


def test_the_earliest_deadline_goes_first_and_takes_what_goes_with_it() -> None:
    gathering = Gathering[None](window_ms=0, batch=2)
    calm, other, urgent, hurried = (
        waiting(0, kind="a"),
        waiting(1, 30, kind="b"),
        waiting(2, 10, kind="a"),
        waiting(3, 20, kind="a"),
    )
    for one in (calm, other, urgent, hurried):
        gathering.add(one)
    assert gathering.take() == [urgent, hurried]
    assert gathering.take() == [other]
    assert gathering.take() == [calm]
    assert gathering.due_ms(4) is None


def test_who_names_no_deadline_is_not_passed_over_for_ever() -> None:
    gathering = Gathering[None](window_ms=0, batch=1)
    calm = waiting(0)
    gathering.add(calm)
    gathering.add(waiting(UNHURRIED_MS, 50))
    assert gathering.take() == [calm]


def test_what_is_not_wanted_any_more_does_not_go() -> None:
    gathering = Gathering[None](window_ms=0, batch=4)
    one, other = waiting(0), waiting(1)
    gathering.add(one)
    gathering.add(other)
    gathering.remove(one)
    gathering.remove(one)
    assert gathering.take() == [other]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from("ab")), min_size=1),
    st.integers(1, 4),
)
def test_everything_goes_once_in_batches_of_one_kind(
    given_: list[tuple[int, int, str]], batch: int
) -> None:
    gathering = Gathering[None](window_ms=1, batch=batch)
    ones = [waiting(at, within, kind) for at, within, kind in given_]
    for one in ones:
        gathering.add(one)
    taken = []
    while len(gathering):
        together = gathering.take()
        assert 1 <= len(together) <= batch
        assert len({one.kind for one in together}) == 1
        earliest = min(one.deadline_ms for one in ones if one not in taken)
        assert together[0].deadline_ms == earliest
        taken += together
    assert set(taken) == set(ones)
    assert len(taken) == len(ones)
