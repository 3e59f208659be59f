"""The blocks of the key-value cache: who holds which, and which a rollout looks at.

Bookkeeping alone: what lies in the blocks is elsewhere. A block has room for a few frames that
follow each other. States that share a past share its blocks: of sessions that were forked from
one another, of a session and its checkpoints, of a state and the one that a step is making.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from protocol.errors import CapacityExceeded


class BlockPool:
    """A fixed number of blocks, each free or held, once or more, by sessions.

    A block that several sessions hold is charged to the one that has held it longest, so that
    the sum of what sessions are charged is what is taken.
    """

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._held: dict[int, Counter[Hashable]] = {}
        self._charged: Counter[Hashable] = Counter()

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def take(self, holder: Hashable) -> int:
        """A free block, held once. Raises CapacityExceeded when there is none."""
        if not self._free:
            raise CapacityExceeded("no block of the cache is free")
        block = self._free.pop()
        self._held[block] = Counter({holder: 1})
        self._charged[holder] += 1
        return block

    def hold(self, blocks: Iterable[int], holder: Hashable) -> None:
        """Hold them once more."""
        for block in blocks:
            self._held[block][holder] += 1

    def drop(self, blocks: Iterable[int], holder: Hashable) -> None:
        """Hold them once less. What nobody holds is free."""
        for block in blocks:
            held = self._held[block]
            charged = next(iter(held))
            held[holder] -= 1
            if held[holder] < 0:
                raise ValueError(f"block {block} was dropped more often than held")
            if held[holder]:
                continue
            del held[holder]
            if holder is charged:
                self._charged[holder] -= 1
                if held:
                    self._charged[next(iter(held))] += 1
            if not held:
                del self._held[block]
                self._free.append(block)

    def holds(self, block: int) -> int:
        """How often a block is held, by all together."""
        return self._held[block].total()

    def charged(self, holder: Hashable) -> int:
        """How many blocks count as this one's."""
        return self._charged[holder]


@dataclass(frozen=True)
class Table:
    """The blocks of a rollout in the order of its frames: `blocks[i]` has the frames from
    `numbers[i]` times the frames of a block on."""

    numbers: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How the cache of a rollout is laid out: the first `sinks` frames and the last `window`,
    of which the last `ring` are looked at as pictures too."""

    block_frames: int
    window: int
    sinks: int
    ring: int = 1

    @property
    def sink_blocks(self) -> int:
        """Blocks that never leave."""
        return -(-self.sinks // self.block_frames)

    @property
    def slots(self) -> int:
        """The most blocks that a rollout looks at, and holds between two steps."""
        return self.sink_blocks + 1 + -(-(self.window - 1) // self.block_frames)

    def kept(self, table: Table, frames: int) -> Table:
        """The table without the blocks that no frame from `frames` on looks at."""
        oldest = frames - self.window
        keep = [
            (number, block)
            for number, block in zip(table.numbers, table.blocks, strict=True)
            if number < self.sink_blocks or (number + 1) * self.block_frames > oldest
        ]
        return Table(tuple(number for number, _ in keep), tuple(block for _, block in keep))

    def place(self, table: Table, frame: int) -> tuple[int, int]:
        """The block that has frame number `frame`, and its place there."""
        number, place = divmod(frame, self.block_frames)
        return table.blocks[table.numbers.index(number)], place

    def offsets(self, table: Table, frames: int) -> list[int]:
        """How far before frame number `frames` each frame of all slots lies; -1: not seen."""
        found = []
        for number in table.numbers:
            for frame in range(number * self.block_frames, (number + 1) * self.block_frames):
                offset = frames - frame
                seen = offset > 0 and (offset <= self.window or frame < self.sinks)
                found.append(offset if seen else -1)
        return found + [-1] * (self.slots * self.block_frames - len(found))
