"""Payloads as their consumer reads them: views of the producer's memory, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from protocol.arena import memory
from protocol.connectors import ShmDescriptor


class _Root(weakref.ref[npt.NDArray[np.uint8]]):
    """Sees the last view of a payload go: every view keeps the referent alive."""

    __slots__ = ("descriptor",)

    descriptor: ShmDescriptor


_ALONE = 2
"""What `sys.getrefcount` says of an object that only its caller knows."""


class Views:
    """Views of payloads, at most one for each slot.

    `on_gone(descriptor)` is called on the loop when nothing can read a dropped payload
    any more: at once, unless an array that was made from its view is still alive.
    """

    def __init__(self, on_gone: Callable[[ShmDescriptor], None]) -> None:
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._roots: dict[int, npt.NDArray[np.uint8]] = {}
        self._watched: dict[tuple[int, int], _Root] = {}
        self._gone: deque[_Root] = deque()

    def __contains__(self, slot: int) -> bool:
        return slot in self._roots

    def make(self, slot: int, source: mmap.mmap, start: int, size_bytes: int) -> memoryview:
        """A read-only view of `source`."""
        root = self._roots[slot] = memory.view(source, start, size_bytes)
        return root.data

    def drop(self, descriptor: ShmDescriptor, view: memoryview) -> None:
        """Let `view` raise from now on, and watch for what was made from it."""
        root = self._roots.pop(descriptor.slot)
        # An array that was made from the view keeps it alive.
        with contextlib.suppress(BufferError):
            view.release()
        if sys.getrefcount(root) > _ALONE:
            watch = _Root(root, self._last_view_gone)
            watch.descriptor = descriptor
            self._watched[descriptor.slot, descriptor.generation] = watch
            return
        del root  # nothing of the map is left when its end is told
        self._on_gone(descriptor)

    def _last_view_gone(self, root: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        """Called wherever the last reference was dropped: any thread, any moment."""
        self._gone.append(cast(_Root, root))
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the claims with it
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._collect)
            else:
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        while self._gone:
            descriptor = self._gone.popleft().descriptor
            self._watched.pop((descriptor.slot, descriptor.generation), None)
            self._on_gone(descriptor)
