"""Sessions' states on their way into the host's store and back.

Files are written and read by one thread, in the order in which that was asked for: what is
to be undone comes after what it undoes, however soon whoever waited was cancelled.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from protocol.errors import SessionStateLost
from protocol.messages import SnapshotOrder
from workers.control_events import ForgetParked, ParkSession, Restore
from workers.engine import EmitEvent, Engine, EngineSession, ParkableSession
from workers.snapshots import SnapshotStore, Stored, Taken

_log = structlog.get_logger(__name__)

Result = TypeVar("Result")


class Parking:
    """Parks and restores the sessions of one worker. Make it on a running loop."""

    def __init__(self, store: SnapshotStore, engine: Engine, kind: str, stage: str) -> None:
        self._store = store
        self._engine = engine
        self._kind = kind
        self._stage = stage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parking")
        # What an earlier deployment left, or a worker that was killed, is in nobody's way.
        self._aside(lambda: store.sweep(time.time()))

    async def park(self, action: ParkSession, state: ParkableSession, size_bytes: int) -> int:
        """Write a session's state, which takes about `size_bytes`; the bytes of the file.

        Raises CapacityExceeded where the store has no room, Fenced where it has a newer state
        of the session, and what the engine raises. Then nothing is left of it; cancelled, one
        that was to stay may be there.
        """
        store, session = self._store, action.session
        draft = await self._in_thread(
            lambda: store.begin(session, self._stage, size_bytes), undo=store.abandon
        )

        def undo(_: int) -> None:
            if not action.stays:
                store.remove(session, self._stage, action.order)

        try:
            await state.snapshot(draft.path)
            return await self._in_thread(
                lambda: store.commit(
                    draft,
                    order=action.order,
                    owner=action.owner,
                    engine=self._kind,
                    weights=self._engine.weights(),
                    step=action.step,
                    expires_at_s=action.expires_at_s,
                ),
                undo=undo,
            )
        except BaseException:
            self._aside(lambda: store.abandon(draft))
            raise

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, restore: Restore
    ) -> tuple[EngineSession, int]:
        """A session with the state that was parked, and the step it is at; it is parked no
        more, unless it `stays`.

        Raises SessionStateLost when there is none that fits, and as the engine's `open` does:
        then it stays parked.
        """
        store, engine = self._store, self._engine
        try:
            taken = await self._in_thread(
                lambda: store.take(
                    session,
                    self._stage,
                    wanted=restore.wanted,
                    taken=restore.taken,
                    engine=self._kind,
                    weights=engine.weights(),
                ),
                undo=Taken.close,
            )
            with taken:
                state = await engine.restore(session, settings, emit, taken.path)
        except SessionStateLost:
            self._remove(session, restore.taken)
            raise
        if not restore.stays:
            self._remove(session, restore.taken)
        return state, taken.step or 0

    async def stored(self) -> list[Stored]:
        """What earlier workers of the stage have stored."""
        return await self._in_thread(lambda: self._store.stored(self._stage))

    def forget(self, action: ForgetParked) -> None:
        """Remove what is parked of a session, if anything is."""
        self._remove(action.session, SnapshotOrder(action.epoch, action.opening, sys.maxsize))

    def _remove(self, session: str, through: SnapshotOrder) -> None:
        self._aside(lambda: self._store.remove(session, self._stage, through))

    async def settled(self) -> None:
        """Wait for what was to be written or removed."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def close(self) -> None:
        """The same, and nothing comes after it."""
        await asyncio.to_thread(self._thread.shutdown)

    async def _in_thread(
        self, work: Callable[[], Result], undo: Callable[[Result], None] = lambda result: None
    ) -> Result:
        """The result of `work`; cancelled, `undo` is called with it once it is there."""
        future = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                self._aside(lambda: _undo(future, undo))
            raise

    def _aside(self, work: Callable[[], object]) -> None:
        """Have something done for which nobody waits; what goes wrong is for the log."""

        def do() -> None:
            try:
                work()
            except Exception:
                _log.exception("parking_failed", stage=self._stage)

        self._thread.submit(do)


def _undo(done: Future[Result], undo: Callable[[Result], None]) -> None:
    if done.exception() is None:
        undo(done.result())
