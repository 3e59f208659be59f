"""How much memory this process, and all processes here, may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as statistics:
            return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def host_memory_bytes(control_groups: Path = _CONTROL_GROUPS) -> int:
    """The memory of this machine, or of the container where that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((machine, *_limits(control_groups)))


def _limits(control_groups: Path) -> Iterator[int]:
    for name in _LIMITS:
        try:
            text = (control_groups / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)
