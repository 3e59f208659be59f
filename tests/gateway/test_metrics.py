"""The metric families are those that docs/operations.md defines."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.metrics import GatewayMetrics

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
