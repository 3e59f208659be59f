"""With `durability: turn` a worker's death costs no step that was answered and stored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import CapacityExceeded
from tests.gateway.test_native_steps import held, step
from tests.gateway.test_parking import STATE_BYTES, WORLD, Game, Player, playing
from workers.snapshots import Draft, SnapshotStore

DURABLE = replace(WORLD, durable=True)


async def stored(game: Game, player: Player, committed: int) -> None:
    """Wait until the state after that step is in the store."""
    async with asyncio.timeout(10):
        while True:
            answer = await game.http.get(f"/v1/sessions/{player.id}")
            if answer.json()["facts"]["restorable_step"] == committed:
                return


async def told(player: Player, kind: str) -> dict[str, Any]:
    """The last frame of a type, which may have come already."""
    if kind not in player.connection.kinds:
        return await player.connection.until(kind)
    frames: list[dict[str, Any]] = player.connection.frames
    return [frame for frame in frames if frame["type"] == kind][-1]


async def test_the_next_step_is_done_on_the_state_that_was_stored() -> None:
    async with playing(places=1, pipeline=DURABLE) as game:
        player = await game.join()
        for number in range(1, 4):
            await player.step()
            await stored(game, player, number)
            await game.gateway.served.replace("world")
            await player.connection.until("restored")
        await player.step()
        restored = [f for f in player.connection.frames if f["type"] == "restored"]
        assert [frame["origin"] for frame in restored] == ["snapshot"] * 3
        assert "state_lost" not in player.connection.kinds


async def test_one_snapshot_a_session_is_kept_and_parking_takes_its_place() -> None:
    async with playing(places=1, pipeline=DURABLE, store_bytes=8 * STATE_BYTES) as game:
        players = [await game.join()]
        for _ in range(5):
            await players[0].step()
        players.append(await game.join())
        for _ in range(3):
            for player in players:
                await player.step()
        for player in players:
            assert {"parked", "restored"} <= set(player.connection.kinds)
            assert "snapshot_failed" not in player.connection.kinds


async def test_a_store_that_is_full_is_told_once_and_the_session_goes_on() -> None:
    async with playing(places=1, pipeline=DURABLE, store_bytes=STATE_BYTES // 2) as game:
        player = await game.join()
        for _ in range(4):
            await player.step()
        failed = await told(player, "snapshot_failed")
        assert (failed["stage"], failed["error"]["code"]) == ("world", "capacity_exceeded")
        await player.step()
        assert player.connection.kinds.count("snapshot_failed") == 1
        await game.gateway.served.replace("world")
        lost = await told(player, "state_lost")
        assert (lost["committed_step"], lost["restorable_step"]) == (5, None)
        await player.connection.say("signal", id="back", signal={"type": "restore"})
        answer = await player.connection.until("answer")
        assert answer["error"]["code"] == "nothing_to_restore"


async def test_a_client_restores_the_step_that_was_stored_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = SnapshotStore.begin

    def full(self: SnapshotStore, session: str, stage: str, size_bytes: int) -> Draft:
        raise CapacityExceeded("the snapshot store is full")

    async with playing(places=1, pipeline=DURABLE) as game:
        player = await game.join()
        await player.step()
        await stored(game, player, 1)
        monkeypatch.setattr(SnapshotStore, "begin", full)
        await player.step()
        await player.step()
        await told(player, "snapshot_failed")
        monkeypatch.setattr(SnapshotStore, "begin", begin)
        await game.gateway.served.replace("world")
        lost = await told(player, "state_lost")
        assert (lost["committed_step"], lost["restorable_step"]) == (3, 1)
        await player.connection.say("update", input=step(4, held(3, 7)))
        failed = await player.connection.until("step_failed")
        assert failed["error"]["code"] == "session_state_lost"
        await player.connection.say("signal", signal={"type": "restore"})
        restored = await player.connection.until("was_restored")
        assert restored["committed_step"] == 1
        del player.inputs[1:]
        for _ in range(3):
            await player.step()
        await stored(game, player, 4)
