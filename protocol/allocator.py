"""How this process keeps memory that it has freed.

Messages of hundreds of kilobytes come and go with every step of a robot. By default glibc gives
the memory of each back to the system and asks for it again, page by page: half a millisecond of
processor time a step on a small machine.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 16 * 1024 * 1024
"""Free memory at the end of the heap that is not given back."""
LARGE_BYTES = 4 * 1024 * 1024
"""What is at least so large is still asked for, and given back, by itself."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Keep some for the next message, from now on; whether this C library lets itself be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
