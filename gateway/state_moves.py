"""Who waits for the state of a session's stages to be put away, or to be brought back."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import AntiphonError, EngineFailed, raised
from sessions.client import Origin, Parked, Restored, Restoring


class StateMoves:
    """Of one session. What it puts out says what becomes of its stages."""

    def __init__(self) -> None:
        self._away: dict[str, list[asyncio.Future[AntiphonError | None]]] = {}
        self._back: dict[str, list[asyncio.Future[tuple[Origin | None, AntiphonError | None]]]] = {}

    async def put_away(self, stage: str) -> AntiphonError | None:
        """Wait until the state of a stage that is being parked is; why it was not, if so.

        Raises SessionStateLost when the session ends before.
        """
        outcome: asyncio.Future[AntiphonError | None] = asyncio.get_running_loop().create_future()
        self._away.setdefault(stage, []).append(outcome)
        return await outcome

    async def brought_back(self, stage: str) -> tuple[Origin | None, AntiphonError | None]:
        """Wait until a stage that is parked has a worker again: from what it goes on, and why it
        is not what was stored. None: it stays parked.

        Raises SessionStateLost when the session ends before.
        """
        outcome: asyncio.Future[tuple[Origin | None, AntiphonError | None]]
        outcome = asyncio.get_running_loop().create_future()
        self._back.setdefault(stage, []).append(outcome)
        return await outcome

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
