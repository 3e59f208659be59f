"""One session's wires: to a replica of each stage, with the payloads that go over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from gateway.placement import Replica
from gateway.transfers import Transfers
from protocol.connector_errors import TurnVoid
from protocol.connectors import Descriptor, ShmDescriptor
from protocol.edges import CLIENT, ConnectorKind, edge_name, worker_arena
from protocol.errors import AntiphonError, EngineLost
from protocol.messages import (
    Acknowledge,
    Answer,
    Attach,
    Close,
    Command,
    Feed,
    Fence,
    Open,
    Output,
    RaiseFloor,
    Report,
    Run,
    TurnEnded,
    TurnStatus,
    Update,
)
from sessions.actions import Event, Reported, StageLost, StageProduced
from sessions.lanes import INPUT_LANE
from sessions.pipeline import Kind, Pipeline

_log = structlog.get_logger(__name__)


@dataclass
class _Turn:
    """A turn whose output is wanted. `held` is what is read in place, by stage, until it is
    acknowledged."""

    lane: str
    entry: str
    held: dict[str, deque[tuple[int, ShmDescriptor]]] = field(default_factory=dict)


class SessionWires:
    """Which worker each stage of a session is bound to, and which turns have output on its way.

    `turns` counts the turns that were ever started.
    """

    def __init__(self, fence: Fence, pipeline: Pipeline, transfers: Transfers) -> None:
        self.turns = 0
        self._fence = fence
        self._session = fence.session
        self._pipeline = pipeline
        self._transfers = transfers
        self._replicas: dict[str, Replica] = {}
        self._opens: dict[str, str] = {}
        """The command with which each stage was told of the session, and not yet of its end."""
        self._wanted: dict[int, _Turn] = {}
        self._relayed: set[tuple[int, str]] = set()

    def bind(self, stage: str, replica: Replica) -> None:
        """Commands for `stage` go to `replica` from now on."""
        self._replicas[stage] = replica
        replica.sessions.add(self._session)

    def replicas(self, commands: Mapping[str, str]) -> dict[str, Replica]:
        """The workers to which these commands went, which are given by stage."""
        bound = self._replicas
        return {command: bound[stage] for stage, command in commands.items() if stage in bound}

    def bound_to(self, replica: Replica) -> bool:
        """Whether this is the session's worker of its stage."""
        return self._replicas.get(replica.stage) is replica

    def replica(self, stage: str) -> Replica:
        """The session's worker of a stage that has one."""
        return self._replicas[stage]

    def give_up(self, stage: str) -> None:
        """The session goes on without its worker of `stage`, which frees what it holds of it."""
        replica = self._replicas.pop(stage, None)
        if replica is None:
            return
        replica.sessions.discard(self._session)
        self._transfers.close_input(self._session, stage)
        self._relayed = {(turn, by) for turn, by in self._relayed if by != stage}
        for turn in [t for t, of in self._wanted.items() if of.lane == INPUT_LANE]:
            # It has this stage alone: nobody else will say that it has ended.
            if self._wanted[turn].entry == stage:
                self.turn_over(turn)
        if self._opens.pop(stage, None) is None:
            return
        try:
            replica.link.send(Close(self._fence, f"{stage}-given-up", "given up"))
        except EngineLost:
            pass  # It is gone, with all that it held.
        except AntiphonError:
            # It cannot be told: only a new link makes both sides agree again on what it holds.
            replica.link.start_afresh()

    def unbind(self, stage: str) -> None:
        """The worker of `stage` holds nothing of the session any more."""
        self._opens.pop(stage, None)
        self.give_up(stage)

    def release(self) -> None:
        """The session is gone: nothing of it is bound, held or on its way."""
        for stage in list(self._replicas):
            self.give_up(stage)
        for turn in list(self._wanted):
            self._void(turn)

    # To the workers

    def send(self, stage: str, command: Command) -> list[Event]:
        """Send a command with its payloads; without a worker it goes nowhere.

        What the session is to be told in its place: that a worker which cannot be told of
        the command is lost to it, that a turn which no worker can read has failed.
        """
        replica = self._replicas.get(stage)
        if replica is None:
            return []
        if isinstance(command, Run) and command.readers:
            readers, events = self._attach_readers(replica, command)
            if len(readers) < len(command.readers):
                return [*events, self._unread(stage, command)]
            command = msgspec.structs.replace(command, readers=readers)
        try:
            rest = self._by_arena(replica, stage, command)
            if rest is not None:
                replica.link.send(rest)
        except AntiphonError as error:
            return [self._unsent(stage, command, error)]
        if isinstance(command, Close):
            self._opens.pop(stage, None)
            replica.sessions.discard(self._session)
        return []

    def _unsent(self, stage: str, command: Command, error: AntiphonError) -> StageLost:
        """A worker cannot be told: the session goes on without it."""
        _log.warning(
            "command_not_sent",
            session=self._session,
            stage=stage,
            command=type(command).__name__,
            error=error.code,
        )
        self.give_up(stage)
        return StageLost(stage)

    def _by_arena(self, replica: Replica, stage: str, command: Command) -> Command | None:
        """What of a command goes inside a message, after its payloads have been seen to."""
        match command:
            case Update():
                return self._transfers.put_input(stage, command)
            case Open():
                self._opens[stage] = command.command
                if self._pipeline.kind is Kind.DUPLEX:
                    kind = self._input_kind(stage)
                    self._transfers.open_input(self._session, stage, replica.consumer, kind)
            case Run():
                return self._run(replica, stage, command)
            case Feed(payload=payload) if payload is not None:
                self._count_inputs(stage, [payload])
            case Acknowledge():
                self._acknowledged(stage, command.turn, command.through)
            case RaiseFloor():
                for turn, of in list(self._wanted.items()):
                    if of.lane == command.lane and turn < command.floor:
                        self._void(turn)
        return command

    def _input_kind(self, stage: str) -> ConnectorKind:
        """How what clients send crosses to `stage`."""
        return self._pipeline.connectors.get(edge_name(CLIENT, stage), ConnectorKind.INLINE)

    def _run(self, replica: Replica, stage: str, run: Run) -> Run:
        if run.turn not in self._wanted:
            self.turns += 1
            self._wanted[run.turn] = _Turn(run.lane, stage)
        if not run.to_client:
            self._relayed.add((run.turn, stage))
        # What it puts into the arena is counted there.
        put = self._transfers.put_inputs(stage, run, replica.consumer, self._input_kind(stage))
        both = zip(run.inputs, put.inputs, strict=True)
        self._count_inputs(stage, [now for before, now in both if now is before])
        return put

    def _attach_readers(self, replica: Replica, run: Run) -> tuple[dict[str, str], list[Event]]:
        """Let the workers that read the turn's output attach to the arena it comes from.

        The consumers by edge, as far as they can read it, and what the session is to be
        told. It is being told already of a reader that has no worker here any more.
        """
        path = worker_arena(replica.link.endpoint)
        consumers: dict[str, str] = {}
        events: list[Event] = []
        for edge, target in run.readers.items():
            reader = self._replicas.get(target)
            if reader is None or reader.consumer is None or path is None:
                continue
            attach = Attach(run.fence, path)
            try:
                reader.link.send(attach)
            except AntiphonError as error:
                events.append(self._unsent(target, attach, error))
            else:
                consumers[edge] = reader.consumer
        return consumers, events

    def _unread(self, stage: str, run: Run) -> Reported:
        """The end of a turn that cannot begin: the stage's own worker is not at fault."""
        readers = ", ".join(run.readers.values())
        error = EngineLost(f"no worker of stage {readers} reads what stage {stage} makes")
        _log.warning("turn_not_read", session=self._session, turn=run.turn, stage=stage)
        ended = TurnEnded(self._session, run.turn, TurnStatus.FAILED, error.info())
        return Reported(stage, ended)

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
        match report:
            case Output():
                return self._output(stage, report)
            case Answer(command=command) if command == self._opens.get(stage):
                if report.error is not None:
                    del self._opens[stage]
                else:
                    self._transfers.opened(self._session, stage)
            case TurnEnded():
                self._relayed.discard((report.turn, stage))
                turn = self._wanted.get(report.turn)
                if turn is not None and turn.lane == INPUT_LANE:
                    self.turn_over(report.turn)
        return Reported(stage, report)

    def turn_over(self, turn: int) -> None:
        """The turn has ended: no more output of it comes, and none is read any more."""
        self._transfers.inputs_read(self._session, turn)
        ended = self._wanted.pop(turn, None)
        if ended is not None:
            for held in ended.held.values():
                for _, descriptor in held:
                    self._transfers.release(descriptor)

    def _void(self, turn: int) -> None:
        """The turn's content is not wanted: what is held of it goes, and what still comes."""
        self.turn_over(turn)
        self._transfers.void(self._session, turn)

    def _acknowledged(self, stage: str, turn: int, through: int) -> None:
        """Output up to `through` has been taken: its views die."""
        wanted = self._wanted.get(turn)
        held = wanted.held.get(stage) if wanted is not None else None
        while held and held[0][0] <= through:
            self._transfers.release(held.popleft()[1])

    def _output(self, stage: str, output: Output) -> Event | None:
        turn, descriptor = output.turn, output.payload
        wanted = self._wanted.get(turn)
        if (turn, stage) in self._relayed:
            # Its bytes are other workers' to read.
            if wanted is None:
                return None
            return StageProduced(stage, turn, output.sequence, None, descriptor)
        if wanted is None:
            # Both ends have voided the turn; its worker may have taken the bytes back already.
            self._transfers.discard(descriptor)
            return None
        try:
            payload = self._transfers.get(stage, descriptor)
        except TurnVoid:
            return None
        if isinstance(descriptor, ShmDescriptor):
            wanted.held.setdefault(stage, deque()).append((output.sequence, descriptor))
        return StageProduced(stage, turn, output.sequence, payload, descriptor)
