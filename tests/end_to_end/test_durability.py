"""A worker is killed after a step, and the next step is answered from what it had stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from protocol.payloads import Payload
from tests.deployment import Deployment
from tests.end_to_end.test_parking import attached, serving, stepped
from tests.gateway.native_client import Stream, opened, requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STATE_BYTES = 4 << 20


def written(folder: Path) -> Path:
    """A config for a world whose state is stored after each step."""
    config = {
        "stages": {
            "world": {
                "engine": "loadtest.synthetic_step:SyntheticStep",
                "state_bytes": STATE_BYTES,
            }
        },
        "pipelines": {
            "game": {
                "kind": "world",
                "outputs": {"frames": "world"},
                "durability": "turn",
            }
        },
        "parking": {"memory": "256MiB"},
    }
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def frames_of(connection: Stream, inputs: list[list[Payload]], steps: int) -> list[bytes]:
    """What so many more steps put out; each is what all steps so far come to."""
    for _ in range(steps):
        await stepped(connection, inputs)
    return [
        piece["data"]
        for frame in connection.frames
        if frame["type"] == "step_done"
        for piece in frame["outputs"]["frames"]
    ]


def stored(deployment: Deployment, session: dict[str, Any], step: int) -> None:
    """Wait until the state after that step is in the store."""
    address = f"{deployment.base_url}/v1/sessions/{session['id']}"
    deployment.until(lambda: httpx.get(address).json()["facts"]["restorable_step"] == step)


async def test_a_killed_worker_costs_no_step_that_was_answered(tmp_path: Path) -> None:
    with serving(written(tmp_path)) as deployment:
        async with requests(deployment.base_url) as http:
            undisturbed = await opened(http)
            async with attached(deployment, undisturbed) as connection:
                expected = await frames_of(connection, [], 6)
            await http.delete(f"/v1/sessions/{undisturbed['id']}")
            session, inputs = await opened(http), []  # type: tuple[dict[str, Any], list[Any]]
            async with attached(deployment, session) as connection:
                for number in range(1, 6):
                    await stepped(connection, inputs)
                    await asyncio.to_thread(stored, deployment, session, number)
                    await asyncio.to_thread(deployment.kill, "world-0")
                    restored = await connection.until("restored")
                    assert restored["origin"] == "snapshot"
                assert await frames_of(connection, inputs, 1) == expected
                assert "state_lost" not in connection.kinds
