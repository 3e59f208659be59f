"""Opens that wait: their order, their positions, what they wait for, and what they are promised."""

from __future__ import annotations

import itertools

import pytest

from protocol.errors import CapacityExceeded
from sessions.openings import AT_ONCE
from sessions.pipeline import Pipeline
from sessions.promises import KEPT_MS, PATIENCE_MS
from tests.sessions.asking import Asker, Gateway, pipeline, seen


def test_fifty_opens_for_three_places_are_served_in_their_order() -> None:
    it = Gateway()
    voice = pipeline(sessions=3, waiting=50)
    askers = [it.ask(f"{n}", voice) for n in range(50)]
    assert [asker.open for asker in askers] == [True] * 3 + [False] * 47
    assert [asker.positions[0] for asker in askers[3:]] == list(range(1, 48))
    for n in range(47):
        it.ends(f"{n}")
    assert it.begun == [f"{n}" for n in range(50)]
    for asker in askers[3:]:
        assert asker.positions == list(range(asker.positions[0], 0, -1))


def test_who_leaves_frees_its_place_in_the_queue_at_once() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=5)
    _, first, second, third = (it.ask(name, voice) for name in "abcd")
    first.leaves()
    assert (second.positions, third.positions) == ([2, 1], [3, 2])
    it.ends("a")
    assert second.open
    assert third.positions == [3, 2, 1]
    assert first.positions == [1]
    assert first.error is None


def test_without_a_queue_who_finds_no_place_is_refused_at_once() -> None:
    it = Gateway()
    it.ask("a", pipeline(sessions=1))
    refused = it.ask("b", pipeline(sessions=1))
    assert refused.refused == "capacity_exceeded"
    assert refused.error is not None
    assert refused.error.field == "model"
    assert "serves 1 sessions and all are taken" in refused.error.message
    assert not refused.positions
    assert len(it.openings) == 0
    assert it.openings.deadline_ms is None


def test_a_full_queue_refuses() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=2)
    askers = [it.ask(name, voice) for name in "abcd"]
    assert [asker.refused for asker in askers] == [None, None, None, "capacity_exceeded"]
    askers[1].leaves()
    assert it.ask("e", voice).positions == [2]


def test_who_has_waited_long_enough_is_refused_and_told_why() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=2, wait_ms=5_000)
    it.ask("a", voice)
    waits = it.ask("b", voice)
    it.waits_until(4_999.0)
    assert waits.error is None
    it.waits_until(5_000.0)
    assert waits.error is not None
    assert "waited for 5.0 s" in waits.error.message
    assert it.openings.deadline_ms is None


def test_an_eviction_prolongs_no_wait_in_the_queue() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=2, wait_ms=3_000)
    it.ask("a", voice)
    it.victims.append("a")
    waits = it.ask("b", voice)
    it.waits_until(3_000.0)
    assert waits.refused == "capacity_exceeded"


def test_who_stands_behind_a_stage_without_room_is_told_so() -> None:
    it = Gateway(think=1)
    voice = pipeline(sessions=9, waiting=5, wait_ms=3_000)
    it.ask("a", voice)
    first, second = it.ask("b", voice), it.ask("c", voice)
    assert it.openings.why(second.opening) == "stage think: no bytes on think"
    it.waits_until(3_000.0)
    for asker in (first, second):
        assert asker.error is not None
        assert asker.error.message.startswith("stage think: no bytes on think")
        assert asker.error.field is None


def test_a_tenant_that_waits_for_its_own_takes_no_room_in_the_queue_of_others() -> None:
    it = Gateway()
    voice = pipeline(sessions=3, sessions_per_tenant=2, waiting=3)
    greedy = [it.ask(f"a{n}", voice, "a") for n in range(7)]
    assert [asker.refused for asker in greedy] == [None] * 5 + ["capacity_exceeded"] * 2
    error = greedy[-1].error
    assert error is not None
    assert "sessions_per_tenant" in error.message
    assert it.ask("b0", voice, "b").open
    assert it.ask("b1", voice, "b").refused is None


def test_a_higher_priority_goes_first_and_pushes_back() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=5)
    it.ask("a", voice)
    low, lower = it.ask("b", voice), it.ask("c", voice, priority=-1)
    high = it.ask("d", voice, priority=1)
    assert (high.positions, low.positions, lower.positions) == ([1], [1, 2], [2, 3])
    it.ends("a")
    assert high.open


