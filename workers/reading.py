"""What a client has sent an engine, as the engine's own type."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidRequest
from protocol.validation import fault

T = TypeVar("T")

SETTINGS = "settings"
PARAMETERS = "parameters"


def read(given: dict[str, Any], kind: type[T], place: str) -> T:
    """`given` as a `kind`; `place` is where it stands in what the client sends: SETTINGS (of an
    open, a fork or a reset) or PARAMETERS (of a step). Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        found = fault(error, place)
        raise InvalidRequest(found.reason, field=found.path, code=found.code) from None
