"""I7: every accepted command is answered exactly once, and carried out once."""

from __future__ import annotations

from collections import Counter

from protocol.messages import (
    Answer,
    Command,
    Configure,
    Open,
    Park,
    ReceivedThrough,
    Report,
    Run,
    Signal,
    TurnEnded,
)
from sessions.client import Answered, Refused, SessionCreated
from sessions.duplex.events import ClientOutput, ClientVerb
from sessions.lifecycle import State
from tests.simulation.client import Client
from tests.simulation.gateway import GatewayProcess, SimulatedLink
from tests.simulation.process import Process
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    Action,
    ApplyInput,
    CommandReceived,
    ConfigureSession,
    Event,
    FreeSession,
    OpenSession,
    ParkSession,
    SendReport,
    SignalSession,
    StartTurn,
)

OPERATIONS = (OpenSession, ConfigureSession, SignalSession, StartTurn, ParkSession)
Asked = tuple[str, str, str]
"""The worker's incarnation as its link names it, the session, the command or turn."""


class I7Answers(Invariant):
    """At the worker: a repeated command does nothing again. At the gateway: one answer a
    command, one end a turn, and none missing when all is quiet. At the client: outputs
    are numbered without gaps, a verb is refused at most once."""

    name = "I7 answers"
    preconditions = (
        "commands answered",
        "turns ended",
        "repeated commands answered again",
        "verbs refused",
        "verbs refused that change nothing",
        "input acknowledged",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._asked: dict[Asked, Command] = {}
        self._answered: Counter[Asked] = Counter()
        self._applied: dict[tuple[str, str], int] = {}
        self._unsaid: set[tuple[str, str]] = set()
        self._refused: set[tuple[str, str]] = set()
        self._first: dict[Asked, Report] = {}
        self._before: tuple[object, ...] | None = None
        """The state of the session that is about to be told a verb."""
        self._again: set[tuple[str, str]] = set()
        self.repeated: CommandReceived | None = None
        """The command that the simulation is about to repeat."""

    def repeat(self, event: CommandReceived | None) -> None:
        """The simulation repeats a command, and may get its answer again; None: it has."""
        self.repeated = event
        if event is not None:
            command = getattr(event.command, "command", "")
            self._again.add((event.command.fence.session, command))

    # The worker

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """Nothing is carried out twice; what is acknowledged was applied or stated as lost."""
        if event is self.repeated:
            self.count("repeated commands answered again")
            self.check(
                not any(isinstance(action, OPERATIONS) for action in actions),
                f"{worker.place} carries {event} out again: {actions}",
            )
        for action in actions:
            match action:
                case ApplyInput():
                    self._applied[worker.incarnation, action.session] = action.sequence
                    self._unsaid.add((worker.incarnation, action.session))
                case OpenSession():
                    self._applied[worker.incarnation, action.session] = 0
                case FreeSession():
                    self._unsaid.discard((worker.incarnation, action.session))
                case SendReport(report=ReceivedThrough() as report):
                    self.count("input acknowledged")
                    self._acknowledged(worker, report)
                case SendReport(report=report) if getattr(report, "name", "") == "input_lost":
                    last = report.arguments["last"]  # type: ignore[union-attr]
                    key = (worker.incarnation, report.session)  # type: ignore[union-attr]
                    self._applied[key] = max(last, self._applied.get(key, 0))

    def stepped(self, process: Process) -> None:
        """What was applied in a turn of the loop is said at its end, while there is a link."""
        for key in [key for key in self._unsaid if key[0] == process.incarnation]:
            self._unsaid.discard(key)
            assert isinstance(process, WorkerProcess)
            session = process.engine.sessions.get(key[1])
            self.check(
                session is None or session.owner not in process.end.gateways,
                f"{process.place} has applied input of {key[1]} and does not say so",
            )

    def _acknowledged(self, worker: WorkerProcess, report: ReceivedThrough) -> None:
        self._unsaid.discard((worker.incarnation, report.session))
        applied = self._applied.get((worker.incarnation, report.session), 0)
        self.check(
            report.sequence == applied,
            f"{worker.place} acknowledges {report.sequence} of {report.session}, applied {applied}",
        )

    # The gateway

    def sent(self, gateway: GatewayProcess, link: SimulatedLink, command: Command) -> None:
        """From now on an answer is owed."""
        worker = link.worker
        assert worker is not None
        session = command.fence.session
        match command:
            case Open() | Configure() | Signal() | Park():
                self._asked[worker, session, command.command] = command
            case Run():
                self._asked[worker, session, f"turn {command.turn}"] = command

    def reported(self, gateway: GatewayProcess, link: SimulatedLink, report: Report) -> None:
        """An answer comes once, and only to what was asked."""
        worker = link.worker
        assert worker is not None
        match report:
            case Answer():
                key = (worker, report.session, report.command)
                self.count("commands answered")
            case TurnEnded():
                key = (worker, report.session, f"turn {report.turn}")
                self.count("turns ended")
            case _:
                return
        if key not in self._asked:
            return
        self._answered[key] += 1
        first = self._first.setdefault(key, report)
        if (report.session, key[2]) in self._again:
            self.check(report == first, f"{report} was {first} before")
        else:
            self.check(self._answered[key] == 1, f"{report} has come before")

    # The client

    def said(self, client: Client, verb: ClientVerb) -> None:
        """What is refused at once must leave everything as it is now."""
        # While nobody is there an answer, like any output, may be one too many to be kept.
        if client.session_state is State.ACTIVE and not isinstance(verb, client.unrefused):
            self._before = _state(client)

    def taken(self, client: Client, verb: ClientVerb) -> None:
        """What is refused from now on may have done something before."""
        self._before = None

    def told(self, client: Client, sequence: int, output: ClientOutput) -> None:
        """Outputs are numbered from 1 without gaps; nothing follows the last."""
        self.check(
            sequence == client.last_sequence + 1,
            f"output {sequence} of {client.session} follows {client.last_sequence}",
        )
        client.last_sequence = sequence
        self.check(client.view.ended is None, f"{client.session} is told {output} after its end")
        self.check(
            isinstance(output, SessionCreated) == (sequence == 1),
            f"output {sequence} of {client.session} is {output}",
        )
        refused = isinstance(output, Answered) and output.error is not None
        refused = refused or (isinstance(output, Refused) and output.ref is not None)
        if refused and self._before is not None:
            self.count("verbs refused that change nothing")
            now = _state(client)
            self.check(now == self._before, f"{output} has changed {self._before} to {now}")
        self._before = None
        if isinstance(output, Refused) and output.ref is not None:
            self.count("verbs refused")
            key = (client.session, output.ref)
            self.check(key not in self._refused, f"{output} has come before")
            self._refused.add(key)

    def settled(self) -> None:
        """Every worker that still runs has answered what it was asked over a link that holds."""
        for gateway in self.deployment.gateways.values():
            if gateway is None:
                continue
            workers = {link.worker for link in gateway.links.values()}
            for key, command in self._asked.items():
                owned = command.fence.owner == gateway.incarnation
                stolen = "stolen" in self.deployment.causes[command.fence.session]
                if key[0] in workers and owned and not stolen:
                    self.check(self._answered[key] >= 1, f"{command} was never answered")


def _state(client: Client) -> tuple[object, ...]:
    """Where a client's session stands, but for what is told of it."""
    assert client.hosted is not None
    life, _, _, *rest = client.hosted.session.freeze()
    return (life, *rest)