def test_a_tenant_that_has_all_it_may_have_holds_up_nobody_else() -> None:
    it = Gateway()
    voice = pipeline(sessions=3, sessions_per_tenant=1, waiting=5)
    it.ask("a", voice, "one")
    second = it.ask("b", voice, "one")
    other = it.ask("c", voice, "two")
    assert not second.open
    assert other.open
    it.ends("a")
    assert second.open


def test_a_tenants_share_of_a_stage_holds_up_nobody_else() -> None:
    it = Gateway()
    voice = pipeline(sessions=9, waiting=5)
    it.share.add("one")
    stuck = it.ask("a", voice, "one")
    assert it.ask("b", voice, "two").open
    assert not stuck.open
    it.share.clear()
    it.openings.room_on("think")
    it.waits_until(10_000.0)
    assert stuck.open


def test_what_lacks_room_on_a_stage_waits_and_is_tried_again_when_there_may_be_some() -> None:
    it = Gateway(think=2)
    voice = pipeline(sessions=9, waiting=5)
    askers = [it.ask(name, voice) for name in "abcd"]
    assert [asker.open for asker in askers] == [True, True, False, False]
    # The second that waits is not even tried: the first was refused by the same stage.
    assert it.begun == ["a", "b", "c"]
    it.waits_until(20_000.0)
    assert it.begun == ["a", "b", "c"]
    it.ends("a")
    it.waits_until(21_000.0)
    assert askers[2].open
    assert not askers[3].open
    assert "d" in it.begun


def test_each_failure_makes_the_next_try_wait_longer() -> None:
    it = Gateway(think=0)
    voice = pipeline(sessions=9, waiting=5, wait_ms=60_000)
    it.ask("a", voice)
    tries = []
    while it.now_ms < 40_000.0:
        it.openings.room_on("think")
        before = len(it.begun)
        it.waits_until(it.now_ms + 50.0)
        if len(it.begun) > before:
            tries.append(it.now_ms)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(5_000.0, abs=60.0)
    assert len(tries) < 15


def test_who_needs_another_stage_is_not_held_up() -> None:
    it = Gateway(think=0)
    stuck = it.ask("a", pipeline("voice", "listen", "think", waiting=5))
    assert it.ask("b", pipeline("ears", "listen", waiting=5)).open
    assert not stuck.open


def test_who_needs_the_same_stage_waits_behind_also_in_another_pipeline() -> None:
    it = Gateway(think=1)
    it.ask("a", pipeline("voice", "think", waiting=5))
    first = it.ask("b", pipeline("voice", "think", waiting=5))
    second = it.ask("c", pipeline("text", "think", waiting=5))
    it.ends("a")
    it.waits_until(3_000.0)
    assert first.open
    assert not second.open


def test_what_would_never_fit_does_not_wait() -> None:
    it = Gateway(think=-1)
    assert it.ask("a", pipeline(waiting=5)).refused == "session_too_large"
    assert len(it.openings) == 0


def test_what_cannot_be_opened_at_all_does_not_hold_up_the_next() -> None:
    it = Gateway()
    it.invalid.add("b")
    voice = pipeline(sessions=1, waiting=5)
    _, wrong, right = (it.ask(name, voice) for name in "abc")
    it.ends("a")
    assert wrong.refused == "invalid_value"
    assert right.open


def test_so_many_are_tried_at_once_and_the_others_know_where_they_stand() -> None:
    it = Gateway()
    it.answers = False
    voice = pipeline(sessions=100, waiting=100)
    askers = [it.ask(f"{n}", voice) for n in range(2 * AT_ONCE)]
    assert len(it.begun) == AT_ONCE
    assert askers[AT_ONCE].positions == [AT_ONCE + 1]
    assert not askers[0].positions
    it.answers = True
    it.settle()
    assert all(asker.open for asker in askers)


def test_a_place_that_is_made_is_waited_for_without_a_queue() -> None:
    it = Gateway()
    voice = pipeline(sessions=1)
    it.ask("a", voice)
    it.victims.append("a")
    waits = it.ask("b", voice)
    assert it.evicted == ["a"]
    assert not waits.open
    assert waits.error is None
    # Whoever comes meanwhile does not take it.
    assert it.ask("c", voice).refused == "capacity_exceeded"
    it.ends("a")
    assert waits.open


