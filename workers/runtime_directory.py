"""A directory for the sockets of a process: private, and gone when the process is.

A process that was killed cannot remove its directory; the next one on this machine that
needs one does, which it may because a lock that the dead one held is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "antiphon-"
_LOCK = "lock"
_LONGEST_PARENT = 64
"""In bytes: a Unix socket's path has at most 107, and what is made here takes up to 40."""


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A new directory of mode 0700 under $XDG_RUNTIME_DIR or the temporary directory.

    Its path is short enough for Unix sockets. Removed at the end.
    """
    with private_directory(_parent()) as directory:
        yield directory


def _parent() -> Path:
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(parent, os.W_OK | os.X_OK):
        parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")
    return parent


@contextmanager
def private_directory(parent: Path) -> Iterator[Path]:
    """A new directory of mode 0700 in `parent`, removed at the end."""
    sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # Only a locked file gets the name that a sweep looks for.
    unnamed = directory / f"{_LOCK}.new"
    with unnamed.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(directory / _LOCK)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Remove what dead processes of this user left in `parent`; returns what was removed."""
    removed: list[Path] = []
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            with (directory / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Not such a directory, or its process lives, or another swept it first.
            continue
        shutil.rmtree(directory, ignore_errors=True)
        removed.append(directory)
    return removed
