"""LeRobot's policies behind the gateway: their chunks are what LeRobot's own call gives.

The gateway runs in the project's environment, and the workers in that of LeRobot, which is
the one that runs this test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from websockets.sync.client import connect

from protocol.openpi import pack, unpack
from tests.deployment import Deployment
from tests.lerobot.reference import Reference, observations

ROOT = Path(__file__).parents[2]
KINDS = ["act", "diffusion", "smolvla"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def robots(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A pipeline for each kind."""
    config: dict[str, Any] = {"stages": {}, "pipelines": {}}
    for kind, folder in checkpoints.items():
        config["stages"][kind] = {
            "engine": "vla",
            "python": sys.executable,
            "policy": "lerobot",
            "options": {"path": str(folder), "threads": 1},
        }
        config["pipelines"][kind] = {
            "kind": "robot",
            "required": True,
            "outputs": {"actions": kind},
        }
    path = tmp_path_factory.mktemp("robots") / "robots.yaml"
    path.write_text(yaml.safe_dump(config))
    gateway = ROOT / ".venv" / "bin" / "python"
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with Deployment(path, python=gateway, environment=environment) as deployment:
        deployment.until_ready()
        yield deployment


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_is_what_lerobots_own_call_gives(
    robots: Deployment, checkpoints: dict[str, Path], kind: str
) -> None:
    reference = Reference(checkpoints[kind])
    with connect(f"{robots.ws_url}/v1/openpi/{kind}", max_size=None) as socket:
        metadata = unpack(received(socket))
        assert metadata["policy"] == f"lerobot/{kind}"
        for observation in observations(3):
            socket.send(pack(observation))
            answer = unpack(received(socket))
            expected = reference.chunk(observation)
            assert answer["actions"].shape == expected.shape
            assert answer["actions"].shape[0] == metadata["action_horizon"]
            np.testing.assert_allclose(answer["actions"], expected, rtol=1e-5, atol=1e-5)


def test_an_observation_that_it_does_not_take_is_said(robots: Deployment) -> None:
    with connect(f"{robots.ws_url}/v1/openpi/act") as socket:
        received(socket)
        socket.send(pack({"observation.state": np.zeros(6, np.float32)}))
        said = socket.recv(timeout=60)
        assert isinstance(said, str)
        assert said.startswith("invalid_value: the observation has no observation.images")


def received(socket: Any) -> memoryview:
    """The next message, which is binary."""
    message = socket.recv(timeout=60)
    assert isinstance(message, bytes), message
    return memoryview(message)
