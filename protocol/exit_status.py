"""What the processes of a deployment say with their exit status."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """A start that failed with CONFIG or MODEL fails again until a person changes something."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    MODEL = 3

    @staticmethod
    def is_final(status: int) -> bool:
        """Whether starting again would fail in the same way."""
        return status in (ExitStatus.CONFIG, ExitStatus.MODEL)
