"""What is left out of a chunk that would be late."""

from __future__ import annotations

import pytest

from workers.engines.world.pace import CallTime, steps_of_next


@pytest.mark.parametrize(
    ("remaining_ms", "frames", "first", "steps"),
    [
        (1000, 4, True, 4),
        (160, 4, True, 4),
        (159, 4, True, 3),
        (85, 4, True, 2),
        (79, 4, True, 2),
        (79, 4, False, 2),
        (19, 4, False, 0),
        (19, 4, True, 2),
        (-5, 1, True, 2),
        (-5, 1, False, 0),
        (20, 1, False, 2),
        (35, 1, False, 3),
    ],
)
def test_first_steps_go_and_then_frames_but_never_all(
    remaining_ms: float, frames: int, first: bool, steps: int
) -> None:
    assert steps_of_next(remaining_ms, frames, 10.0, 4, 2, first=first) == steps


def test_a_call_is_expected_to_take_what_the_last_ones_took() -> None:
    time = CallTime()
    assert steps_of_next(0.0, 8, time.expected_ms, 2, 1, first=False) == 2
    time.took(100.0)
    assert time.expected_ms == 100.0
    for _ in range(50):
        time.took(10.0)
    assert 10.0 < time.expected_ms < 10.1