def test_a_gateway_that_closes_refuses_who_waits_and_who_comes() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=5)
    it.ask("a", voice)
    waits = it.ask("b", voice)
    it.openings.close(CapacityExceeded("draining", code="draining"))
    assert (waits.refused, it.ask("c", voice).refused) == ("draining", "draining")


def test_what_fails_while_the_gateway_closes_does_not_wait_again() -> None:
    it = Gateway(think=0)
    it.answers = False
    tried = it.ask("a", pipeline(waiting=5))
    it.openings.close(CapacityExceeded("draining", code="draining"))
    it.answers = True
    it.settle()
    assert tried.refused == "capacity_exceeded"
    assert len(it.openings) == 0


def test_the_estimate_follows_from_how_long_sessions_last() -> None:
    it = Gateway()
    seen(it, *[10_000.0] * 10)
    voice = pipeline(sessions=2, waiting=5)
    it.ask("a", voice)
    it.now_ms = 4_000.0
    it.ask("b", voice)
    first, second = it.ask("c", voice), it.ask("d", voice)
    assert first.estimates == [pytest.approx(6_000.0, abs=50.0)]
    assert second.estimates == [pytest.approx(11_000.0, abs=50.0)]


def test_who_is_refused_is_told_when_a_place_will_be_free_and_the_next_a_later_time() -> None:
    it = Gateway()
    seen(it, *[10_000.0] * 40)
    voice = pipeline(sessions=2)
    it.ask("a", voice)
    it.now_ms = 4_000.0
    it.ask("b", voice)
    waits = [it.ask(name, voice).error for name in "cde"]
    assert [None if error is None else error.retry_after_ms for error in waits] == [
        pytest.approx(6_000, abs=50),
        pytest.approx(10_000, abs=50),
        # Who was told first will be here from 6 s to 16 s.
        pytest.approx(16_000, abs=100),
    ]


def test_nothing_is_promised_of_which_nothing_is_known() -> None:
    it = Gateway()
    it.ask("a", pipeline(sessions=1))
    error = it.ask("b", pipeline(sessions=1)).error
    assert error is not None
    assert error.retry_after_ms is None


def told_ms(asker: Asker) -> int:
    """What it was told when it was refused."""
    assert asker.error is not None
    assert asker.error.retry_after_ms is not None
    return asker.error.retry_after_ms


def clients_keep_to_it(it: Gateway, length_ms: float) -> None:
    """Others have come back when they were told to; sessions last so long."""
    it.now_ms = -1e6
    voice = pipeline(sessions=1)
    seen(it, *[length_ms] * 40)
    last = it.ask("first", voice)
    for n in range(6):
        it.now_ms += length_ms - 100.0
        wait_ms = told_ms(it.ask(f"refused {n}", voice))
        it.now_ms += 100.0
        it.ends(last.name)
        it.now_ms += wait_ms - 100.0
        last = it.ask(f"again {n}", voice)
        assert last.open
    it.now_ms += length_ms
    it.ends(last.name)
    it.now_ms = 0.0


def taken(length_ms: float = 10_000.0, waiting: int = 0) -> tuple[Gateway, Pipeline]:
    """A gateway whose clients keep to what they are told, and whose only place "a" has."""
    it = Gateway()
    clients_keep_to_it(it, length_ms)
    voice = pipeline(sessions=1, waiting=waiting)
    it.ask("a", voice)
    return it, voice


def test_a_promised_place_is_not_given_to_who_comes_before() -> None:
    it, voice = taken()
    due_ms = told_ms(it.ask("b", voice))
    it.now_ms = 9_990.0
    it.ends("a")
    early = it.ask("c", voice)
    assert early.error is not None
    assert "promised" in early.error.message
    it.now_ms = due_ms
    assert it.ask("b again", voice).open


def test_where_clients_do_not_come_back_when_they_were_told_nothing_is_kept_for_them() -> None:
    it = Gateway()
    clients_keep_to_it(it, 1_000.0)
    voice = pipeline(sessions=1)
    kept = 0
    for n in range(12):
        it.ask(f"a {n}", voice)
        it.ask(f"b {n}", voice)
        it.now_ms += 900.0
        it.ends(f"a {n}")
        early = it.ask(f"c {n}", voice)
        kept += not early.open
        if early.open:
            it.ends(f"c {n}")
        it.now_ms += 10_000.0
    assert 0 < kept < 8


