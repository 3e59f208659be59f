"""A worker: one engine behind the link.

The endpoint is bound before the model is loaded, so that gateways know at once that a
worker is coming. The control side (`workers.control`) decides; this shell carries out:
it calls the engine, runs a task for each turn, and sends reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from protocol.arena import Arrival
from protocol.deadline_timer import DeadlineTimer
from protocol.edges import decode_note
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    EngineFailed,
    EngineLost,
    ErrorInfo,
    InvalidRequest,
)
from protocol.link_events import LinkSettings
from protocol.link_frames import WorkerInfo
from protocol.messages import (
    Command,
    Fence,
    Output,
    Report,
    TurnEnded,
    Update,
)
from protocol.payloads import Payload
from protocol.schema import check_payload, schema_of
from protocol.worker_endpoint import WorkerEndpoint
from workers.control import Control
from workers.control_events import (
    AbandonTurn,
    Action,
    ApplyInput,
    AttachArena,
    CancelTurn,
    CommandReceived,
    CommitTurn,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    Emitted,
    EngineReady,
    Event,
    FeedTurn,
    FreeSession,
    GatewayDown,
    GatewayUp,
    InputFailed,
    InputTaken,
    LinkCrowded,
    Noticed,
    OpenSession,
    OperationDone,
    OutputRefused,
    PaceTurn,
    RepeatTurn,
    SendOutput,
    SendReport,
    Settle,
    ShuttingDown,
    SignalSession,
    StartTurn,
    Tick,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
    VoidTurn,
)
from workers.engine import Engine, EngineSession, Turn, TurnResult
from workers.spec import WorkerSpec
from workers.transfers import Transfers
from workers.turns import TurnInputs

_log = structlog.get_logger(__name__)

_STOP_S = 3.0


@dataclass
class _RunningTurn:
    task: asyncio.Task[TurnResult | ErrorInfo]
    inputs: TurnInputs
    room: asyncio.Event


class Worker:
    """One worker: its engine, its sessions and its turns."""

    def __init__(
        self,
        spec: WorkerSpec,
        engine: Engine,
        *,
        limits: ControlLimits | None = None,
        link: LinkSettings | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._spec = spec
        self._engine = engine
        self._link_settings = link
        self._control = Control(
            # The sessions of a gateway that has gone can be taken over by nobody.
            limits or ControlLimits.serving(spec.sessions, owner_gone_ms=0.0)
        )
        self._sessions: dict[str, EngineSession] = {}
        self._turns: dict[tuple[str, int], _RunningTurn] = {}
        self._events: deque[Event] = deque()
        self._telling = False
        self._settle_due = False
        self._stop = asyncio.Event()
        self._emptied = asyncio.Event()

    def stop(self) -> None:
        """Cancel all turns, free all sessions, shut the engine down; then `serve` ends."""
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Bind, load and serve until `stop`; `on_ready` is called once the model is loaded.

        Raises ConfigError when the endpoint cannot be bound, and what loading raises.
        """
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(lambda: self._tell(Tick()), self._now_ms)
        self._endpoint = WorkerEndpoint(
            self._spec.endpoint,
            self.incarnation,
            WorkerInfo(self._spec.stage, self._spec.engine, False),
            on_command=self._on_command,
            on_gateway_up=self._on_gateway_up,
            on_gateway_down=self._on_gateway_down,
            on_turn_end=lambda: self._tell(Settle()),
            status=lambda: self._control.status(self._spec.stage, resident_bytes()),
            on_crowded=lambda gateway, crowded: self._tell(LinkCrowded(gateway, crowded)),
            settings=self._link_settings,
        )
        self._transfers = Transfers(
            self._spec.endpoint,
            self.incarnation,
            send=self._report,
            on_failed=lambda session, turn, error: self._tell(
                OutputRefused(session, turn, error.info())
            ),
            on_input=self._on_input,
        )
        loading = asyncio.create_task(self._load(on_ready))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not loading.done() or loading.exception() is None:
                    await stopping
                    await self._wind_down()
            if loading.done():
                loading.result()
        finally:
            # All that needs no waiting comes first: it is done whenever this is cancelled.
            self._endpoint.close()
            self._timer.cancel()
            for session in list(self._sessions):
                self._free(session)
            for task in (loading, stopping):
                task.cancel()
            try:
                await self._transfers.close()
                await asyncio.gather(loading, stopping, return_exceptions=True)
            finally:
                await self._engine.shutdown()

    async def _load(self, on_ready: Callable[[], None]) -> None:
        _log.info("loading", engine=self._spec.engine)
        await self._engine.load()
        # The model's objects live as long as the process: no collection need look at them.
        gc.collect()
        gc.freeze()
        self._tell(EngineReady())
        self._endpoint.announce()
        _log.info("ready")
        on_ready()

    async def _wind_down(self) -> None:
        _log.info("stopping", sessions=self._control.sessions)
        self._tell(ShuttingDown())
        self._endpoint.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._emptied.wait()
        for running in self._turns.values():
            running.task.cancel()

    # Between the control side and the rest

    def _on_command(self, gateway: str, command: Command) -> None:
        self._tell(CommandReceived(gateway, command))

    def _on_gateway_up(self, gateway: str) -> None:
        self._transfers.gateway_up(gateway)
        self._tell(GatewayUp(gateway))

    def _on_gateway_down(self, gateway: str) -> None:
        _log.warning("gateway_lost", gateway=gateway, sessions=self._control.sessions)
        self._tell(GatewayDown(gateway))

    def _on_input(self, arrival: Arrival) -> None:
        """Stream input came through the gateway's arena, beside the link."""
        try:
            note = decode_note(arrival.note)
        except msgspec.DecodeError:
            _log.error("malformed_input", gateway=arrival.producer, session=arrival.session)
            self._transfers.release(arrival.descriptor)
            return
        fence = Fence(arrival.session, note.epoch, note.owner)
        update = Update(fence, note.sequence, arrival.descriptor, note.after_controls)
        self._on_command(arrival.producer, update)
        if not self._settle_due:
            self._settle_due = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._settle_due = False
        self._tell(Settle())

    def _tell(self, event: Event) -> None:
        """Handle `event` after those before it; what it causes is done when this returns.

        Called from inside an action it only queues: the outer call goes on with it.
        """
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._events:
                now_ms = self._now_ms()
                for action in self._control.handle(self._events.popleft(), now_ms):
                    self._carry_out(action)
        finally:
            self._telling = False
        if self._stop.is_set() and not self._control.sessions:
            self._emptied.set()
        self._timer.arm(self._control.deadline_ms)

    def _now_ms(self) -> float:
        return self._loop.time() * 1000.0

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendReport():
                self._send(action)
            case SendOutput():
                self._transfers.put(action)
            case PaceTurn():
                self._pace(action)
            case ApplyInput():
                self._apply(action)
            case FeedTurn():
                self._feed(action)
            case StartTurn():
                self._start(action)
            case RepeatTurn():
                self._transfers.begin(action.session, action.turn, action.readers, action.to_client)
            case CommitTurn():
                self._commit(action)
            case CancelTurn():
                self._transfers.void(action.session, action.turn)
                if (running := self._turns.get((action.session, action.turn))) is not None:
                    running.task.cancel()
            case VoidTurn():
                self._transfers.void(action.session, action.turn)
            case AbandonTurn():
                if self._turns.pop((action.session, action.turn), None) is not None:
                    _log.error("turn_abandoned", session=action.session, turn=action.turn)
            case OpenSession():
                self._operate(action.session, lambda: self._open(action))
            case ConfigureSession():
                self._operate(action.session, lambda: self._configure(action))
            case SignalSession():
                session = self._sessions[action.session]
                self._operate(action.session, lambda: session.signal(action.name, action.arguments))
            case FreeSession():
                self._free(action.session)
            case AttachArena():
                self._transfers.read_from(action.path)
            case DiscardPayload():
                self._transfers.discard(action.payload)

    def _send(self, action: SendReport) -> None:
        report = action.report
        if not (isinstance(report, TurnEnded) and self._transfers.end(action.gateway, report)):
            self._report(action.gateway, report)

    def _report(self, gateway: str, report: Report) -> None:
        try:
            self._endpoint.send(gateway, report)
        except EngineLost:
            # The link has just gone, and the control side is about to be told. Output
            # stays kept; whether anybody asks for it again is the gateway's to say.
            return
        except (CapacityExceeded, InvalidRequest) as error:
            if isinstance(report, Output):
                self._tell(OutputRefused(report.session, report.turn, error.info()))
                return
            # Nothing but output may be missing: a gateway this far behind starts afresh.
            _log.error("gateway_dropped", gateway=gateway, reason=error.message)
            self._endpoint.drop(gateway)

    def _pace(self, action: PaceTurn) -> None:
        running = self._turns.get((action.session, action.turn))
        if running is None:
            return
        if action.wait:
            running.room.clear()
        else:
            running.room.set()

    # Between the control side and the engine

    def _operate(self, session: str, operation: Callable[[], dict[str, Any]]) -> None:
        try:
            done = OperationDone(session, None, operation())
        except Exception as error:
            done = OperationDone(session, self._explain(error, session=session))
        self._tell(done)

    def _open(self, action: OpenSession) -> dict[str, Any]:
        name = action.session

        def emit(event: str, arguments: dict[str, Any]) -> None:
            self._tell(Noticed(name, event, arguments))

        self._sessions[name] = self._engine.open(name, action.settings, emit)
        self._transfers.opened(name, action.owner, action.output)
        return {}

    def _configure(self, action: ConfigureSession) -> dict[str, Any]:
        self._sessions[action.session].configure(action.settings)
        return {}

    def _apply(self, action: ApplyInput) -> None:
        try:
            self._sessions[action.session].update(self._transfers.get(action.payload))
        except Exception as error:
            info = self._explain(error, session=action.session)
            self._tell(InputFailed(action.session, action.sequence, info))
        finally:
            self._transfers.discard(action.payload)

    def _free(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        self._transfers.freed(name)
        if session is None:
            return
        try:
            session.close()
        except Exception:
            _log.exception("session_close_failed", session=name)

    def _start(self, action: StartTurn) -> None:
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
            if (running := self._turns.get(key)) is not None and running.inputs is inputs:
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
        )
        task = self._tasks.create_task(self._run(self._sessions[action.session], action, turn))
        self._turns[key] = _RunningTurn(task, inputs, room)
        # Also told when the task is cancelled before its first step.
        task.add_done_callback(lambda done: self._finished(key, inputs, done))

    def _feed(self, action: FeedTurn) -> None:
        running = self._turns.get((action.session, action.turn))
        if running is None:
            if action.payload is not None:
                self._transfers.discard(action.payload)
            return
        if action.payload is not None:
            running.inputs.put(action.payload, counted=True)
        if action.last:
            running.inputs.end()

    async def _run(
        self, session: EngineSession, action: StartTurn, turn: Turn
    ) -> TurnResult | ErrorInfo:
        structlog.contextvars.bind_contextvars(
            session=action.session, epoch=action.epoch, turn=action.turn, lane=action.lane
        )
        try:
            return await session.run(turn)
        except Exception as error:
            return self._explain(error)

    def _finished(
        self,
        key: tuple[str, int],
        inputs: TurnInputs,
        task: asyncio.Task[TurnResult | ErrorInfo],
    ) -> None:
        # An abandoned turn reads until here, and holds what it reads.
        inputs.close()
        running = self._turns.get(key)
        if running is None or running.task is not task:
            return
        del self._turns[key]
        if task.cancelled():
            self._tell(TurnFinished(*key, TurnOutcome.CANCELLED))
            return
        result = task.result()
        if isinstance(result, ErrorInfo):
            self._tell(TurnFinished(*key, TurnOutcome.FAILED, result))
        else:
            self._tell(TurnFinished(*key, TurnOutcome.COMPLETED, None, result.usage, result.commit))

    def _commit(self, action: CommitTurn) -> None:
        """Put the turn's state in its place; nothing comes between this and the answer."""
        error = None
        try:
            action.commit()
        except Exception as raised:
            error = self._explain(raised, session=action.session, turn=action.turn)
        self._tell(TurnCommitted(action.session, action.turn, error))

    def _explain(self, error: Exception, **context: object) -> ErrorInfo:
        """What a client is told of an engine's exception; the rest is for the log."""
        match error:
            case AntiphonError():
                _log.warning("engine_refused", code=error.code, reason=error.message, **context)
                return error.info()
            case _:
                _log.error("engine_failed", exc_info=error, **context)
                kind = type(error).__name__
                return EngineFailed(
                    f"the engine of stage {self._spec.stage} failed ({kind})"
                ).info()


def resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as statistics:
            return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
