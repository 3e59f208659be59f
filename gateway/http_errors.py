"""Errors as answers over HTTP: one form for all of the gateway, that of the OpenAI API."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from protocol.errors import (
    AntiphonError,
    ErrorInfo,
    ErrorKind,
    InvalidRequest,
    NotFound,
    SessionBusy,
)

ERROR_TYPES = {
    ErrorKind.CLIENT: "invalid_request_error",
    ErrorKind.CAPACITY: "rate_limit_error",
    ErrorKind.SERVER: "server_error",
    ErrorKind.FENCED: "server_error",
    ErrorKind.LOST: "server_error",
}
"""The `type` of an error, by whose fault it is; the events of the Realtime wire have it too."""

_STATUS = {
    ErrorKind.CLIENT: 400,
    ErrorKind.CAPACITY: 503,
    ErrorKind.SERVER: 500,
    ErrorKind.FENCED: 503,
    ErrorKind.LOST: 503,
}


class HttpRefusal(InvalidRequest):
    """A request that may not be served; `status` says why better than 400."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message, code=code)
        self.status = status


def error_members(error: ErrorInfo) -> dict[str, Any]:
    """The members that an error has wherever it is told in the OpenAI API's form."""
    return {"type": ERROR_TYPES[error.kind], "code": error.code, "message": error.message}


def error_body(error: AntiphonError) -> dict[str, Any]:
    """The body of an answer that says `error`; `retry_after_ms` where that is known."""
    info = error.info()
    members = {**error_members(info), "param": info.field}
    if info.retry_after_ms is not None:
        members["retry_after_ms"] = info.retry_after_ms
    return {"error": members}


def error_response(error: AntiphonError) -> JSONResponse:
    """The answer to a request that failed with `error`, as docs/errors.md has it."""
    info = error.info()
    headers = {}
    if info.retry_after_ms is not None:
        headers["retry-after"] = str(-(-info.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(info.retry_after_ms)
    return JSONResponse(error_body(error), error_status(error), headers)


def can_answer(scope: Scope) -> bool:
    """Whether the server lets an upgrade be answered by a response, and not by a close alone."""
    return "websocket.http.response" in scope.get("extensions", {})


def error_status(error: AntiphonError) -> int:
    """The status of an answer that says `error`."""
    if isinstance(error, HttpRefusal):
        return error.status
    # One that came as a value has no class of its own.
    if isinstance(error, SessionBusy) or error.code == SessionBusy.code:
        return 409
    return 404 if isinstance(error, NotFound) else _STATUS[error.kind]
