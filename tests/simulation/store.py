"""The store of parked states, which all workers share and which outlives each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import Fenced, SessionStateLost
from protocol.messages import SnapshotOrder
from tests.simulation.engine import EngineSession
from workers.control_events import Restore


@dataclass(frozen=True)
class Snapshot:
    """The state of one session on one stage, after `step`."""

    state: EngineSession
    step: int
    order: SnapshotOrder
    damaged: bool = False


class Store:
    """Snapshots by session and stage; a newer one takes the place of the one before."""

    def __init__(self) -> None:
        self.snapshots: dict[tuple[str, str], Snapshot] = {}

    def put(self, session: str, stage: str, snapshot: Snapshot) -> None:
        """Keep it. It is a copy: what becomes of the session does not show in it.

        Raises Fenced where there is a newer one.
        """
        there = self.snapshots.get((session, stage))
        if there is not None and there.order > snapshot.order:
            raise Fenced("a newer snapshot of the session is in the store")
        copy = replace(snapshot.state, epoch=0, owner="")
        self.snapshots[session, stage] = replace(snapshot, state=copy)

    def take(self, session: str, stage: str, restore: Restore) -> Snapshot:
        """The snapshot of a session, which stays. Raises SessionStateLost."""
        snapshot = self.snapshots.get((session, stage))
        if snapshot is None:
            raise SessionStateLost("there is no snapshot of the session")
        if not restore.wanted <= snapshot.order <= restore.taken:
            raise SessionStateLost("the session's snapshot is not the one that is wanted")
        self.snapshots[session, stage] = replace(snapshot, order=restore.taken)
        if snapshot.damaged:
            raise SessionStateLost("the session's snapshot is damaged")
        return snapshot

    def remove(self, session: str, stage: str, epoch: int, opening: int) -> None:
        """Nobody will want what this opening or an earlier one has stored. Idempotent."""
        there = self.snapshots.get((session, stage))
        if there is not None and (there.order.epoch, there.order.opening) <= (epoch, opening):
            del self.snapshots[session, stage]
