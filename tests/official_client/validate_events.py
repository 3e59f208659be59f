"""Check server events against the types of the official `openai` package.

Run by the client's own Python. Reads one JSON event a line from standard input and
prints a line for each that the types refuse; the exit status is 1 if there was any.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

import pydantic
from openai.types.realtime import RealtimeServerEvent
from openai.types.realtime.realtime_session_create_response import RealtimeSessionCreateResponse


def event_models() -> dict[str, type[pydantic.BaseModel]]:
    """The package's model of each server event, by its `type`."""
    union = get_args(RealtimeServerEvent)[0]
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(union)}


MODELS = event_models()


def complaints(event: dict[str, Any]) -> list[str]:
    """What the types have against `event`."""
    kind = str(event.get("type"))
    model = MODELS.get(kind)
    if model is None:
        return [f"{kind}: no such event"]
    found = []
    try:
        model.model_validate(event)
        if kind in ("session.created", "session.updated"):
            RealtimeSessionCreateResponse.model_validate(event["session"])
    except pydantic.ValidationError as error:
        found.append(f"{kind}: {error}")
    return found


def main() -> int:
    """Check all of standard input."""
    found = [line for text in sys.stdin for line in complaints(json.loads(text))]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
