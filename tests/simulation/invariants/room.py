"""I8 at the worker: who is asked to make room for whom, and how long that is waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.messages import (
    Acknowledge,
    Answer,
    Command,
    Configure,
    Feed,
    Open,
    Park,
    RoomWanted,
    Run,
    Signal,
    TurnEnded,
)
from sessions.lifecycle import State
from tests.simulation.engine import declared
from tests.simulation.profile import SMALL_UNIT_BYTES
from tests.simulation.taker import THIEF
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    AbandonTurn,
    Action,
    ApplyInput,
    CommandReceived,
    CommitTurn,
    Emitted,
    Event,
    FreeSession,
    GatewayDown,
    OpenSession,
    OperationDone,
    ParkSession,
    SendReport,
    SessionFreed,
    StartTurn,
    TurnCommitted,
    TurnFinished,
)

if TYPE_CHECKING:
    from tests.simulation.gateway import GatewayProcess, SimulatedLink


@dataclass
class _Session:
    """One session as its worker was told of it, and has told."""

    owner: str
    priority: int | None
    progress_ms: float
    opened: bool = False
    parks: bool = False
    runs: set[int] = field(default_factory=set)
    """Turns that run."""
    owed: set[int | str] = field(default_factory=set)
    """Turns and commands whose last word was not said."""
    made: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Pieces of output by turn."""
    taken: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Those that were acknowledged."""
    spoilt: bool = False
    """Whether its state was lost in a commit."""
    parking: bool = False
    storing: bool = False
    """Whether its state is written between two turns."""
    kept_ms: float | None = None
    """When its state could not be put away."""
    asked_ms: float | None = None
    """When it was asked to make room, unless it got something to do after that."""
    ever_asked: bool = False

    @property
    def idle(self) -> bool:
        """Whether it can make room without any doubt, and nobody has asked it to."""
        untaken = any(self.taken[turn] < made for turn, made in self.made.items())
        busy = self.runs or self.owed or untaken or self.spoilt or self.storing
        doubtful = self.kept_ms or self.ever_asked
        return self.parks and self.priority is not None and not busy and not doubtful

    @property
    def rank(self) -> tuple[int, float]:
        """The lower, the sooner it is asked."""
        assert self.priority is not None
        return (self.priority, self.progress_ms)


@dataclass
class _Waiting:
    """An open that waits for room, since a time of its worker's clock."""

    since_ms: float
    first: bool
    """Whether nobody waited before it."""
    large: bool


