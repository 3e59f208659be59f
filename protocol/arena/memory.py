"""Sealed anonymous memory: made and written by one process, only read by the others.

A memfd has no name, so nothing is left to sweep: it is gone with the last process that
holds it. The seals promise its readers that it never shrinks under them, and that nobody
who gets the descriptor can make a writable mapping of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys

import numpy as np
import numpy.typing as npt

from protocol.connector_errors import DescriptorRefused
from protocol.errors import CapacityExceeded

_F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: no new writable mapping, no write(2). The fcntl module does not name it yet."""


def unavailable() -> str | None:
    """Why this system has no sealed memory; None where it has."""
    if not sys.platform.startswith("linux"):
        return f"sealed memory (memfd, eventfd) needs Linux; this is {sys.platform}"
    for name in ("memfd_create", "eventfd"):
        if not hasattr(os, name):
            return f"this Python's os module has no {name}"
    return None


def create(name: str, size_bytes: int) -> tuple[int, mmap.mmap]:
    """New sealed memory of zeros: its file descriptor, to be passed on, and a writable map.

    The map is the only writable one there will ever be. `name` shows in /proc only.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        writable = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        _seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        # An older kernel refuses: consumers map for reading only, of their own accord.
        with contextlib.suppress(OSError):
            _seal(fd, _F_SEAL_FUTURE_WRITE)
        _seal(fd, fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, writable


def create_filled(name: str, parts: list[bytes | memoryview]) -> int:
    """Memory of its own for one payload, sealed against any change; its file descriptor.

    Raises CapacityExceeded when the system has no memory, or this process no file, left.
    """
    try:
        return _filled(name, parts)
    except OSError as error:
        raise CapacityExceeded(f"no memory for a large payload: {error}") from error


def _filled(name: str, parts: list[bytes | memoryview]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, sum(len(part) for part in parts))
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        _seal(fd, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, size_bytes: int) -> mmap.mmap:
    """Map another process's memory for reading; `fd` stays the caller's.

    Raises DescriptorRefused when it is not sealed against shrinking or is smaller than
    `size_bytes`, where reading it could end this process, and when it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise DescriptorRefused("what the peer passed is no sealed memory") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise DescriptorRefused("the peer could shrink the memory that it passed")
    if os.fstat(fd).st_size < size_bytes:
        raise DescriptorRefused("the memory that the peer passed is smaller than it says")
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise DescriptorRefused(f"what the peer passed cannot be mapped: {error}") from error


def view(memory: mmap.mmap, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of a map as an array that keeps the map alive; read-only where the map is."""
    return np.frombuffer(memory, np.uint8, size_bytes, offset)


def _seal(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
