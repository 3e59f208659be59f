"""The world engine by itself: bytes, calls, actions, deadlines, what it refuses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded, InvalidRequest, ModelFileError, SessionStateLost
from protocol.payloads import Payload
from sessions.ledger import Budget, Ledger
from tests.workers.world.playing import SIZE, actions, forked, keys, loaded, opened, play, step
from workers.engine import Turn, TurnResult
from workers.engines.world import WorldEngine, WorldOptions
from workers.engines.world.session import WorldSession

START_BYTES = SIZE * SIZE * 3


def commit(result: TurnResult) -> None:
    assert result.commit is not None
    result.commit()


# Bytes


def account(engine: WorldEngine, ledger: Ledger, sessions: list[WorldSession]) -> list[int]:
    """What the ledger counts for each, as the runtime has it measured."""
    for number, session in enumerate(sessions):
        ledger.measure(str(number), session.measure())
    return [ledger.of(str(number))[HOST] for number in range(len(sessions))]


def ledger_of(engine: WorldEngine) -> Ledger:
    use = engine.devices()[HOST]
    ledger = Ledger({HOST: Budget(use.pool)})
    ledger.load(HOST, pool=use.pool)
    return ledger


@pytest.mark.parametrize("block_frames", [1, 2, 3])
async def test_a_session_grows_block_by_block_to_its_window_and_stops(block_frames: int) -> None:
    async with loaded(block_frames=block_frames, reserve_blocks=0, checkpoints=0) as engine:
        ledger, session = ledger_of(engine), opened(engine)
        ledger.reserve("0", "", engine.declare({}))
        sizes = []
        for row in keys(40):
            sizes += account(engine, ledger, [session])
            await play(session, [row])
        size, slots = engine.block_bytes, engine.model.layout.slots
        grown = [START_BYTES, *(blocks * size for blocks in range(1, slots + 1))]
        changes = [b - a for a, b in itertools.pairwise(sizes)]
        assert set(sizes) <= set(grown)
        assert max(sizes) == slots * size
        assert max(changes) <= size
        assert set(sizes[12:]) <= {(slots - 1) * size, slots * size}
        assert sizes[:7] == sorted(sizes[:7])
        assert engine.pool.charged(session) <= slots


async def test_what_is_declared_is_never_exceeded() -> None:
    async with loaded(checkpoints=2, chunk=5, blocks=64) as engine:
        session, most = opened(engine), engine.declare({})[HOST]
        held = []
        inner = engine.model.denoise

        def denoise(batch: Any) -> Any:
            held.append(session.measure()[HOST])
            return inner(batch)

        vars(engine.model)["denoise"] = denoise
        for _ in range(12):
            await play(session, keys(5), chunk=5)
            session.signal("checkpoint", {})
            held.append(session.measure()[HOST])
            assert len(session.checkpoints) <= 2
        assert max(held) <= most


@pytest.mark.parametrize("block_frames", [1, 2, 3])
async def test_a_fork_adds_at_most_one_block(block_frames: int) -> None:
    async with loaded(blocks=64, block_frames=block_frames) as engine:
        for before in range(12):
            parent = opened(engine)
            await play(parent, keys(before))
            taken = engine.options.blocks - engine.pool.free
            child = forked(parent, {})
            assert engine.options.blocks - engine.pool.free == taken
            await play(child, keys(1))
            assert engine.options.blocks - engine.pool.free <= taken + 1
            child.close()
            parent.close()


async def test_twenty_forks_fit_where_five_copies_would_not() -> None:
    async with loaded(blocks=28, block_frames=1, reserve_blocks=0, checkpoints=0) as engine:
        parent = opened(engine)
        await play(parent, keys(11))
        copy = engine.model.layout.slots
        assert 5 * copy > engine.options.blocks
        ledger = ledger_of(engine)
        sessions = [parent]
        for number in range(21):
            if number:
                sessions.append(forked(parent, {}))
            ledger.reserve(str(number), "", engine.declare({}))
        await asyncio.gather(*(play(one, keys(1, seed)) for seed, one in enumerate(sessions[1:])))
        total = sum(account(engine, ledger, sessions))
        taken = engine.options.blocks - engine.pool.free
        assert taken <= copy + 20
        assert ledger.devices()[HOST].sessions == total <= engine.devices()[HOST].pool
        assert sum(engine.pool.charged(one) for one in sessions) == taken


async def test_without_a_free_block_a_step_fails_and_all_is_as_it_was() -> None:
    async with loaded(blocks=2, reserve_blocks=0) as engine:
        session, expected = opened(engine, seed=1), None
        frames = await play(session, keys(3))
        other = opened(engine)
        state = session.rollout
        for session_, rows in ((session, keys(2, seed=1)), (other, keys(1))):
            with pytest.raises(CapacityExceeded):
                await step(session_, rows)
        assert session.rollout is state
        assert session.step == 3
        other.close()
        expected = await play(session, keys(1, seed=1))
        session.signal("reset", {})
        assert engine.pool.free == 2
        assert await play(session, keys(3)) == frames
        assert await play(session, keys(1, seed=1)) == expected


async def test_what_was_made_and_not_committed_is_gone() -> None:
    async with loaded() as engine:
        session = opened(engine)
        await play(session, keys(3))
        expected = opened(engine)
        await play(expected, keys(3))
        for rows in (keys(4, seed=1), keys(2, seed=2)):
            await step(session, rows)
        taken = engine.options.blocks - engine.pool.free
        assert await play(session, keys(5, seed=3)) == await play(expected, keys(5, seed=3))
        for one in (session, expected):
            one.close()
        assert engine.pool.free == engine.options.blocks
        assert taken > 0


# Calls


async def test_sessions_that_play_share_calls() -> None:
    async with loaded(window_ms=1000.0, blocks=256) as engine:
        alone = opened(engine)
        await play(alone, keys(6), chunk=2)
        assert engine.counted["calls"] == engine.counted["denoising_steps"] == 12
        sessions = [opened(engine, seed=seed) for seed in range(16)]
        await asyncio.gather(*(play(one, keys(6), chunk=2) for one in sessions))
        frames, calls = 16 * 6, engine.counted["calls"] - 12
        assert engine.counted["frames"] == frames + 6
        # Alone it is two calls a frame.
        assert calls / frames <= 2 / 8


async def test_counters_exist_before_the_first_frame() -> None:
    async with loaded() as engine:
        before = engine.counters()
        session = opened(engine)
        await play(session, keys(2))
        session.close()
        after = engine.counters()
    assert set(before) == set(after)
    assert not any(before.values())
    assert after["frames"] == 2


async def test_nobody_waits_for_who_does_not_play() -> None:
    async with loaded(window_ms=1000.0) as engine:
        _idle, plays = opened(engine), opened(engine)
        begun_ms = engine.now_ms()
        async with asyncio.timeout(30):
            await play(plays, keys(30))
        assert engine.counted["calls"] == 60
        assert engine.now_ms() - begun_ms < 60 * 1000.0


async def test_who_is_late_gets_fewer_steps_and_then_fewer_frames() -> None:
    async with loaded(steps=3, least_steps=2) as engine:
        session = opened(engine)
        pieces: list[Payload] = []
        engine.call_time.took(1_000_000.0)
        engine.call_time.took = lambda call_ms: None  # type: ignore[method-assign]
        commit(result := await step(session, keys(4), pieces, deadline_ms=1_900_000))
        assert result.usage["frames"] == 1
        assert result.usage["cut_frames"] == 3
        assert [piece.attributes["steps"] for piece in pieces] == [2]
        assert session.rollout.frames == 1
        engine.call_time.expected_ms = 1e-9
        commit(result := await step(session, keys(4), pieces, deadline_ms=60_000))
        assert result.usage == {
            "frames": 4,
            "denoising_steps": 12,
            "hurried_frames": 0,
            "cut_frames": 0,
        }
        assert engine.counted["hurried_frames"] == 1
        assert engine.counted["cut_frames"] == 3


# Actions


async def test_what_is_held_is_sampled_for_each_frame_and_told_with_it() -> None:
    async with loaded() as engine:
        session, expected = opened(engine), opened(engine)
        rows = keys(3)
        inner = engine.model.denoise
        calls = 0

        def denoise(batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 2 == 0:
                # Somebody presses something else while the last step of a frame is made.
                row, number = rows[min(calls // 2, 2)], 10 + calls // 2
                loop.call_soon_threadsafe(session.update, actions(row, sequence=number))
            return inner(batch)

        loop = asyncio.get_running_loop()
        vars(engine.model)["denoise"] = denoise
        pieces: list[Payload] = []
        session.update(actions([0] * 5, sequence=3))
        session.update(actions(rows[0], sequence=4))
        commit(await step(session, (), pieces, frames=3))
        assert [piece.attributes["action_sequence"] for piece in pieces] == [4, 11, 12]
        assert [piece.attributes["frame"] for piece in pieces] == [1, 2, 3]
        del vars(engine.model)["denoise"]
        assert await play(expected, rows, chunk=3) == [bytes(piece.data) for piece in pieces]
        assert session.held.values == tuple(rows[2])
        session.signal("release", {})
        assert (session.held.values, session.held.sequence) == ((0.0,) * 5, 13)


async def test_actions_change_the_picture() -> None:
    async with loaded() as engine:
        found = {
            tuple(await play(opened(engine), [[float(key == down) for key in range(5)]] * 2))
            for down in range(6)
        }
        assert len(found) == 6


# Settings and signals


async def test_the_same_seed_and_actions_give_the_same_frames() -> None:
    async with loaded() as engine, loaded() as other:
        rows = keys(5)
        first = await play(opened(engine, seed=1), rows)
        assert await play(opened(other, seed=1), rows) == first
        assert await play(opened(engine, seed=1 + len(engine.model.world.starts)), rows) != first
        session = opened(engine, seed=2)
        await play(session, keys(3, seed=4))
        session.signal("reset", {"seed": 1})
        assert session.step == 0
        assert await play(session, rows) == first


async def test_a_rollout_may_begin_with_a_frame_of_the_clients() -> None:
    async with loaded() as engine:
        frame = bytes(range(256)) * 3
        session = opened(engine, frame=frame, scene="two")
        assert session.scene == 1
        assert session.rollout.start is not None
        assert session.rollout.start.permute(1, 2, 0).numpy().tobytes() == frame


async def test_a_scene_changes_between_two_chunks_or_not_at_all() -> None:
    async with loaded() as engine:
        session, expected = opened(engine), opened(engine)
        for wrong in ({"scene": "three"}, {"scene": "two", "seed": 5}, {"scene": 2}, {"x": 1}):
            with pytest.raises(InvalidRequest):
                session.configure(wrong)
        rows = keys(4)
        assert await play(session, rows) == await play(expected, rows)
        session.configure({"scene": "two"})
        assert await play(session, rows) != await play(expected, rows)
        expected.configure({"scene": "two"})
        assert session.scene == expected.scene == 1


async def test_checkpoints_are_bounded_and_go_with_what_they_are_of() -> None:
    async with loaded(checkpoints=2) as engine:
        session = opened(engine)
        for _ in range(4):
            await play(session, keys(1))
            kept = session.signal("checkpoint", {})
        assert kept == {"step": 4, "kept": [3, 4]}
        with pytest.raises(InvalidRequest, match="no checkpoint"):
            session.signal("rewind", {"step": 2})
        session.signal("rewind", {"step": 3})
        assert sorted(session.checkpoints) == [3]
        session.signal("reset", {})
        assert engine.pool.free == engine.options.blocks
    async with loaded(checkpoints=0) as engine:
        with pytest.raises(InvalidRequest):
            opened(engine).signal("checkpoint", {})


async def test_actions_that_come_with_a_step_keep_their_number() -> None:
    async with loaded() as engine:
        session = opened(engine)
        pieces: list[Payload] = []

        async def inputs() -> AsyncIterator[Payload]:
            yield actions(keys(2), sequence=41)

        turn = Turn(1, "default", {"frames": 2}, inputs(), pieces.append, step=1)
        commit(await session.run(turn))
        assert [piece.attributes["action_sequence"] for piece in pieces] == [41, 41]


async def test_a_scene_changes_with_the_step_that_says_so_if_that_is_committed() -> None:
    async with loaded() as engine:
        session = opened(engine, scene="one")
        pieces: list[Payload] = []
        await step(session, keys(1), scene="two")
        # It was never committed.
        commit(await step(session, keys(1), pieces))
        session.signal("reset", {})
        commit(await step(session, keys(1), pieces, scene="two"))
        commit(await step(session, keys(1), pieces))
        assert [piece.attributes["scene"] for piece in pieces] == ["one", "two", "two"]
        assert pieces[0].data != pieces[1].data


@pytest.mark.parametrize(
    ("rows", "parameters"),
    [
        (keys(2), {"frames": 3}),
        ((), {"frames": 9}),
        ((), {"frames": 0}),
        ((), {"steps": 3}),
        ((), {"deadline_ms": -1}),
        ((), {"deadline_ms": float("inf")}),
        ((), {"later": True}),
        ((), {"scene": "moon"}),
    ],
)
async def test_a_step_that_cannot_be_is_refused(rows: Any, parameters: Any) -> None:
    async with loaded() as engine:
        session = opened(engine)
        with pytest.raises(InvalidRequest):
            await step(session, rows, **parameters)
        assert engine.counted["calls"] == 0


@pytest.mark.parametrize(
    "settings", [{"seed": -1}, {"seed": "x"}, {"scene": "moon"}, {"frame": b"short"}, {"sed": 1}]
)
async def test_settings_that_cannot_be_are_refused(settings: Any) -> None:
    async with loaded() as engine:
        for refused in (engine.declare, lambda given: opened(engine, **given)):
            with pytest.raises(InvalidRequest):
                refused(settings)
        with pytest.raises(InvalidRequest):
            opened(engine).signal("jump", {})


@pytest.mark.parametrize(
    "options",
    [{}, {"random": 1, "weights": "x"}, {"random": 1, "steps": 1, "least_steps": 2}],
)
def test_options_that_cannot_be_are_refused(options: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        WorldOptions.model_validate(options)


# Files


async def test_weights_come_back_from_a_file(tmp_path: Path) -> None:
    from workers.engines.world.weights import save_world

    path = tmp_path / "world.safetensors"
    async with loaded() as engine:
        with torch.no_grad():
            for value in engine.model.denoiser.parameters():
                value.copy_(value.half())
        save_world(path, engine.model.world, {"steps": 0})
        expected = await play(opened(engine), keys(3))
    async with loaded(random=None, weights=path) as engine:
        assert await play(opened(engine), keys(3)) == expected
        assert engine.about["width"] == engine.about["height"] == SIZE
    path.write_bytes(path.read_bytes()[:-1])
    for missing in (path, tmp_path / "none"):
        with pytest.raises(ModelFileError):
            async with loaded(random=None, weights=missing):
                pass


async def test_what_is_no_snapshot_is_state_that_is_lost(tmp_path: Path) -> None:
    async with loaded(blocks=6) as engine:
        session = opened(engine)
        await play(session, keys(9))
        path = tmp_path / "parked"
        await session.snapshot(path)
        taken = engine.pool.free
        with pytest.raises(CapacityExceeded):
            await engine.restore("s", {}, lambda event, arguments: None, path)
        assert engine.pool.free == taken
        content = path.read_bytes()
        for wrong in (b"", content[:-1], content[: len(content) // 2]):
            path.write_bytes(wrong)
            with pytest.raises(SessionStateLost):
                await engine.restore("s", {}, lambda event, arguments: None, path)
        assert engine.pool.free == taken
