"""The value of an output at the moment it was told: what it holds may grow later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec


def value_of(output: Any) -> Any:
    """`output` as plain values that do not change any more."""
    if isinstance(output, memoryview):
        return bytes(output)
    if isinstance(output, list | tuple):
        return tuple(value_of(entry) for entry in output)
    if isinstance(output, dict):
        return tuple((name, value_of(entry)) for name, entry in output.items())
    if dataclasses.is_dataclass(output):
        fields = tuple(getattr(output, field.name) for field in dataclasses.fields(output))
        return (type(output).__name__, *value_of(fields))
    if isinstance(output, msgspec.Struct):
        fields = tuple(getattr(output, name) for name in output.__struct_fields__)
        return (type(output).__name__, *value_of(fields))
    return output


def size_of(values: Iterable[Any]) -> int:
    """The bytes of text and data in values, at least."""
    total = 0
    for value in values:
        if isinstance(value, tuple):
            total += size_of(value)
        elif isinstance(value, bytes | str):
            total += len(value)
    return total
