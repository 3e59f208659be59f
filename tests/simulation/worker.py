"""A worker process: the real control side and the real link end, and a synthetic engine.

What `workers.worker` and `protocol.worker_endpoint` do on a loop is done here on virtual time:
actions are carried out, nothing is decided.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, assert_never

from protocol.connectors import InlineDescriptor
from protocol.errors import CapacityExceeded, ErrorInfo, SessionStateLost
from protocol.link import NotLinked, WorkerEnd
from protocol.link_events import (
    Action as LinkAction,
)
from protocol.link_events import (
    Crowded,
    Deliver,
    Disconnected,
    Down,
    Flush,
    PeerStatus,
    Received,
    Refused,
    StatusChanged,
    Transmit,
    Up,
)
from protocol.link_events import (
    Event as LinkEvent,
)
from protocol.link_events import Tick as LinkTick
from protocol.link_frames import WorkerInfo
from protocol.messages import Output, Report, Update, decode_command, encode
from sessions.compute import Compute, ComputeSample
from sessions.ledger import Ledger
from tests.simulation.engine import (
    FAILED,
    CommitRefused,
    EngineSession,
    SyntheticEngine,
    declared,
    payload_of,
)
from tests.simulation.process import Process
from tests.simulation.store import Snapshot
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
    DiscardPayload,
    EngineReady,
    Event,
    FeedTurn,
    ForgetParked,
    FreeSession,
    GatewayDown,
    GatewayUp,
    LinkCrowded,
    OpenSession,
    OutputRefused,
    PaceTurn,
    ParkSession,
    RepeatTurn,
    Restore,
    RoomGiven,
    SendOutput,
    SendReport,
    SessionFreed,
    Settle,
    ShuttingDown,
    SignalSession,
    StartTurn,
    Tick,
    TurnCommitted,
    VoidTurn,
)

if TYPE_CHECKING:
    from tests.simulation.deployment import Deployment


class WorkerProcess(Process):
    """One incarnation of the worker at a place."""

    def __init__(self, deployment: Deployment, place: str, stage: str, incarnation: str) -> None:
        super().__init__(deployment.world, place, incarnation)
        self.profile = deployment.profile
        self.watch = deployment.watch
        self.stage = stage
        places = self.profile.places
        self.ledger = Ledger()
        if places is not None and not places.pooled:
            self.ledger = Ledger({places.device: places.budget(stage)})
        self.control = Control(
            self.profile.control,
            self.ledger,
            lambda settings: declared(places, settings),
            Compute(),
        )
        self._own_s, self._measured_ms = 0.0, self.now_ms
        self.recent: deque[CommandReceived] = deque(maxlen=24)
        """What its present links brought last, to be repeated."""
        self._deployment = deployment
        self.engine = SyntheticEngine(self)
        if deployment.quiet_since_ms is not None:
            self.engine.obey()
        info = WorkerInfo(stage, "synthetic", False)
        self.end = WorkerEnd(incarnation, info, self.profile.link)
        self._events: deque[Event] = deque()
        self._telling = False
        self._settle_due = False
        self.later(deployment.world.random.choice([0.0, 0.0, 50.0, 800.0]), self._loaded)

    def thought(self, run: int, last: int) -> None:
        """An engine has thought a run, up to the word of this number."""
        self._deployment.runs[run] = last

    def spoke(self, run: int, clause: int, piece: int) -> None:
        """An engine has spoken a piece of a run."""
        self._deployment.spoken[run] = (clause, piece)

    def stop(self) -> None:
        """End in order: whoever has a session here is told, then the process ends."""
        self.tell(ShuttingDown())

    def blame(self, session: str, cause: str) -> None:
        """What goes wrong with `session` from now on has this cause."""
        self._deployment.blame(session, cause)

    def causes(self, session: str) -> set[str]:
        """What was done to `session` that may make it fail."""
        return self._deployment.causes[session]

    # Parked state

    def park(self, session: EngineSession, action: ParkSession) -> None:
        """A session's state is in the store from now on; it may be spoilt there. Raises Fenced."""
        spoilt = self.world.chance(0.0 if self.engine.obeys else self.profile.engine.spoil_snapshot)
        snapshot = Snapshot(session, action.step, action.order, spoilt)
        self._deployment.store.put(session.name, self.stage, snapshot)
        if spoilt:
            self.world.count("fault: snapshot damaged")
            self.blame(session.name, "snapshot")
            if self.world.chance(0.5):
                order = action.order
                self._deployment.store.remove(session.name, self.stage, order.epoch, order.opening)

    def restore(self, session: str, restore: Restore) -> Snapshot:
        """What was parked of a session, which is parked no more, unless it stays. Raises
        SessionStateLost."""
        store, taken, stays = self._deployment.store, restore.taken, restore.stays
        try:
            return store.take(session, self.stage, restore)
        except SessionStateLost:
            stays = False
            raise
        finally:
            if not stays:
                store.remove(session, self.stage, taken.epoch, taken.opening)

    # From outside

    def receive(self, gateway: str, data: bytes) -> None:
        """The network brought a frame."""
        self._link(Received(data, gateway))

    def disconnected(self, gateway: str) -> None:
        """The transport has lost a gateway for certain."""
        self._link(Disconnected(gateway))

    def input_arrived(self, gateway: str, update: Update) -> None:
        """Stream input came beside the link."""
        self._settle_due = True
        self.tell(CommandReceived(gateway, update))

    def inject(self, event: CommandReceived | GatewayUp) -> None:
        """Something comes that the simulation made: a command repeated, or of another owner."""
        self._settle_due = True
        self.world.note(self.place, event)
        self.tell(event)

    # The control side

    def tell(self, event: Event) -> None:
        """Handle `event` after those before it, and carry out what it causes."""
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        while self._events:
            following = self._events.popleft()
            actions = self.control.handle(following, self.now_ms)
            self.watch.handled(self, following, actions)
            for action in actions:
                self.world.note(self.place, action)
                self._carry_out(action)
        self._telling = False

    def _carry_out(self, action: Action) -> None:
        engine = self.engine
        match action:
            case SendReport():
                self._report(action.gateway, action.report)
            case SendOutput():
                descriptor = InlineDescriptor(action.payload)
                report = Output(action.session, action.turn, action.sequence, descriptor)
                self._report(action.gateway, report)
            case OpenSession() | ConfigureSession() | SignalSession() | ParkSession():
                engine.operate(action)
            case ApplyInput():
                engine.apply(action)
            case StartTurn():
                engine.start(action)
            case RepeatTurn():
                pass  # Its output follows.
            case CommitTurn():
                self._commit(action)
            case FeedTurn():
                payload = None if action.payload is None else payload_of(action.payload)
                engine.feed(action.session, action.turn, payload, action.last)
            case CancelTurn():
                engine.cancel(action.session, action.turn)
            case AbandonTurn():
                engine.abandon(action.session, action.turn)
            case RoomGiven():
                pass  # No engine asks for more than it has declared here.
            case PaceTurn():
                engine.pace(action.session, action.turn, action.wait)
            case FreeSession():
                if not engine.free(action.session):
                    self.tell(SessionFreed(action.session, FAILED))
                    return
                self.tell(SessionFreed(action.session))
                # Said again it would be said to another session of that name.
                for event in [e for e in self.recent if e.command.fence.session == action.session]:
                    self.recent.remove(event)
            case Announce():
                self._refresh_status(announce=True)
            case AttachArena() | DiscardPayload() | VoidTurn():
                pass  # Everything travels inside messages here.
            case ForgetParked():
                self._deployment.store.remove(
                    action.session, self.stage, action.epoch, action.opening
                )
            case _:
                assert_never(action)

    def _report(self, gateway: str, report: Report) -> None:
        try:
            payload = isinstance(report, Output)
            actions = self.end.send(gateway, encode(report), payload=payload)
        except NotLinked:
            return
        except CapacityExceeded as error:
            self.world.count("link full at the worker")
            if isinstance(report, Output):
                self.blame(report.session, "full")
                self.tell(OutputRefused(report.session, report.turn, error.info()))
            else:
                self.soon(lambda: self._link(Disconnected(gateway)))
            return
        for action in actions:
            self._carry_out_link(action)

    def _commit(self, action: CommitTurn) -> None:
        """At once, or after a while in which it is too late to cancel the turn."""
        if self.world.chance(self.profile.engine.slow_commit):
            self.world.count("fault: slow commit")
            delay_ms = self.world.random.choice([1.0, 50.0, 600.0])
            self.later(delay_ms, lambda: self._commit_now(action))
        else:
            self._commit_now(action)

    def _commit_now(self, action: CommitTurn) -> None:
        error: ErrorInfo | None = None
        try:
            action.commit()
        except CommitRefused:
            error = FAILED
        self.tell(TurnCommitted(action.session, action.turn, error))

    def _loaded(self) -> None:
        if (places := self.profile.places) is not None:
            unit_bytes, pool_bytes = places.unit_bytes, 0
            if places.pooled:
                self.ledger.bound(places.device, places.budget(self.stage))
                pool_bytes = unit_bytes * places.of(self.stage)
            self.ledger.load(places.device, engine=unit_bytes, pool=pool_bytes)
        self.tell(EngineReady())

    def _measure_compute(self) -> None:
        """Sessions take what the world says, while they are open."""
        now_ms, each = self.now_ms, self.profile.session_cores
        passed_s = max(0.0, now_ms - self._measured_ms) / 1000
        self._own_s += each * len(self.engine.sessions) * passed_s
        self._measured_ms = now_ms
        self.tell(ComputeMeasured(ComputeSample(self._own_s, now_ms / 1e4, 1.0 if each else None)))

    def _refresh_status(self, *, announce: bool = False) -> None:
        self._measure_compute()
        status = self.control.status(self.stage, 0)
        self._link(StatusChanged(encode(status), status.ready, announce))

    # The link

    def _link(self, event: LinkEvent) -> None:
        for action in self.end.handle(event, self.now_ms):
            self._carry_out_link(action)

    def _carry_out_link(self, action: LinkAction) -> None:
        match action:
            case Transmit():
                self.leave(lambda: self._deployment.to_gateway(self, action.peer, action.data))
            case Deliver():
                command = decode_command(action.message)
                self.world.note(self.place, command)
                self._settle_due = True
                received = CommandReceived(action.peer, command)
                self.recent.append(received)
                self.tell(received)
            case Up():
                for event in [e for e in self.recent if e.gateway == action.peer]:
                    self.recent.remove(event)
                self.tell(GatewayUp(action.peer))
            case Down():
                self.world.note(self.place, action)
                self.world.count("links lost")
                self.tell(GatewayDown(action.peer))
            case Crowded():
                self.world.count("links crowded")
                self.tell(LinkCrowded(action.peer, action.crowded))
            case PeerStatus() | Refused():
                raise AssertionError("a gateway has no status and refuses nobody")
            case _:
                assert_never(action)

    # Time

    def deadline_ms(self) -> float | None:
        """The next deadline of the link and of the control side."""
        times = (self.end.deadline_ms, self.control.deadline_ms)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """Do what is due."""
        if (due := self.end.deadline_ms) is not None and due <= now_ms:
            self._refresh_status()
            self._link(LinkTick())
        if (due := self.control.deadline_ms) is not None and due <= now_ms:
            self.tell(Tick())

    def turn_ended(self) -> None:
        """Say how far input has come, and let go what was collected."""
        if self._settle_due:
            self._settle_due = False
            self.tell(Settle())
        self._link(Flush())
        self.watch.stepped(self)
