"""How much of the processor a worker uses, as workers tell it."""

from __future__ import annotations

import math

import msgspec

AUTO_CORES = -1.0
"""Instead of a number of cores: those that others leave."""


class ComputeUse(msgspec.Struct, frozen=True):
    """What a worker's sessions were measured to take of the processor, in cores.

    `cores` is what they may have together; None: any amount. `used` is what the worker takes of
    it, `session` what each of its sessions does on average, 0 before that is known, and
    `turn_ms` the processor time of a turn.
    """

    cores: float | None = None
    used: float = 0.0
    session: float = 0.0
    turn_ms: float = 0.0

    @property
    def fits(self) -> float:
        """How many more sessions have their share of what is left; infinite where nobody counts,
        or nothing is known."""
        if self.cores is None or self.session <= 0:
            return math.inf
        return max(0.0, self.cores - self.used) // self.session
