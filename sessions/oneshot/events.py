"""What goes into and comes out of a session of one turn, free of any wire format.

`ref` is whatever the client wants echoed in the refusal of a verb; it has no other meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ErrorInfo
from protocol.payloads import Payload
from sessions.client import SessionOutput

# Verbs


@dataclass(frozen=True)
class Request:
    """Run the one turn. `parameters` are by stage; `ports` None asks for every output."""

    inputs: list[Payload]
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    ports: frozenset[str] | None = None
    ref: str | None = None


@dataclass(frozen=True)
class CancelRequest:
    """Nobody wants the rest of the answer."""

    ref: str | None = None


OneShotVerb = Request | CancelRequest


# Outputs


@dataclass(frozen=True)
class Piece:
    """The next piece of the answer on `port`, in the order in which it was made."""

    port: str
    payload: Payload


@dataclass(frozen=True)
class RequestDone:
    """The answer is whole: counters by stage, and hop times by stage (ms)."""

    usage: dict[str, dict[str, Any]]
    timeline: dict[str, dict[str, float]]


@dataclass(frozen=True)
class RequestFailed:
    """The answer ends here, with what was sent of it."""

    error: ErrorInfo


OneShotOutput = SessionOutput | Piece | RequestDone | RequestFailed
