"""A ring's pieces never overlap, whatever order they are freed in; so do blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena.blocks import Blocks
from protocol.arena.ring import Piece, Ring

steps = st.lists(st.one_of(st.integers(1, 300), st.floats(0, 1, exclude_max=True)), max_size=80)
"""Take so many bytes, or free the piece at that part of the list of pieces."""


@given(steps)
def test_pieces_of_a_ring_never_overlap(actions: list[int | float]) -> None:
    ring = Ring(512)
    pieces: list[Piece] = []
    for action in actions:
        if isinstance(action, int):
            piece = ring.take(action)
            if piece is None:
                assert pieces
                continue
            assert 0 <= piece.offset <= 512 - action
            for other in pieces:
                apart = piece.offset + piece.length <= other.offset
                assert apart or other.offset + other.length <= piece.offset
            pieces.append(piece)
        elif pieces:
            ring.free(pieces.pop(int(action * len(pieces))))
    for piece in pieces:
        ring.free(piece)
    assert ring.empty
    assert ring.take(512) is not None


@given(steps)
def test_a_ring_freed_in_order_wastes_less_than_its_longest_piece(
    actions: list[int | float],
) -> None:
    ring = Ring(512)
    pieces: list[Piece] = []
    for action in actions:
        if isinstance(action, int):
            piece = ring.take(action)
            if piece is None:
                lengths = [piece.length for piece in pieces]
                assert sum(lengths) + action + max(*lengths, action) > 512
            else:
                pieces.append(piece)
        elif pieces:
            ring.free(pieces.pop(0))


@given(steps)
def test_blocks_never_overlap_and_join_again(actions: list[int | float]) -> None:
    blocks = Blocks(2048, 64)
    taken: dict[int, int] = {}
    for action in actions:
        if isinstance(action, int):
            offset = blocks.take(action)
            size = blocks.size_for(action)
            if offset is None:
                assert sum(taken.values()) + size > 512
                continue
            assert offset % size == 0
            assert all(
                offset + size <= other or other + length <= offset
                for other, length in taken.items()
            )
            taken[offset] = size
        elif taken:
            offset = list(taken)[int(action * len(taken))]
            del taken[offset]
            blocks.give(offset)
        assert blocks.taken_bytes == sum(taken.values())
    for offset in taken:
        blocks.give(offset)
    assert blocks.take(2048) == 0


def test_a_block_is_given_back_once() -> None:
    blocks = Blocks(1024, 64)
    offset = blocks.take(100)
    assert offset is not None
    blocks.give(offset)
    with pytest.raises(KeyError):
        blocks.give(offset)
