"""What the benchmark of faults makes of the ticks that it saw."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loadtest.robot_faults import FAULTS, Robot, judged

TIMES = (0.0, 2.0, 4.0)
"""Begin, fault and mending."""


def robot(*ticks: tuple[float, float, str | None], broken_s: float | None = None) -> Robot:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    return Robot(process, list(ticks), broken_s)


def result(fault: str, *robots: Robot) -> dict[str, Any]:
    return judged(FAULTS[fault], list(robots), TIMES, allowed_ms=150.0, margin_ms=50.0)


def test_every_tick_that_is_answered_too_late_is_a_miss() -> None:
    seen = result(
        "stalled-worker",
        robot((1.0, 20.0, None), (2.1, 150.0, "late"), (5.0, 20.0, None)),
        robot((2.15, 151.0, "late"), (4.5, 30.0, None)),
    )
    assert seen["missed"] == 1
    assert seen["fresh_after_s"] == 0.5
    assert seen["fault"]["not_fresh"] == {"late": 2}
    assert seen["curve"][1] == {
        "at_s": 0.1,
        "ticks": 2,
        "max_ms": 151.0,
        "not_fresh": 2,
        "missed": 1,
    }


def test_a_policy_that_does_not_come_back_is_a_miss() -> None:
    assert result("killed-worker", robot((5.0, 20.0, "worker_lost")))["missed"] == 1
    assert result("killed-gateway", robot((5.0, 20.0, "watchdog: disconnected")))["missed"] == 0


@pytest.mark.parametrize(("broken_s", "missed"), [(2.05, 0), (2.2, 1), (None, 1)])
def test_a_connection_that_does_not_break_at_once_is_a_miss(
    broken_s: float | None, missed: int
) -> None:
    seen = result("killed-gateway-openpi", robot((1.0, 20.0, None), broken_s=broken_s))
    assert seen["missed"] == missed
