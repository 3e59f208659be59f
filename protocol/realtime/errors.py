"""How a client event that cannot be read is reported."""

from __future__ import annotations

import msgspec

from protocol.errors import InvalidRequest
from protocol.validation import fault


class MalformedEvent(InvalidRequest):
    """A client event that breaks the protocol; nothing of it was carried out.

    `code` is one of the Realtime API's codes, `field` is the path of the wrong
    parameter (the wire's `param`), `event_id` is the client's id of the event.
    """

    def __init__(
        self, message: str, *, code: str, field: str | None = None, event_id: str | None = None
    ) -> None:
        super().__init__(message, code=code, field=field)
        self.event_id = event_id


def unknown_parameter(path: str) -> MalformedEvent:
    """The error for a field that the protocol does not know."""
    return MalformedEvent(f"Unknown parameter: '{path}'.", code="unknown_parameter", field=path)


def missing_parameter(path: str) -> MalformedEvent:
    """The error for a required field that is absent."""
    return MalformedEvent(
        f"Missing required parameter: '{path}'.", code="missing_required_parameter", field=path
    )


def invalid_value(path: str, message: str) -> MalformedEvent:
    """The error for a field whose value the protocol does not allow."""
    return MalformedEvent(f"Invalid '{path}': {message}", code="invalid_value", field=path)


def unsupported_parameter(path: str, message: str) -> MalformedEvent:
    """The error for a field of the protocol that this server does not serve."""
    return MalformedEvent(
        f"'{path}' is not supported: {message}", code="unsupported_parameter", field=path
    )


def unsupported_value(path: str, message: str) -> MalformedEvent:
    """The error for a value of the protocol that this server does not serve."""
    return MalformedEvent(
        f"Value of '{path}' is not supported: {message}", code="unsupported_value", field=path
    )


def from_validation(error: msgspec.ValidationError, prefix: str = "") -> MalformedEvent:
    """The protocol error for a msgspec validation error; `prefix` is put before its path."""
    found = fault(error, prefix)
    if found.code == "unknown_parameter":
        return unknown_parameter(found.path)
    if found.code == "missing_required_parameter":
        return missing_parameter(found.path)
    where = f"Invalid '{found.path}': " if found.path else "Invalid event: "
    return MalformedEvent(f"{where}{found.reason}.", code=found.code, field=found.path or None)
