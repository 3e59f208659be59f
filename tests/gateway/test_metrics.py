"""The metric families are those that docs/operations.md defines."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.metrics import GatewayMetrics
from protocol.compute_use import ComputeUse

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(antiphon_\w+)` \| (\w+) \|", re.MULTILINE)


def documented_families() -> dict[str, str]:
    """Type of each family by its name."""
    return dict(ROW.findall(DOCUMENT.read_text()))


def test_the_families_are_the_documented_ones() -> None:
    metrics = GatewayMetrics()
    metrics.session_opened("voice", 0.02)
    exposed = dict(
        line.split()[2:4]
        for line in metrics.render().decode().splitlines()
        if line.startswith("# TYPE ")
    )
    assert exposed == documented_families()


def test_a_pipeline_without_sessions_has_none_in_every_state() -> None:
    exposed = GatewayMetrics(["voice", "text"]).render().decode()
    states = {line for line in exposed.splitlines() if line.startswith("antiphon_sessions{")}
    assert states == {
        f'antiphon_sessions{{pipeline="{pipeline}",state="{state}"}} 0.0'
        for pipeline in ("voice", "text")
        for state in ("opening", "active", "detached", "closing")
    }


def test_a_worker_without_cores_of_its_own_has_no_bound() -> None:
    metrics = GatewayMetrics()
    uses = {"bound": ComputeUse(1.5, 0.75, 0.25), "free": ComputeUse(None, 0.5, 0.0)}
    for worker, use in uses.items():
        metrics.watch_compute("think", worker, lambda use=use: use)  # type: ignore[misc]
    exposed = metrics.render().decode()
    told = {line for line in exposed.splitlines() if line.startswith("antiphon_worker_")}
    assert {line for line in told if "cores" in line} == {
        'antiphon_worker_cores{stage="think",worker="bound"} 1.5',
        'antiphon_worker_used_cores{stage="think",worker="bound"} 0.75',
        'antiphon_worker_used_cores{stage="think",worker="free"} 0.5',
        'antiphon_worker_session_cores{stage="think",worker="bound"} 0.25',
        'antiphon_worker_session_cores{stage="think",worker="free"} 0.0',
    }


def test_what_an_engine_counts_is_exposed_by_its_own_names() -> None:
    metrics = GatewayMetrics()
    counts = {"calls": 3, "frames": 12}
    metrics.watch_counters("sim", "sim-0", lambda: counts)
    counts["calls"] += 1
    told = [line for line in metrics.render().decode().splitlines() if "antiphon_engine" in line]
    assert told[2:] == [
        'antiphon_engine_total{counter="calls",stage="sim",worker="sim-0"} 4.0',
        'antiphon_engine_total{counter="frames",stage="sim",worker="sim-0"} 12.0',
    ]
