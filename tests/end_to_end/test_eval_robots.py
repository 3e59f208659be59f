"""`antiphon eval robots` against a deployment, with the official client and a synthetic world."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.openpi import unpack
from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python
from tests.synthetic.steering import PREFIX, Steering
from workers.engines.vla.policy import NoOptions
from workers.engines.vla.stacking import stack, unstack

KEY = "a-key-for-robots"
LIMIT_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

CONFIG = f"""
gateway: {{keys: [{KEY}]}}
stages:
  act: {{engine: vla, policy: "tests.synthetic.steering:Steering"}}
  whatever: {{engine: vla, policy: synthetic-any, options: {{horizon: 20, dimensions: 1}}}}
pipelines:
  point:
    kind: robot
    required: true
    outputs: {{actions: act}}
    limits: {{sessions: 32}}
  any:
    kind: robot
    outputs: {{actions: whatever}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A policy that steers a point."""
    config = tmp_path_factory.mktemp("point") / "point.yaml"
    config.write_text(CONFIG)
    with Deployment(config, key=KEY, environment={"PYTHONPATH": str(ROOT)}) as deployment:
        yield deployment


def command(served: Deployment, *words: str, world: str = "Point") -> list[str]:
    """The command line, with what is always the same."""
    known = ["--url", served.base_url, "--pipeline", "point", "--python", str(openpi_python())]
    if not {"--recorded", "--simulation"} & set(words):
        known += ["--simulation", f"tests.synthetic.point:{world}"]
    if "--key" not in words:
        known += ["--key", KEY]
    return [sys.executable, "-m", "antiphon", "eval", "robots", *known, *words]


def run(
    served: Deployment, *words: str, world: str = "Point", cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it."""
    result = subprocess.run(
        command(served, *words, world=world),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result


def report(served: Deployment, *words: str) -> dict[str, Any]:
    """What it measured. A clock that a busy machine kept back is no fault of what is tested."""
    result = run(served, "--json", *words)
    said: dict[str, Any] = json.loads(result.stdout)
    faults = [fault for fault in said["faults"] if "of its speed" not in fault]
    assert faults == [], result.stderr
    assert result.returncode == (1 if said["faults"] else 0)
    return said


def succeeded(result: dict[str, Any]) -> list[int]:
    """How many episodes of each task did."""
    return [figures["succeeded"] for figures in result["tasks"]]


def test_who_looks_arrives_and_who_does_not_fails(served: Deployment) -> None:
    said = report(
        served, *("--control", "chunked", "--images", "seen,blank,frozen"),
        *("--tasks", "near", "--episodes", "2"),
    )  # fmt: skip
    seen, blank, frozen = said["results"]
    assert (succeeded(seen), succeeded(blank), succeeded(frozen)) == ([2], [0], [0])
    assert said["policy"]["action_prefix"] == [PREFIX, 2]
    for result in said["results"]:
        assert result["chunks"]["robots"] == result["chunks"]["gateway"] > 0
        assert len(result["clocks"]) == 1
    assert blank["tasks"][0]["steps"] == 2 * 60


def test_latency_hurts_synchronous_control(served: Deployment, tmp_path: Path) -> None:
    said = report(
        served, *("--control", "synchronous:2", "--latency", "0,300"),
        *("--episodes", "2", "--slow-motion", "0.5"),
        *("--tasks", "near", "--plots", str(tmp_path)),
    )  # fmt: skip
    quick, slow = said["results"]
    assert succeeded(slow) == [0]
    assert succeeded(quick) > [0]
    (figures,) = slow["tasks"]
    assert figures["step_time_ms"]["p50"] >= 300
    assert figures["miss_share"] > 0.5
    assert (tmp_path / "success.svg").read_text().startswith("<svg")


def test_what_is_lost_comes_later(served: Deployment) -> None:
    said = report(
        served, *("--loss", "1", "--loss-ms", "60", "--jitter", "10"),
        *("--control", "chunked", "--tasks", "near", "--episodes", "1"),
    )  # fmt: skip
    (figures,) = said["results"][0]["tasks"]
    assert figures["step_time_ms"]["p50"] >= 120


def test_a_table_is_printed(served: Deployment) -> None:
    result = run(served, "--control", "chunked", "--tasks", "near", "--episodes", "2")
    header, row = result.stdout.splitlines()
    assert header.split()[:4] == ["control", "robots", "latency", "jitter"]
    assert "2/2" in row.split()


def recorded(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The chunks of each episode in the recordings in `folder`."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        messages = []
        while content:
            (length,) = struct.unpack_from(">I", content)
            messages.append(unpack(content[4 : 4 + length]))
            content = content[4 + length :]
        about, *chunks = messages
        assert about == {"rate_hz": 50.0, "max_steps": 60}
        for _, episode in groupby(chunks, key=lambda chunk: (chunk["task"], chunk["seed"])):
            yield list(episode)


def test_actions_through_the_gateway_are_those_of_the_policy_in_process(
    served: Deployment, tmp_path: Path
) -> None:
    said = report(served, "--robots", "2", "--episodes", "3", "--record", str(tmp_path))
    policy = Steering(NoOptions())
    policy.load()
    episodes = list(recorded(tmp_path))
    assert len(episodes) == 6
    for chunks in episodes:
        state = policy.initial_state({})
        for chunk in chunks:
            inferred = policy.infer(stack([chunk["observation"]], [state]))
            ((answer, state),) = unstack(inferred, 1, state)
            np.testing.assert_allclose(chunk["actions"], answer["actions"], rtol=0, atol=1e-5)
    assert [figures["task"] for figures in said["results"][0]["tasks"]] == ["near", "corner"]
    assert sum(map(len, episodes)) == said["results"][0]["chunks"]["gateway"]


def test_real_time_chunking_gives_the_policy_what_it_has_committed_to(
    served: Deployment, tmp_path: Path
) -> None:
    report(
        served, *("--control", "real-time-chunking", "--latency", "50", "--slow-motion", "0.5"),
        *("--episodes", "2", "--record", str(tmp_path)),
    )  # fmt: skip
    longest = 0
    for chunks in recorded(tmp_path):
        assert chunks[0]["observation"]["action_prefix_length"] == 0
        for before, chunk in pairwise(chunks):
            seen = chunk["observation"]
            length = seen["action_prefix_length"]
            prefix = seen["action_prefix"]
            assert prefix.shape == (PREFIX, 2)
            begin = chunk["step"] - before["step"]
            np.testing.assert_array_equal(
                prefix[:length], before["actions"][begin : begin + length]
            )
            np.testing.assert_array_equal(prefix[:length], chunk["actions"][:length])
            longest = max(longest, length)
    assert longest > 0


def test_a_recording_is_a_load(served: Deployment, tmp_path: Path) -> None:
    report(served, "--tasks", "near", "--episodes", "1", "--record", str(tmp_path))
    (recording,) = tmp_path.iterdir()
    words = ["--recorded", str(recording), "--episodes", "4", "--control", "chunked"]
    (result,) = report(served, *words, "--robots", "4")["results"]
    (figures,) = result["tasks"]
    assert (figures["task"], figures["success"], figures["steps"]) == ("recorded", None, 4 * 60)
    assert len(result["clocks"]) == 4


def test_a_world_that_lags_behind_its_clock_is_a_fault(served: Deployment) -> None:
    result = run(served, "--tasks", "near", "--episodes", "1", world="Stuck")
    assert result.returncode == 1
    assert "of its speed, which has to be within 2%" in result.stderr


def test_the_simulation_that_the_docs_show_can_be_played(
    served: Deployment, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "evaluating-robots.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shown.py").write_text(shown)
    words = ["--simulation", "shown:Reach", "--pipeline", "any", "--episodes", "1"]
    words += ["--control", "chunked", "--tasks", "left"]
    result = run(served, "--json", *words, cwd=tmp_path)
    (played,) = json.loads(result.stdout)["results"]
    assert played["chunks"]["robots"] == played["chunks"]["gateway"] > 0


def test_without_an_answer_it_fails(served: Deployment) -> None:
    result = run(served, "--episodes", "1", "--latency", "1000", "--timeout-s", "0.2")
    assert (result.returncode, result.stdout) == (1, "")
    assert "robot 0: no answer within 0.2 s" in result.stderr


def test_another_key_is_refused(served: Deployment) -> None:
    result = run(served, "--episodes", "1", "--key", "another")
    assert (result.returncode, result.stdout) == (1, "")
    assert "robot 0: no connection to ws://" in result.stderr
    assert "HTTP 401" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "999"], "seeds 999 to 1000 touch those of the training, 0 to 999"),
        (["--tasks", "far"], "the simulation has no task far; it has near, corner"),
        (["--pipeline", "arm"], "has no pipeline arm; it has any, point"),
        (["--python", "nowhere/python"], "nowhere/python is missing"),
    ],
)
def test_what_cannot_be_played_is_told(served: Deployment, words: list[str], said: str) -> None:
    result = run(served, "--episodes", "2", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_simulation_that_is_not_there(served: Deployment) -> None:
    result = run(served, world="Missing")
    assert (result.returncode, result.stdout) == (2, "")
    assert "robot 0: module 'tests.synthetic.point' has no attribute 'Missing'" in result.stderr


def test_a_gateway_that_is_killed_fails_the_run(served: Deployment, tmp_path: Path) -> None:
    out = tmp_path / "report.json"

    def completed() -> float:
        return served.metrics()['antiphon_turns_total{pipeline="point",status="completed"}']

    before = completed()
    with subprocess.Popen(
        command(served, "--episodes", "1000", "--out", str(out)),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        served.until(lambda: completed() > before + 10)
        served.kill("gateway")
        table, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, table) == (1, "")
    assert "antiphon eval: synchronous, 1 robot: robot 0: " in said
    assert "connection" in said
    written = json.loads(out.read_text())
    assert (written["passed"], written["results"], len(written["faults"])) == (False, [], 1)
    assert KEY not in out.read_text()
    served.until_ready()


def test_a_count_that_is_not_the_gateway_s_is_a_fault(served: Deployment) -> None:
    words = ["--control", "chunked", "--tasks", "near", "--episodes", "2"]
    with subprocess.Popen(
        command(served, "--episodes", "1000"), cwd=ROOT, stdout=subprocess.DEVNULL
    ) as other:
        try:
            served.until(lambda: served.get("/v1/admin/sessions").json()["sessions"])
            result = run(served, *words)
        finally:
            other.terminate()
    assert result.returncode == 1
    assert "somebody else uses point" in result.stderr