@dataclass
class _Worker:
    """The sessions of one incarnation, and the opens that it has not answered."""

    sessions: dict[str, _Session] = field(default_factory=dict)
    opens: defaultdict[str, dict[str, Open]] = field(default_factory=lambda: defaultdict(dict))
    seen: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Opens by session, answered ones as well."""
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    """By session, those that find no room."""


class I8Room(Invariant):
    """Room is wanted of the session that nothing was done for the longest, of those of the
    lowest priority that have nothing to do, and only while somebody waits for room; nobody
    waits for longer than the limit, or while it holds something already."""

    name = "I8 room"
    preconditions = (
        "opens that waited",
        "opens that waited and were opened",
        "opens that waited and were refused",
        "sessions asked to make room",
        "sessions parked to make room",
        "chosen among several",
        "chosen for a lower priority",
        "asked again",
        "opens that waited where the room was lacking, and held nothing",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._workers: defaultdict[str, _Worker] = defaultdict(_Worker)

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """Follow what is said, and hold each choice against it."""
        places = self.deployment.profile.places
        if places is None:
            return
        here, now_ms = self._workers[worker.incarnation], worker.now_ms
        self._event(worker, here, event, actions, now_ms)
        for action in actions:
            self._action(worker, here, action, now_ms)
        for session in [name for name in here.opens if name not in here.sessions]:
            if worker.ledger.of(session):
                # It has its room, and waits for a step of the session that it begins as.
                here.waiting.pop(session, None)
                continue
            if here.opens[session] and session not in here.waiting:
                self.count("opens that waited")
                command = next(iter(here.opens[session].values()))
                wanted = sum(declared(places, command.settings).values())
                large = wanted > places.unit_bytes
                here.waiting[session] = _Waiting(now_ms, not here.waiting, large)
        due_ms, limit_ms = worker.control.deadline_ms, self.deployment.profile.control.room_ms
        for session, waiting in here.waiting.items():
            until_ms = waiting.since_ms + limit_ms
            self.check(
                now_ms < until_ms, f"{session} waits for room on {worker.place} until {until_ms}"
            )
            self.check(
                due_ms is not None and due_ms <= until_ms,
                f"{worker.place} does not mean to refuse {session} in time",
            )

    def sent(self, gateway: GatewayProcess, link: SimulatedLink, command: Command) -> None:
        """A session that is being opened waits at one stage alone."""
        if not isinstance(command, Open) or not command.waits:
            return
        hosted = gateway.hosted.get(command.fence.session)
        if hosted is None or hosted.session.state is not State.OPENING:
            return
        stage = link.replica.stage
        held = {of for of, worker in hosted.session.workers().items() if worker is not None}
        self.check(held == {stage}, f"{hosted.id} may wait for room on {stage}, and holds {held}")
        if stage != self.deployment.profile.stages[0]:
            self.count("opens that waited where the room was lacking, and held nothing")

    def _event(
        self,
        worker: WorkerProcess,
        here: _Worker,
        event: Event,
        actions: list[Action],
        now_ms: float,
    ) -> None:
        match event:
            case CommandReceived(command=command):
                # Of what becomes of others nobody is told.
                answerable = event.gateway in (THIEF, *worker.end.gateways)
                session = here.sessions.get(command.fence.session)
                match command:
                    case Open() if (
                        answerable and command.command not in here.seen[command.fence.session]
                    ):
                        here.seen[command.fence.session].add(command.command)
                        here.opens[command.fence.session][command.command] = command
                    case Acknowledge() if session is not None:
                        session.taken[command.turn] = command.through
                    case Configure() | Signal() | Park() if session is not None:
                        session.owed.add(command.command)
                        session.asked_ms = None
                    case Run() if session is not None:
                        session.owed.add(command.turn)
                        session.asked_ms = None
                    case Feed() if session is not None:
                        session.asked_ms = None
            case GatewayDown(gateway):
                # What comes of its opens is told to nobody.
                for name, opens in list(here.opens.items()):
                    if any(command.fence.owner == gateway for command in opens.values()):
                        del here.opens[name]
                        here.waiting.pop(name, None)
            case OperationDone(session=name) if (
                name in here.sessions and here.sessions[name].storing
            ):
                here.sessions[name].storing = False
            case OperationDone() if event.session in here.sessions:
                session = here.sessions[event.session]
                session.progress_ms = now_ms
                if not session.opened:
                    session.opened, session.parks = True, event.result.get("parks", False)
                    if event.error is not None:
                        del here.sessions[event.session]
                if session.parking:
                    session.parking = False
                    session.kept_ms = None if event.error is None else now_ms
                    if session.ever_asked and event.error is None:
                        self.count("sessions parked to make room")
            case SessionFreed(error=None):
                here.sessions.pop(event.session, None)
            case Emitted() if event.session in here.sessions:
                here.sessions[event.session].made[event.turn] += 1
            case TurnFinished():
                if not any(isinstance(a, CommitTurn) and a.turn == event.turn for a in actions):
                    self._turn_over(here, event.session, event.turn, now_ms)
            case TurnCommitted():
                if event.error is not None and event.session in here.sessions:
                    here.sessions[event.session].spoilt = True
                self._turn_over(here, event.session, event.turn, now_ms)

    def _action(self, worker: WorkerProcess, here: _Worker, action: Action, now_ms: float) -> None:
        match action:
            case OpenSession():
                opens = here.opens[action.session]
                own = [c for c in opens.values() if c.fence.owner == action.owner]
                priority = own[0].priority if own else None
                if own:
                    del opens[own[0].command]
                here.sessions[action.session] = _Session(action.owner, priority, now_ms)
                if here.waiting.pop(action.session, None) is not None:
                    self.count("opens that waited and were opened")
            case FreeSession():
                # It can be asked for nothing, also where the engine cannot close it yet.
                if (freed := here.sessions.get(action.session)) is not None:
                    freed.parks = False
            case ParkSession(stays=True):
                here.sessions[action.session].storing = True
            case ParkSession():
                here.sessions[action.session].parking = True
            case StartTurn():
                here.sessions[action.session].runs.add(action.turn)
            case AbandonTurn():
                self._turn_over(here, action.session, action.turn, now_ms)
            case ApplyInput():
                here.sessions[action.session].progress_ms = now_ms
            case SendReport(report=Answer() as answer):
                self._answered(worker, here, answer)
            case SendReport(report=TurnEnded() as ended) if ended.session in here.sessions:
                here.sessions[ended.session].owed.discard(ended.turn)
            case SendReport(report=RoomWanted() as wanted):
                self._wanted(worker, here, wanted.session)

    @staticmethod
    def _turn_over(here: _Worker, name: str, turn: int, now_ms: float) -> None:
        session = here.sessions.get(name)
        if session is not None and turn in session.runs:
            session.runs.discard(turn)
            session.progress_ms = now_ms

    def _answered(self, worker: WorkerProcess, here: _Worker, answer: Answer) -> None:
        opened = here.opens[answer.session].get(answer.command)
        session = here.sessions.get(answer.session)
        if session is not None:
            session.owed.discard(answer.command)
        refused = opened is not None and answer.error is not None
        waited = here.waiting.pop(answer.session, None) if refused else None
        if waited is not None:
            self.count("opens that waited and were refused")
            self._refused(worker, here, answer.session, waited)
        here.opens[answer.session].pop(answer.command, None)

    def _refused(self, worker: WorkerProcess, here: _Worker, name: str, waited: _Waiting) -> None:
        """For want of room, in time: not while there was somebody who was never asked."""
        places, now_ms = self.deployment.profile.places, worker.now_ms
        assert places is not None
        in_time = now_ms >= waited.since_ms + self.deployment.profile.control.room_ms
        small = places.unit_bytes == SMALL_UNIT_BYTES
        if not in_time or not waited.first or waited.large or small:
            return
        idle = self._idle(worker, here)
        # A clock that jumps ends the wait before the next could be asked.
        lately_ms = max(waited.since_ms, worker.jumped_ms)
        jumped = worker.jumped_ms > waited.since_ms
        asked = [
            s
            for s in here.sessions.values()
            if s.parking
            or self._waited_for(s, now_ms)
            or (jumped and s.asked_ms is not None and s.asked_ms < lately_ms)
        ]
        self.check(
            not idle or bool(asked),
            f"{worker.place} has no room for {name}, and has never asked {list(idle)}",
        )

    def _waited_for(self, session: _Session, now_ms: float) -> bool:
        answer_ms = self.deployment.profile.control.room_answer_ms
        return session.asked_ms is not None and now_ms < session.asked_ms + answer_ms

    @staticmethod
    def _idle(worker: WorkerProcess, here: _Worker) -> dict[str, _Session]:
        """Those that could make room now, of whom it is known for sure."""
        opens = [command for opens in here.opens.values() for command in opens.values()]
        forked = {command.fork.session for command in opens if command.fork is not None}
        return {
            name: session
            for name, session in here.sessions.items()
            if session.idle
            and name not in forked
            and session.owner in worker.end.gateways
            and "stolen" not in worker.causes(name)
        }

    def _wanted(self, worker: WorkerProcess, here: _Worker, name: str) -> None:
        """Nobody has gone before this one without need."""
        chosen = here.sessions[name]
        self.count("sessions asked to make room")
        self.check(not chosen.runs, f"{name} is to make room, and {chosen.runs} run")
        lately = self._waited_for(chosen, worker.now_ms)
        self.check(not lately, f"{name} is to make room, and was asked before: {chosen}")
        limit_ms = self.deployment.profile.control.room_ms
        kept_ms = chosen.kept_ms
        self.check(
            kept_ms is None or worker.now_ms >= kept_ms + limit_ms,
            f"{name} is to make room, and could not be put away: {chosen}",
        )
        self.check(
            chosen.parks and chosen.priority is not None,
            f"{name} is to make room, and cannot be parked: {chosen}",
        )
        waits = any(opens and other not in here.sessions for other, opens in here.opens.items())
        self.check(waits, f"{name} is to make room on {worker.place} for nobody")
        others = self._idle(worker, here)
        if name in others and len(others) > 1:
            self.count("chosen among several")
        if chosen.ever_asked:
            self.count("asked again")
        for other, session in others.items():
            if other != name and session.priority != chosen.priority:
                self.count("chosen for a lower priority")
            again = chosen.asked_ms is not None
            self.check(
                not again and chosen.rank <= session.rank,
                f"{name} is to make room on {worker.place} before {other}: {chosen}, {session}",
            )
        chosen.asked_ms, chosen.ever_asked = worker.now_ms, True
