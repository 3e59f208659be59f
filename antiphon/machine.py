"""What a figure was measured on, and how much the machine was disturbed meanwhile."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("antiphon", "pyzmq", "uvicorn", "websockets", "msgspec", "onnxruntime", "ctranslate2")


def description() -> dict[str, Any]:
    """Processor, cores, kernel, Python and the packages that matter."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
    }


class Disturbance:
    """How much of the measured time the machine was busy with, or kept from, other things.

    `steal` is the share of processor time that the hypervisor gave to others,
    `waiting` the share of time in which some task waited for a core (pressure stall
    information; None where the kernel does not tell).
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._ticks, self._stolen = _processor_ticks()
        self._waited_us = _waited_us()

    def result(self) -> dict[str, float | None]:
        """The shares since construction."""
        ticks, stolen = _processor_ticks()
        waited_us = _waited_us()
        elapsed_us = (time.monotonic() - self._begun) * 1e6
        waiting = None
        if waited_us is not None and self._waited_us is not None:
            waiting = round((waited_us - self._waited_us) / elapsed_us, 3)
        steal = (stolen - self._stolen) / max(1, ticks - self._ticks)
        return {"steal": round(steal, 4), "waiting": waiting}


def _processor_ticks() -> tuple[int, int]:
    """Ticks of all processors in all states, and those that were stolen."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:8]), fields[7]


def _waited_us() -> int | None:
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return None
    return int(some.rpartition("total=")[2])
