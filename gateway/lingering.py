"""The places of sessions that have ended, and that a worker has not finished to clean up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.placement import Replica
from protocol.messages import Answer


@dataclass
class _Place:
    give_back: Callable[[], None]
    awaited: dict[str, Replica]
    """The workers that have not answered, by the command that told them."""


class Lingering:
    """Gives a place back once every worker has answered the close, or is lost.

    Nobody waits for that: neither a drain nor the end of the process.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def release(
        self, session: str, awaited: Mapping[str, Replica], give_back: Callable[[], None]
    ) -> None:
        """The session has ended, and these workers have not answered these commands."""
        self._places[session] = _Place(give_back, dict(awaited))
        self._settle(session)

    def answered(self, answer: Answer) -> None:
        """A worker has answered a command, which may be one of these."""
        place = self._places.get(answer.session)
        if place is not None and place.awaited.pop(answer.command, None) is not None:
            self._settle(answer.session)

    def lost(self, replica: Replica) -> None:
        """A worker is gone, with all that it held."""
        for session, place in list(self._places.items()):
            place.awaited = {c: other for c, other in place.awaited.items() if other is not replica}
            self._settle(session)

    def _settle(self, session: str) -> None:
        place = self._places[session]
        if not place.awaited:
            del self._places[session]
            place.give_back()
