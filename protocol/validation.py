"""What msgspec says of a message that does not fit its type, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

_PLACE = re.compile(r" - at (?:`key` in )?`\$?\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"field `(?P<field>[^`]*)`")


@dataclass(frozen=True)
class Fault:
    """The first thing that is wrong: an error code, the path of the field, and why.

    `path` is "" for the whole message.
    """

    code: str
    path: str
    reason: str


def fault(error: msgspec.ValidationError, prefix: str = "") -> Fault:
    """What `error` says; `prefix` is where the value that was checked stands."""
    text = str(error)
    place = _PLACE.search(text)
    reason = text[: place.start()] if place else text
    path = _joined(prefix, place["path"] if place else "")
    named = _FIELD.search(reason)
    if named is not None and reason.startswith("Object contains unknown field"):
        return Fault("unknown_parameter", _joined(path, named["field"]), reason)
    if named is not None and reason.startswith("Object missing required field"):
        return Fault("missing_required_parameter", _joined(path, named["field"]), reason)
    # "Expected `int`, got `str`" is about the type; "Expected `int` >= 0" about the value.
    code = "invalid_type" if ", got `" in reason else "invalid_value"
    return Fault(code, path, reason)


def _joined(path: str, inner: str) -> str:
    return path + inner if not path or not inner or inner[0] == "[" else f"{path}.{inner}"
