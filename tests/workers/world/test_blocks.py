"""Who holds which block of the cache, and which blocks a rollout looks at."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import CapacityExceeded
from workers.engines.world.blocks import BlockPool, Layout, Table


def test_a_block_is_free_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    first, second = pool.take("a"), pool.take("b")
    with pytest.raises(CapacityExceeded):
        pool.take("a")
    pool.hold([first], "b")
    pool.drop([first], "a")
    assert (pool.free, pool.holds(first)) == (0, 1)
    pool.drop([first, second], "b")
    assert pool.free == 2


def test_a_shared_block_is_charged_to_who_has_held_it_longest() -> None:
    pool = BlockPool(1)
    block = pool.take("parent")
    pool.hold([block, block], "child")
    assert (pool.charged("parent"), pool.charged("child")) == (1, 0)
    pool.drop([block], "parent")
    assert (pool.charged("parent"), pool.charged("child")) == (0, 1)
    pool.drop([block, block], "child")
    assert pool.charged("child") == 0


def test_what_is_not_held_cannot_be_dropped() -> None:
    pool = BlockPool(1)
    block = pool.take("a")
    with pytest.raises(ValueError, match="more often than held"):
        pool.drop([block], "b")


@given(st.lists(st.tuples(st.sampled_from("thd"), st.integers(0, 7), st.sampled_from("xyz"))))
def test_every_taken_block_is_charged_once(moves: list[tuple[str, int, str]]) -> None:
    pool = BlockPool(4)
    held: dict[int, Counter[str]] = {}
    for move, choice, holder in moves:
        known = sorted(held)
        if move == "t":
            if pool.free:
                held[pool.take(holder)] = Counter({holder: 1})
        elif known:
            block = known[choice % len(known)]
            if move == "h":
                pool.hold([block], holder)
                held[block][holder] += 1
            elif held[block][holder]:
                pool.drop([block], holder)
                held[block][holder] -= 1
                if not held[block].total():
                    del held[block]
        assert pool.free == 4 - len(held)
        assert sum(pool.charged(holder) for holder in "xyz") == len(held)
        for block, holders in held.items():
            assert pool.holds(block) == holders.total()
        for one in "xyz":
            assert pool.charged(one) <= sum(1 for holders in held.values() if holders[one])


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 60))
def test_a_rollout_keeps_what_a_next_frame_looks_at_and_little_more(
    block_frames: int, window: int, sinks: int, frames: int
) -> None:
    layout = Layout(block_frames, window, sinks)
    table, most = Table(), 0
    for frame in range(frames):
        number, place = divmod(frame, block_frames)
        if place == 0:
            table = Table((*table.numbers, number), (*table.blocks, 100 + number))
        table = layout.kept(table, frame + 1)
        most = max(most, len(table.blocks))
    assert most <= layout.slots
    assert table.blocks == tuple(100 + number for number in table.numbers)
    offsets = layout.offsets(table, frames)
    assert len(offsets) == layout.slots * block_frames
    seen = {frames - offset for offset in offsets if offset != -1}
    expected = set(range(min(sinks, frames))) | set(range(max(0, frames - window), frames))
    assert seen == expected
