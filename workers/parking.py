"""Sessions' states on their way into the host's store and back.

Files are written and read by one thread, in the order in which that was asked for: what is
to be undone comes after what it undoes, however soon whoever waited was cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from protocol.errors import SessionStateLost
from workers.engine import EmitEvent, Engine, EngineSession, ParkableSession
from workers.snapshots import SnapshotStore, Taken

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

    async def park(
        self,
        session: str,
        state: ParkableSession,
        size_bytes: int,
        step: int,
        expires_at_s: int,
    ) -> int:
        """Write the state of `session`, which takes about `size_bytes`; the bytes of the file.

        Raises CapacityExceeded where the store has no room, and what the engine raises.
        Then, and when it is cancelled, nothing is left of it.
        """
        store = self._store
        draft = await self._in_thread(
            lambda: store.begin(session, self._stage, size_bytes), undo=store.abandon
        )
        try:
            await state.snapshot(draft.path)
            return await self._in_thread(
                lambda: store.commit(
                    draft,
                    engine=self._kind,
                    weights=self._engine.weights(),
                    step=step,
                    expires_at_s=expires_at_s,
                ),
                undo=lambda _: store.remove(session, self._stage),
            )
        except BaseException:
            self._aside(lambda: store.abandon(draft))
            raise

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent
    ) -> tuple[EngineSession, int]:
        """A session with the state that was parked, and the step it is at; it is parked no more.

        Raises SessionStateLost when there is none that fits, and as the engine's `open` does:
        then it stays parked.
        """
        store, engine = self._store, self._engine
        try:
            taken = await self._in_thread(
                lambda: store.take(
                    session, self._stage, engine=self._kind, weights=engine.weights()
                ),
                undo=Taken.close,
            )
            with taken:
                state = await engine.restore(session, settings, emit, taken.path)
        except SessionStateLost:
            self.forget(session)
            raise
        self.forget(session)
        return state, taken.step or 0

    def forget(self, session: str) -> None:
        """Remove what is parked of `session`, if anything is."""
        self._aside(lambda: self._store.remove(session, self._stage))

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
