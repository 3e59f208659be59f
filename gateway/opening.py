"""One call for a session: it waits for a place, and leaves nothing behind when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from gateway.clients import Clients
from gateway.hosted import HostedSessions
from gateway.hosting import OnPosition
from protocol.errors import AntiphonError, InvalidRequest
from sessions.actions import CloseRequested
from sessions.lifecycle import CloseReason
from sessions.opening import Opening, Position
from sessions.pipeline import Pipeline
from sessions.session import Session

_log = structlog.get_logger(__name__)


class SessionOpening:
    """Somebody who waits for a session. Make it on a running loop.

    `new_session` makes one that nothing knows of, and raises AntiphonError for what cannot be
    opened; `begin` hosts it. `changed` is called when the queue may have. `fork` is the session
    that it begins as.
    """

    def __init__(
        self,
        hosted: HostedSessions,
        pipeline: Pipeline,
        tenant: str,
        new_session: Callable[[], Session],
        begin: Callable[[Session], None],
        on_position: OnPosition | None,
        changed: Callable[[], None],
        fork: str | None = None,
    ) -> None:
        self.result: asyncio.Future[Clients] = asyncio.get_running_loop().create_future()
        """The clients of the session, once it is open."""
        self.opening = Opening(
            pipeline,
            tenant,
            pipeline.priority,
            self._begin,
            self._stands,
            self._refused,
            fork,
        )
        self._hosted = hosted
        self._new_session = new_session
        self._host_session = begin
        self._on_position = on_position
        self._changed = changed

    @property
    def since_ms(self) -> float:
        """When it was asked for (monotonic)."""
        return self.opening.since_ms

    async def opened(self, clock_ms: Callable[[], float]) -> Clients:
        """The clients of the session, once it is open. Raises AntiphonError.

        Cancelled at any point it closes what it had opened, and waits no more.
        """
        hosted, opening = self._hosted, self.opening
        if hosted.admission.lacking(opening.pipeline, opening.tenant) is not None:
            # What cannot be opened ends nobody's session.
            self._new_session()
        hosted.open(opening, clock_ms())
        try:
            if not (opening.trying or self.result.done()):
                # Nor does it wait to be told so.
                self._new_session()
            self._changed()
            await asyncio.wait({self.result})
            if (error := self.result.exception()) is not None:
                # What is kept of it elsewhere must not hold this call's frames.
                raise error.again() if isinstance(error, AntiphonError) else error
            return self.result.result()
        except BaseException:
            self.result.cancel()
            hosted.withdraw(opening, clock_ms())
            done = self.result.done() and not self.result.cancelled()
            if done and self.result.exception() is None:
                session = self.result.result().session.identity.session
                hosted.handle(session, CloseRequested(CloseReason.CLIENT), clock_ms())
            self._changed()
            raise
        finally:
            # Nothing that knows of this opening still holds whoever wanted it.
            self._new_session = self._host_session = _nobody_waits
            self._on_position = None

    def _begin(self) -> None:
        """Raises AntiphonError alone: a fault here is no fault of whoever made the place free."""
        try:
            self._host_session(self._new_session())
        except AntiphonError:
            raise
        except Exception as error:
            _log.exception("open_failed", pipeline=self.opening.pipeline.name)
            raise AntiphonError("the gateway failed at this open; its log says more") from error

    def _stands(self, position: Position) -> None:
        self._changed()
        if self._on_position is not None:
            self._on_position(position)

    def _refused(self, error: AntiphonError) -> None:
        self._changed()
        if not self.result.done():
            self.result.set_exception(error)


def _nobody_waits(*_: object) -> Any:
    raise AntiphonError("nobody waits for this session any more")


def prioritised(pipeline: Pipeline, priority: int | None) -> Pipeline:
    """The pipeline as a client has it that asks for this priority. Raises InvalidRequest."""
    if priority is None:
        return pipeline
    if priority > pipeline.priority:
        raise InvalidRequest(
            f"the priority is at most that of the pipeline: {pipeline.priority}", field="priority"
        )
    return replace(pipeline, priority=priority)
