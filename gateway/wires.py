"""One session's wires: to a replica of each stage, with the payloads that go over them."""

from __future__ import annotations

import msgspec

from gateway.pools import Replica
from gateway.transfers import Transfers
from protocol.connector_errors import TurnVoid
from protocol.connectors import Descriptor
from protocol.edges import CLIENT, ConnectorKind, edge_name, worker_arena
from protocol.errors import EngineLost
from protocol.messages import (
    Acknowledge,
    Attach,
    Close,
    Command,
    Feed,
    Open,
    Output,
    RaiseFloor,
    Report,
    Run,
    TurnEnded,
    Update,
)
from sessions.actions import Event, Reported, StageProduced
from sessions.lanes import INPUT_LANE
from sessions.pipeline import Pipeline


class SessionWires:
    """Which worker each stage of a session is bound to, and which turns have output on its way.

    `turns` counts the turns that were ever started.
    """

    def __init__(self, session: str, pipeline: Pipeline, transfers: Transfers) -> None:
        self.turns = 0
        self._session = session
        self._pipeline = pipeline
        self._transfers = transfers
        self._replicas: dict[str, Replica] = {}
        self._lanes: dict[int, str] = {}
        self._relayed: set[tuple[int, str]] = set()

    def bind(self, stage: str, replica: Replica) -> None:
        """Commands for `stage` go to `replica` from now on."""
        self._replicas[stage] = replica
        replica.sessions.add(self._session)

    def unbind(self, stage: str) -> None:
        """The stage has no worker any more."""
        replica = self._replicas.pop(stage, None)
        self._transfers.close_input(self._session, stage)
        if replica is not None:
            replica.sessions.discard(self._session)

    def bound_to(self, replica: Replica) -> bool:
        """Whether this is the session's worker of its stage."""
        return self._replicas.get(replica.stage) is replica

    def release(self) -> None:
        """The session is gone: nothing of it is bound, held or on its way."""
        for stage in list(self._replicas):
            self.unbind(stage)
        for turn in self._lanes:
            self._transfers.void(self._session, turn)
        self._transfers.freed(self._session)

    # To the workers

    def send(self, stage: str, command: Command) -> None:
        """Send a command with its payloads; without a worker it goes nowhere.

        Raises AntiphonError when the worker cannot be told.
        """
        replica = self._replicas.get(stage)
        if replica is None:
            return
        rest = self._by_arena(replica, stage, command)
        if rest is not None:
            replica.link.send(rest)
        if isinstance(command, Close):
            replica.sessions.discard(self._session)

    def start_afresh(self, stage: str) -> None:
        """The worker knows the session and cannot be told of it: only a new link makes both
        sides agree again on what it holds."""
        replica = self._replicas.get(stage)
        if replica is not None:
            replica.link.start_afresh()

    def _by_arena(self, replica: Replica, stage: str, command: Command) -> Command | None:
        """What of a command goes inside a message, after its payloads have been seen to."""
        match command:
            case Update():
                return self._transfers.put_input(stage, command)
            case Open():
                edge = edge_name(CLIENT, stage)
                kind = self._pipeline.connectors.get(edge, ConnectorKind.INLINE)
                self._transfers.open_input(self._session, stage, replica.consumer, kind)
            case Run():
                return self._run(replica, stage, command)
            case Feed(payload=payload) if payload is not None:
                self._count_inputs(stage, [payload])
            case Acknowledge():
                self._transfers.acknowledged(self._session, stage, command.turn, command.through)
            case RaiseFloor():
                for turn, lane in list(self._lanes.items()):
                    if lane == command.lane and turn < command.floor:
                        del self._lanes[turn]
                        self._transfers.void(self._session, turn)
        return command

    def _run(self, replica: Replica, stage: str, run: Run) -> Run:
        if run.turn not in self._lanes:
            self.turns += 1
        self._lanes[run.turn] = run.lane
        self._count_inputs(stage, run.inputs)
        if not run.to_client:
            self._relayed.add((run.turn, stage))
        if not run.readers:
            return run
        # The workers that read the turn's output attach to the arena it comes from.
        path = worker_arena(replica.link.endpoint)
        readers = {}
        for edge, target in run.readers.items():
            reader = self._replicas.get(target)
            if reader is None or reader.consumer is None or path is None:
                raise EngineLost(f"the worker of stage {target} cannot read the arena")
            reader.link.send(Attach(run.fence, path))
            readers[edge] = reader.consumer
        return msgspec.structs.replace(run, readers=readers)

    def _count_inputs(self, stage: str, payloads: list[Descriptor]) -> None:
        sources = [edge.source for edge in self._pipeline.edges if edge.target == stage]
        for source in sources or [CLIENT]:
            for payload in payloads:
                self._transfers.count(source, stage, payload)

    # From the workers

    def received(self, stage: str, report: Report) -> Event | None:
        """What the session is to be told; None for what nobody wants any more.

        Raises AntiphonError when output cannot be had although it is wanted.
        """
        if isinstance(report, Output):
            return self._output(stage, report)
        self._transfers.opened(self._session, stage)
        if isinstance(report, TurnEnded):
            self._relayed.discard((report.turn, stage))
            if self._lanes.get(report.turn) == INPUT_LANE:
                self.turn_over(report.turn)
        return Reported(stage, report)

    def turn_over(self, turn: int) -> None:
        """The turn has ended: no more output of it comes."""
        self._lanes.pop(turn, None)

    def _output(self, stage: str, output: Output) -> Event | None:
        turn, descriptor = output.turn, output.payload
        wanted = turn in self._lanes
        if (turn, stage) in self._relayed:
            # Its bytes are other workers' to read.
            if not wanted:
                return None
            return StageProduced(stage, turn, output.sequence, None, descriptor)
        if not wanted:
            # Both ends have voided the turn; its worker may have taken the bytes back already.
            self._transfers.discard(descriptor)
            return None
        try:
            payload = self._transfers.get(self._session, stage, turn, output.sequence, descriptor)
        except TurnVoid:
            return None
        return StageProduced(stage, turn, output.sequence, payload, descriptor)
