"""The sessions that are to begin as another one is: where they open, and what they wait for.

A fork opens on the worker that has the state, once the step that was in flight when it came is
over. A state that is parked is brought back for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import AntiphonError, CapacityExceeded
from sessions.bindings import BindingState
from sessions.lifecycle import State
from sessions.session import Session
from sessions.steps.events import StepSnapshot
from sessions.steps.refusals import source_gone


@dataclass
class _Waiting:
    stage: str
    in_flight: int | None
    """The step that it waits for; None: whatever is under way."""


class Forks:
    """What waits for which session. `find` knows those that are here, `restore` has a session's
    state brought back."""

    def __init__(
        self, find: Callable[[str], Session | None], restore: Callable[[str], None]
    ) -> None:
        self._find = find
        self._restore = restore
        self._waiting: dict[str, dict[str, _Waiting]] = {}

    def ready(self, fork: str, source: str, stage: str) -> bool:
        """Whether `fork` can open `stage` beside its source now, or else waits until `due` says
        so. Raises AntiphonError where that is no use."""
        session = self._stands(source, stage)
        waiting = _Waiting(stage, _in_flight(session))
        if _settled(session, waiting):
            return True
        self._waiting.setdefault(source, {})[fork] = waiting
        if stage in session.parked:
            self._restore(source)
        return False

    def due(self, source: str) -> list[tuple[str, str, AntiphonError | None]]:
        """The forks that wait no longer after what has become of their source, each with its
        stage, and why it cannot open, if so."""
        found: list[tuple[str, str, AntiphonError | None]] = []
        for fork, waiting in list(self._waiting.get(source, {}).items()):
            error: AntiphonError | None = None
            try:
                session = self._stands(source, waiting.stage)
                if session.stage_state(waiting.stage) is BindingState.PARKED:
                    refused = session.refused_by_worker(waiting.stage)
                    if refused is not None:
                        why = f"the session to fork does not come back: {refused.message}"
                        raise CapacityExceeded(why, code=refused.code)
                    # It has made room for others meanwhile.
                    self._restore(source)
                    continue
                if not _settled(session, waiting):
                    continue
            except AntiphonError as refusal:
                error = refusal
            self.forget(fork)
            found.append((fork, waiting.stage, error))
        return found

    def forget(self, fork: str) -> None:
        """It waits for nothing any more."""
        for source, waiting in list(self._waiting.items()):
            waiting.pop(fork, None)
            if not waiting:
                del self._waiting[source]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def awaits(self, source: str) -> bool:
        """Whether anything waits for this session."""
        return source in self._waiting

    def _stands(self, source: str, stage: str) -> Session:
        """The session, while there is a state to begin with. Raises SessionStateLost."""
        session = self._find(source)
        if session is None or session.state not in (State.ACTIVE, State.DETACHED):
            raise source_gone("it has ended")
        stands = session.stands
        if not isinstance(stands, StepSnapshot) or stands.lost:
            raise source_gone("its state is lost")
        return session


def _in_flight(session: Session) -> int | None:
    stands = session.stands
    return stands.in_flight if isinstance(stands, StepSnapshot) else None


def _settled(session: Session, waiting: _Waiting) -> bool:
    """Whether what it waits for is over, and a worker has the state."""
    if session.stage_state(waiting.stage) is not BindingState.READY:
        return False
    in_flight = _in_flight(session)
    return not session.working or in_flight not in (None, waiting.in_flight)
