"""The engines that the distribution registers can be named in a config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.config import read_config
from tests.test_imports import ENGINE_LIBRARIES
from workers.check import check_stages
from workers.engine_registry import engine_class

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", ["ar", "codec", "speech-in", "vla", "world"])
def test_an_engine_is_registered(name: str) -> None:
    assert engine_class(name).outputs


@pytest.mark.parametrize("example", ["voice.yaml", "robots.yaml"])
def test_an_example_fits_its_engines(example: str) -> None:
    check_stages(read_config(ROOT / "examples" / example, {}))


def test_a_worker_process_starts_without_what_only_reads_configs() -> None:
    code = "import sys, workers.runtime; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"protocol.config", "yaml"}.isdisjoint(result.stdout.split())


def test_naming_an_engine_loads_none_of_its_libraries() -> None:
    code = (
        "import sys; from workers.engine_registry import engine_class\n"
        "for name in ('ar', 'codec', 'speech-in', 'vla', 'world'): engine_class(name)\n"
        "print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ENGINE_LIBRARIES.isdisjoint(result.stdout.split())
