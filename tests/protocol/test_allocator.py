"""A process that was told so keeps the memory of messages that come and go."""

from __future__ import annotations

import subprocess
import sys

from tests.official_client.environment import ROOT

CODE = """
import resource, sys
from protocol.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def messages(count):
    for _ in range(count):
        held = [bytearray(300_000) for _ in range(4)]
messages(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages(100)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kept: str) -> int:
    """Page faults of a hundred rounds of messages, of 1.2 MB each."""
    result = subprocess.run(
        [sys.executable, "-c", CODE, kept], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def test_memory_of_messages_is_not_asked_for_again() -> None:
    assert faults("keep") < faults("as_it_is") / 10
