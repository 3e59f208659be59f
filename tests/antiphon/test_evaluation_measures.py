"""The figures of an evaluation, their plots, and what counts against it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from antiphon.evaluation.measures import clocks, keeps_time, percentiles, task_figures, wilson
from antiphon.evaluation.plan import Condition, conditions
from antiphon.evaluation.plots import write_plots


def episode(succeeded: bool | None = True, **more: Any) -> dict[str, Any]:
    """What a robot says of an episode of ten steps of 50 ms."""
    return {
        "task": "reach",
        "robot": 0,
        "succeeded": succeeded,
        "steps": 10,
        "elapsed_s": 0.5,
        "period_s": 0.05,
        "misses": 1,
        "not_fresh": {"late": 1},
        "fresh": 2,
        "unused": 1,
        "took_ms": [1.0, 2.0, 3.0],
        "late_ms": [-2.0, 1.0],
        **more,
    }


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Brown, Cai, DasGupta (2001); the last two by hand.
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (95, 100, 0.8882, 0.9785),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p99": None, "max": None}
    assert percentiles(range(1, 102)) == {"p50": 51.0, "p99": 100.0, "max": 101.0}


def test_the_figures_of_a_task_are_those_of_all_its_episodes() -> None:
    figures = task_figures("reach", [episode(), episode(False), episode()])
    assert (figures["episodes"], figures["succeeded"]) == (3, 2)
    assert figures["success"] == pytest.approx(2 / 3)
    assert figures["success_95"] == wilson(2, 3)
    assert (figures["steps"], figures["misses"], figures["miss_share"]) == (30, 3, 0.1)
    assert (figures["chunks"], figures["unused"], figures["not_fresh"]) == (6, 3, {"late": 3})
    assert figures["step_time_ms"]["p50"] == 2.0
    assert figures["jitter_ms"]["max"] == 2.0


def test_what_was_recorded_has_no_success() -> None:
    assert task_figures("recorded", [episode(None)])["success"] is None


def test_each_robot_has_a_clock_of_its_own() -> None:
    late = episode(robot=1, elapsed_s=0.6)
    assert clocks([episode(), late, episode()]) == [1.0, 0.8333]
    assert clocks([late, episode(robot=1, elapsed_s=0.4)]) == [1.0]


@pytest.mark.parametrize(
    ("clock", "kept"), [(1.0, True), (0.981, True), (0.979, False), (1.021, False)]
)
def test_a_clock_may_be_off_by_two_percent(clock: float, kept: bool) -> None:
    assert keeps_time(clock) is kept


def test_conditions_are_all_combinations() -> None:
    made = conditions(["chunked"], [1, 2], [0.0, 100.0], [0.0], [0.0], ["seen"])
    assert made == [
        Condition("chunked", 1),
        Condition("chunked", 1, 100.0),
        Condition("chunked", 2),
        Condition("chunked", 2, 100.0),
    ]
    assert str(made[-1]) == "chunked, 2 robots, latency 100 ms"


def test_a_control_may_say_how_many_actions_are_played() -> None:
    assert (Condition("chunked:4").way, Condition("chunked:4").actions) == ("chunked", 4)
    assert (Condition("chunked").way, Condition("chunked").actions) == ("chunked", None)


def result(control: str, latency_ms: float) -> dict[str, Any]:
    return {
        "control": control,
        "robots": 1,
        "latency_ms": latency_ms,
        "jitter_ms": 0.0,
        "loss": 0.0,
        "images": "seen",
        "tasks": [task_figures("<reach>", [episode()]), task_figures("push", [episode(False)])],
    }


def test_plots_have_a_panel_a_task_and_a_line_a_way(tmp_path: Path) -> None:
    results = [result(way, ms) for way in ("synchronous", "chunked") for ms in (0.0, 100.0)]
    written = write_plots(results, tmp_path / "plots")
    assert [path.name for path in written] == ["success.svg", "step_time.svg", "misses.svg"]
    drawn = ElementTree.parse(written[0])
    svg = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in drawn.iter(f"{svg}text")}
    assert {"<reach>", "push", "synchronous", "chunked", "injected latency in ms"} <= texts
    assert len(list(drawn.iter(f"{svg}polyline"))) == 4
    assert len(list(drawn.iter(f"{svg}circle"))) == 8


def test_nothing_is_drawn_of_one_condition(tmp_path: Path) -> None:
    assert write_plots([result("chunked", 0.0)], tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
