"""`?priority=N` of a WebSocket's URL: how the session stands among others, on request."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from starlette.types import Scope

from protocol.errors import InvalidRequest

_MOST = 1000


def asked_priority(scope: Scope) -> int | None:
    """The priority that the client asks for; None: that of the pipeline. Raises InvalidRequest."""
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if "priority" not in query:
        return None
    asked = query["priority"][-1]
    if not re.fullmatch(r"-?[0-9]{1,4}", asked) or abs(int(asked)) > _MOST:
        raise InvalidRequest(f"a priority is a number from -{_MOST} to {_MOST}", field="priority")
    return int(asked)
