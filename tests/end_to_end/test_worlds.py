"""A deployment that serves worlds: its ledger, its counters, and more players than have room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.payloads import Payload
from tests.deployment import Deployment
from tests.end_to_end.test_parking import attached
from tests.gateway.native_client import Stream, opened, requests
from tests.workers.world.playing import actions, keys, loaded, play
from tests.workers.world.playing import opened as opened_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOM = 3
PLAYERS = 30
TURNS = 3


def written(folder: Path, **options: Any) -> Path:
    """A config for random worlds."""
    config = {
        "stages": {
            "dream": {"engine": "workers.engines.world:WorldEngine", "random": 1, **options}
        },
        "pipelines": {
            "world": {
                "kind": "world",
                "required": True,
                "outputs": {"frames": "dream"},
                "limits": {"sessions": 64},
            }
        },
    }
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def input_of(number: int, payload: Payload, **parameters: Any) -> dict[str, Any]:
    data = {
        "type": "actions",
        "data": bytes(payload.data),
        "dtype": payload.dtype,
        "shape": list(payload.shape),
    }
    return {"type": "step", "step": number, "inputs": [data], "parameters": parameters}


async def stepped(connection: Stream, number: int, rows: list[list[float]]) -> list[bytes]:
    """The frames of a step."""
    asked = input_of(number, actions(rows), frames=len(rows))
    await connection.say("update", input=asked)
    done = await connection.until("step_done")
    return [frame["data"] for frame in done["outputs"]["frames"]]


async def test_thirty_players_in_turn_come_back_to_the_very_world_they_left(
    tmp_path: Path,
) -> None:
    options = {"block_frames": 1, "checkpoints": 0, "chunk": 2}
    async with loaded(**options) as alone:
        blocks = ROOM * alone.declare({})["cpu"] // alone.block_bytes
        size, expected = alone.declare({})["cpu"], []
        for player in range(PLAYERS):
            world = opened_alone(alone, seed=player)
            expected.append(await play(world, keys(2 * TURNS, seed=player), chunk=2))
            world.close()
    with Deployment(
        written(tmp_path, blocks=blocks, **options),
        environment={"PYTHONPATH": str(Path.cwd())},
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            sessions = [
                await opened(http, model="world", settings={"seed": player})
                for player in range(PLAYERS)
            ]
            for turn in range(TURNS):
                for player, session in enumerate(sessions):
                    rows = keys(2 * TURNS, seed=player)[2 * turn : 2 * turn + 2]
                    async with attached(deployment, session) as connection:
                        frames = await stepped(connection, turn + 1, rows)
                    assert frames == expected[player][2 * turn : 2 * turn + 2]
            (worker,) = deployment.workers()
            assert worker["devices"]["cpu"]["sessions"] == ROOM * size
            counter = 'antiphon_engine_total{counter="frames",stage="dream",worker="dream-0"}'
            deployment.until(lambda: deployment.metrics()[counter] == 2 * TURNS * PLAYERS)
