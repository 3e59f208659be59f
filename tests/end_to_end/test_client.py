"""The client SDK in environments of its own, against a gateway that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python

CLIENT = ROOT / "clients" / "python"
LIMIT_S = 60
PYTHONS: dict[str, Callable[[], Path]] = {
    "numpy 1": openpi_python,
    "numpy 2": lambda: Path(sys.executable),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

environments = pytest.mark.parametrize("environment", PYTHONS)


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The example that serves a synthetic policy."""
    config = tmp_path_factory.mktemp("robots") / "robots.yaml"
    example = (ROOT / "examples" / "robots.yaml").read_text()
    config.write_text(example.replace("port: 8000", "port: 0"))
    with Deployment(config) as deployment:
        yield deployment


def run(environment: str, directory: Path, program: str, *arguments: str) -> str:
    """What a program prints that can import the client, and of ours nothing else."""
    result = subprocess.run(
        [str(PYTHONS[environment]()), "-c", program, *arguments],
        env={"PYTHONPATH": str(CLIENT)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@environments
def test_it_needs_nothing_of_the_server(environment: str, tmp_path: Path) -> None:
    program = """
import sys, antiphon_client, numpy
ours = {"antiphon", "gateway", "protocol", "sessions", "workers"} & set(sys.modules)
print(numpy.__version__.split(".")[0], sorted(ours))
"""
    assert run(environment, tmp_path, program) == f"{environment[-1]} []\n"


@environments
def test_what_its_readme_shows_can_be_run(
    environment: str, robots: Deployment, tmp_path: Path
) -> None:
    readme = (CLIENT / "README.md").read_text()
    robot, session = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    shown = [text.replace("http://127.0.0.1:8080", robots.base_url) for text in (robot, session)]
    ticks = run(environment, tmp_path, shown[0]).splitlines()
    assert len(ticks) == 20
    assert any(tick.endswith("] policy None") for tick in ticks)
    assert run(environment, tmp_path, shown[1]).startswith("was_reset Token(session='sess_")
    robots.until(lambda: not robots.get("/v1/admin/sessions").json()["sessions"])


@environments
def test_a_gateway_that_dies_leaves_the_robot_its_safe_action(
    environment: str, robots: Deployment, tmp_path: Path
) -> None:
    program = """
import os, signal, sys
from antiphon_client import RobotLoop
url, pid = sys.argv[1], int(sys.argv[2])
options = dict(rate_hz=50, deadline_ms=20, max_age_ms=200, safe_action=[0.0] * 32)
with RobotLoop.open(url, "synthetic-any", **options) as robot:
    while not robot.act({"state": 1}).fresh:
        pass
    os.kill(pid, signal.SIGKILL)
    while robot.error is None:
        action = robot.act({"state": 1})
        assert action.fresh or action.values.tolist() == [0.0] * 32
        robot.pace()
    action = robot.act({"state": 1})
print(action.source, action.reason, robot.error.code)
"""
    said = run(environment, tmp_path, program, robots.base_url, str(robots.children()["gateway"]))
    assert said == "watchdog session_not_found session_not_found\n"
    robots.until_ready()
