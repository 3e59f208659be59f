"""Worlds that reserve less than they grow to: those that play have those that do not put away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.gateway.real_host import RealGateway
from tests.gateway.worlds.player import opened, serving_worlds
from tests.gateway.worlds.test_requests import UP, error, frames, stepped
from workers.snapshots import SnapshotPlace

BLOCKS = 24
POOL: dict[str, Any] = {"blocks": BLOCKS, "block_frames": 3, "chunk": 8}


@asynccontextmanager
async def crowded(directory: Path, **options: Any) -> AsyncIterator[tuple[RealGateway, Any]]:
    """A gateway whose worlds reserve little of the cache, and can be put away."""
    spec = {"snapshots": [SnapshotPlace(str(directory), 1 << 24)]}
    async with serving_worlds(spec=spec, **{**POOL, "reserve_blocks": 2, **options}) as it:
        yield it


async def grown(http: httpx.AsyncClient, worlds: list[dict[str, Any]]) -> None:
    for world in worlds:
        for _ in range(3):
            await frames(http, world, actions=[UP], frames=8)


async def test_a_step_finds_room_where_others_that_are_idle_hold_all_blocks(
    tmp_path: Path,
) -> None:
    async with serving_worlds(**{**POOL, "blocks": 512}) as (_, http):
        alone = [await opened(http, settings={"seed": seed}) for seed in range(8)]
        await grown(http, alone)
        expected = [await frames(http, it, actions=[UP], frames=8) for it in alone]
    async with crowded(tmp_path) as (gateway, http):
        worlds = [await opened(http, settings={"seed": seed}) for seed in range(8)]
        await grown(http, worlds)
        pool = gateway.served.engines["dream"].pool
        assert pool.free < 8
        # Those that were put away come back in the same way, and nothing of them is lost.
        for _ in range(2):
            checkpoints = [await http.post(f"/v1/worlds/{it['id']}/checkpoint") for it in worlds]
            assert [answer.status_code for answer in checkpoints] == [200] * 8
            found = [await frames(http, it, actions=[UP], frames=8) for it in worlds]
            assert found == expected
            for it in worlds:
                rewound = await http.post(f"/v1/worlds/{it['id']}/rewind", json={"step": 3})
                assert rewound.status_code == 200
        for it in worlds:
            await http.delete(f"/v1/worlds/{it['id']}")
        await gateway.served.emptied()
        assert pool.free == BLOCKS


async def test_forks_that_share_their_past_find_room_too(tmp_path: Path) -> None:
    async with crowded(tmp_path, blocks=12, checkpoints=0) as (_, http):
        source = await opened(http)
        await grown(http, [source])
        forks = [await opened(http, fork={"session": source["id"]}) for _ in range(5)]
        expected = await frames(http, forks[0], actions=[UP], frames=8)
        for it in (*forks[1:], source):
            assert await frames(http, it, actions=[UP], frames=8) == expected


async def test_steps_at_once_are_done_or_refused_and_in_the_end_all_are_done(
    tmp_path: Path,
) -> None:
    async with crowded(tmp_path) as (_, http):
        worlds = [await opened(http) for _ in range(8)]
        await grown(http, worlds)
        left, done = list(worlds), []
        while left:
            answers = await asyncio.gather(*(stepped(http, it, frames=8) for it in left))
            refused = []
            for it, answer in zip(left, answers, strict=True):
                if answer.status_code == 200:
                    told = msgspec.msgpack.decode(answer.content)["frames"]
                    done.append(tuple(frame["data"] for frame in told))
                else:
                    assert error(answer)[:2] == (503, "capacity_exceeded")
                    refused.append(it)
            assert len(refused) < len(left)
            left = refused
        assert len(set(done)) == 1


async def test_where_nothing_can_be_put_away_a_step_is_refused() -> None:
    async with serving_worlds(**{**POOL, "reserve_blocks": 1, "blocks": 6}) as (_, http):
        first, second = await opened(http), await opened(http)
        await frames(http, first, actions=[UP], frames=8)
        refused = await stepped(http, second, frames=8)
        while refused.status_code == 200:
            refused = await stepped(http, second, frames=8)
        assert error(refused)[:2] == (503, "capacity_exceeded")
        await http.delete(f"/v1/worlds/{first['id']}")
        await frames(http, second, frames=8)
