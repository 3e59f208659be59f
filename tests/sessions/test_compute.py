"""Realtime head-room: how many sessions are let in, by what they were measured to take."""

from __future__ import annotations

import pytest

from sessions.compute import HALF_LIFE_MS, Compute, ComputeSample


class Machine:
    """A worker whose sessions take what a test says, sampled twice a second."""

    def __init__(self, cores: float | None, head_room: float = 0.0) -> None:
        self.compute = Compute(head_room)
        self.cores = cores
        self.now_ms = 1_000.0
        self.own_s = self.others_s = 5.0
        self.open = 0
        self._sample()

    def opens(self, count: int = 1) -> None:
        """Sessions come, or go."""
        self.open += count
        self.compute.sessions(self.open, self.now_ms)

    def runs(self, seconds: float, *, each: float, others: float = 0.0, turns: int = 0) -> None:
        """Time passes: each session takes that share of a core, others that many cores."""
        for _ in range(int(seconds * 2)):
            self.now_ms += 500.0
            self.own_s += each * self.open * 0.5
            self.others_s += others * 0.5
            for _ in range(turns):
                self.compute.turn_ended()
            self._sample()

    def fills(self, *, each: float, others: float = 0.0) -> int:
        """How many are let in, one every 3 s."""
        while self.compute.refusal() is None and self.open < 100:
            self.opens()
            self.runs(3.0, each=each, others=others)
        return self.open

    def _sample(self) -> None:
        self.compute.sampled(ComputeSample(self.own_s, self.others_s, self.cores), self.now_ms)


@pytest.mark.parametrize(
    ("cores", "head_room", "each", "fit"),
    [(2.0, 0.0, 0.3, 6), (2.0, 0.1, 0.3, 6), (1.0, 0.05, 0.1, 9), (16.0, 0.0, 0.49, 32)],
)
def test_as_many_are_let_in_as_there_are_cores_for(
    cores: float, head_room: float, each: float, fit: int
) -> None:
    machine = Machine(cores, head_room)
    assert machine.fills(each=each) == fit
    reason = machine.compute.refusal()
    assert reason is not None
    assert f"a session takes {each:.2g} of a core, and the {fit} that are open" in reason


def test_what_others_take_is_not_there() -> None:
    machine = Machine(2.0)
    machine.runs(10.0, each=0.0, others=1.0)
    assert machine.fills(each=0.3, others=1.0) == 3


def test_the_first_is_let_in_whatever_is_left() -> None:
    machine = Machine(2.0)
    machine.runs(30.0, each=0.0, others=2.0)
    assert machine.compute.refusal() is None


def test_any_number_is_let_in_where_no_cores_are_given() -> None:
    machine = Machine(None)
    machine.opens(50)
    machine.runs(30.0, each=1.0)
    assert machine.compute.refusal() is None
    assert machine.compute.use().cores is None
    assert machine.compute.use().used == pytest.approx(50.0)


def test_a_short_burst_of_the_first_session_keeps_nobody_out() -> None:
    machine = Machine(2.0)
    machine.opens()
    machine.runs(1.5, each=2.0)
    assert machine.compute.refusal() is None


def test_sessions_that_do_little_make_room_for_more() -> None:
    machine = Machine(2.0)
    machine.opens(6)
    machine.runs(20.0, each=0.32)
    assert machine.compute.refusal() is not None
    machine.runs(20.0, each=0.02)
    assert machine.compute.refusal() is None


def test_a_place_is_there_again_as_soon_as_one_has_gone() -> None:
    machine = Machine(2.0)
    machine.fills(each=0.3)
    machine.opens(-1)
    assert machine.compute.refusal() is None


def test_those_that_came_at_once_count_before_they_were_measured() -> None:
    machine = Machine(2.0)
    machine.opens()
    machine.runs(10.0, each=0.3)
    for _ in range(20):
        if machine.compute.refusal() is None:
            machine.opens()
    assert machine.open == 6


def test_what_is_told_is_what_was_measured() -> None:
    machine = Machine(2.0, head_room=0.1)
    machine.opens(3)
    machine.runs(4 * HALF_LIFE_MS / 1000, each=0.2, others=0.5, turns=2)
    use = machine.compute.use()
    assert use.cores == pytest.approx(2.0 * 0.9 - 0.5)
    assert use.used == pytest.approx(0.6)
    assert use.session == pytest.approx(0.2)
    assert use.turn_ms == pytest.approx(0.6 * 1000 / 4)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    compute = Compute()
    for own_s in (1.0, 2.0):
        compute.sampled(ComputeSample(own_s, 0.0, 2.0), 1_000.0)
    assert compute.use().used == 0.0
