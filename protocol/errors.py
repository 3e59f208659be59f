"""Every failure that Antiphon reports, as one hierarchy.

An error has a stable `code` (what programs branch on), a `kind` (whose fault it
is, which each surface maps once to its own status), a message for people, and
where it applies the `field` that was wrong.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec

MAX_MESSAGE_CHARS = 1024
"""A longer message is cut when it is told: it may quote what a client sent."""
MAX_FIELD_CHARS = 256
"""A longer path of a field is cut when it is told."""


class ErrorKind(StrEnum):
    """Whose fault a failure is; each surface maps a kind to its status once."""

    CLIENT = "client"
    CAPACITY = "capacity"
    SERVER = "server"
    FENCED = "fenced"
    LOST = "lost"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it crosses a process boundary."""

    code: str
    kind: ErrorKind
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


class AntiphonError(Exception):
    """The root of all errors that a client or an operator is told of."""

    code = "internal_error"
    kind = ErrorKind.SERVER

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code

    def info(self) -> ErrorInfo:
        """The form of this error that crosses process boundaries, of bounded length."""
        message = _clipped(self.message, MAX_MESSAGE_CHARS)
        field = None if self.field is None else _clipped(self.field, MAX_FIELD_CHARS)
        return ErrorInfo(self.code, self.kind, message, field, self.retry_after_ms)

    def again(self) -> Self:
        """The same error, to be raised by itself: this one may have been, and holds frames."""
        # Not by `copy`, which would make it anew, of arguments that each class has of its own.
        same = type(self).__new__(type(self), *self.args)
        vars(same).update(vars(self))
        return same


class InvalidRequest(AntiphonError):
    """The client sent something that cannot be carried out; its state is untouched."""

    code = "invalid_value"
    kind = ErrorKind.CLIENT


class SessionBusy(InvalidRequest):
    """Not now: the session has work that would be touched."""

    code = "session_busy"


class NotFound(InvalidRequest):
    """The client named something that does not exist."""

    code = "not_found"


class CapacityExceeded(AntiphonError):
    """There is no room now; `retry_after_ms` says when to try again, where it is known."""

    code = "capacity_exceeded"
    kind = ErrorKind.CAPACITY


class TenantShareExceeded(CapacityExceeded):
    """The tenant has all bytes that it may have of a device; others may well have room."""

    code = "tenant_share_exceeded"


class SessionTooLarge(CapacityExceeded):
    """A session with such settings would find no room if it were the only one."""

    code = "session_too_large"


class EngineFailed(AntiphonError):
    """An engine raised while it worked on this session's turn."""

    code = "engine_failed"
    kind = ErrorKind.SERVER


class DeadlineMissed(EngineFailed):
    """No action could be given within the deadline; the worker says it of an observation that it
    did not begin in time, and does not compute any more."""

    code = "deadline_missed"


class EngineLost(AntiphonError):
    """The worker that held this turn or session died."""

    code = "engine_lost"
    kind = ErrorKind.LOST


class SessionStateLost(AntiphonError):
    """State that the next turn needs is gone and could not be rebuilt."""

    code = "session_state_lost"
    kind = ErrorKind.LOST


class Fenced(AntiphonError):
    """The command came from someone who no longer owns the session."""

    code = "fenced"
    kind = ErrorKind.FENCED


class ConfigError(AntiphonError):
    """The configuration cannot be used; the message names file, line and field."""

    code = "config_invalid"
    kind = ErrorKind.CLIENT


class ModelFileError(AntiphonError):
    """A model file is missing or is not the file that was pinned."""

    code = "model_file_invalid"
    kind = ErrorKind.SERVER


def raised(info: ErrorInfo) -> AntiphonError:
    """An error that came as a value, to be raised."""
    error = AntiphonError(
        info.message, field=info.field, code=info.code, retry_after_ms=info.retry_after_ms
    )
    error.kind = info.kind
    return error


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
