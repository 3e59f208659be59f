"""The sessions of one worker that are to begin as another one is, and wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workers.session_control import SessionControl, SessionState


class Forks:
    """Those that have their bytes, and begin once no step of the other runs."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}

    def note(self, session: SessionControl, sessions: Mapping[str, SessionControl]) -> None:
        """Take account of a session that opens, or does not any more."""
        fork = session.fork
        if fork is None:
            return
        source = sessions.get(fork.session)
        opening = session.state is SessionState.OPENING
        if source is not None:
            (source.forks.add if opening else source.forks.discard)(session.session)
        if session.forking:
            self._waiting[session.session] = None
        else:
            self._waiting.pop(session.session, None)

    def serve(
        self, sessions: Mapping[str, SessionControl], now_ms: float
    ) -> Iterator[SessionControl]:
        """Let those begin that can, or never will: each has to be noted."""
        for name in list(self._waiting):
            session = sessions[name]
            assert session.fork is not None
            if session.begin_as(sessions.get(session.fork.session), now_ms):
                yield session

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple(self._waiting)
