"""The outputs of a session that a client may still ask for again.

Bounded in bytes. The rule when it is full: the oldest go, and whoever asks for them is
told of the gap. What was put out while no client was attached is not dropped: then the
session is paced instead.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import msgspec

_OUTPUT_BYTES = 256
"""What an output costs beside the text and the bytes in it."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The outputs after a cursor; those from `lost[0]` to `lost[1]` are gone."""

    outputs: list[tuple[int, Any]]
    lost: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class _Kept:
    sequence: int
    output: Any
    size: int


class OutputLog:
    """Outputs by their number, the latest `limit_bytes` of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._last = 0
        self._held_from: int | None = None
        self._held_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What is kept, in bytes."""
        return self._bytes

    @property
    def full(self) -> bool:
        """Whether so much was put out unseen that no more should be made."""
        return self._held_bytes >= self._limit_bytes

    def append(self, sequence: int, output: Any) -> None:
        """Keep a copy of output number `sequence`."""
        copy, size = _copy(output)
        size += _OUTPUT_BYTES
        self._kept.append(_Kept(sequence, copy, size))
        self._bytes += size
        self._last = sequence
        if self._held_from is not None:
            self._held_bytes += size
        self._trim()

    def hold(self) -> None:
        """Nobody is attached: what comes now is kept until somebody is."""
        self._held_from = self._last + 1
        self._held_bytes = 0

    def let_go(self) -> None:
        """Somebody is attached."""
        self._held_from = None
        self._held_bytes = 0
        self._trim()

    def acknowledge(self, through: int) -> None:
        """The client has all outputs up to `through`."""
        while self._kept and self._kept[0].sequence <= through:
            self._drop()

    def after(self, cursor: int) -> Tail:
        """The outputs after number `cursor`, and what of them is gone."""
        outputs = [(kept.sequence, kept.output) for kept in self._kept if kept.sequence > cursor]
        first = outputs[0][0] if outputs else self._last + 1
        return Tail(outputs, (cursor + 1, first - 1) if first > cursor + 1 else None)

    def clear(self) -> None:
        """Nobody will ask for anything any more."""
        self._kept.clear()
        self._bytes = self._held_bytes = 0

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            tuple((kept.sequence, kept.size) for kept in self._kept),
            self._last,
            self._held_from,
        )

    def _trim(self) -> None:
        while self._bytes > self._limit_bytes and self._kept:
            if self._held_from is not None and self._kept[0].sequence >= self._held_from:
                return
            self._drop()

    def _drop(self) -> None:
        """The oldest goes, which is none of those held: who acknowledges is attached."""
        self._bytes -= self._kept.popleft().size


def _copy(value: Any) -> tuple[Any, int]:
    """`value` as it is now, and the bytes of the text and data in it.

    Items and responses grow after they were told of, and audio may lie in memory that
    its worker takes back.
    """
    if isinstance(value, bytes | str):
        return value, len(value)
    if isinstance(value, memoryview):
        return bytes(value), value.nbytes
    if isinstance(value, list | tuple):
        entries = [_copy(entry) for entry in value]
        return type(value)(copy for copy, _ in entries), sum(size for _, size in entries)
    if isinstance(value, dict):
        named = {name: _copy(entry) for name, entry in value.items()}
        copies = {name: copy for name, (copy, _) in named.items()}
        return copies, sum(size for _, size in named.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {
            field.name: _copy(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        copies = {name: copy for name, (copy, _) in named.items()}
        return dataclasses.replace(value, **copies), sum(size for _, size in named.values())
    if isinstance(value, msgspec.Struct):
        return value, len(msgspec.msgpack.encode(value))
    return value, 0
