"""The memory that a process, and all of them, may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.host_memory import host_memory_bytes

ROOT = Path(__file__).parents[2]
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("memory.max", "max\n", MACHINE),
        ("memory.max", "1048576\n", 1 << 20),
        ("memory/memory.limit_in_bytes", "2097152\n", 2 << 20),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", MACHINE),
        ("something else", "5\n", MACHINE),
    ],
)
def test_a_container_may_have_less_than_the_machine(
    tmp_path: Path, name: str, text: str, expected: int
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert host_memory_bytes(tmp_path) == expected


def test_what_is_held_is_resident() -> None:
    # In a process of its own: this one may have memory left over from other tests.
    program = (
        "from workers.host_memory import resident_bytes\n"
        "before = resident_bytes()\n"
        "held = b'\\x01' * (32 << 20)\n"
        "print(resident_bytes() - before)"
    )
    grown = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert int(grown) > 0.9 * (32 << 20)
