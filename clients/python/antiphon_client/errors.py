"""What can go wrong, as one hierarchy. Programs branch on the type or on `code`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AntiphonError(Exception):
    """The root. `code` is stable (the gateway's page of errors lists them), `message` is for
    people, `field` names what was wrong, `retry_after_ms` when to try again, where known."""

    code = "internal_error"
    committed_step: int | None = None
    """Where the world stands whose step was refused, where that was told."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        place = f" ({self.field})" if self.field else ""
        return f"{self.code}: {self.message}{place}"


class Refused(AntiphonError):
    """What was asked for cannot be; nothing of it was carried out. Ask for something else."""

    code = "invalid_value"


class NoRoom(AntiphonError):
    """There is no room now; try again after `retry_after_ms`."""

    code = "capacity_exceeded"


class ServerFailed(AntiphonError):
    """The gateway or an engine failed, or what they held is gone."""


class NotReachable(AntiphonError):
    """Nobody answers at the gateway's address."""

    code = "not_reachable"


class ConnectionLost(AntiphonError):
    """The connection broke and could not be restored within the session's lease."""

    code = "connection_lost"


class ControlLost(AntiphonError):
    """Somebody else controls the session now: it goes on without this client."""

    code = "replaced"


class SessionEnded(AntiphonError):
    """The session is closed. `reason` is the gateway's, `code` that of its error if it has one."""

    code = "session_ended"

    def __init__(self, reason: str, error: AntiphonError | None = None) -> None:
        message = f"the session ended: {reason}" if error is None else error.message
        super().__init__(message, code=error.code if error is not None else None)
        self.reason = reason


class OutputsLost(AntiphonError):
    """The outputs from number `first` to number `last` will never come; those behind them will.

    Raised once by whoever reads next. The session goes on.
    """

    code = "outputs_lost"

    def __init__(self, first: int, last: int) -> None:
        super().__init__(f"outputs {first} to {last} are gone")
        self.first = first
        self.last = last


class ProtocolError(AntiphonError):
    """The gateway sent what this client does not understand."""

    code = "protocol_error"


class NoAnswer(AntiphonError, TimeoutError):
    """A command was not answered in time. It may still be carried out."""

    code = "no_answer"


_KINDS: Mapping[str, type[AntiphonError]] = {"client": Refused, "capacity": NoRoom}


def error_of(info: Any) -> AntiphonError:
    """An error as the gateway told it, to be raised. Raises ProtocolError for what is none."""
    if not isinstance(info, Mapping):
        raise ProtocolError(f"an error is a map, not {info!r:.100}")
    kind = _KINDS.get(str(info.get("kind")), ServerFailed)
    field, retry_after_ms = info.get("field"), info.get("retry_after_ms")
    return kind(
        str(info.get("message", "")),
        code=str(info.get("code", kind.code)),
        field=field if isinstance(field, str) else None,
        retry_after_ms=retry_after_ms if type(retry_after_ms) is int else None,
    )
