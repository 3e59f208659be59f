"""Every config that a load test writes for itself can be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest import admission, robots, stalled_readers
from protocol.config import read_config
from workers.check import check_stages

CONFIGS = {
    **{f"admission {part}": text for part, text in admission.CONFIGS.items()},
    "robots": robots.CONFIG.format(port=0, infer_ms=40),
    "stalled readers": stalled_readers.CONFIG,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_load_test_serves_is_valid(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGS[name])
    check_stages(read_config(path, {}))
