"""What a figure was measured on, and what a process takes of it."""

from __future__ import annotations

from pathlib import Path

from antiphon.machine import Disturbance, description

__all__ = ["Disturbance", "description", "resident_mib"]


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0
