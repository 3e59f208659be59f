"""A robot with the official client is answered in time, whatever becomes of the worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIG = """
gateway: {{openpi: {{port: {port}, model: arm}}}}
stages:
  act: {{engine: vla, policy: synthetic-any}}
pipelines:
  arm:
    kind: robot
    required: true
    outputs: {{actions: act}}
    durability: {durability}
    control: {{rate_hz: 20, deadline_ms: 200, safe_action: hold}}
"""
WORKER = "act-0"
SECONDS = 120


class Robot:
    """A process with pip's openpi-client that observes 20 times a second."""

    def __init__(self, port: int) -> None:
        program = ROOT / "loadtest" / "openpi_ticks.py"
        self.process = subprocess.Popen(
            [openpi_python(), program, f"ws://127.0.0.1:{port}", "20", str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.line() == "ready"
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self) -> Any:
        """The next that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the robot ended"
        return line.strip() if line == "ready\n" else json.loads(line)

    def until(self, reason: str | None) -> set[str | None]:
        """Read until an answer is not fresh for this reason (None: it is); the reasons on the
        way."""
        seen: set[str | None] = set()
        while (said := self.line()[2]) != reason:
            seen.add(said)
        return seen


@pytest.fixture(params=["turn", "none"])
def served(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Deployment, Robot, str]]:
    port = free_port()
    config = tmp_path / "robots.yaml"
    config.write_text(CONFIG.format(port=port, durability=request.param))
    with Deployment(config) as deployment:
        robot = Robot(port)
        try:
            robot.until(None)
            yield deployment, robot, request.param
        finally:
            robot.process.kill()
            robot.process.wait()


def admin(deployment: Deployment, path: str) -> None:
    assert httpx.post(f"{deployment.base_url}/v1/admin/{path}", timeout=10).status_code == 200


def test_a_worker_that_stalls_or_dies_leaves_no_robot_without_an_answer(
    served: tuple[Deployment, Robot, str],
) -> None:
    deployment, robot, durability = served
    worker = deployment.children()[WORKER]
    os.kill(worker, signal.SIGSTOP)
    assert robot.until("late") <= {None}
    # Nobody waits for a worker to be stopped.
    (session,) = deployment.get("/v1/admin/sessions").json()["sessions"]
    admin(deployment, f"sessions/{session['id']}/stop")
    assert robot.until("stopped") <= {"late"}
    os.kill(worker, signal.SIGCONT)
    admin(deployment, f"sessions/{session['id']}/release")
    robot.until(None)
    deployment.kill(WORKER)
    if durability == "turn":
        robot.until("worker_lost")
        robot.until(None)
    else:
        robot.until("state_lost")
        assert robot.until("broken") <= {"state_lost"}
