"""A rollout: the state of a world at one moment, and the one that a step is making."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from torch import Tensor

from protocol.errors import CapacityExceeded
from workers.engines.world.blocks import BlockPool, Layout, Table
from workers.engines.world.cache import Cache


@dataclass(frozen=True)
class Rollout:
    """Where a world stands after `frames` frames; it never changes.

    `start` is the frame that it begins with, as bytes, (3, height, width), while that is looked
    at.
    """

    seed: int
    start: Tensor | None
    frames: int = 0
    table: Table = field(default_factory=Table)


class Draft:
    """The rollout that a step is making beside its session's.

    It holds the blocks of what it began with, and writes only into blocks that are its own, or
    behind what its session's rollout has in them. Given up or kept, it is over after that.
    """

    def __init__(
        self, begun: Rollout, layout: Layout, pool: BlockPool, cache: Cache, holder: Hashable
    ) -> None:
        self.rollout = begun
        self._layout = layout
        self._pool = pool
        self._cache = cache
        self._holder = holder
        pool.hold(begun.table.blocks, holder)
        self._taken: list[int] = []
        """Blocks for the frames that are still to come."""
        self._over = False

    def lacks(self, frames: int) -> int:
        """How many more blocks so many frames may take."""
        size, done = self._layout.block_frames, self.rollout.frames
        begun = -(-(done + frames) // size) - -(-done // size)
        copied = done % size > 0 and self._pool.holds(self.rollout.table.blocks[-1]) > 2
        # What it has made itself and looks at no more is free again.
        return min(begun + copied, self._layout.slots + 1)

    def take(self, blocks: int) -> None:
        """Hold so many blocks for the frames to come. Raises CapacityExceeded when there are not
        so many, and then nothing has changed."""
        if self._pool.free < blocks:
            raise CapacityExceeded("no block of the cache is free")
        self._taken += [self._pool.take(self._holder) for _ in range(blocks)]

    def _block(self) -> int:
        return self._taken.pop() if self._taken else self._pool.take(self._holder)

    def append(self, frame: Tensor, left: Tensor) -> None:
        """One frame further: it as bytes, and what it leaves in the cache.

        Raises CapacityExceeded when there is no block for it, and then nothing has changed.
        """
        if self._over:
            raise RuntimeError("the step is over")
        layout, table = self._layout, self.rollout.table
        number, place = divmod(self.rollout.frames, layout.block_frames)
        if place == 0:
            block = self._block()
            self._cache.clear(block)
            table = Table((*table.numbers, number), (*table.blocks, block))
        elif self._pool.holds(table.blocks[-1]) > 2:
            # Others than the session's rollout and this draft look at it.
            block = self._block()
            self._cache.copy(table.blocks[-1], block)
            self._pool.drop(table.blocks[-1:], self._holder)
            table = Table(table.numbers, (*table.blocks[:-1], block))
        self._cache.write(table.blocks[-1], place, frame, left)
        frames = self.rollout.frames + 1
        kept = layout.kept(table, frames)
        self._pool.drop(set(table.blocks) - set(kept.blocks), self._holder)
        start = None if frames >= layout.ring else self.rollout.start
        self.rollout = replace(self.rollout, start=start, frames=frames, table=kept)

    def give_up(self) -> None:
        """Hold nothing any more, also when it was said before."""
        if not self._over:
            self._pool.drop(self.rollout.table.blocks, self._holder)
            self._give_back()
        self._over = True

    def keep(self) -> Rollout:
        """The rollout, whose blocks are held on by who asks. Raises RuntimeError after its end."""
        if self._over:
            raise RuntimeError("the step is over")
        self._over = True
        self._give_back()
        return self.rollout

    def _give_back(self) -> None:
        self._pool.drop(self._taken, self._holder)
        self._taken = []
