"""The official OpenPI client, unmodified and in an environment of its own, is served."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from protocol.openpi import pack
from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python
from tests.ports import free_port
from training.robots.simulator import Simulation
from workers.engines.vla.onnx_policy import OnnxOptions, OnnxPolicy
from workers.engines.vla.stacking import stack

SCENARIOS = ROOT / "tests" / "official_client" / "robots.py"
KEY = "a-key-for-robots"
LIMIT_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

CONFIG = """
gateway:
  keys: [{key}]
  openpi: {{port: {port}, model: arm}}
stages:
  act: {{engine: vla, policy: "tests.workers.vla.policies:Counting"}}
pipelines:
  arm:
    kind: robot
    required: true
    outputs: {{actions: act}}
    limits: {{sessions: 32}}
"""


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of one policy that counts, with a key."""
    config = tmp_path_factory.mktemp("robots") / "robots.yaml"
    # A gateway that is started again takes the ports that it was told, so it has to be told some.
    own, gateways = free_port(), free_port()
    config.write_text(CONFIG.format(key=KEY, port=own))
    environment = {"PYTHONPATH": str(ROOT)}
    with Deployment(
        config, "--port", str(gateways), key=KEY, environment=environment
    ) as deployment:
        yield deployment


def policy_port(deployment: Deployment) -> int:
    """Where the port of its own was opened last."""
    opened = [json.loads(line) for line in list(deployment.log) if '"policy_port_open"' in line]
    assert opened, "\n".join(deployment.log)
    return int(opened[-1]["port"])


def play(deployment: Deployment, scenario: str, uri: str | None = None) -> None:
    """Have the client play a scenario to its end."""
    result = subprocess.run(
        command(scenario, uri or f"ws://127.0.0.1:{policy_port(deployment)}"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = "\n".join([result.stdout, result.stderr, *list(deployment.log)[-30:]])
    assert result.returncode == 0, said
    assert result.stdout == f"ok {scenario}\n"


def command(scenario: str, uri: str) -> list[str]:
    """What runs a scenario."""
    return [str(openpi_python()), str(SCENARIOS), "--uri", uri, "--key", KEY, scenario]


@pytest.mark.parametrize(
    "scenario",
    [
        "policy_loop",
        "action_chunk_broker",
        "errors",
        "slow_call",
        "odd_arrays",
        "ten_at_once",
        "without_key",
    ],
)
def test_the_official_client_is_served_on_a_port_of_its_own(arm: Deployment, scenario: str) -> None:
    play(arm, scenario)


def test_the_official_client_is_served_at_the_path_of_a_pipeline(arm: Deployment) -> None:
    play(arm, "policy_loop", f"{arm.ws_url}/v1/openpi/arm")


def test_its_health_is_on_the_same_port(arm: Deployment) -> None:
    answer = httpx.get(f"http://127.0.0.1:{policy_port(arm)}/healthz")
    assert (answer.status_code, answer.text) == (200, "OK\n")


def test_the_client_comes_back_after_the_gateway_was_killed(arm: Deployment) -> None:
    uri = f"ws://127.0.0.1:{policy_port(arm)}"
    with subprocess.Popen(
        command("restart", uri), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        arm.kill("gateway")
        output, _ = client.communicate("\n", timeout=LIMIT_S)
    assert (client.returncode, output) == (0, "ok restart\n")


def test_every_session_of_the_client_has_ended(arm: Deployment) -> None:
    arm.until(lambda: not arm.get("/v1/admin/sessions").json()["sessions"])


def test_the_example_serves_any_observation_and_a_policy_that_looks(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "robots.yaml").read_text()
    config = tmp_path / "robots.yaml"
    with contextlib.closing(Simulation("pick", 1)) as world:
        observations = []
        for _ in range(5):
            observations.append(world.observe())
            world.step([1.0, 0.5, -1.0, 1.0])
    example = example.replace("port: 8000", "port: 0")
    config.write_text(example.replace("training/", f"{ROOT}/training/"))
    ask = """
import json, sys, numpy as np
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
looks = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]))
assert looks.get_server_metadata()["policy"] == "tabletop"
seen = msgpack_numpy.unpackb(sys.stdin.buffer.read())
print(json.dumps([looks.infer(each)["actions"].tolist() for each in seen]))
policy = WebsocketClientPolicy(f"{sys.argv[2]}/v1/openpi/synthetic-any")
assert policy.get_server_metadata()["policy"] == "synthetic-any"
answer = policy.infer({"whatever": np.arange(5), "it": {"is": "called"}})
assert answer["actions"].shape == (50, 32)
again = policy.infer({"whatever": np.arange(5), "it": {"is": "different"}})
assert not np.array_equal(answer["actions"], again["actions"])
"""
    with Deployment(config) as deployment:
        asked = subprocess.run(
            [openpi_python(), "-c", ask, str(policy_port(deployment)), deployment.ws_url],
            input=pack(observations),
            stdout=subprocess.PIPE,
            check=True,
            timeout=LIMIT_S,
        )
    policy = OnnxPolicy(OnnxOptions(model=ROOT / "training/robots/tabletop.onnx"))
    policy.load()
    in_process = [policy.infer(stack([each], [{}])).answers["actions"][0] for each in observations]
    np.testing.assert_allclose(json.loads(asked.stdout), in_process, atol=1e-5)
