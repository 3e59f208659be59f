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
from tests.gateway.native_client import Stream, opened, requests, stream
from tests.relay import relay
from tests.workers.world.playing import actions, keys, loaded, play
from tests.workers.world.playing import opened as opened_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOM = 3
PLAYERS = 30
TURNS = 3
ROLLOUTS = 64


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
                "limits": {"sessions": 80},
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


async def signalled(connection: Stream, kind: str, told: str, **arguments: Any) -> dict[str, Any]:
    """What comes of a signal."""
    await connection.say("signal", signal={"type": kind, **arguments})
    return await connection.until(told)


async def test_a_world_that_was_rewound_is_the_one_that_never_went_on(tmp_path: Path) -> None:
    options = {"block_frames": 1, "checkpoints": 2, "chunk": 2}
    past, undone, future = keys(4), keys(4, seed=1), keys(4, seed=2)
    async with loaded(**options) as alone:
        expected = await play(opened_alone(alone, seed=3), past + future, chunk=2)
    with Deployment(
        written(tmp_path, **options), environment={"PYTHONPATH": str(Path.cwd())}
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            session = await opened(http, model="world", settings={"seed": 3})
            park = f"/v1/admin/sessions/{session['id']}/park"
            async with attached(deployment, session) as connection:
                told = await signalled(connection, "checkpoint", "checkpoint_kept")
                assert (told["committed_step"], told["kept"]) == (0, [0])
                frames = [*await stepped(connection, 1, past[:2])]
                frames += await stepped(connection, 2, past[2:])
                told = await signalled(connection, "checkpoint", "checkpoint_kept")
                assert (told["committed_step"], told["kept"]) == (2, [0, 2])
                await stepped(connection, 3, undone[:2])
                await stepped(connection, 4, undone[2:])
                # Its checkpoints go with it, and come back.
                assert (await http.post(park)).json()["parked"] == ["dream"]
                refused = await signalled(connection, "rewind", "refused", step=3)
                assert refused["error"]["code"] == "no_checkpoint"
                assert refused["error"]["field"] == "signal.step"
                assert "those that are: 0, 2" in refused["error"]["message"]
                assert (await http.post(park)).json()["parked"] == ["dream"]
                told = await signalled(connection, "rewind", "was_rewound", step=2)
                assert told["committed_step"] == 2
                facts = (await http.get(f"/v1/sessions/{session['id']}")).json()["facts"]
                assert facts["committed_step"] == 2
                frames += await stepped(connection, 3, future[:2])
                frames += await stepped(connection, 4, future[2:])
                assert frames == expected
                told = await signalled(connection, "release_actions", "actions_released")
                assert told["committed_step"] == 4
                # And once more from the very beginning.
                await signalled(connection, "rewind", "was_rewound", step=0)
                assert await stepped(connection, 1, past[:2]) == expected[:2]


async def test_a_step_whose_answer_was_lost_is_answered_once_with_the_truth(tmp_path: Path) -> None:
    rows = keys(4)
    async with loaded(block_frames=1, chunk=2) as alone:
        expected = await play(opened_alone(alone), rows, chunk=2)
    with Deployment(
        written(tmp_path, block_frames=1, chunk=2), environment={"PYTHONPATH": str(Path.cwd())}
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            session = await opened(http, model="world")
            first = input_of(1, actions(rows[:2]), frames=2)
            async with relay(deployment.port) as way:
                url = f"ws://127.0.0.1:{way.port}/v1/sessions/{session['id']}/stream"
                async with stream(
                    url, "antiphon.msgpack", role="controller", secret=session["secret"]
                ) as connection:
                    session["secret"] = (await connection.until("attached"))["secret"]
                    await connection.say("update", input=first, id="one")
                    await connection.until("answer")
                    cursor = connection.cursor
                    way.drop()
            # The step was done meanwhile, or is being done; it is told once, whoever asks again.
            url = f"{deployment.ws_url}/v1/sessions/{session['id']}/stream"
            async with stream(
                url,
                "antiphon.msgpack",
                role="controller",
                secret=session["secret"],
                cursor=cursor,
            ) as connection:
                await connection.until("attached")
                await connection.say("update", input=first, id="one")
                done = await connection.until("step_done", step=1)
                assert [f["data"] for f in done["outputs"]["frames"]] == expected[:2]
                assert await stepped(connection, 2, rows[2:]) == expected[2:]
                assert connection.kinds.count("step_done") == 2
            counter = 'antiphon_engine_total{counter="frames",stage="dream",worker="dream-0"}'
            deployment.until(lambda: deployment.metrics().get(counter) == 4)


def holding(deployment: Deployment) -> tuple[int, int]:
    """The sessions of the one worker, and the bytes that they hold of the host's memory."""
    (worker,) = deployment.workers()
    return worker["sessions"], worker["devices"]["cpu"]["sessions"]


async def test_a_fork_is_the_world_that_played_the_same_from_the_beginning(tmp_path: Path) -> None:
    options = {"block_frames": 1, "checkpoints": 1, "chunk": 2}
    past, one_way, other_way = keys(4), keys(4, seed=1), keys(4, seed=2)
    async with loaded(**options) as alone:
        ways = [
            await play(opened_alone(alone, seed=3), past + way, chunk=2)
            for way in (one_way, other_way)
        ]
    with Deployment(
        written(tmp_path, **options), environment={"PYTHONPATH": str(Path.cwd())}
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            first = await opened(http, model="world", settings={"seed": 3})
            async with attached(deployment, first) as connection:
                await stepped(connection, 1, past[:2])
                await stepped(connection, 2, past[2:])
            # What is parked is brought back for it.
            await http.post(f"/v1/admin/sessions/{first['id']}/park")
            second = await opened(http, fork={"session": first["id"]})
            assert second["facts"] == {"committed_step": 2}
            assert (second["model"], second["settings"]) == ("world", {"seed": 3})
            players = list(zip((first, second), (one_way, other_way), ways, strict=True))
            for session, way, frames in players:
                async with attached(deployment, session) as connection:
                    assert await stepped(connection, 3, way[:2]) == frames[4:6]
            # Each is parked and comes back by itself.
            for session in (second, first):
                await http.post(f"/v1/admin/sessions/{session['id']}/park")
            for session, way, frames in players:
                async with attached(deployment, session) as connection:
                    assert await stepped(connection, 4, way[2:]) == frames[6:]
            gone = await http.post("/v1/sessions", json={"fork": {"session": "sess_none"}})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


async def test_twenty_forks_fit_where_five_copies_would_not(tmp_path: Path) -> None:
    options = {"block_frames": 1, "checkpoints": 0, "chunk": 1, "reserve_blocks": 1}
    rows, more, forks = keys(12), keys(1, seed=1), 20
    async with loaded(**options) as alone:
        world = opened_alone(alone)
        expected = await play(world, rows + more)
        window, block_bytes = alone.pool.charged(world), alone.block_bytes
    blocks = window + forks + 2
    assert blocks < 5 * window
    with Deployment(
        written(tmp_path, blocks=blocks, **options),
        environment={"PYTHONPATH": str(Path.cwd())},
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            first = await opened(http, model="world")
            async with attached(deployment, first) as connection:
                for number, row in enumerate(rows, 1):
                    await stepped(connection, number, [row])
            deployment.until(lambda: holding(deployment) == (1, window * block_bytes))
            others = [await opened(http, fork={"session": first["id"]}) for _ in range(forks)]
            # What they share is counted once; each has reserved the block that it may need.
            most = (window + forks) * block_bytes
            deployment.until(lambda: holding(deployment) == (1 + forks, most))
            for session in others:
                async with attached(deployment, session) as connection:
                    assert await stepped(connection, len(rows) + 1, more) == expected[-1:]
            deployment.until(lambda: holding(deployment) == (1 + forks, most))
            assert (await http.delete(f"/v1/sessions/{first['id']}")).status_code == 204
            async with attached(deployment, others[0]) as connection:
                await stepped(connection, len(rows) + 2, more)


async def test_rollouts_that_were_abandoned_are_gone_after_their_time(tmp_path: Path) -> None:
    options = {"block_frames": 1, "checkpoints": 0, "chunk": 1, "reserve_blocks": 1}
    with Deployment(
        written(tmp_path, blocks=2 * ROLLOUTS, **options),
        environment={"PYTHONPATH": str(Path.cwd())},
    ) as deployment:
        await asyncio.to_thread(deployment.until_ready)
        async with requests(deployment.base_url) as http:
            first = await opened(http, model="world")
            async with attached(deployment, first) as connection:
                await stepped(connection, 1, keys(1))
            for _ in range(ROLLOUTS):
                # Nobody ever comes to it.
                rollout = await opened(
                    http, fork={"session": first["id"]}, limits={"grace_s": 1.0, "idle_s": 5.0}
                )
                step = {"type": "step", "step": 2, "inputs": []}
                told = await http.post(f"/v1/sessions/{rollout['id']}/update", json={"input": step})
                assert told.json()["result"] == {"committed_step": 1}
            deployment.until(lambda: holding(deployment)[0] == 1)
            async with attached(deployment, first) as connection:
                await stepped(connection, 2, keys(1))
            await http.delete(f"/v1/sessions/{first['id']}")
            deployment.until(lambda: holding(deployment) == (0, 0))
            assert (await http.get("/v1/sessions")).json() == {"sessions": []}
