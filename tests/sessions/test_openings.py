"""Opens that wait: their order, their positions, what they wait for, and what they are promised."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    InvalidRequest,
    SessionTooLarge,
    TenantShareExceeded,
)
from sessions.admission import Admission
from sessions.openings import AT_ONCE, Opening, Openings, Position
from sessions.pipeline import Kind, Limits, Pipeline
from sessions.promises import KEPT_MS


def pipeline(name: str = "voice", *stages: str, **limits: int) -> Pipeline:
    names = stages or ("think",)
    return Pipeline(name, names, (), {"text": names[-1]}, limits=Limits(**limits), kind=Kind.WORLD)


class Asker:
    """Somebody who asks for a session, and what became of that."""

    def __init__(self, it: Gateway, name: str, opening: Opening) -> None:
        self.name = name
        self.opening = opening
        self.positions: list[int] = []
        self.estimates: list[int | None] = []
        self.error: AntiphonError | None = None
        self.open = False
        self._it = it

    @property
    def refused(self) -> str | None:
        """The code that it was refused with."""
        return None if self.error is None else self.error.code

    def leaves(self) -> None:
        """It waits no more."""
        self._it.openings.withdraw(self.opening, self._it.now_ms)
        self._it.settle()


class Gateway:
    """What hosts the sessions: each is open as soon as it has been begun, unless a stage of it
    has no room (`rooms`, by stage), and until it `ends`."""

    def __init__(self, **rooms: int) -> None:
        self.now_ms = 0.0
        self.admission = Admission()
        self.victims: list[str] = []
        self.evicted: list[str] = []
        self.openings = Openings(self.admission, self._evict)
        self.rooms = rooms
        self.begun: list[str] = []
        self.askers: dict[str, Asker] = {}
        self.answers = True
        """Whether workers answer at once."""
        self._unanswered: list[Asker] = []
        self.invalid: set[str] = set()
        self.share: set[str] = set()
        """Tenants that have their share of every stage."""

    def ask(self, name: str, spec: Pipeline, tenant: str = "t", priority: int = 0) -> Asker:
        """Somebody asks."""
        asker: Asker

        def begin() -> None:
            if name in self.invalid:
                raise InvalidRequest("no such voice")
            self.admission.take(spec, tenant, name, self.now_ms)
            self.begun.append(name)
            self._unanswered.append(asker)

        def told(position: Position) -> None:
            asker.positions.append(position.position)
            asker.estimates.append(position.estimate_ms)

        def refused(error: AntiphonError) -> None:
            assert asker.error is None
            asker.error = error

        asker = Asker(self, name, Opening(spec, tenant, priority, begin, told, refused))
        self.askers[name] = asker
        self.openings.ask(asker.opening, self.now_ms)
        self.settle()
        return asker

    def settle(self) -> None:
        """Workers answer what they were asked."""
        while self.answers and self._unanswered:
            self.answer(self._unanswered.pop(0))

    def answer(self, asker: Asker) -> None:
        """The workers of a session answer."""
        spec = asker.opening.pipeline
        for stage in spec.stages:
            room = self.rooms.get(stage)
            held = sum(
                stage in other.opening.pipeline.stages
                for other in self.askers.values()
                if other.open
            )
            error: AntiphonError | None = None
            if asker.opening.tenant in self.share:
                error = TenantShareExceeded("your share is taken")
            elif room is not None and room < 0:
                error = SessionTooLarge("it would never fit")
            elif room is not None and held >= room:
                error = CapacityExceeded(f"no bytes on {stage}")
            if error is not None:
                self._give_back(asker, opened=False)
                self.openings.failed(asker.opening, error, stage, self.now_ms)
                return
        asker.open = True
        self.openings.opened(asker.opening, self.now_ms)

    def ends(self, name: str) -> None:
        """A session ends."""
        asker = self.askers[name]
        asker.open = False
        self._give_back(asker, opened=True)
        for stage in asker.opening.pipeline.stages:
            self.openings.room_on(stage)
        self.openings.serve(self.now_ms)
        self.settle()

    def waits_until(self, now_ms: float) -> None:
        """Time passes, and what is due is done."""
        while (due := self.openings.deadline_ms) is not None and due <= now_ms:
            self.now_ms = max(self.now_ms, due)
            self.openings.serve(self.now_ms)
            self.settle()
        self.now_ms = now_ms

    def _give_back(self, asker: Asker, *, opened: bool) -> None:
        name = asker.opening.pipeline.name
        self.admission.give_back(name, asker.name, self.now_ms, opened=opened)

    def _evict(self, spec: Pipeline, tenant: str) -> bool:
        if not self.victims:
            return False
        self.evicted.append(self.victims.pop(0))
        return True


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


def seen(it: Gateway, *lengths_ms: float, name: str = "voice") -> None:
    """Sessions of these lengths have ended before."""
    for length_ms in lengths_ms:
        it.admission.forecast.ended(name, length_ms)


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
    seen(it, *[10_000.0] * 10)
    voice = pipeline(sessions=2)
    it.ask("a", voice)
    it.now_ms = 4_000.0
    it.ask("b", voice)
    waits = [it.ask(name, voice).error for name in "cde"]
    assert [None if error is None else error.retry_after_ms for error in waits] == [
        pytest.approx(6_000, abs=50),
        pytest.approx(10_000, abs=50),
        None,
    ]


def test_nothing_is_promised_of_which_nothing_is_known() -> None:
    it = Gateway()
    it.ask("a", pipeline(sessions=1))
    error = it.ask("b", pipeline(sessions=1)).error
    assert error is not None
    assert error.retry_after_ms is None


def clients_keep_to_it(it: Gateway) -> None:
    """Others have come back when they were told to."""
    it.now_ms -= 60_000.0
    alone = pipeline("other", "elsewhere", sessions=1)
    seen(it, *[1_000.0] * 10, name="other")
    for n in range(6):
        it.ask(f"holder {n}", alone)
        error = it.ask(f"refused {n}", alone).error
        assert error is not None
        assert error.retry_after_ms is not None
        it.now_ms += error.retry_after_ms
        it.ends(f"holder {n}")
        assert it.ask(f"again {n}", alone).open
        it.ends(f"again {n}")
    it.now_ms = 0.0


def test_a_promised_place_is_not_given_to_who_comes_before() -> None:
    it = Gateway()
    clients_keep_to_it(it)
    seen(it, *[10_000.0] * 10)
    voice = pipeline(sessions=1)
    it.ask("a", voice)
    error = it.ask("b", voice).error
    assert error is not None
    due_ms = error.retry_after_ms
    assert due_ms is not None
    it.now_ms = 9_990.0
    it.ends("a")
    early = it.ask("c", voice)
    assert early.error is not None
    assert "promised" in early.error.message
    it.now_ms = due_ms
    assert it.ask("b again", voice).open


def test_where_clients_do_not_come_back_when_they_were_told_nothing_is_kept_for_them() -> None:
    it = Gateway()
    clients_keep_to_it(it)
    seen(it, *[1_000.0] * 10)
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
    it = Gateway()
    clients_keep_to_it(it)
    seen(it, *[10_000.0] * 10)
    voice = pipeline(sessions=1)
    it.ask("a", voice)
    error = it.ask("b", voice).error
    assert error is not None
    assert error.retry_after_ms is not None
    it.ends("a")
    it.now_ms = error.retry_after_ms + KEPT_MS
    assert it.ask("c", voice).open


def test_a_promise_far_off_keeps_no_place_empty_that_is_free_again_by_then() -> None:
    it = Gateway()
    clients_keep_to_it(it)
    seen(it, *[1_000.0] * 10)
    voice = pipeline(sessions=1)
    it.ask("a", voice)
    it.ask("b", voice)  # Promised for 1,000 ms.
    it.ends("a")
    seen(it, *[100.0] * 128)
    assert it.ask("c", voice).open


def test_who_waits_is_not_put_behind_a_promise_that_came_later() -> None:
    it = Gateway()
    clients_keep_to_it(it)
    seen(it, *[10_000.0] * 10)
    voice = pipeline(sessions=1, waiting=1)
    it.ask("a", voice)
    waits = it.ask("b", voice)
    assert it.ask("c", voice).refused == "capacity_exceeded"
    it.ends("a")
    assert waits.open


@pytest.mark.parametrize("kind", ["places", "stage"])
@pytest.mark.parametrize("draw", ["fixed", "uniform", "exponential"])
def test_nine_of_ten_who_come_back_when_they_were_told_to_are_let_in(kind: str, draw: str) -> None:
    """Twelve clients for six places: each holds one for a while, goes, pauses and comes again;
    who is refused comes back at `retry_after_ms`, a little late as on a network."""
    drawn = random.Random(f"{kind} {draw}")
    it = Gateway(think=6) if kind == "stage" else Gateway()
    voice = pipeline(sessions=6 if kind == "places" else 100)

    def length_ms() -> float:
        match draw:
            case "fixed":
                return 8_000.0
            case "uniform":
                return drawn.uniform(2_000.0, 14_000.0)
        return drawn.expovariate(1 / 8_000.0)

    due: list[tuple[float, int, Callable[[], None]]] = []
    counts = {"told": 0, "let in": 0}
    number = 0

    def at(when_ms: float, do: Callable[[], None]) -> None:
        nonlocal number
        number += 1
        due.append((when_ms, number, do))

    def come(told: bool) -> None:
        nonlocal number
        number += 1
        name = f"{number}"
        asker = it.ask(name, voice)
        if told and it.now_ms > 100_000.0:
            counts["told"] += 1
            counts["let in"] += asker.open
        if asker.open:
            at(it.now_ms + length_ms(), lambda: go(name))
            return
        assert asker.error is not None
        wait_ms = asker.error.retry_after_ms
        if wait_ms is None:
            at(it.now_ms + drawn.uniform(100.0, 4_000.0), lambda: come(False))
        else:
            at(it.now_ms + wait_ms + drawn.uniform(1.0, 40.0), lambda: come(True))

    def go(name: str) -> None:
        it.ends(name)
        at(it.now_ms + drawn.expovariate(1 / 3_000.0), lambda: come(False))

    for _ in range(12):
        at(drawn.uniform(0.0, 2_000.0), lambda: come(False))
    while it.now_ms < 2_000_000.0:
        due.sort()
        when_ms, _, do = due.pop(0)
        it.waits_until(when_ms)
        do()
    assert counts["told"] > 300
    assert counts["let in"] / counts["told"] >= 0.9
