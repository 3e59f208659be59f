"""The turns that run on a worker: a task each, with its input and its room for output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from protocol.errors import ErrorInfo
from protocol.payloads import Payload
from protocol.schema import check_payload, schema_of
from workers.control_events import (
    Emitted,
    Event,
    FeedTurn,
    InputTaken,
    PaceTurn,
    StartTurn,
    TurnFinished,
    TurnOutcome,
)
from workers.engine import Engine, EngineSession, Turn, TurnResult
from workers.transfers import Transfers
from workers.turns import TurnInputs

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Running:
    inputs: TurnInputs
    room: asyncio.Event
    task: asyncio.Task[None] = field(init=False)


class RunningTurns:
    """All turns of one worker's sessions. What comes of them is told to the control side.

    `explain` says what a client is told of an exception. `reserve(session, turn, needs)` has a
    session count with so many bytes, by device, and waits for that.
    """

    def __init__(
        self,
        engine: Engine,
        transfers: Transfers,
        tasks: asyncio.TaskGroup,
        *,
        tell: Callable[[Event], None],
        explain: Callable[[Exception], ErrorInfo],
        reserve: Callable[[str, int, dict[str, int]], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._tasks = tasks
        self._tell = tell
        self._explain = explain
        self._reserve = reserve
        self._running: dict[tuple[str, int], _Running] = {}

    def start(self, action: StartTurn, session: EngineSession) -> None:
        """Have the engine run a turn."""
        key = (action.session, action.turn)
        inputs = TurnInputs(
            self._transfers.receive,
            self._transfers.release,
            self._transfers.discard,
            lambda size: self._tell(InputTaken(*key, size)),
        )
        self._transfers.begin(*key, action.readers, action.to_client)
        for descriptor in action.inputs:
            inputs.put(descriptor, counted=False)
        if action.last:
            inputs.end()

        def emit(payload: Payload) -> None:
            if (schema := schema_of(self._engine.produces, payload.type)) is not None:
                check_payload(payload, schema)
            # What an engine's thread hands over after its turn has ended is not wanted.
            if (running := self._running.get(key)) is not None and running.inputs is inputs:
                self._tell(Emitted(*key, payload))

        room = asyncio.Event()
        room.set()

        async def wait_for_room() -> None:
            # Of the many that wake together the first may have taken all the room again.
            while not room.is_set() or not self._transfers.has_room(*key):
                await room.wait()
                await self._transfers.room(*key)

        turn = Turn(
            action.turn,
            action.lane,
            action.parameters,
            inputs,
            emit,
            wait_for_room,
            action.step,
            lambda needs: self._reserve(*key, needs),
        )
        running = _Running(inputs, room)
        running.task = self._tasks.create_task(self._run(session, action, turn, running))
        self._running[key] = running
        # One that is cancelled before its first step says nothing itself.
        running.task.add_done_callback(lambda _: self._finished(key, running, None))

    def feed(self, action: FeedTurn) -> None:
        """Give a turn more input."""
        running = self._running.get((action.session, action.turn))
        if running is None:
            if action.payload is not None:
                self._transfers.discard(action.payload)
            return
        if action.payload is not None:
            running.inputs.put(action.payload, counted=True)
        if action.last:
            running.inputs.end()

    def pace(self, action: PaceTurn) -> None:
        """Have a turn wait for room, or go on."""
        running = self._running.get((action.session, action.turn))
        if running is None:
            return
        if action.wait:
            running.room.clear()
        else:
            running.room.set()

    def cancel(self, session: str, turn: int) -> None:
        """Stop a turn, which is told once its engine has stopped."""
        if (running := self._running.get((session, turn))) is not None:
            running.task.cancel()

    def cancel_all(self) -> None:
        """Stop every turn."""
        for running in self._running.values():
            running.task.cancel()

    def abandon(self, session: str, turn: int) -> None:
        """Take no notice any more of a turn whose engine does not stop."""
        if self._running.pop((session, turn), None) is not None:
            _log.error("turn_abandoned", session=session, turn=turn)

    async def _run(
        self, session: EngineSession, action: StartTurn, turn: Turn, running: _Running
    ) -> None:
        structlog.contextvars.bind_contextvars(
            session=action.session, epoch=action.epoch, turn=action.turn, lane=action.lane
        )
        result: TurnResult | ErrorInfo
        try:
            result = await session.run(turn)
        except Exception as error:
            result = self._explain(error)
        # Here and not when the task is done: its end leaves with its last output.
        try:
            self._finished((action.session, action.turn), running, result)
        except Exception:
            _log.exception("turn_end_failed", session=action.session, turn=action.turn)

    def _finished(
        self, key: tuple[str, int], running: _Running, result: TurnResult | ErrorInfo | None
    ) -> None:
        """The engine has stopped; without a result because it was cancelled."""
        # An abandoned turn reads until here, and holds what it reads.
        running.inputs.close()
        if self._running.get(key) is not running:
            return
        del self._running[key]
        if result is None:
            self._tell(TurnFinished(*key, TurnOutcome.CANCELLED))
        elif isinstance(result, ErrorInfo):
            self._tell(TurnFinished(*key, TurnOutcome.FAILED, result))
        else:
            self._tell(TurnFinished(*key, TurnOutcome.COMPLETED, None, result.usage, result.commit))
