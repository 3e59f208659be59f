"""The worker's control side: who may command which session, and what becomes of it.

`Control.handle(event, now_ms)` returns actions for the runtime to carry out in order;
what the engine answers comes back as an event. Every command's fence is checked: an
accepted (epoch, owner) excludes lower epochs and other owners of the same epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    Fenced,
    SessionStateLost,
)
from protocol.messages import (
    Acknowledge,
    Answer,
    Attach,
    Close,
    Command,
    Configure,
    Feed,
    Fence,
    Open,
    Park,
    RaiseFloor,
    Replay,
    Report,
    RoomWanted,
    Run,
    Signal,
    SnapshotOrder,
    StageEvent,
    Stop,
    TurnEnded,
    TurnStatus,
    Update,
    WorkerStatus,
)
from sessions.compute import Compute
from sessions.deadlines import Deadlines, earliest
from sessions.ledger import Ledger
from workers.control_events import (
    Action,
    Announce,
    AttachArena,
    CommandReceived,
    ComputeMeasured,
    ControlLimits,
    DiscardPayload,
    Emitted,
    EngineReady,
    Event,
    ForgetParked,
    GatewayDown,
    GatewayUp,
    InputFailed,
    InputTaken,
    LinkCrowded,
    Noticed,
    OperationDone,
    OutputRefused,
    RoomAsked,
    SendOutput,
    SendReport,
    SessionFreed,
    SessionMeasured,
    Settle,
    ShuttingDown,
    StoredFound,
    Tick,
    TurnCommitted,
    TurnFinished,
)
from workers.forks import Forks
from workers.reopens import Reopens
from workers.rooms import Rooms
from workers.session_control import Declare, SessionControl, SessionState
from workers.turn_control import Totals, payloads_of


class _Stored(NamedTuple):
    """Whose session is in the store, and what removes it."""

    owner: str
    forget: ForgetParked


class Control:
    """All sessions of one worker."""

    def __init__(
        self,
        limits: ControlLimits | None = None,
        ledger: Ledger | None = None,
        declare: Declare = lambda settings: {},
        compute: Compute | None = None,
    ) -> None:
        self._limits = limits or ControlLimits()
        self._ledger = ledger or Ledger()
        self._declare = declare
        self._compute = compute or Compute()
        self._ready = False
        self._stopping = False
        self._sessions: dict[str, SessionControl] = {}
        self._gateways: set[str] = set()
        self._crowded: set[str] = set()
        self._gone_ms: dict[str, float] = {}
        self._fences: OrderedDict[str, tuple[int, str]] = OrderedDict()
        # Whose sessions are in the store, and how long ago who had them has gone.
        self._parked: OrderedDict[str, _Stored] = OrderedDict()
        self._parked_alone_ms: dict[str, float] = {}
        self._past_opens: OrderedDict[tuple[Fence, str], Answer] = OrderedDict()
        """What was answered to the opens of sessions that are here no more."""
        self._timed = Deadlines()
        self._unsaid: set[str] = set()
        self._reopens = Reopens(self._limits, self._refuse)
        self._totals = Totals()
        self._forks = Forks()
        self._rooms = Rooms(
            self._ledger,
            self._limits,
            lambda session: self._report(session.owner, RoomWanted(session.session)),
            self._gateways.__contains__,
        )
        self._actions: list[Action] = []

    @property
    def ready(self) -> bool:
        """Whether sessions can be opened: the engine is loaded, and the process is not ending."""
        return self._ready and not self._stopping

    @property
    def sessions(self) -> int:
        """Sessions that hold anything, those opening and closing included."""
        return len(self._sessions)

    @property
    def unsaid(self) -> bool:
        """Whether `Settle` has something to say."""
        return bool(self._unsaid)

    @property
    def waiting(self) -> int:
        """Turns that run and commands that wait."""
        return self._totals.turns + self._totals.waiting

    @property
    def kept_bytes(self) -> int:
        """Output that no consumer has acknowledged yet, in all sessions."""
        return self._ledger.kept_bytes

    @property
    def progress(self) -> int:
        """Grows with everything that the engine gets done."""
        return self._totals.progress

    def status(self, stage: str, resident_bytes: int) -> WorkerStatus:
        """What gateways are told regularly; `resident_bytes` is the process's memory."""
        return WorkerStatus(
            stage,
            self.sessions,
            self.waiting,
            self.progress,
            resident_bytes,
            self.ready,
            self._ledger.devices(),
            self._compute.use(),
        )

    @property
    def deadline_ms(self) -> float | None:
        """When the next `Tick` is due."""
        first_ms = earliest(self._timed.next_ms(), self._rooms.deadline_ms)
        if self._gone_ms:
            first_ms = earliest(first_ms, min(self._gone_ms.values()) + self._limits.owner_gone_ms)
        if self._parked_alone_ms:
            alone_ms = min(self._parked_alone_ms.values()) + self._limits.parked_alone_ms
            first_ms = earliest(first_ms, alone_ms)
        return first_ms

    def handle(self, event: Event, now_ms: float) -> list[Action]:
        """Take `event` in; the actions are to be carried out in order."""
        match event:
            case CommandReceived():
                self._command(event.gateway, event.command, now_ms)
            case GatewayUp():
                self._gateways.add(event.gateway)
                self._gone_ms.pop(event.gateway, None)
                self._parked_alone_ms.pop(event.gateway, None)
                self._free_sessions_of(event.gateway, now_ms)
            case GatewayDown():
                self._gateway_down(event.gateway, now_ms)
            case LinkCrowded():
                self._link_crowded(event.gateway, event.crowded)
            case StoredFound():
                self._found(event, now_ms)
            case EngineReady():
                self._ready = True
                self._actions.append(Announce())
            case Settle():
                pass
            case Tick():
                self._tick(now_ms)
            case SessionMeasured():
                self._ledger.measure(event.session, event.measured)
            case ComputeMeasured(sample=sample):
                self._compute.sampled(sample, now_ms)
            case ShuttingDown():
                self._stopping = True
                # Before anybody is told that a session is lost here, and looks for a place.
                self._actions.append(Announce())
                for session in list(self._sessions.values()):
                    session.close(None, now_ms)
                    self._note(session, now_ms)
            case _:
                session_ = self._sessions.get(event.session)
                if session_ is not None:
                    self._engine_event(session_, event, now_ms)
                    self._note(session_, now_ms)
        for served in self._rooms.serve(self._sessions.values(), now_ms):
            self._note(served, now_ms)
        for begun in self._forks.serve(self._sessions, now_ms):
            self._note(begun, now_ms)
        if not isinstance(event, CommandReceived):
            # Only commands come in numbers, and have a `Settle` behind them.
            self._settle()
        actions, self._actions = self._actions, []
        return actions

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self._ready,
            self._stopping,
            tuple(session.freeze() for session in self._sessions.values()),
            tuple(sorted(self._gateways)),
            tuple(sorted(self._crowded)),
            tuple(sorted(self._gone_ms.items())),
            tuple(self._fences.items()),
            tuple(self._past_opens.items()),
            (tuple(self._parked.items()), tuple(sorted(self._parked_alone_ms.items()))),
            self._reopens.freeze(),
            self._rooms.freeze(),
            self._forks.freeze(),
            (self._totals.turns, self._totals.waiting),
            self._ledger.freeze(),
        )

    def _engine_event(
        self,
        session: SessionControl,
        event: OperationDone
        | SessionFreed
        | InputFailed
        | InputTaken
        | Emitted
        | OutputRefused
        | Noticed
        | TurnFinished
        | RoomAsked
        | TurnCommitted,
        now_ms: float,
    ) -> None:
        match event:
            case OperationDone():
                session.operation_done(event, now_ms)
            case SessionFreed():
                session.freed(event.error, now_ms)
            case Emitted():
                # Whose output is the longest ago goes on first when a link has room again.
                self._sessions[event.session] = self._sessions.pop(event.session)
                session.turns.output(event, now_ms)
            case OutputRefused():
                session.turns.fail_turn(event.turn, event.error, now_ms)
            case InputTaken():
                session.turns.input_taken(event)
            case TurnFinished():
                self._compute.turn_ended()
                session.turns.turn_finished(event, now_ms)
            case RoomAsked():
                session.room_asked(event, now_ms)
            case TurnCommitted():
                session.turns.turn_committed(event, now_ms)
            case Noticed():
                self._report(session.owner, StageEvent(event.session, event.name, event.arguments))
            case InputFailed():
                arguments = {
                    "sequence": event.sequence,
                    "code": event.error.code,
                    "message": event.error.message,
                }
                self._report(session.owner, StageEvent(event.session, "input_failed", arguments))

    def _settle(self) -> None:
        """Say how far stream input has been applied."""
        for name in self._unsaid:
            if (session := self._sessions.get(name)) is not None:
                session.settle()
        self._unsaid.clear()

    def _command(self, gateway: str, command: Command, now_ms: float) -> None:
        fence = command.fence
        if not self._admits(gateway, fence):
            self._refuse(gateway, command, Fenced("another gateway owns this session"))
            return
        if isinstance(command, Open) and (past := self._past_opens.get((fence, command.command))):
            self._report(gateway, past)
            return
        session = self._sessions.get(fence.session)
        if session is None:
            self._command_unknown(gateway, command, now_ms)
            return
        if self._reopens.takes(gateway, command):
            return
        session.epoch, session.owner = fence.epoch, fence.owner
        session.turns.link_crowded(fence.owner in self._crowded)
        self._remember_fence(fence)
        match command:
            case Open() if not session.knows(command.command):
                # Its owner has given up what is here, and wants it anew.
                self._reopens.put(gateway, command)
                session.close(None, now_ms)
            case Update():
                session.update(command, now_ms)
            case RaiseFloor():
                session.raise_floor(command, now_ms)
            case Stop():
                session.stop(command.turn, now_ms)
            case Attach():
                self._actions.append(AttachArena(command.path))
            case Acknowledge():
                session.turns.acknowledge(command)
            case Replay():
                session.replay(command)
            case Close() if SnapshotOrder(fence.epoch, command.opening) < session.opened_as:
                # It is about what an earlier opening has stored.
                forget = ForgetParked(fence.session, fence.epoch, command.opening)
                self._actions.append(forget)
                self._report(gateway, Answer(fence.session, command.command))
            case Close():
                self._reopens.refuse(fence.session)
                session.close(command.command, now_ms)
            case Open() | Configure() | Signal() | Run() | Feed() | Park():
                session.command(command, now_ms)
                if self._rooms.knows(session.session) and not session.evictable:
                    self._rooms.declined(session.session)
        self._note(session, now_ms)

    def _command_unknown(self, gateway: str, command: Command, now_ms: float) -> None:
        fence = command.fence
        match command:
            case Open() if self._stopping:
                self._refuse(gateway, command, CapacityExceeded("this worker is stopping"))
            case Open() if not self._ready:
                error = CapacityExceeded("this worker is still loading its model", code="not_ready")
                self._refuse(gateway, command, error)
            case Open() if len(self._sessions) >= self._limits.sessions:
                self._refuse(gateway, command, CapacityExceeded("this worker is full"))
            case Open(restore=None) if (reason := self._compute.refusal()) is not None:
                self._refuse(gateway, command, CapacityExceeded(reason))
            case Open():
                self._open(command, now_ms)
            case Close():
                self._remember_fence(fence)
                self._parked.pop(fence.session, None)
                forget = ForgetParked(fence.session, fence.epoch, command.opening)
                self._actions.append(forget)
                self._report(gateway, Answer(fence.session, command.command))
            case _:
                self._refuse(gateway, command, SessionStateLost("this worker has no such session"))

    def _open(self, command: Open, now_ms: float) -> None:
        fence = command.fence
        self._remember_fence(fence)
        self._parked.pop(fence.session, None)
        session = SessionControl(
            fence.session,
            fence.epoch,
            fence.owner,
            self._limits,
            self._totals,
            self._ledger,
            self._declare,
            self._actions_append,
            self._report,
            self._send_output,
        )
        session.turns.crowded = fence.owner in self._crowded
        self._sessions[fence.session] = session
        self._compute.sessions(len(self._sessions), now_ms)
        session.command(command, now_ms)
        self._note(session, now_ms)

    def _admits(self, gateway: str, fence: Fence) -> bool:
        if fence.owner != gateway:
            return False
        known = self._fences.get(fence.session)
        return (
            known is None
            or fence.epoch > known[0]
            or (fence.epoch == known[0] and fence.owner == known[1])
        )

    def _remember_fence(self, fence: Fence) -> None:
        self._fences[fence.session] = (fence.epoch, fence.owner)
        self._fences.move_to_end(fence.session)
        if len(self._fences) <= self._limits.remembered_fences:
            return
        for name in self._fences:
            # The fence of a session that is still here is never forgotten.
            if name not in self._sessions:
                del self._fences[name]
                return

    def _refuse(self, gateway: str, command: Command, error: AntiphonError) -> None:
        """Tell the sender, in the form that its command is answered in."""
        name = command.fence.session
        for payload in payloads_of(command):
            self._actions.append(DiscardPayload(payload))
        match command:
            case Open() | Configure() | Signal() | Replay() | Park() | Close():
                self._report(gateway, Answer(name, command.command, error.info()))
            case Run():
                ended = TurnEnded(name, command.turn, TurnStatus.FAILED, error.info())
                self._report(gateway, ended)
            case Update() | Feed() | RaiseFloor() | Stop() | Attach() | Acknowledge():
                pass

    def _gateway_down(self, gateway: str, now_ms: float) -> None:
        self._gateways.discard(gateway)
        self._link_crowded(gateway, False)
        self._reopens.gateway_gone(gateway)
        if any(stored.owner == gateway for stored in self._parked.values()):
            self._parked_alone_ms[gateway] = now_ms
        owned = [s for s in self._sessions.values() if s.owner == gateway]
        if owned:
            self._gone_ms[gateway] = now_ms
        for session in owned:
            # Nobody is there to take what these turns would still make, or needs the room that
            # others would be asked to make.
            session.turns.cancel_all(now_ms)
            if session.shortage is not None and session.state is SessionState.OPENING:
                session.close(None, now_ms)
            self._note(session, now_ms)

    def _link_crowded(self, gateway: str, crowded: bool) -> None:
        if crowded is (gateway in self._crowded):
            return
        if crowded:
            self._crowded.add(gateway)
        else:
            self._crowded.discard(gateway)
        for session in self._sessions.values():
            if session.owner == gateway:
                session.turns.link_crowded(crowded)

    def _free_sessions_of(self, gateway: str, now_ms: float) -> None:
        for session in list(self._sessions.values()):
            if session.owner == gateway:
                session.close(None, now_ms)
                self._note(session, now_ms)

    def _tick(self, now_ms: float) -> None:
        for name in self._timed.due(now_ms):
            session = self._sessions[name]
            session.tick(now_ms)
            self._note(session, now_ms)
        for gateway, gone_ms in list(self._gone_ms.items()):
            if now_ms >= gone_ms + self._limits.owner_gone_ms:
                del self._gone_ms[gateway]
                self._free_sessions_of(gateway, now_ms)
        for gateway, gone_ms in list(self._parked_alone_ms.items()):
            if now_ms >= gone_ms + self._limits.parked_alone_ms:
                del self._parked_alone_ms[gateway]
                for name, stored in list(self._parked.items()):
                    if stored.owner == gateway:
                        del self._parked[name]
                        self._actions.append(stored.forget)

    def _found(self, stored: StoredFound, now_ms: float) -> None:
        """An earlier worker has stored it, and cannot remove it any more."""
        order = stored.order
        forget = ForgetParked(stored.session, order.epoch, order.opening)
        if stored.session not in self._sessions:
            self._remember_stored(stored.session, _Stored(stored.owner, forget), now_ms)

    def _remember_stored(self, session: str, stored: _Stored, now_ms: float) -> None:
        self._parked[session] = stored
        if stored.owner not in self._gateways:
            self._parked_alone_ms.setdefault(stored.owner, now_ms)
        if len(self._parked) > self._limits.remembered_fences:
            self._parked.popitem(last=False)

    def _note(self, session: SessionControl, now_ms: float) -> None:
        """Bring what is kept about all sessions up to date with this one."""
        name = session.session
        self._forks.note(session, self._sessions)
        if session.state is SessionState.CLOSED:
            self._sessions.pop(name, None)
            self._compute.sessions(len(self._sessions), now_ms)
            if session.parked:
                stored = _Stored(session.owner, session.forget_parked)
                self._remember_stored(name, stored, now_ms)
            if session.opened is not None:
                command, answer = session.opened
                self._past_opens[command.fence, command.command] = answer
                if len(self._past_opens) > self._limits.remembered_fences:
                    self._past_opens.popitem(last=False)
            self._ledger.release(name)
            self._timed.set(name, None)
            self._unsaid.discard(name)
            self._rooms.forget(name)
            if (reopen := self._reopens.pop(name)) is not None:
                for waiting in (reopen.command, *reopen.following):
                    self._command(reopen.gateway, waiting, now_ms)
            return
        if session.shortage is not None:
            self._rooms.wait(session, now_ms)
        else:
            self._rooms.waits_no_more(name)
        if session.unsaid:
            self._unsaid.add(name)
        self._timed.ask(name, session.deadline_ms)

    def _actions_append(self, action: Action) -> None:
        self._actions.append(action)

    def _send_output(self, output: SendOutput) -> None:
        if output.gateway in self._gateways:
            self._actions.append(output)

    def _report(self, gateway: str, report: Report) -> None:
        if gateway in self._gateways:
            self._actions.append(SendReport(gateway, report))
