"""I5: no turn ever runs on silently empty or partial state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from protocol.connectors import InlineDescriptor
from protocol.messages import Command, Run
from protocol.payloads import read_conversation
from sessions.client import Parking, Restored, Restoring
from sessions.duplex import events as said
from sessions.lanes import DEFAULT_LANE
from tests.simulation.client import Client
from tests.simulation.engine import EngineSession, EngineTurn
from tests.simulation.gateway import GatewayProcess, SimulatedLink
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import Action, ApplyInput, Event, OpenSession, SendReport


class I5State(Invariant):
    """Input is applied without gaps, or the gap is stated; what is to be heard was heard by
    this very engine; what thinks gets the whole conversation as its client knows it."""

    name = "I5 state"
    preconditions = (
        "inputs applied",
        "gaps stated",
        "stages rebuilt in a session",
        "conversations of several items",
        "turns on audio heard before",
        "items retrieved",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._applied: dict[EngineSession, int] = {}
        self._stated: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._clients: dict[str, Client] = {}
        self._bound: set[tuple[str, str]] = set()
        self._restoring: defaultdict[str, set[str]] = defaultdict(set)
        self._meanwhile: defaultdict[str, list[_Told]] = defaultdict(list)
        """What a client knew at any time since a stage of its session was lost, or parked."""

    def opened(self, client: Client) -> None:
        """Its view is what a conversation is held against."""
        self._clients[client.session] = client

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """What is lost is said before anything goes on behind the gap."""
        for action in actions:
            if isinstance(action, OpenSession):
                self._stated.pop((worker.incarnation, action.session), None)
            elif isinstance(action, SendReport):
                report = action.report
                if getattr(report, "name", "") == "input_lost":
                    self.count("gaps stated")
                    profile = self.deployment.profile
                    self.check(
                        profile.arena or profile.tight,
                        f"{worker.place} misses {report}, and all input comes over a link",
                    )
                    arguments = report.arguments  # type: ignore[union-attr]
                    key = (worker.incarnation, report.session)  # type: ignore[union-attr]
                    gap = (arguments["first"], arguments["last"])
                    self._stated.setdefault(key, []).append(gap)

    def input_applied(
        self, worker: WorkerProcess, session: EngineSession, action: ApplyInput
    ) -> None:
        """The next piece, or the first one behind a gap that was stated."""
        self.count("inputs applied")
        expected = self._applied.get(session, 0) + 1
        for first, last in self._stated.get((worker.incarnation, session.name), ()):
            if first <= expected <= last:
                expected = last + 1
        # With its gateway gone there is nobody to state a gap to.
        self.check(
            action.sequence == expected or session.owner not in worker.end.gateways,
            f"{worker.place} applies input {action.sequence} of {session.name}, not {expected}",
        )
        self._applied[session] = action.sequence

    def turn_started(self, worker: WorkerProcess, turn: EngineTurn) -> None:
        """Audio that is to be heard now was applied to this engine's session."""
        parameters, session = turn.action.parameters, turn.session
        if "end_ms" not in parameters:
            return
        if (worker.incarnation, session.name) in self._stated:
            return
        self.count("turns on audio heard before")
        start_ms, end_ms = parameters["start_ms"], parameters["end_ms"]
        self.check(
            session.opened_ms - 1 <= start_ms and end_ms <= session.heard_ms + 1,
            f"{worker.place} is to hear {start_ms} to {end_ms} ms of {session.name}, but it heard"
            f" {session.opened_ms} to {session.heard_ms} ms",
        )

    def sent(self, gateway: GatewayProcess, link: SimulatedLink, command: Command) -> None:
        """A conversation that is handed to an engine is the one that the client was told of."""
        stage = link.replica.stage
        session = command.fence.session
        if command.__class__.__name__ == "Open":
            if (session, stage) in self._bound:
                self.count("stages rebuilt in a session")
            self._bound.add((session, stage))
        if not isinstance(command, Run) or stage != "think" or command.lane != DEFAULT_LANE:
            return
        descriptor = command.inputs[0]
        assert isinstance(descriptor, InlineDescriptor)
        messages = read_conversation(descriptor.payload)
        client = self._clients.get(session)
        if client is None:
            return
        # A turn that has waited for a worker is about what was told when it began to wait.
        told = [*self._meanwhile.get(session, ()), _told(client)]
        got = [(message.role, message.text) for message in messages]
        if len(told[-1].texts) > 1:
            self.count("conversations of several items")
        self.check(
            any(known.in_doubt or known.texts == got for known in told),
            f"{session} was told {told}, but {got} are to be answered",
        )

    def told(self, client: Client, sequence: int, output: said.ClientOutput) -> None:
        """An item that is retrieved is the item that was told."""
        restoring = self._restoring[client.session]
        if isinstance(output, Restoring | Parking):
            restoring.add(output.stage)
        if restoring:
            self._meanwhile[client.session].append(_told(client))
        if isinstance(output, Restored):
            restoring.discard(output.stage)
            if not restoring:
                self._meanwhile.pop(client.session, None)
        if isinstance(output, said.ItemRetrieved):
            item = client.view.item(output.item.id)
            self.check(item is not None, f"{output.item.id} is unknown to its client")
            assert item is not None
            if not (item.unheard or item.truncated):
                self.count("items retrieved")
                texts = [part.text.strip() for part in output.item.parts if part.text]
                text = " ".join(texts)
                self.check(
                    text == (item.text or "").strip(),
                    f"{item.id} was told with {item.text!r}, and is retrieved with {text!r}",
                )


@dataclass(frozen=True)
class _Told:
    """A conversation as a client knew it. What is left of a truncated reply, or comes of audio
    that was not heard, is the session's to say."""

    texts: list[tuple[str, str]]
    in_doubt: bool


def _told(client: Client) -> _Told:
    items = client.view.items
    texts = [(item.role, item.text.strip()) for item in items if item.text]
    return _Told(texts, any(item.unheard or bool(item.truncated and item.text) for item in items))
