"""What is measured of a session is what the device cannot give to anyone else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from workers.storages import storage_bytes


@dataclass
class Held:
    name: str
    frames: list[Any]


def test_views_and_aliases_count_once_and_whole() -> None:
    array = np.zeros((64, 16), np.float32)
    assert storage_bytes(array) == {"cpu": 4096}
    assert storage_bytes(array, array, array[1:3], array.T, array.reshape(-1)[::2]) == {"cpu": 4096}
    assert storage_bytes(array[:1]) == {"cpu": 4096}


def test_what_a_view_looks_into_counts() -> None:
    data = bytes(1000)
    assert storage_bytes(np.frombuffer(data, np.uint8)[:10]) == {"cpu": 1000}
    assert storage_bytes(memoryview(data)[:10], data) == {"cpu": 1000}
    assert storage_bytes(bytearray(7), b"12345") == {"cpu": 12}


def test_containers_and_dataclasses_are_looked_into_once() -> None:
    array = np.zeros(100, np.uint8)
    ring: list[Any] = [array]
    ring.append(ring)
    held = Held("a", [array, {"more": np.zeros(50, np.uint8)}, deque([(b"123",)])])
    assert storage_bytes(held, ring, held) == {"cpu": 153}


def test_nothing_holds_nothing() -> None:
    assert storage_bytes() == {}
    assert storage_bytes("text", 5, None, SimpleNamespace(data=b"123"), Held) == {}


def test_tensors_count_by_their_storage_and_device() -> None:
    tensor = torch.zeros(64, 16)
    assert storage_bytes(tensor, tensor[1:], tensor.T) == {"cpu": 4096}
    assert storage_bytes({"a": tensor.half()}, tensor) == {"cpu": 4096 + 2048}
    assert storage_bytes(torch.zeros(8, device="meta")) == {"meta:0": 32}
