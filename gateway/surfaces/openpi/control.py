"""What a robot's client says of its control loop when it connects: query parameters."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from protocol.errors import InvalidRequest

NUMBERS = ("deadline_ms", "rate_hz")
SAFE_ACTION = "safe_action"


def chosen_control(scope: Scope) -> dict[str, Any]:
    """`deadline_ms`, `rate_hz` and `safe_action` of the connection, where they are given.

    Raises InvalidRequest for what is no number; the session core says which are of use.
    """
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    chosen: dict[str, Any] = {}
    for name in NUMBERS:
        if name in query:
            try:
                chosen[name] = float(query[name][-1])
            except ValueError:
                raise InvalidRequest("must be a number", field=name) from None
    if SAFE_ACTION in query:
        chosen[SAFE_ACTION] = query[SAFE_ACTION][-1]
    return chosen