def test_a_promise_that_nobody_comes_for_binds_nobody() -> None:
    it, voice = taken()
    due_ms = told_ms(it.ask("b", voice))
    it.ends("a")
    it.now_ms = due_ms + KEPT_MS
    assert it.ask("c", voice).open


def test_a_promise_far_off_keeps_no_place_empty_that_is_free_again_by_then() -> None:
    it, voice = taken(1_000.0)
    it.ask("b", voice)  # Promised for 1,000 ms.
    it.ends("a")
    seen(it, *[100.0] * 128)
    assert it.ask("c", voice).open


def test_who_waits_is_not_put_behind_a_promise_that_came_later() -> None:
    it, voice = taken(waiting=1)
    waits = it.ask("b", voice)
    assert it.ask("c", voice).refused == "capacity_exceeded"
    it.ends("a")
    assert waits.open


def test_who_comes_when_it_was_told_to_waits_a_moment_for_the_next_place() -> None:
    it, voice = taken()
    it.now_ms = told_ms(it.ask("b", voice))
    waits = it.ask("b again", voice)
    assert waits.error is None
    it.waits_until(it.now_ms + PATIENCE_MS - 1)
    assert it.ask("c", voice).refused == "capacity_exceeded"
    it.ends("a")
    assert waits.open


def test_it_is_refused_when_that_takes_longer_and_the_next_is_told_a_later_time() -> None:
    it, voice = taken()
    it.now_ms = told_ms(it.ask("b", voice))
    waits = it.ask("b again", voice)
    it.waits_until(it.now_ms + PATIENCE_MS)
    assert waits.refused == "capacity_exceeded"


def test_who_comes_when_it_was_told_to_stands_before_who_came_since() -> None:
    it = Gateway()
    clients_keep_to_it(it, 10_000.0)
    voice = pipeline(sessions=2, waiting=1)
    it.ask("a", voice)
    it.ask("a2", voice)
    first = it.ask("b", voice)
    due_ms = told_ms(it.ask("c", voice))
    it.waits_until(9_900.0)
    it.ends("a")
    assert first.open
    since = it.ask("d", voice)
    it.waits_until(due_ms)
    again = it.ask("c again", voice)
    assert (again.positions, since.positions) == ([1], [1, 2])
    it.ends("a2")
    assert again.open
    assert not since.open


def test_who_finds_that_somebody_else_came_for_its_promise_stands_there_all_the_same() -> None:
    it, voice = taken()
    it.now_ms = told_ms(it.ask("b", voice))
    it.ends("a")
    assert it.ask("another", voice).open
    it.waits_until(it.now_ms + 30.0)
    again = it.ask("b again", voice)
    assert again.error is None
    it.ends("another")
    assert again.open


def test_a_promise_is_taken_up_by_nobody_of_another_tenant() -> None:
    it, voice = taken()
    it.now_ms = told_ms(it.ask("b", voice, "one"))
    it.ends("a")
    assert it.ask("c", voice, "two").refused == "capacity_exceeded"
    assert it.ask("b again", voice, "one").open


def test_what_is_promised_of_a_stage_is_told_with_its_name() -> None:
    it = Gateway(think=1)
    clients_keep_to_it(it, 10_000.0)
    voice = pipeline(sessions=9)
    it.ask("a", voice)
    due_ms = told_ms(it.ask("b", voice))
    it.now_ms = due_ms - 10.0
    it.ends("a")
    early = it.ask("c", voice)
    assert early.error is not None
    assert early.error.message.startswith("stage think: ")


