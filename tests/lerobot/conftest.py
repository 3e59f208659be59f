"""These tests run where LeRobot is: `make test-lerobot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("lerobot") is None:
    collect_ignore_glob = ["*.py"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each kind's tiny policy."""
    from tests.lerobot.tiny import ACT, DIFFUSION, SMOLVLA, save

    root = tmp_path_factory.mktemp("checkpoints")
    return {
        config["type"]: save(config, root / config["type"]) for config in (ACT, DIFFUSION, SMOLVLA)
    }
