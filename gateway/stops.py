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

_OF_PIPELINES = frozenset((StoppedBy.PIPELINE, StoppedBy.ROBOTS))


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
        robots = [name for name, it in pipelines.items() if it.kind is Kind.ROBOT]
        self._holds: dict[str, set[StoppedBy]] = {name: set() for name in robots}
        """What holds all of a pipeline still."""
        self._sessions = sessions
        self._handle = handle

    def stopped(self, pipeline: str) -> bool:
        """Whether a pipeline stands still."""
        return bool(self._holds.get(pipeline))

    def session(self, session: Session, stopped: bool) -> bool:
        """Stop one session, or release it; whether it stands still now, as it does when it is
        released and its pipeline is not.

        One that is not open yet is closed instead of stopped: nobody is told of it, so nothing
        stops it. Raises InvalidRequest for a session that is no robot's.
        """
        if session.pipeline.kind is not Kind.ROBOT:
            raise InvalidRequest(
                f"a session of kind {session.pipeline.kind} cannot be stopped", code="unsupported"
            )
        self._say(session, stopped, StoppedBy.OPERATOR)
        if not stopped:
            # A pipeline may have been released while this was not open yet, and could not be told.
            for hold in _OF_PIPELINES - self._holds[session.pipeline.name]:
                self._say(session, stopped, hold)
        return session.stopped

    def robots(self, pipeline: str | None, stopped: bool) -> dict[str, list[str]]:
        """Stop or release all sessions of a robot pipeline, or of all; their ids by pipeline.

        Raises NotFound.
        """
        if pipeline is not None and pipeline not in self._holds:
            raise NotFound(f"there is no robot pipeline {pipeline!r}", code="model_not_found")
        hold = StoppedBy.ROBOTS if pipeline is None else StoppedBy.PIPELINE
        touched: dict[str, list[str]] = {}
        for name in self._holds if pipeline is None else [pipeline]:
            holds = self._holds[name]
            (holds.add if stopped else holds.discard)(hold)
            touched[name] = []
        for session in list(self._sessions()):
            if session.pipeline.name in touched:
                self._say(session, stopped, hold)
                touched[session.pipeline.name].append(session.identity.session)
        return touched

    def begun(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline as a new session has it."""
        if not self.stopped(pipeline.name):
            return pipeline
        holds = frozenset(self._holds[pipeline.name])
        return replace(pipeline, control=replace(pipeline.control, stopped=holds))

    def _say(self, session: Session, stopped: bool, hold: StoppedBy) -> None:
        if session.announced:
            verb = (EmergencyStop if stopped else ReleaseStop)(hold)
            self._handle(session.identity.session, ClientSaid(verb))
        elif stopped:
            self._handle(session.identity.session, CloseRequested(CloseReason.ADMIN))
