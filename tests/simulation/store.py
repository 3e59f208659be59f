"""The store of parked states, which all workers share and which outlives each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import SessionStateLost
from tests.simulation.engine import EngineSession


@dataclass(frozen=True)
class Snapshot:
    """The state of one session on one stage, after `step`."""

    state: EngineSession
    step: int
    damaged: bool = False


class Store:
    """Snapshots by session and stage; a newer one takes the place of the one before."""

    def __init__(self) -> None:
        self.snapshots: dict[tuple[str, str], Snapshot] = {}

    def put(self, session: str, stage: str, snapshot: Snapshot) -> None:
        """Keep it. It is a copy: what becomes of the session does not show in it."""
        copy = replace(snapshot.state, epoch=0, owner="")
        self.snapshots[session, stage] = replace(snapshot, state=copy)

    def take(self, session: str, stage: str) -> Snapshot:
        """The snapshot of a session, which stays. Raises SessionStateLost."""
        snapshot = self.snapshots.get((session, stage))
        if snapshot is None:
            raise SessionStateLost("there is no snapshot of the session")
        if snapshot.damaged:
            raise SessionStateLost("the session's snapshot is damaged")
        return snapshot

    def remove(self, session: str, stage: str) -> None:
        """Nobody will want it any more. Idempotent."""
        self.snapshots.pop((session, stage), None)
