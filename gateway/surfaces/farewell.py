"""How a connection ends, by the reason for which its session ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import ErrorInfo, ErrorKind

CLOSE_POLICY = 1008
CLOSE_INTERNAL = 1011
CLOSE_TRY_LATER = 1013

CLOSE_CODES = {
    ErrorKind.CLIENT: CLOSE_POLICY,
    ErrorKind.CAPACITY: CLOSE_TRY_LATER,
    ErrorKind.SERVER: CLOSE_INTERNAL,
    ErrorKind.FENCED: CLOSE_TRY_LATER,
    ErrorKind.LOST: CLOSE_TRY_LATER,
}
"""The close codes of connections that are refused, by whose fault it is."""

LET_GO = {
    "replaced": (4001, "replaced"),
    "stalled": (CLOSE_POLICY, "session_stalled"),
    "failed": (CLOSE_INTERNAL, "internal_error"),
}
"""Close code and reason of a connection whose session goes on without it."""


@dataclass(frozen=True)
class Farewell:
    """How a connection ends: a WebSocket close code, its reason, an error event before it."""

    code: int
    reason: str
    error: ErrorInfo | None = None


class _Ending(NamedTuple):
    """The close code of a reason, and the error code that is told before it."""

    close: int
    code: str | None = None


_ENDINGS = {
    "client": _Ending(1000),
    "completed": _Ending(1000),
    "idle": _Ending(1000, code="session_expired"),
    "max_age": _Ending(1000, code="session_expired"),
    "detached": _Ending(1000, code="session_expired"),
    "drained": _Ending(1001),
    "engine_lost": _Ending(1012, code="engine_lost"),
    "admission": _Ending(1013, code="capacity_exceeded"),
    "evicted": _Ending(1000, code="session_expired"),
    "fenced": _Ending(1012, code="fenced"),
    "stalled": _Ending(1008, code="session_stalled"),
    "admin": _Ending(1008, code="session_closed"),
}
_FAULT = _Ending(1011, code="internal_error")

_KINDS = {
    "session_expired": ErrorKind.CLIENT,
    "capacity_exceeded": ErrorKind.CAPACITY,
    "fenced": ErrorKind.FENCED,
    "engine_lost": ErrorKind.LOST,
}


def farewell(reason: str, error: ErrorInfo | None) -> Farewell:
    """How a connection ends whose session ended for `reason`.

    1012 and 1013 tell a client library to try again, 1000 and 1008 not to.
    """
    ending = _ENDINGS.get(reason, _FAULT)
    if error is None and ending.code is not None:
        kind = _KINDS.get(ending.code, ErrorKind.SERVER)
        error = ErrorInfo(ending.code, kind, f"The session ended: {reason}.")
    return Farewell(ending.close, reason, error)
