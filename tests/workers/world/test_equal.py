"""That a world is the same world however it came about: paged, batched, forked, rewound, parked.

Everything here is compared to the last bit, but for the two comparisons with other arithmetic,
which say so.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.world.playing import SIZE, actions, forked, keys, loaded, opened, play, step
from workers.engines.world.denoiser import Past
from workers.engines.world.model import Denoising, Model, picture
from workers.engines.world.sampler import euler_step, first_noise, noise_levels

LONG = 14
"""Frames of a rollout whose first have left the window, whatever the size of a block."""


def dense(model: Model, start: Any, seed: int, scene: int, rows: Any, steps: int) -> list[bytes]:
    """The plain reference: one session, whose keys and values lie one after the other in memory
    of its own, for all of its frames."""
    a, layout = model.architecture, model.layout
    width = layout.slots * layout.block_frames
    caches: list[list[Any]] = [[] for _ in range(a.layers)]
    frame, found = start, []
    for number, row in enumerate(rows):
        seen = [n for n in range(number) if number - n <= a.window or n < a.sinks]
        # Where the cache has frames that are not seen any more, in a block with others.
        first = [n for n in range(number) if n // layout.block_frames < layout.sink_blocks]
        oldest = (number - a.window) // layout.block_frames * layout.block_frames
        placed = first + [n for n in range(max(0, oldest), number) if n not in first]
        room = torch.zeros(1, a.heads, width * a.tokens, a.head_dim)
        keys_, values = [room.clone() for _ in caches], [room.clone() for _ in caches]
        offsets = torch.full((1, width), -1)
        for place, n in enumerate(placed):
            offsets[0, place] = number - n if n in seen else -1
            for layer, cache in enumerate(caches):
                at = slice(place * a.tokens, (place + 1) * a.tokens)
                keys_[layer][0, :, at], values[layer][0, :, at] = cache[n]
        noisy = first_noise(seed, number, (3, a.height, a.width))[None]
        levels = noise_levels(steps)
        for level, following in itertools.pairwise(levels):
            with torch.inference_mode():
                made, left = model.denoiser(
                    noisy,
                    torch.tensor([level]),
                    torch.tensor([row]),
                    torch.tensor([scene]),
                    frame[None] / 127.5 - 1.0,
                    Past(keys_, values, offsets),
                )
                noisy = euler_step(
                    noisy, made.clamp(-1, 1), torch.tensor([level]), torch.tensor([following])
                )
        for layer, cache in enumerate(caches):
            cache.append((left[layer, 0, 0], left[layer, 1, 0]))
        frame = picture(noisy[0])
        found.append(frame.permute(1, 2, 0).numpy().tobytes())
    return found


@pytest.mark.parametrize("block_frames", [1, 2, 3])
async def test_paged_equals_dense(block_frames: int) -> None:
    async with loaded(block_frames=block_frames) as engine:
        session, rows = opened(engine, seed=5), keys(LONG)
        start = session.rollout.start
        expected = dense(engine.model, start, 5, session.scene, rows, steps=2)
        assert await play(session, rows, chunk=3) == expected
        assert len(set(expected)) == LONG


async def test_playing_equals_what_training_computes() -> None:
    """The sums of a whole sequence are of another order: up to 1e-4 of a range of 2."""
    async with loaded() as engine:
        model, rows = engine.model, keys(LONG)
        a = model.architecture
        session = opened(engine, seed=5)
        rings, pictures, made = [], [], []
        inner = model.denoise

        def denoise(batch: Sequence[Denoising]) -> Any:
            found = inner(batch)
            rings.append(batch[0].ring[0].clone())
            made.append(found[0].frame)
            return found

        vars(model)["denoise"] = denoise
        for row in rows:
            result = await step(session, [row], steps=1)
            assert result.commit is not None
            result.commit()
            pictures.append(model.ring(session.rollout)[0].clone())
        assert all(torch.equal(one, two) for one, two in zip(rings[1:], pictures, strict=False))
        shape = (3, a.height, a.width)
        with torch.inference_mode():
            expected = model.denoiser.sequence(
                torch.stack([first_noise(5, n, shape) for n in range(LONG)])[None],
                torch.ones(1, LONG),
                torch.tensor([rows]),
                torch.full((1, LONG), session.scene),
                torch.stack(rings)[None] / 127.5 - 1.0,
                torch.arange(LONG)[None],
            )[0].clamp(-1, 1)
        assert (expected - torch.stack(made)).abs().max() < 1e-4


async def test_a_frame_sees_its_window_and_its_sink_and_nothing_else() -> None:
    async with loaded(block_frames=2) as engine:
        expected, rest = None, keys(1, seed=3)
        # 14 frames: the sink's block has a frame that has left, and so has the window's first.
        places = [(None, True), ((0, 0), False), ((0, 1), True), ((1, 0), True), ((1, 1), False)]
        places += [((3, 1), False)]
        for place, alike in places:
            session = opened(engine)
            await play(session, keys(14))
            assert session.rollout.table.numbers == (0, 4, 5, 6)
            if place is not None:
                index, frame = place
                block = session.rollout.table.blocks[index]
                picture = engine.cache.picture(block, frame)
                engine.cache.write(block, frame, picture, torch.tensor(0.7))
            found = await play(session, rest)
            expected = expected or found
            assert (found == expected) is alike, place


async def test_batched_equals_alone_at_whatever_place_of_their_schedules() -> None:
    async with loaded(window_ms=1000.0) as engine:
        players = [(seed, keys(9 + seed, seed), 1 + seed % 3) for seed in range(6)]
        alone = [await play(opened(engine, seed=s), rows, chunk) for s, rows, chunk in players]
        calls = engine.counted["calls"]
        sessions = [opened(engine, seed=seed) for seed, _, _ in players]
        together = await asyncio.gather(
            *(
                play(session, rows, chunk)
                for session, (_, rows, chunk) in zip(sessions, players, strict=True)
            )
        )
        assert together == alone
        assert engine.counted["calls"] - calls < calls / 2


async def test_steps_of_different_frames_and_levels_share_calls() -> None:
    async with loaded(window_ms=1000.0, steps=3) as engine:
        levels: list[set[float]] = []
        inner = engine.model.denoise

        def denoise(batch: Sequence[Denoising]) -> Any:
            levels.append({one.level for one in batch})
            return inner(batch)

        vars(engine.model)["denoise"] = denoise
        fast, slow = opened(engine, seed=1), opened(engine, seed=2)
        await asyncio.gather(step(fast, keys(6), steps=2), step(slow, keys(4)))
        assert len(levels) == 12
        assert any(len(one) == 2 for one in levels)


async def test_a_fork_equals_a_replay() -> None:
    async with loaded() as engine:
        for before in (0, 1, 4, 11):
            rows, one_way, other_way = keys(before), keys(7, seed=1), keys(7, seed=2)
            parent = opened(engine, seed=3)
            await play(parent, rows)
            child = forked(parent, {})
            ways = await asyncio.gather(play(parent, one_way, 2), play(child, other_way))
            for way, got in zip((one_way, other_way), ways, strict=True):
                replayed = await play(opened(engine, seed=3), rows + way)
                assert got == replayed[before:]


async def test_a_fork_lives_on_without_its_parent() -> None:
    async with loaded() as engine:
        parent = opened(engine)
        await play(parent, keys(5))
        child = forked(parent, {"scene": "two"})
        parent.close()
        other = opened(engine)
        await play(other, keys(20, seed=9))
        expected = opened(engine)
        await play(expected, keys(5))
        expected.configure({"scene": "two"})
        assert await play(child, keys(6, seed=1)) == await play(expected, keys(6, seed=1))
        for session in (child, other, expected):
            session.close()
        assert engine.pool.free == engine.options.blocks


async def test_a_rewound_world_equals_one_that_never_went_on() -> None:
    async with loaded() as engine:
        for before, beyond in ((1, 1), (3, 2), (12, 20)):
            session, expected = opened(engine, seed=4), opened(engine, seed=4)
            await asyncio.gather(play(session, keys(before)), play(expected, keys(before)))
            assert session.signal("checkpoint", {}) == {"step": before, "kept": [before]}
            went_on = await play(session, keys(beyond, seed=1))
            session.configure({"seed": 4, "scene": "two"})
            await play(session, keys(1, seed=1))
            for _ in range(2):
                rewound = session.signal("rewind", {"step": before})
                assert rewound == {"committed_step": before, "frame": before}
                assert session.step == before
                assert await play(session, keys(beyond, seed=1)) == went_on
            session.signal("rewind", {"step": before})
            way = keys(8, seed=2)
            assert await play(session, way) == await play(expected, way)


@pytest.mark.parametrize("before", [0, 1, 6, 13])
async def test_a_parked_world_equals_one_that_never_was(tmp_path: Path, before: int) -> None:
    async with loaded() as engine, loaded() as other:
        session, expected = opened(engine, seed=6), opened(engine, seed=6)
        for one in (session, expected):
            await play(one, keys(before))
            one.signal("checkpoint", {})
            await play(one, keys(3, seed=1))
            one.update(actions([1, 0, 0, 1, 0.25], sequence=12))
        path = tmp_path / "parked"
        await session.snapshot(path)
        session.close()
        await play(opened(other), keys(4))
        assert engine.weights() == other.weights() != ""
        settings = {"seed": 6}
        again = await other.restore("s", settings, lambda event, arguments: None, path)
        assert isinstance(again, type(session))
        assert again.held == expected.held
        assert (again.step, again.rollout.frames) == (expected.step, expected.rollout.frames)
        assert await play(again, keys(9, seed=2)) == await play(expected, keys(9, seed=2))
        for one in (again, expected):
            one.signal("rewind", {"step": before})
        assert await play(again, keys(9, seed=3)) == await play(expected, keys(9, seed=3))


async def test_a_reset_begins_as_the_open_whatever_came_before_it(tmp_path: Path) -> None:
    async with loaded() as engine:
        settings = {"seed": 6, "scene": "one"}
        begun = await play(opened(engine, **settings), keys(3))
        session = opened(engine, **settings)
        session.signal("reset", {"seed": 9, "scene": "two"})
        assert await play(session, keys(3)) != begun
        path = tmp_path / "parked"
        await session.snapshot(path)
        parked = await engine.restore("s", settings, lambda event, arguments: None, path)
        assert isinstance(parked, type(session))
        assert await play(parked, keys(2)) == await play(session, keys(2))
        for one in (session, parked):
            one.signal("reset", {})
            assert await play(one, keys(3)) == begun
            # These are what its gateway knows it by, then as ever.
            one.configure(settings)


class Gate:
    """Holds one of the model's calls, the `number`th from now on, until it may go on."""

    def __init__(self, model: Model, number: int) -> None:
        self._begun, self.go = threading.Event(), threading.Event()
        calls = iter(range(1, 1_000_000))
        inner = model.denoise

        def denoise(batch: Sequence[Denoising]) -> Any:
            if next(calls) == number:
                self._begun.set()
                assert self.go.wait(30)
            return inner(batch)

        vars(model)["denoise"] = denoise

    async def begun(self) -> None:
        """Until the call has begun."""
        assert await asyncio.to_thread(self._begun.wait, 30)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
