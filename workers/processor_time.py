"""How much processor time this process has used, and all others of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from protocol.compute_use import AUTO_CORES
from sessions.compute import ComputeSample

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_STATISTICS = Path("/proc/stat")
_IDLE = (3, 4)
"""The columns of /proc/stat that count what was not used: idle, and waiting for a disk."""
_GUEST = 8
"""From here on they count again what is in others already."""


def sample(
    cores: float | None,
    control_groups: Path = _CONTROL_GROUPS,
    statistics: Path = _STATISTICS,
) -> ComputeSample:
    """The processor time so far. `cores` are the worker's own, whatever others do; AUTO_CORES:
    those of the machine, or of its container, that others leave; None: any amount."""
    own_s = time.process_time()
    if cores != AUTO_CORES:
        return ComputeSample(own_s, 0.0, cores)
    available = float(len(os.sched_getaffinity(0)))
    quota = _quota(control_groups)
    if quota is not None and quota < available:
        return ComputeSample(own_s, max(0.0, _of_group(control_groups) - own_s), quota)
    return ComputeSample(own_s, max(0.0, _of_machine(statistics) - own_s), available)


def _quota(control_groups: Path) -> float | None:
    """The cores that a container may use; None where nobody has said."""
    try:
        most, _, period = (control_groups / "cpu.max").read_text().partition(" ")
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _of_group(control_groups: Path) -> float:
    try:
        for line in (control_groups / "cpu.stat").read_text().splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
    except (OSError, ValueError):
        pass
    return 0.0


def _of_machine(statistics: Path) -> float:
    try:
        ticks = statistics.read_text().split("\n", 1)[0].split()[1:]
        used = sum(int(n) for at, n in enumerate(ticks[:_GUEST]) if at not in _IDLE)
    except (OSError, ValueError):
        return 0.0
    return used / float(os.sysconf("SC_CLK_TCK"))
