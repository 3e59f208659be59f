"""What a gateway has told, looked at before it is used: whoever answers may say anything."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from antiphon_client.errors import ProtocolError

_REFUSALS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading raises of a value that is not as it should be."""


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Where `what` is read. Raises ProtocolError for all that reading stumbles over."""
    try:
        yield
    except _REFUSALS as error:
        raise ProtocolError(f"{what} is not understood: {error!r:.200}") from error


def whole(value: Any, name: str) -> int:
    """A number that counts. Raises ProtocolError for what is none."""
    if type(value) is not int or value < 0:
        raise _none(name, "a whole number", value)
    return value


def seconds(value: Any, name: str) -> float:
    """A finite time. Raises ProtocolError for what is none."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise _none(name, "a time in seconds", value)
    return float(value)


def text(value: Any, name: str) -> str:
    """Raises ProtocolError for what is no text."""
    if not isinstance(value, str):
        raise _none(name, "a text", value)
    return value


def yes_or_no(value: Any, name: str) -> bool:
    """Raises ProtocolError for what is neither."""
    if not isinstance(value, bool):
        raise _none(name, "true or false", value)
    return value


def fields(value: Any, name: str) -> Mapping[str, Any]:
    """A map. Raises ProtocolError for what is none."""
    if not isinstance(value, Mapping):
        raise _none(name, "a map", value)
    return value


def _none(name: str, form: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{name} is {form}, not {value!r:.100}")
