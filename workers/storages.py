"""The bytes that arrays and tensors really hold, for engines that measure their sessions.

Each storage counts once, however many views and aliases of it there are, and whole, also
where only a part of it can be seen: that is what the device cannot give to anyone else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from protocol.device_bytes import HOST


def storage_bytes(*held: object) -> dict[str, int]:
    """Bytes by device of the storages below `held`.

    Looked into are mappings, lists, tuples, sets, deques and dataclasses; counted are
    numpy arrays, torch tensors, bytes, bytearrays and memory views. Other objects are
    passed over.
    """
    found: dict[tuple[str, int], int] = {}
    for device, address, size in _storages(held):
        found[device, address] = size
    total: Counter[str] = Counter()
    for (device, _), size in found.items():
        total[device] += size
    return dict(total)


def _storages(held: object) -> Iterator[tuple[str, int, int]]:
    """Device, identity and bytes of each storage, aliases as often as they are met."""
    torch = sys.modules.get("torch")
    waiting, seen = [held], set()
    while waiting:
        item = waiting.pop()
        if torch is not None and isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            yield _device(item), storage.data_ptr(), storage.nbytes()
        elif isinstance(item, np.ndarray | bytes | bytearray | memoryview):
            owner = _owner(item)
            yield HOST, id(owner), owner.nbytes if isinstance(owner, np.ndarray) else len(owner)
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _parts(item)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [*item.values()]
    if isinstance(item, list | tuple | set | frozenset | deque):
        return [*item]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return []


def _owner(item: Any) -> Any:
    """What the memory of a view belongs to."""
    while True:
        below = item.obj if isinstance(item, memoryview) else getattr(item, "base", None)
        if not isinstance(below, np.ndarray | bytes | bytearray | memoryview):
            return item
        item = below


def _device(tensor: Any) -> str:
    device = tensor.device
    return HOST if device.type == "cpu" else f"{device.type}:{device.index or 0}"
