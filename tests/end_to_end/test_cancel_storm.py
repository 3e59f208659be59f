"""Replies that are asked for and cancelled as fast as they come, through the arena."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.talk.realtime_client import RealtimeClient
from loadtest.stalled_readers import CONFIG
from tests.deployment import Deployment

CLIENTS = 6
REPLIES = 15


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    """A pipeline of synthetic engines whose replies are long and made at once."""
    path = tmp_path / "synthetic.yaml"
    path.write_text(CONFIG)
    return path


async def ask_and_cancel(client: RealtimeClient) -> list[str]:
    """Cancel each reply at its first sound; how each ended."""
    ends = []
    for _ in range(REPLIES):
        await client.send({"type": "response.create"})
        cancelled = False
        while True:
            received = await client.receive()
            assert received.type != "error", received.event
            if received.type == "response.output_audio.delta" and not cancelled:
                cancelled = True
                await client.send({"type": "response.cancel"})
            if received.type == "response.done":
                ends.append(received.event["response"]["status"])
                break
    return ends


async def storm(url: str) -> list[list[str]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_client(url)) for _ in range(CLIENTS)]
    return [task.result() for task in tasks]


async def one_client(url: str) -> list[str]:
    async with RealtimeClient.open(url, model="long") as client:
        return await ask_and_cancel(client)


def test_a_cancelled_reply_costs_nobody_anything(synthetic: Path) -> None:
    with Deployment(synthetic, environment={"PYTHONPATH": str(Path.cwd())}) as deployment:
        ends = asyncio.run(storm(deployment.base_url))
        assert ends == [["cancelled"] * REPLIES] * CLIENTS
        samples = deployment.metrics()
        assert samples['antiphon_edge_bytes_total{connector="shm",edge="speak->client"}'] > 0
        assert 'antiphon_edge_bytes_total{connector="inline",edge="speak->client"}' not in samples
        assert not [line for line in deployment.log if '"level": "error"' in line]
