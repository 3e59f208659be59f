"""Files and folders that options name: whether they can be used, before anything is played."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import InvalidRequest


def to_read(file: Path, option: str) -> None:
    """Raise InvalidRequest unless there is a file that can be read."""
    if not file.is_file():
        raise _unusable(option, f"{file} is no file" if file.exists() else f"{file} is missing")
    if not os.access(file, os.R_OK):
        raise _unusable(option, f"{file} cannot be read")


def to_run(file: Path, option: str, why: str) -> None:
    """Raise InvalidRequest unless there is a program. `why` it is needed."""
    if not file.exists():
        raise _unusable(option, f"{file} is missing: {why}")
    if not file.is_file() or not os.access(file, os.X_OK):
        raise _unusable(option, f"{file} is no program: {why}")


def to_write_in(folder: Path, option: str) -> None:
    """Make a folder, if need be. Raise InvalidRequest where nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(option, f"{folder} cannot be a folder: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(option, f"nothing can be written in {folder}")


def to_write(file: Path, option: str) -> None:
    """Raise InvalidRequest where no such file can be written; its folder is made."""
    to_write_in(file.parent, option)
    if file.is_dir():
        raise _unusable(option, f"{file} is a folder, and a file is wanted")
    if file.exists() and not os.access(file, os.W_OK):
        raise _unusable(option, f"{file} cannot be written")


def _unusable(option: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"--{option}: {reason}", field=option)
