"""The answer to a request for a session, which may have to wait for a place.

Who accepts `text/event-stream` is told where the open stands while it waits; others just wait.
Whoever hangs up has left the queue at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.hosting import OnPosition
from gateway.http_errors import error_body
from gateway.surfaces.while_waiting import while_waiting
from protocol.errors import AntiphonError
from protocol.native import QueuedBody
from sessions.opening import Position

EVENT_STREAM = "text/event-stream"

Body = TypeVar("Body")
"""What an open session is described by."""


def wants_events(request: Request) -> bool:
    """Whether the client asks to be told where its open stands."""
    accepted = request.headers.get("accept", "")
    return any(part.partition(";")[0].strip() == EVENT_STREAM for part in accepted.split(","))


class OpenAnswer(Generic[Body]):
    """Opens a session by `open_session(on_position)` and answers with what came of it.

    As an event stream, once there is something to wait for: `queued` events, then one `session`
    or `error`. Otherwise `answer(body)`, or the error that is raised. `undo` is called with a
    session that nobody will be told of.
    """

    def __init__(
        self,
        open_session: Callable[[OnPosition], Coroutine[Any, Any, Body]],
        answer: Callable[[Body], Response],
        undo: Callable[[Body], None],
        *,
        events: bool,
    ) -> None:
        self._open_session = open_session
        self._answer = answer
        self._undo = undo
        self._events = events
        self._position: Position | None = None
        self._moved = asyncio.Event()
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. Raises AntiphonError before anything has been sent."""
        beside = [self._tell(send)] if self._events else []
        opening = self._open_session(self._stands)
        try:
            body = await while_waiting(opening, _gone(receive), *beside, undo=self._undo)
        except ConnectionAbortedError:
            return
        except AntiphonError as error:
            if not self._begun:
                raise
            last = _event("error", error_body(error))
        else:
            if not self._begun:
                await self._answer(body)(scope, receive, send)
                return
            last = _event("session", body)
        with contextlib.suppress(OSError):
            await send({"type": "http.response.body", "body": last})

    def _stands(self, position: Position) -> None:
        self._position = position
        self._moved.set()

    async def _tell(self, send: Send) -> None:
        """Say where the open stands, the newest position only. Ends when nobody takes it."""
        with contextlib.suppress(OSError):
            while True:
                await self._moved.wait()
                self._moved.clear()
                if not self._begun:
                    self._begun = True
                    headers = [
                        (b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()),
                        (b"cache-control", b"no-store"),
                    ]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                assert self._position is not None
                said = QueuedBody(self._position.position, self._position.estimate_ms)
                body = _event("queued", said)
                await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
