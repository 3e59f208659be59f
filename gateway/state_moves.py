"""Who waits for the state of a session's stages to be put away, or to be brought back."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import AntiphonError, EngineFailed, raised
from sessions.client import Origin, Parked, Restored, Restoring

_Back = tuple[Origin | None, AntiphonError | None]


class StateMoves:
    """Of one session. What it puts out says what becomes of its stages."""

    def __init__(self) -> None:
        self._away: dict[str, list[asyncio.Future[AntiphonError | None]]] = {}
        self._back: dict[str, list[asyncio.Future[_Back]]] = {}

    def put_away(self, stage: str) -> asyncio.Future[AntiphonError | None]:
        """Of a stage that is being parked: why it was not, if so. It fails with SessionStateLost
        when the session ends before."""
        outcome: asyncio.Future[AntiphonError | None] = asyncio.get_running_loop().create_future()
        self._away.setdefault(stage, []).append(outcome)
        return outcome

    def brought_back(self, stage: str) -> asyncio.Future[_Back]:
        """Of a stage that is parked, once it has a worker again: from what it goes on, and why
        that is not what was stored. None: it stays parked. It fails as `put_away` does."""
        outcome: asyncio.Future[_Back] = asyncio.get_running_loop().create_future()
        self._back.setdefault(stage, []).append(outcome)
        return outcome

    def told(self, output: Any) -> None:
        """What the session puts out."""
        match output:
            case Parked(stage=stage, error=None):
                _settle(self._away.pop(stage, []), None)
            case Parked(stage=stage, error=error):
                why = None if error is None else raised(error)
                _settle(self._back.pop(stage, []), (None, why))
            case Restored(stage=stage, origin=origin, error=error):
                why = None if error is None else raised(error)
                if origin is Origin.KEPT:
                    _settle(self._away.pop(stage, []), why)
                _settle(self._back.pop(stage, []), (origin, why))
            case Restoring(stage=stage):
                lost = f"the worker of stage {stage} was lost while it stored the state"
                _settle(self._away.pop(stage, []), EngineFailed(lost))

    def end(self) -> list[asyncio.Future[Any]]:
        """Nothing more comes: those that wait still."""
        waiting = [future for futures in self._away.values() for future in futures]
        others = [future for futures in self._back.values() for future in futures]
        self._away.clear()
        self._back.clear()
        return [*waiting, *others]


def _settle(waiting: list[asyncio.Future[Any]], outcome: object) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(outcome)
