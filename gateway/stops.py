"""Emergency stops by an operator: which sessions of robots stand still, and which pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from protocol.errors import InvalidRequest, NotFound
from sessions.actions import ClientSaid, CloseRequested, Event
from sessions.lifecycle import CloseReason
from sessions.pipeline import Kind, Pipeline
from sessions.session import Session
from sessions.steps.events import EmergencyStop, ReleaseStop, StoppedBy


class Stops:
    """Stops and releases; a pipeline that is stopped has no session that runs, new ones included.

    `sessions()` are all that hold anything; `handle` feeds one of them an event.
    """

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        sessions: Callable[[], Iterable[Session]],
        handle: Callable[[str, Event], None],
    ) -> None:
        self._robots = [name for name, it in pipelines.items() if it.kind is Kind.ROBOT]
        self._sessions = sessions
        self._handle = handle
        self.stopped: set[str] = set()
        """The pipelines that stand still."""

    def session(self, session: Session, stopped: bool) -> bool:
        """Stop one session, or release it; whether it stands still now.

        One that is not open yet is closed instead: nobody is told of it, so nothing stops it.
        Raises InvalidRequest for a session that is no robot's.
        """
        if session.pipeline.kind is not Kind.ROBOT:
            raise InvalidRequest(
                f"a session of kind {session.pipeline.kind} cannot be stopped", code="unsupported"
            )
        if session.announced:
            verb = (EmergencyStop if stopped else ReleaseStop)(StoppedBy.OPERATOR)
            self._handle(session.identity.session, ClientSaid(verb))
        elif stopped:
            self._handle(session.identity.session, CloseRequested(CloseReason.ADMIN))
        return session.stopped

    def robots(self, pipeline: str | None, stopped: bool) -> dict[str, list[str]]:
        """Stop or release all sessions of a robot pipeline, or of all; their ids by pipeline.

        Raises NotFound.
        """
        if pipeline is not None and pipeline not in self._robots:
            raise NotFound(f"there is no robot pipeline {pipeline!r}", code="model_not_found")
        touched: dict[str, list[str]] = {}
        for name in self._robots if pipeline is None else [pipeline]:
            (self.stopped.add if stopped else self.stopped.discard)(name)
            touched[name] = []
        for session in list(self._sessions()):
            if session.pipeline.name in touched:
                self.session(session, stopped)
                touched[session.pipeline.name].append(session.identity.session)
        return touched

    def begun(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline as a new session has it."""
        if pipeline.name not in self.stopped:
            return pipeline
        return replace(pipeline, control=replace(pipeline.control, stopped=True))