async def test_who_is_cancelled_in_a_call_changes_no_bit_of_the_others(number: int) -> None:
    async with loaded(window_ms=1000.0) as engine:
        rows = keys(4, seed=1)
        expected = []
        for seed in (1, 2, 9):
            session = opened(engine, seed=seed)
            await play(session, keys(3))
            expected.append(await play(session, rows, chunk=4))
            session.close()
        stay, newcomer, leaves = (opened(engine, seed=seed) for seed in (1, 2, 3))
        other = opened(engine, seed=9)
        for one in (stay, newcomer, leaves, other):
            await play(one, keys(3))
        gate = Gate(engine.model, number)
        playing = [asyncio.create_task(play(one, rows, chunk=4)) for one in (stay, other)]
        leaving = asyncio.create_task(step(leaves, rows))
        await gate.begun()
        leaving.cancel()
        await asyncio.wait({leaving})
        leaves.close()
        # Its blocks are anybody's now, while the call still runs.
        playing.insert(1, asyncio.create_task(play(newcomer, rows, chunk=4)))
        gate.go.set()
        assert await asyncio.gather(*playing) == expected
        for one in (stay, newcomer, other):
            one.close()
        assert engine.pool.free == engine.options.blocks


async def test_who_fails_changes_no_bit_of_the_others() -> None:
    async with loaded(window_ms=1000.0, blocks=64) as engine:
        rows = keys(9, seed=1)
        expected = []
        for seed in (1, 2):
            session = opened(engine, seed=seed)
            expected.append(await play(session, rows, chunk=3))
            session.close()
        first, second, fails = (opened(engine, seed=seed) for seed in (1, 2, 3))
        await play(fails, keys(4))
        state = fails.rollout
        for block in state.table.blocks:
            cache = engine.model.cache
            cache.write(block, 0, cache.picture(block, 0), torch.tensor(float("nan")))
        results = await asyncio.gather(
            play(first, rows, 3),
            step(fails, rows[:3]),
            play(second, rows, 3),
            return_exceptions=True,
        )
        assert [results[0], results[2]] == expected
        assert "no picture" in str(results[1])
        assert fails.rollout is state
        # What it leaves behind harms nobody who gets its blocks.
        fails.close()
        later = [opened(engine, seed=1) for _ in range(8)]
        assert await asyncio.gather(*(play(one, rows, 3) for one in later)) == [expected[0]] * 8


async def test_weights_of_zero_destroy_the_picture() -> None:
    async with loaded() as engine:
        rows = keys(3)
        before = await play(opened(engine), rows)
        with torch.no_grad():
            for value in engine.model.denoiser.parameters():
                value.zero_()
        after = await play(opened(engine), rows)
        assert np.ptp(np.frombuffer(before[-1], np.uint8)) > 50
        assert np.ptp(np.frombuffer(after[-1], np.uint8)) == 0
        assert len(after[-1]) == SIZE * SIZE * 3
