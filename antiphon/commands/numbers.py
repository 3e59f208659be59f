"""Values of options, as argparse takes them: whoever gives a wrong one is told what is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, not {text!r}"
            )
        return value

    return read


def number(low: float, high: float, *, least: bool = False) -> Callable[[str], float]:
    """A number up to `high` and above `low`, or also `low` itself if that is the `least`."""
    words = f"from {low:g}" if least else f"above {low:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        # What is no number compares with none.
        if not low <= value <= high or (value == low and not least):
            raise argparse.ArgumentTypeError(f"must be {words} to {high:g}, not {text!r}")
        return value

    return read


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """One of these words."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, not {text!r}")
        return text

    return read


def name(text: str) -> str:
    """Any word."""
    if not text:
        raise argparse.ArgumentTypeError("a name is missing")
    return text


def listed(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Values with commas between them, none of them twice."""

    def read(text: str) -> tuple[Value, ...]:
        values = tuple(kind(word.strip()) for word in text.split(","))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"names something twice: {text!r}")
        return values

    return read
