"""When a robot asks, and which action it takes at which step."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.evaluation.plan import CONTROLS
from antiphon.evaluation.robot.control import (
    WAYS,
    Actions,
    Chunked,
    Control,
    RealTimeChunking,
    Synchronous,
)


def chunk(first: int, horizon: int = 4) -> Actions:
    """Actions that say which they are: first, first + 1, ..."""
    return np.arange(first, first + horizon, dtype=np.float32)[:, np.newaxis]


def play(control: Control, steps: int, delay: int, horizon: int = 4) -> tuple[str, list[int]]:
    """What is taken at each step (`.`: nothing), and at which steps it asked; each answer comes
    `delay` steps late and begins with the number of the step that was asked at, times 10."""
    taken, asked = [], []
    due: int | None = None
    for step in range(steps):
        if control.wants(step):
            control.asked(step)
            asked.append(step)
            due = step + delay
        if due == step:
            control.answered(chunk(10 * asked[-1], horizon), step, True)
            due = None
        action, _ = control.action(step)
        taken.append("." if action is None else str(int(action[0])))
    return " ".join(taken), asked


def test_the_plan_offers_every_way() -> None:
    assert tuple(WAYS) == CONTROLS


def test_synchronous_control_asks_for_every_step_and_waits() -> None:
    assert play(Synchronous(None, None), 4, 0) == ("0 10 20 30", [0, 1, 2, 3])
    assert play(Synchronous(None, None), 7, 2) == (". . 0 . . 30 .", [0, 3, 6])


def test_synchronous_control_takes_as_many_actions_as_it_is_told() -> None:
    assert play(Synchronous(3, None), 8, 1) == (". 0 1 2 . 40 41 42", [0, 4])


def test_chunks_are_played_one_behind_the_other() -> None:
    taken, asked = play(Chunked(None, None), 9, 1)
    assert (taken, asked) == (". 0 1 2 3 40 41 42 43", [0, 4, 8])


def test_a_chunk_that_comes_late_leaves_a_gap_and_begins_at_its_beginning() -> None:
    assert play(Chunked(None, 1), 12, 3)[0] == ". . . 0 1 2 3 . . 60 61 62"


def test_who_asks_earlier_has_no_gap() -> None:
    assert play(Chunked(None, 3), 12, 3)[0] == ". . . 0 1 2 3 40 41 42 43 80"


def test_only_the_first_actions_of_a_chunk_are_played() -> None:
    assert play(Chunked(2, 0), 5, 0)[0] == "0 1 20 21 40"


def test_real_time_chunking_goes_on_at_the_step_that_it_is() -> None:
    taken, asked = play(RealTimeChunking(None, None), 9, 1, 8)
    assert asked == [0, 4, 8]
    assert taken == ". 1 2 3 4 41 42 43 44"


def test_an_answer_that_is_older_than_its_chunk_gives_nothing() -> None:
    taken, _ = play(RealTimeChunking(None, None), 10, 5)
    assert set(taken.split()) == {"."}


def test_the_prefix_is_what_will_have_been_taken_when_the_answer_comes() -> None:
    control = RealTimeChunking(None, None)
    assert len(control.prefix(0, 8)) == 0
    control.asked(0)
    control.answered(chunk(0, 8), 2, True)
    assert control.prefix(4, 8)[:, 0].tolist() == [4, 5]
    assert control.prefix(4, 1)[:, 0].tolist() == [4]
    assert control.prefix(7, 8)[:, 0].tolist() == [7]
    assert len(control.prefix(9, 8)) == 0


def test_whole_chunks_have_no_prefix() -> None:
    control = Chunked(None, None)
    control.asked(0)
    control.answered(chunk(0), 0, True)
    assert len(control.prefix(1, 4)) == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_not_fresh_is_played_and_told(
    way: type[Synchronous] | type[Chunked] | type[RealTimeChunking],
) -> None:
    control = way(None, None)
    control.asked(0)
    control.answered(chunk(7), 6, False)
    action, fresh = control.action(6)
    assert action is not None
    assert (action[0], fresh) == (7, False)
