"""Blocks of an arena: powers of two, split in halves and joined again."""

from __future__ import annotations


class Blocks:
    """Which blocks of `capacity_bytes` are taken; both arguments are powers of two.

    Taken blocks never overlap, so what is handed out never exceeds the capacity.
    """

    def __init__(self, capacity_bytes: int, smallest_bytes: int) -> None:
        if not (_is_power_of_two(capacity_bytes) and _is_power_of_two(smallest_bytes)):
            raise ValueError("sizes of an arena and its smallest block are powers of two")
        if smallest_bytes > capacity_bytes:
            raise ValueError("the smallest block is larger than the arena")
        self.capacity_bytes = capacity_bytes
        self.smallest_bytes = smallest_bytes
        self.taken_bytes = 0
        # Insertion-ordered sets: both the newest and a given offset leave in constant time.
        self._free: dict[int, dict[int, None]] = {}
        size = smallest_bytes
        while size <= capacity_bytes:
            self._free[size] = {}
            size *= 2
        self._free[capacity_bytes][0] = None
        self._taken: dict[int, int] = {}

    def size_for(self, size_bytes: int) -> int:
        """The size of the block that `size_bytes` would get."""
        return max(self.smallest_bytes, 1 << max(0, size_bytes - 1).bit_length())

    def take(self, size_bytes: int) -> int | None:
        """The offset of a free block of at least `size_bytes`, now taken; None without one."""
        wanted = self.size_for(size_bytes)
        size = wanted
        while size <= self.capacity_bytes and not self._free[size]:
            size *= 2
        if size > self.capacity_bytes:
            return None
        offset, _ = self._free[size].popitem()
        while size > wanted:
            size //= 2
            self._free[size][offset + size] = None
        self._taken[offset] = wanted
        self.taken_bytes += wanted
        return offset

    def give(self, offset: int) -> None:
        """Free the block at `offset`. Raises KeyError when none is taken there."""
        size = self._taken.pop(offset)
        self.taken_bytes -= size
        while size < self.capacity_bytes:
            buddy = offset ^ size
            if buddy not in self._free[size]:
                break
            del self._free[size][buddy]
            offset = min(offset, buddy)
            size *= 2
        self._free[size][offset] = None

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple(sorted(self._taken.items()))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
