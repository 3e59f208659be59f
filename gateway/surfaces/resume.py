"""WebSockets whose session outlives them: an addition to a protocol, on request.

With `?resume=1` the session waits for its client to come back, and the client is told the
secret for that. A connection to `?session=ID`, with the secret in the sub-protocol
`antiphon-resume.SECRET`, has it again; `&cursor=N` says which output was the last to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.types import Scope

from protocol.errors import InvalidRequest

RESUME_SUBPROTOCOL = "antiphon-resume."


@dataclass(frozen=True)
class Return:
    """A client that comes back: to which session, and what was the last it has of it."""

    session: str
    cursor: int | None
    secret: str = field(repr=False)


def wants_resume(scope: Scope) -> bool:
    """Whether the session is to outlive its connection. Raises InvalidRequest."""
    asked = _query(scope).get("resume", ["0"])[-1]
    if asked not in ("0", "1"):
        raise InvalidRequest("resume is 0 or 1", field="resume")
    return asked == "1"


def returning(scope: Scope) -> Return | None:
    """Who comes back; None for who wants a new session. Raises InvalidRequest."""
    query = _query(scope)
    if "session" not in query:
        return None
    secret = _secret(scope["subprotocols"])
    if secret is None:
        raise InvalidRequest(
            f"send the session's secret as the sub-protocol {RESUME_SUBPROTOCOL}SECRET",
            field="session",
        )
    cursor = query.get("cursor", [""])[-1]
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
        raise InvalidRequest("the cursor is the last `sequence` that came", field="cursor")
    return Return(query["session"][-1], int(cursor) if cursor else None, secret)


def _secret(subprotocols: Sequence[str]) -> str | None:
    for subprotocol in subprotocols:
        if subprotocol.startswith(RESUME_SUBPROTOCOL):
            return subprotocol.removeprefix(RESUME_SUBPROTOCOL)
    return None


def _query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
