"""What a robot's client says of its control loop when it connects: query parameters."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from protocol.errors import InvalidRequest

NUMBERS = ("deadline_ms", "rate_hz")
SAFE_ACTION = "safe_action"


RESUMED = frozenset({"session", "resume"})
OPENED = frozenset({"resume", "priority", *NUMBERS, SAFE_ACTION})
"""What a connection may say that comes back to its session, or opens one."""


def check_parameters(scope: Scope) -> None:
    """Raise InvalidRequest for a query parameter that has no meaning here: what a robot believes
    to be its deadline must not be nobody's."""
    said = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    known = RESUMED if "session" in said else OPENED
    for name, values in said.items():
        if name in known:
            if len(values) > 1:
                raise InvalidRequest("is said more than once", field=name)
            continue
        if name in OPENED:
            raise InvalidRequest("is said when the session is opened, and holds", field=name)
        names = ", ".join(sorted({*OPENED, *RESUMED}))
        raise InvalidRequest(
            f"there is no parameter {name[:64]!r}; known are {names}",
            field=name[:64],
            code="unknown_parameter",
        )


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
