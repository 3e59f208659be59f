"""What is stored of sessions that will not come back for it, until a worker has removed it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from gateway.placement import Placement, Replica
from protocol.errors import AntiphonError
from protocol.messages import Answer, Close

REMEMBERED = 1024
"""Of so many, by session and stage; of one more the oldest goes when its own time has come."""


@dataclass
class _Forgotten:
    command: Close
    told: Replica | None = None


class Forgetting:
    """Tells any worker of the stage, and another one when that is gone before it has answered."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._forgotten: OrderedDict[tuple[str, str], _Forgotten] = OrderedDict()

    def __len__(self) -> int:
        return len(self._forgotten)

    def forget(self, stage: str, command: Close, now_ms: float) -> None:
        """Have what is stored of the command's session removed, now or once there is a worker."""
        key = (command.fence.session, stage)
        self._forgotten[key] = forgotten = _Forgotten(command)
        self._forgotten.move_to_end(key)
        if len(self._forgotten) > REMEMBERED:
            self._forgotten.popitem(last=False)
        self._tell(stage, forgotten, now_ms)

    def answered(self, stage: str, answer: Answer) -> None:
        """A worker has answered a command, which may be one of these."""
        key = (answer.session, stage)
        forgotten = self._forgotten.get(key)
        if forgotten is not None and forgotten.command.command == answer.command:
            del self._forgotten[key]

    def ready(self, stage: str, now_ms: float) -> None:
        """A worker of `stage` takes sessions: it is told what nobody has been told."""
        for (_, of), forgotten in self._forgotten.items():
            if of == stage and forgotten.told is None:
                self._tell(stage, forgotten, now_ms)

    def lost(self, replica: Replica, now_ms: float) -> None:
        """A worker is gone: what it has not answered is for another."""
        for forgotten in self._forgotten.values():
            if forgotten.told is replica:
                self._tell(replica.stage, forgotten, now_ms)

    def _tell(self, stage: str, forgotten: _Forgotten, now_ms: float) -> None:
        forgotten.told = None
        try:
            replica = self._placement.pick(stage, now_ms)
            replica.link.send(forgotten.command)
        except AntiphonError:
            return
        forgotten.told = replica
