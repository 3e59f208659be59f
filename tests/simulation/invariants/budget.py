"""I3: nothing is reserved that the budget of a device has no room for."""

from __future__ import annotations

from collections import defaultdict

from protocol.device_bytes import HOST
from protocol.errors import ErrorInfo
from protocol.messages import Answer, Close, Configure, Open, TurnEnded
from tests.simulation.engine import declared
from tests.simulation.profile import OUT_OF_BYTES
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    Action,
    CancelTurn,
    CommandReceived,
    ConfigureSession,
    Emitted,
    Event,
    GatewayUp,
    OpenSession,
    OperationDone,
    SendReport,
    SessionFreed,
    ShuttingDown,
)


class I3Budget(Invariant):
    """On every device of every worker what is reserved is within the budget, by the ledger's
    account and by one kept here of what engines were asked for. Who is refused finds no room
    by that account either."""

    name = "I3 budget"
    preconditions = (
        "devices full",
        "opens refused for bytes",
        "restores refused for bytes",
        "settings refused for bytes",
        "output refused for bytes",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By worker incarnation: bytes of the sessions that engines hold."""
        self._changing: dict[tuple[str, str], tuple[int, int]] = {}
        """What a session whose settings change held before, and holds if they are taken."""
        self._asked: dict[tuple[str, str, str], Open | Configure] = {}
        """Commands that may come to nothing for want of bytes."""
        self._forking: defaultdict[str, set[str]] = defaultdict(set)
        """By worker incarnation: sessions that are to begin as others."""
        self._answered: set[tuple[str, str, str]] = set()
        """Those that were refused."""

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """Keep the account, and hold the worker's against it."""
        places = self.deployment.profile.places
        if places is None:
            return
        held = self._held[worker.incarnation]
        before = held.copy()
        match event:
            case CommandReceived(command=Open() | Configure() as command):
                key = (worker.incarnation, command.fence.session, command.command)
                # One that comes again is answered as it was.
                if key not in self._answered:
                    self._asked[key] = command
                if isinstance(command, Open) and command.fork is not None:
                    self._forking[worker.incarnation].add(command.fence.session)
            case OperationDone() if event.session in held:
                unchanged = (held[event.session],) * 2
                earlier, wanted = self._changing.pop((worker.incarnation, event.session), unchanged)
                held[event.session] = wanted if event.error is None else earlier
                if event.session not in worker.engine.sessions:
                    del held[event.session]
            case SessionFreed(error=None):
                held.pop(event.session, None)
                self._changing.pop((worker.incarnation, event.session), None)
            case Emitted() if any(
                isinstance(a, CancelTurn) and a.turn == event.turn for a in actions
            ):
                # It may also be too much that is kept of the session.
                self.deployment.blame(event.session, "no room")
        for name in self._forking[worker.incarnation] - held.keys():
            # What begins as another session has its bytes before that one is between two steps.
            taken = worker.ledger.of(name).get(places.device)
            if taken is not None:
                held[name] = taken
                self._forking[worker.incarnation].discard(name)
        for action in actions:
            match action:
                case OpenSession() | ConfigureSession():
                    wanted = declared(places, action.settings)[places.device]
                    earlier = held.get(action.session, 0)
                    if isinstance(action, ConfigureSession):
                        self._changing[worker.incarnation, action.session] = (earlier, wanted)
                    held[action.session] = max(wanted, earlier)
                case SendReport(report=TurnEnded(error=ErrorInfo() as error)):
                    if "budget" in error.message:
                        self.count("output refused for bytes")
                case SendReport(report=Answer() as answer) if answer.error is not None:
                    self._refused(worker, event, answer, before)
        for device, reserved in worker.ledger.devices().items():
            free = reserved.free
            self.check(free is None or free >= 0, f"{worker.place} has {reserved} of {device}")
        most = places.unit_bytes * places.of(worker.stage)
        self.check(
            sum(held.values()) <= most,
            f"{worker.place} has room for {most} bytes, and engines hold {held}",
        )
        if sum(held.values()) == most:
            self.count("devices full")

    def _refused(
        self, worker: WorkerProcess, event: Event, answer: Answer, before: dict[str, int]
    ) -> None:
        places, error = self.deployment.profile.places, answer.error
        assert places is not None
        assert error is not None
        key = (worker.incarnation, answer.session, answer.command)
        self._answered.add(key)
        command = self._asked.pop(key, None)
        if command is None or error.code not in OUT_OF_BYTES or "needed" not in error.message:
            return
        kind = "settings" if isinstance(command, Configure) else "opens"
        if isinstance(command, Open) and command.restore:
            kind = "restores"
        self.count(f"{kind} refused for bytes")
        self.deployment.blame(answer.session, "no room")
        # Who waited and is closed is told how it was before, and so are many that end at once.
        held = max(before, self._held[worker.incarnation], key=lambda held: sum(held.values()))
        wanted = declared(places, command.settings)[places.device]
        wanted += sum(size for name, size in held.items() if name != answer.session)
        if places.device == HOST:
            # What is kept of output is beyond the head-room only where there is much of it.
            head_room = places.budget(worker.stage).head_room_bytes
            wanted += max(0, worker.control.kept_bytes - head_room)
        most = places.unit_bytes * places.of(worker.stage) * places.tenant_share
        closed = isinstance(event, ShuttingDown | GatewayUp) or (
            isinstance(event, CommandReceived) and isinstance(event.command, Close)
        )
        self.check(
            wanted > most or closed,
            f"{worker.place} refuses {command}: {error}, and only {held} is held",
        )
