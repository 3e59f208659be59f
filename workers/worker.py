"""A worker: one engine behind the link.

The endpoint is bound before the model is loaded, so that gateways know at once that a
worker is coming. The control side (`workers.control`) decides; this shell carries out:
it calls the engine, runs a task for each turn, and sends reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from protocol.arena import Arrival
from protocol.deadline_timer import DeadlineTimer
from protocol.device_bytes import HOST
from protocol.edges import decode_note
from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ConfigError,
    EngineFailed,
    EngineLost,
    ErrorInfo,
    InvalidRequest,
    SessionStateLost,
    raised,
)
from protocol.link_events import LinkSettings
from protocol.link_frames import WorkerInfo
from protocol.messages import (
    Command,
    Fence,
    Fork,
    Output,
    Report,
    SnapshotTaken,
    TurnEnded,
    Update,
    WorkerStatus,
)
from protocol.worker_endpoint import WorkerEndpoint
from sessions.compute import Compute
from sessions.ledger import Budget, Ledger
from workers import processor_time
from workers.control import Control
from workers.control_events import (
    AbandonTurn,
    Action,
    Announce,
    ApplyInput,
    AttachArena,
    CancelTurn,
    CommandReceived,
    CommitTurn,
    ComputeMeasured,
    ConfigureSession,
    ControlLimits,
    DiscardPayload,
    EngineReady,
    Event,
    FeedTurn,
    ForgetParked,
    FreeSession,
    GatewayDown,
    GatewayUp,
    InputFailed,
    LinkCrowded,
    Noticed,
    OpenSession,
    OperationDone,
    OutputRefused,
    PaceTurn,
    ParkSession,
    RepeatTurn,
    Restore,
    RoomAsked,
    RoomGiven,
    SendOutput,
    SendReport,
    SessionFreed,
    SessionMeasured,
    Settle,
    ShuttingDown,
    SignalSession,
    StartTurn,
    StoredFound,
    Tick,
    TurnCommitted,
    TurnFinished,
    VoidTurn,
)
from workers.engine import (
    DeviceUse,
    EmitEvent,
    Engine,
    EngineSession,
    NeedsRoom,
    ParkableSession,
)
from workers.host_memory import resident_bytes
from workers.parking import Parking
from workers.running_turns import RunningTurns
from workers.snapshots import SnapshotStore
from workers.spec import WorkerSpec
from workers.transfers import Transfers

_log = structlog.get_logger(__name__)

_STOP_S = 3.0
_RESTORES = 8
"""How often a restore is tried for which others have made room: there may be less again."""
_SAMPLE_MS = 500.0
"""Processor time is counted by the system in steps of 10 ms: too soon says too little."""


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
        self._ledger = Ledger({device: self._budget(size) for device, size in spec.budget.items()})
        self._control = Control(
            # The sessions of a gateway that has gone can be taken over by nobody.
            limits or ControlLimits.serving(spec.sessions, owner_gone_ms=0.0),
            self._ledger,
            self._declare,
            Compute(spec.head_room),
        )
        self._sampled_ms = 0.0
        self._sessions: dict[str, EngineSession] = {}
        self._parking: Parking | None = None
        self._moving: dict[str, asyncio.Task[OperationDone]] = {}
        self._asked: dict[str, asyncio.Future[ErrorInfo | None]] = {}
        """By session, who waits for room that its engine has asked for."""
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
            status=self._status,
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
        if self._spec.snapshots:
            store = SnapshotStore(self._spec.snapshots, self._spec.deployment)
            self._parking = Parking(store, self._engine, self._spec.engine, self._spec.stage)
        loading = asyncio.create_task(self._load(on_ready))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._turns = RunningTurns(
                    self._engine,
                    self._transfers,
                    tasks,
                    tell=self._turn_tells,
                    explain=self._explain,
                    reserve=self._reserve,
                )
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
                if self._parking is not None:
                    await self._parking.close()
                await asyncio.gather(loading, stopping, return_exceptions=True)
            finally:
                await self._engine.shutdown()

    async def _load(self, on_ready: Callable[[], None]) -> None:
        _log.info("loading", engine=self._spec.engine)
        await self._engine.load()
        # The model's objects live as long as the process: no collection need look at them.
        gc.collect()
        gc.freeze()
        self._account()
        if self._parking is not None:
            for stored in await self._parking.stored():
                self._tell(StoredFound(*stored))
        self._tell(EngineReady())
        _log.info("ready")
        on_ready()

    def _status(self) -> WorkerStatus:
        """What is told with a heartbeat, and when a session was taken in or let go."""
        now_ms = self._now_ms()
        if now_ms >= self._sampled_ms + _SAMPLE_MS:
            self._sampled_ms = now_ms
            self._tell(ComputeMeasured(processor_time.sample(self._spec.cores)))
        status = self._control.status(self._spec.stage, resident_bytes())
        return msgspec.structs.replace(status, counters=self._engine.counters())

    def _budget(self, total_bytes: int) -> Budget:
        return Budget(total_bytes, self._spec.head_room, self._spec.tenant_share)

    def _account(self) -> None:
        """Enter what this process holds now that its engine is loaded.

        Raises ConfigError when the budget leaves nothing for sessions.
        """
        used = {HOST: DeviceUse(), **self._engine.devices()}
        for device, use in used.items():
            if use.total is not None:
                self._ledger.bound(device, self._budget(use.total))
            engine, arena = use.model, 0
            if device == HOST:
                engine = max(0, resident_bytes() - use.pool)
                arena = self._transfers.arena_bytes
                if self._spec.shares_memory:
                    # The others may well need less than their share of a small machine.
                    least = engine + use.pool + arena + self._spec.budget[HOST] // 2
                    self._ledger.raise_to(HOST, least)
            try:
                self._ledger.load(device, engine=engine, pool=use.pool, arena=arena)
            except CapacityExceeded as error:
                field = f"stages.{self._spec.stage}.{error.field}"
                raise ConfigError(f"{field}: {error.message}", field=field) from None

    async def _wind_down(self) -> None:
        _log.info("stopping", sessions=self._control.sessions)
        self._tell(ShuttingDown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._emptied.wait()
        self._turns.cancel_all()
        for moving in self._moving.values():
            moving.cancel()

    # Between the control side and the rest

    def _on_command(self, gateway: str, command: Command) -> None:
        self._tell(CommandReceived(gateway, command))
        # Of the commands that come together the last is followed by a word about all.
        if self._control.unsaid and not self._settle_due:
            self._settle_due = True
            self._loop.call_soon(self._settle)

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
        self._timer.arm_soon(self._deadline_ms)

    def _deadline_ms(self) -> float | None:
        return self._control.deadline_ms

    def _now_ms(self) -> float:
        # Not the loop's clock, which is uvloop's, of whole ms: turns are measured by this.
        return time.monotonic() * 1000.0

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendReport():
                self._send(action)
            case SendOutput():
                self._transfers.put(action)
            case PaceTurn():
                self._turns.pace(action)
            case RoomGiven():
                if (asked := self._asked.pop(action.session, None)) is not None and (
                    not asked.done()
                ):
                    asked.set_result(action.error)
            case ApplyInput():
                self._apply(action)
            case FeedTurn():
                self._turns.feed(action)
            case StartTurn():
                self._turns.start(action, self._sessions[action.session])
            case RepeatTurn():
                self._transfers.begin(action.session, action.turn, action.readers, action.to_client)
            case CommitTurn():
                self._commit(action)
            case CancelTurn():
                self._transfers.void(action.session, action.turn)
                self._turns.cancel(action.session, action.turn)
            case VoidTurn():
                self._transfers.void(action.session, action.turn)
            case AbandonTurn():
                self._turns.abandon(action.session, action.turn)
            case OpenSession(restore=Restore() as restore):
                self._move(action.session, self._restore(action, restore))
            case OpenSession(fork=Fork() as fork):
                self._operate(action.session, lambda: self._fork(action, fork))
            case OpenSession():
                self._operate(action.session, lambda: self._open(action))
            case ParkSession():
                self._move(action.session, self._park(action), logged=not action.stays)
            case ForgetParked():
                if self._parking is not None:
                    self._parking.forget(action)
            case ConfigureSession():
                self._operate(action.session, lambda: self._configure(action))
            case SignalSession():
                session = self._sessions[action.session]
                self._operate(action.session, lambda: session.signal(action.name, action.arguments))
            case FreeSession():
                self._tell(SessionFreed(action.session, self._free(action.session)))
            case Announce():
                self._endpoint.announce()
            case AttachArena():
                self._transfers.read_from(action.path)
            case DiscardPayload():
                self._transfers.discard(action.payload)

    def _send(self, action: SendReport) -> None:
        report = action.report
        if isinstance(report, SnapshotTaken) and report.error is not None:
            # As often as the session's owner is told, and not with each turn.
            _log.warning(
                "snapshot_failed",
                session=report.session,
                step=report.step,
                code=report.error.code,
                reason=report.error.message,
            )
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

    # Between the control side and the engine

    def _operate(self, session: str, operation: Callable[[], dict[str, Any]]) -> None:
        try:
            done = OperationDone(session, None, operation())
        except Exception as error:
            done = OperationDone(session, self._explain(error, session=session))
        self._measure(session)
        self._tell(done)

    def _declare(self, settings: dict[str, Any]) -> dict[str, int]:
        try:
            return self._engine.declare(settings)
        except AntiphonError:
            raise
        except Exception as error:
            raise self._failed(error) from None

    def _measure(self, name: str) -> None:
        """Correct the session's account by what its engine counts."""
        if (session := self._sessions.get(name)) is None:
            return
        try:
            measured = session.measure()
        except Exception:
            _log.exception("measuring_failed", session=name)
            return
        if measured is not None and not self._ledger.measures(name, measured):
            self._tell(SessionMeasured(name, measured))

    def _open(self, action: OpenSession) -> dict[str, Any]:
        name = action.session
        return self._opened(action, self._engine.open(name, action.settings, self._notice(name)))

    def _fork(self, action: OpenSession, fork: Fork) -> dict[str, Any]:
        name, source = action.session, self._sessions[fork.session]
        return self._opened(action, source.fork(name, fork.settings, self._notice(name)))

    def _notice(self, name: str) -> EmitEvent:
        return lambda event, arguments: self._tell(Noticed(name, event, arguments))

    def _opened(self, action: OpenSession, session: EngineSession) -> dict[str, Any]:
        self._sessions[action.session] = session
        self._transfers.opened(action.session, action.owner, action.output)
        said = {"about": session.describe(), "kept": session.kept()}
        return {**self._may_park(session), **{name: what for name, what in said.items() if what}}

    def _may_park(self, session: EngineSession) -> dict[str, Any]:
        if not isinstance(session, ParkableSession):
            return {}
        if self._parking is None:
            return {"unparkable": "its host has no store: parking.memory is 0, and no parking.disk"}
        return {"parks": True}

    def _move(
        self, session: str, moving: Coroutine[Any, Any, dict[str, Any]], *, logged: bool = True
    ) -> None:
        """Park or restore a session, unless it is freed before that is done."""

        async def move() -> OperationDone:
            try:
                return OperationDone(session, None, await moving)
            except AntiphonError as error:
                if not logged:
                    return OperationDone(session, error.info())
                return OperationDone(session, self._explain(error, session=session))
            except Exception as error:
                return OperationDone(session, self._explain(error, session=session))

        def moved(task: asyncio.Task[OperationDone]) -> None:
            if self._moving.get(session) is not task or task.cancelled():
                return
            del self._moving[session]
            self._measure(session)
            self._tell(task.result())

        self._moving[session] = self._tasks.create_task(move())
        self._moving[session].add_done_callback(moved)

    async def _park(self, action: ParkSession) -> dict[str, Any]:
        session = self._sessions[action.session]
        assert self._parking is not None
        assert isinstance(session, ParkableSession)
        size_bytes = sum(self._ledger.of(action.session).values())
        return {"parked": await self._parking.park(action, session, size_bytes)}

    async def _restore(self, action: OpenSession, restore: Restore) -> dict[str, Any]:
        if self._parking is None:
            raise SessionStateLost("this worker has no store of parked sessions")
        name = action.session
        for attempt in range(_RESTORES):
            try:
                session, step = await self._parking.restore(
                    name, action.settings, self._notice(name), restore
                )
                break
            except NeedsRoom as lacking:
                if attempt == _RESTORES - 1:
                    raise
                await self._reserve(name, None, lacking.needs)
        return {**self._opened(action, session), "committed_step": step}

    async def _reserve(self, name: str, turn: int | None, needs: dict[str, int]) -> None:
        """Have a session count with so many bytes, once others have made room if they have to.

        Raises CapacityExceeded, or what else there is against it.
        """
        if name in self._asked:
            raise CapacityExceeded("the session waits for room already")
        # What sessions that share something are charged for may have changed with one of them.
        for session in self._sessions:
            self._measure(session)
        asked = self._asked[name] = self._loop.create_future()
        try:
            self._tell(RoomAsked(name, turn, needs))
            error = await asked
        finally:
            if self._asked.get(name) is asked:
                del self._asked[name]
        if error is not None:
            raise raised(error)

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

    def _free(self, name: str) -> ErrorInfo | None:
        """Close the engine's session; where that fails it stays, and the error is returned."""
        if (moving := self._moving.pop(name, None)) is not None:
            moving.cancel()
        self._transfers.freed(name)
        if (session := self._sessions.get(name)) is None:
            return None
        try:
            session.close()
        except Exception as error:
            return self._failed(error, session=name, operation="close").info()
        del self._sessions[name]
        return None

    def _turn_tells(self, event: Event) -> None:
        # What is to be committed is measured then.
        if isinstance(event, TurnFinished) and event.commit is None:
            self._measure(event.session)
        self._tell(event)

    def _commit(self, action: CommitTurn) -> None:
        """Put the turn's state in its place; nothing comes between this and the answer."""
        error = None
        try:
            action.commit()
        except Exception as raised:
            error = self._explain(raised, session=action.session, turn=action.turn)
        self._measure(action.session)
        self._tell(TurnCommitted(action.session, action.turn, error))

    def _explain(self, error: Exception, **context: object) -> ErrorInfo:
        """What a client is told of an engine's exception; the rest is for the log."""
        match error:
            case AntiphonError():
                _log.warning("engine_refused", code=error.code, reason=error.message, **context)
                return error.info()
            case _:
                return self._failed(error, **context).info()

    def _failed(self, error: Exception, **context: object) -> EngineFailed:
        _log.error("engine_failed", exc_info=error, **context)
        kind = type(error).__name__
        return EngineFailed(f"the engine of stage {self._spec.stage} failed ({kind})")
