"""The bytes of a device that a worker has reserved, as workers tell them."""

from __future__ import annotations

import msgspec

HOST = "cpu"
"""The device that is the host's own memory."""


class DeviceBytes(msgspec.Struct, frozen=True):
    """What one worker has reserved of one device, in bytes; `budget` None: not bounded.

    `engine` is the process and its model. `pool` is what the engine set aside for sessions
    when it was loaded; where there is one `sessions`, what they have reserved, comes out of it
    and cannot be more.
    `undeclared` is the part of that which engines turned out to hold beyond what they had
    declared. `kept` is output that no consumer has acknowledged, `arena` the memory through which
    payloads go. `head_room` is the part of the budget that no session may reserve: it is for
    output and for what turns out to need more than was declared.
    """

    budget: int | None
    head_room: int = 0
    engine: int = 0
    pool: int = 0
    sessions: int = 0
    kept: int = 0
    arena: int = 0
    undeclared: int = 0

    def accounts(self) -> dict[str, int]:
        """Who has reserved how much; of the pool, what no session has taken."""
        return {
            "engine": self.engine,
            "pool": max(self.pool - self.sessions, 0),
            "sessions": self.sessions,
            "kept": self.kept,
            "arena": self.arena,
        }

    @property
    def reserved(self) -> int:
        """All of it."""
        return sum(self.accounts().values())

    @property
    def free(self) -> int | None:
        """What the budget has left, below zero when engines hold more than they declared."""
        return None if self.budget is None else self.budget - self.reserved


def binary_size(size_bytes: int) -> str:
    """`size_bytes` for a reader: 67108864 is "64 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
