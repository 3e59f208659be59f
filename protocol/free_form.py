"""What in a message is free in form, and how a message that cannot be read is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from protocol.errors import InvalidRequest

MAX_DEPTH = 32
"""How deep settings and parameters may be nested."""
MAX_VALUES = 16_384
"""How many values settings or parameters may hold: each is looked at, while all others wait."""

_INTEGERS = range(-(2**63), 2**64)


class Unreadable(InvalidRequest):
    """A message that is none of the protocol's; nothing of it was carried out.

    `id` and `ref` are the client's names for it, where they could be read.
    """

    id: str | None = None
    ref: str | None = None


def check_plain(message: Any, path: str = "") -> None:
    """Raise Unreadable unless all that is free in form is what JSON and MessagePack both have."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        place = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            _FreeForm(place).check(value)
        elif isinstance(value, msgspec.Struct):
            check_plain(value, place)


class _FreeForm:
    """A look at each value below one that is free in form.

    Paths are put together for what is wrong only: keys may be long, and values many.
    """

    def __init__(self, path: str) -> None:
        self._place = [path]
        self._left = MAX_VALUES

    def check(self, value: Any) -> None:
        """Raise Unreadable for the first value that has no place here."""
        self._left -= 1
        if self._left < 0:
            raise Unreadable(f"holds more than {MAX_VALUES} values", field=self._place[0])
        match value:
            case None | bool() | str():
                pass
            case int():
                if value not in _INTEGERS:
                    raise self._refusal("an integer has at most 64 bits")
            case float():
                if not math.isfinite(value):
                    raise self._refusal("a number is finite")
            case list():
                for index, entry in enumerate(value):
                    self._check_below(f"[{index}]", entry)
            case dict():
                for key, entry in value.items():
                    if not isinstance(key, str):
                        raise self._refusal("the keys of a map are strings")
                    self._check_below(key, entry)
            case _:
                raise self._refusal("of a type that JSON does not have", "invalid_type")

    def _check_below(self, step: str, value: Any) -> None:
        self._place.append(step)
        if len(self._place) > MAX_DEPTH + 1:
            raise self._refusal(f"nested deeper than {MAX_DEPTH}")
        self.check(value)
        self._place.pop()

    def _refusal(self, message: str, code: str = "invalid_value") -> Unreadable:
        first, *below = self._place
        path = first + "".join(step if step[0:1] == "[" else f".{step}" for step in below)
        return Unreadable(message, code=code, field=path)