def test_after_broken_promises_later_times_are_told() -> None:
    def told(broken: int) -> int:
        it = Gateway()
        clients_keep_to_it(it, 10_000.0)
        seen(it, *[1_000.0 * n for n in range(1, 101)])
        voice = pipeline(sessions=2)
        for n in range(broken):
            holders = [it.ask(f"{name} {n}", voice) for name in "ab"]
            it.waits_until(it.now_ms + told_ms(it.ask(f"c {n}", voice)))
            again = it.ask(f"d {n}", voice)
            it.waits_until(it.now_ms + PATIENCE_MS)
            assert again.error is not None
            it.now_ms += 1e6
            for holder in holders:
                it.admission.give_back("voice", holder.name, it.now_ms, opened=False)
            it.openings.serve(it.now_ms)
        it.ask("a", voice)
        it.ask("b", voice)
        return told_ms(it.ask("c", voice))

    assert told(3) > told(0)


@pytest.mark.parametrize("waiting", [0, 5])
def test_a_stage_without_room_is_full_until_something_has_changed_there(waiting: int) -> None:
    it = Gateway(think=1)
    voice = pipeline(sessions=9, waiting=waiting, wait_ms=1_000)
    it.ask("a", voice)
    assert not it.openings.full(voice, it.now_ms)
    refused = it.ask("b", voice)
    it.waits_until(2_000.0)
    assert refused.refused == "capacity_exceeded"
    assert it.openings.full(voice, it.now_ms)
    it.ends("a")
    assert not it.openings.full(voice, it.now_ms)


def test_a_stage_that_took_another_before_it_refused_is_not_tried_again_at_once() -> None:
    it = Gateway(think=0, speak=0)
    asked: list[Asker] = []
    it.on_asked = asked.append
    spec = pipeline("voice", "think", "speak", sessions=9, waiting=5, wait_ms=1_000)
    first = it.ask("a", spec)
    it.now_ms = 900.0
    it.ask("b", spec)
    it.answer(asked[1])
    # The first was taken there before, and that is why there was no room.
    it.rooms["think"] = 1
    it.now_ms = 1_050.0
    it.answer(asked[0])
    assert first.refused == "capacity_exceeded"
    assert it.begun == ["a", "b"]
    it.openings.room_on("think")
    it.waits_until(1_200.0)
    assert it.begun == ["a", "b", "b"]


def test_room_that_is_made_while_a_stage_is_asked_is_not_missed() -> None:
    it = Gateway(think=0)
    it.answers = False
    waits = it.ask("a", pipeline(sessions=9, waiting=5))
    it.openings.room_on("think")
    it.answers = True
    it.settle()
    it.rooms["think"] = 1
    it.waits_until(5_000.0)
    assert waits.open


def test_who_waits_for_a_share_of_its_own_makes_it_full_for_nobody_else() -> None:
    it = Gateway()
    voice = pipeline(sessions=4, sessions_per_tenant=2, waiting=3)
    for name in "abcde":
        it.ask(name, voice, "one")
    assert not it.openings.full(voice, it.now_ms)
    assert it.ask("f", voice, "two").open


def test_where_others_wait_for_what_it_needs_it_is_full() -> None:
    it = Gateway()
    voice = pipeline(sessions=1, waiting=3)
    it.ask("a", voice)
    it.ask("b", voice)
    assert it.openings.full(voice, it.now_ms)


def test_where_what_is_free_is_promised_it_is_full() -> None:
    it, voice = taken()
    it.now_ms = told_ms(it.ask("b", voice)) - 10.0
    it.ends("a")
    assert it.openings.full(voice, it.now_ms)
    it.now_ms += 10.0 + KEPT_MS
    it.openings.serve(it.now_ms)
    assert not it.openings.full(voice, it.now_ms)


def test_an_operator_is_told_what_each_waits_for() -> None:
    it = Gateway()
    voice = pipeline(sessions=3, sessions_per_tenant=2, waiting=3)
    for name in "abc":
        it.ask(name, voice, "one")
    it.ask("d", voice, "two")
    own, place = it.openings.waiting("voice")[0], it.ask("e", voice, "two").opening
    assert "sessions_per_tenant" in (it.openings.why(own) or "")
    assert it.openings.why(place) == "pipeline voice serves 3 sessions and all are taken"


def test_a_worker_that_is_missing_is_no_want_of_room() -> None:
    it = Gateway(think=1)
    voice = pipeline(sessions=9)
    seen(it, *[1_000.0] * 40)
    it.ask("a", voice)
    it.missing.add("think")
    for name in "bc":
        error = it.ask(name, voice).error
        assert error is not None
        assert (error.code, error.retry_after_ms) == ("engine_unavailable", None)
