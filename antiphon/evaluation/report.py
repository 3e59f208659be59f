"""What an evaluation came to: one JSON object, or a table for a person."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from typing import Any

from rich.table import Table

from antiphon.evaluation.evaluation import Evaluation
from antiphon.machine import Disturbance, description

SECRETS = {"key"}


def as_json(evaluation: Evaluation, disturbance: Disturbance) -> dict[str, Any]:
    """The report; docs/evaluating-robots.md describes it."""
    order = {
        name: value if isinstance(value, int | float | str | tuple | None) else str(value)
        for name, value in asdict(evaluation.order).items()
        if name not in SECRETS
    }
    return {
        "passed": not evaluation.faults,
        "faults": evaluation.faults,
        "antiphon": importlib.metadata.version("antiphon"),
        "machine": description(),
        "disturbance": disturbance.result(),
        "order": order,
        "world": {name: evaluation.about.get(name) for name in ("rate_hz", "max_steps")},
        "policy": evaluation.about.get("metadata"),
        "results": evaluation.results,
    }


def as_table(evaluation: Evaluation) -> Table:
    """A line for each task under each condition."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("control", "robots", "latency", "jitter", "loss", "images", "task"):
        text = column in ("control", "images", "task")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for column in ("success", "95 %", "step p50", "p99", "jitter p99", "misses", "chunks", "clock"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in evaluation.results:
        for figures in result["tasks"]:
            table.add_row(*_condition(result), *_figures(figures), _clock(result))
    return table


def _condition(result: dict[str, Any]) -> list[str]:
    return [
        result["control"],
        str(result["robots"]),
        f"{result['latency_ms']:g} ms",
        f"{result['jitter_ms']:g} ms",
        f"{result['loss']:g}",
        result["images"],
    ]


def _figures(figures: dict[str, Any]) -> list[str]:
    success = interval = "-"
    if figures["success"] is not None:
        low, high = figures["success_95"]
        success = f"{figures['succeeded']}/{figures['episodes']}"
        interval = f"{low * 100:.1f}-{high * 100:.1f}"
    return [
        figures["task"],
        success,
        interval,
        _ms(figures["step_time_ms"]["p50"]),
        _ms(figures["step_time_ms"]["p99"]),
        _ms(figures["jitter_ms"]["p99"]),
        f"{figures['miss_share']:.1%}",
        str(figures["chunks"]),
    ]


def _clock(result: dict[str, Any]) -> str:
    """That of the robot whose world was off most."""
    worst = max(result["clocks"], key=lambda clock: abs(clock - 1.0), default=1.0)
    return f"{worst:.3f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
