"""The safe action of a robot as configs and clients write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOLD = "hold"
ZERO = "zero"
MOST_NUMBERS = 65_536
"""Of one array."""
MOST = 3.4028235e38
"""The largest of 32 bits, as which it is given before a policy has answered."""

SafeValue = str | tuple[float, ...] | tuple[tuple[float, ...], ...]
"""`HOLD`, `ZERO`, one action, or a whole chunk of them."""


def read_safe_action(value: Any) -> SafeValue | dict[str, SafeValue]:
    """What it means: for all arrays of an answer, or by their keys. Raises ValueError."""
    if not isinstance(value, Mapping):
        return _value(value)
    if "actions" not in value:
        raise ValueError("must say what becomes of actions")
    return {str(key): _value(each) for key, each in value.items()}


def _value(value: Any) -> SafeValue:
    if value in (HOLD, ZERO):
        return str(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(row, list | tuple) and row for row in value):
            if len({len(row) for row in value}) > 1:
                raise ValueError("must have rows of one length")
            _check([entry for row in value for entry in row])
            return tuple(tuple(map(float, row)) for row in value)
        _check(value)
        return tuple(map(float, value))
    raise ValueError("must be hold, zero, a list of numbers, or a list of such lists")


def _check(numbers: list[Any] | tuple[Any, ...]) -> None:
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(f"must have at most {MOST_NUMBERS} numbers")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError("must be hold, zero, a list of numbers, or a list of such lists")
        if not abs(number) <= MOST:
            raise ValueError("must be finite, and numbers of 32 bits")
