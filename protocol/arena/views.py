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
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.arena import memory
from protocol.arena.content import Description
from protocol.connectors import ShmDescriptor
from protocol.payloads import Payload, PayloadType

# An attribute of an Enum class costs five times a name of the module.
_TEXT = PayloadType.TEXT


class _Root(weakref.ref[npt.NDArray[np.uint8]]):
    """Sees the last view of a payload go: every view keeps the referent alive."""

    __slots__ = ("descriptor",)

    descriptor: ShmDescriptor


class Taken(msgspec.Struct, eq=False):
    """A payload that its consumer reads. Without `root` its data is a copy."""

    descriptor: ShmDescriptor
    payload: Payload
    root: Any
    """An array of the data that every view keeps alive, or None."""


_ALONE = 2
"""What `sys.getrefcount` says of an object that only its caller knows."""


class Views:
    """The payloads that are being read, at most one for each slot.

    Those of up to `copied_bytes`, and text, are copied: that costs less than a view.
    `on_gone(descriptor)` is called on the loop when nothing can read a dropped payload
    any more: at once, unless an array that was made from its view is still alive.
    """

    def __init__(self, copied_bytes: int, on_gone: Callable[[ShmDescriptor], None]) -> None:
        self._copied_bytes = copied_bytes
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._taken: dict[int, Taken] = {}
        self._watched: dict[tuple[int, int], _Root] = {}
        self._gone: deque[_Root] = deque()

    def __len__(self) -> int:
        return len(self._taken)

    def all(self) -> list[Taken]:
        """What is being read."""
        return list(self._taken.values())

    def find(self, descriptor: ShmDescriptor) -> Taken | None:
        """The payload that `descriptor` names, if it is being read."""
        taken = self._taken.get(descriptor.slot)
        if taken is None or (taken.descriptor is not descriptor and taken.descriptor != descriptor):
            return None
        return taken

    def take(
        self,
        descriptor: ShmDescriptor,
        description: Description,
        source: mmap.mmap,
        start: int,
    ) -> Payload:
        """Begin to read: a read-only view of `source`, or a copy."""
        size_bytes = descriptor.size_bytes
        root = None
        data: Any
        if size_bytes <= self._copied_bytes or description.type is _TEXT:
            data = source[start : start + size_bytes]
        else:
            root = memory.view(source, start, size_bytes)
            data = root.data
        payload = Payload(
            description.type,
            data,
            description.dtype,
            description.shape,
            description.attributes.copy(),
        )
        self._taken[descriptor.slot] = Taken(descriptor, payload, root)
        return payload

    def drop_copy(self, descriptor: ShmDescriptor) -> bool:
        """Stop reading a payload that was copied; False, and nothing done, for another."""
        taken = self._taken.get(descriptor.slot)
        if (
            taken is None
            or taken.root is not None
            or (taken.descriptor is not descriptor and taken.descriptor != descriptor)
        ):
            return False
        del self._taken[descriptor.slot]
        return True

    def drop(self, descriptor: ShmDescriptor) -> None:
        """Stop reading: the payload's view raises from now on. Unknown ones are let be."""
        taken = self.find(descriptor)
        if taken is None:
            return
        del self._taken[descriptor.slot]
        root, taken.root = taken.root, None
        if root is not None:
            # An array that was made from the view keeps it alive.
            with contextlib.suppress(BufferError):
                cast(memoryview, taken.payload.data).release()
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
