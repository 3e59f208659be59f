"""The orchestrator core: one turn's way across the stages of a pipeline.

It owns progress, credits on the edges, completion and cancellation. It does not
know what the turn is for: the machine of the session's kind starts turns and
takes their output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from protocol.connectors import Descriptor, InlineDescriptor
from protocol.edges import ConnectorKind, edge_name
from protocol.errors import CapacityExceeded, EngineFailed, EngineLost, ErrorInfo
from protocol.messages import TurnEnded, TurnStatus
from protocol.payloads import Payload, PayloadType, text_payload
from sessions.actions import StageProduced
from sessions.bindings import Binding
from sessions.deadlines import earliest
from sessions.flow import ClauseCut, EdgeFlow, Flow, FlowEvent, Produced
from sessions.lanes import DEFAULT_LANE, Lanes
from sessions.pipeline import Delivery, Pipeline


class Orchestrator:
    """The turns in progress of one session."""

    def __init__(
        self,
        pipeline: Pipeline,
        bindings: Mapping[str, Binding],
        lanes: Lanes,
        emit: Callable[[FlowEvent], None],
    ) -> None:
        self._pipeline = pipeline
        self._limits = pipeline.limits
        self._bindings = bindings
        self._lanes = lanes
        self._emit = emit
        self._flows: dict[int, Flow] = {}
        self._stages: dict[tuple[str, frozenset[str]], frozenset[str]] = {}
        """Which stages turns run, by where they enter and which ports they fill."""

    def start(
        self,
        lane: str,
        entry: str,
        ports: frozenset[str],
        inputs: list[Payload],
        parameters: Mapping[str, dict[str, Any]],
        now_ms: float,
        steps: Mapping[str, int] | None = None,
    ) -> int:
        """Start a turn at stage `entry` that ends when all `ports` have drained.

        `steps` names the stages whose state the turn moves on, and to which step.

        Raises CapacityExceeded when too much waits for a worker already.
        """
        stages = self._needed(entry, ports)
        turn = self._lanes.start()
        edges = [
            EdgeFlow(edge, paced=self._pipeline.streams_from(edge.target))
            for edge in self._pipeline.edges
            if edge.source in stages and edge.target in stages
        ]
        for edge_flow in edges:
            if edge_flow.edge.payload is PayloadType.TEXT:
                edge_flow.told = True
                break
        flow = Flow(turn, lane, ports, stages, parameters, edges, steps or {})
        descriptors: list[Descriptor] = [InlineDescriptor(payload) for payload in inputs]
        self._run(flow, entry, descriptors, last=True)
        flow.stirred_ms = now_ms
        self._flows[turn] = flow
        self._watch_waiting(flow, now_ms)
        return turn

    def _needed(self, entry: str, ports: frozenset[str]) -> frozenset[str]:
        known = self._stages.get((entry, ports))
        if known is None:
            known = self._pipeline.needed(entry, ports) if ports else frozenset({entry})
            self._stages[entry, ports] = known
        return known

    def output(self, piece: StageProduced, now_ms: float) -> None:
        """A stage produced a piece of the turn's output."""
        flow = self._flows.get(piece.turn)
        if flow is None or not self._lanes.wanted(flow.lane, flow.turn):
            return
        flow.stirred_ms = now_ms
        stage, payload = piece.stage, piece.payload
        if payload is not None:
            if not flow.ports and stage in flow.stages:
                self._emit(Produced(flow.turn, stage, stage, piece.sequence, payload))
            for port in sorted(flow.ports):
                if self._pipeline.outputs[port] == stage:
                    self._emit(Produced(flow.turn, port, stage, piece.sequence, payload))
        for edge_flow in self._edges_from(flow, stage):
            if edge_flow.edge.payload is not PayloadType.TEXT:
                self._relay(flow, edge_flow, piece.descriptor, now_ms)
            elif payload is not None:
                edge_flow.clauses.push(bytes(payload.data).decode())
                self._cut(flow, edge_flow)
                self._advance(flow, edge_flow, now_ms)
        if self.running(flow.turn) and not self._for_client(flow, stage):
            # Who reads it has claims of its own; nobody here will acknowledge it.
            self.acknowledge(flow.turn, stage, piece.sequence)

    def ended(self, stage: str, ended: TurnEnded, now_ms: float) -> None:
        """A stage has said its last word about the turn."""
        flow = self._flows.get(ended.turn)
        if flow is None:
            return
        flow.stirred_ms = now_ms
        flow.ended[stage] = ended
        if ended.status is not TurnStatus.COMPLETED:
            self._fail(flow, ended.error or _unasked(stage, ended.status))
            return
        for edge_flow in self._edges_from(flow, stage):
            edge_flow.source_ended = True
            self._cut(flow, edge_flow)
            self._advance(flow, edge_flow, now_ms)
        if flow.turn in self._flows and flow.stages <= flow.ended.keys():
            del self._flows[flow.turn]
            self._emit(flow.result(None))

    def acknowledge(self, turn: int, stage: str, through: int) -> None:
        """The turn's output from `stage` up to `through` was taken, and need not be kept."""
        self._bindings[stage].acknowledge(turn, through)

    def take(self, turn: int, now_ms: float) -> None:
        """The client side took all audio of one clause: its credit returns."""
        flow = self._flows.get(turn)
        if flow is None:
            return
        flow.stirred_ms = now_ms
        for edge_flow in flow.edges:
            if edge_flow.held and self.running(turn):
                edge_flow.held -= 1
                self._cut(flow, edge_flow)
                self._advance(flow, edge_flow, now_ms)

    def cancel(self, lane: str) -> None:
        """Raise the floor of `lane`: its turns end here and on every stage they reached."""
        flows = [flow for flow in self._flows.values() if flow.lane == lane]
        floor = self._lanes.raise_floor(lane)
        turns = {flow.turn for flow in flows}
        for stage in self._pipeline.stages:
            if any(stage in flow.started for flow in flows):
                self._bindings[stage].raise_floor(lane, floor, turns)
        for turn in turns:
            del self._flows[turn]

    def fail(self, turn: int, error: ErrorInfo) -> None:
        """End a turn that cannot go on any more."""
        if (flow := self._flows.get(turn)) is not None:
            self._fail(flow, error)

    def stop(self, turn: int, stage: str) -> None:
        """Cancel the turn on `stage`, or before it gets there, unless it has completed there.

        What becomes of it is told as of any turn, once the stages have had their last word.
        """
        flow = self._flows.get(turn)
        if flow is None:
            return
        running = {stage} if stage in flow.started else flow.started
        if not all([self._bindings[s].stop(turn) for s in running - flow.ended.keys()]):
            self._fail(flow, EngineFailed("the turn was cancelled before it ran").info())

    def stage_lost(self, stage: str) -> None:
        """The worker of `stage` is gone: turns that it, or what it reads, had begun fail."""
        error = EngineLost(f"the worker of stage {stage} was lost").info()
        for flow in list(self._flows.values()):
            if any(not self._bindings[s].waits(flow.turn) for s in self._in_need_of(flow, stage)):
                self._fail(flow, error)

    def workers_ready(self, now_ms: float) -> None:
        """Turns have been handed to the workers that they waited for."""
        for flow in self._flows.values():
            if not self._waits(flow):
                flow.waits_until_ms = None
                flow.stirred_ms = now_ms

    def stir(self, now_ms: float) -> None:
        """Turns that stood still because nobody took their output may go on."""
        for flow in self._flows.values():
            flow.stirred_ms = now_ms

    def stage_refused(self, stage: str, error: ErrorInfo) -> None:
        """A new worker refused the session: turns that wait for the stage fail."""
        for flow in list(self._flows.values()):
            if self._in_need_of(flow, stage):
                self._fail(flow, error)

    def deadline(self, paused: Callable[[str], bool]) -> float | None:
        """When the first turn is given up: it waits for a worker, or gets nothing done.

        `paused(lane)` says that nobody takes the output of that lane now, so that its turns
        may stand still.
        """
        first_ms = None
        for flow in self._flows.values():
            first_ms = earliest(first_ms, self._given_up_at_ms(flow, paused))
        return first_ms

    def tick(self, now_ms: float, paused: Callable[[str], bool]) -> None:
        """Fail the turns that have waited long enough."""
        for flow in list(self._flows.values()):
            at_ms = self._given_up_at_ms(flow, paused)
            if at_ms is None or at_ms > now_ms:
                continue
            if flow.waits_until_ms is not None:
                missing = {m for s in flow.started for m in self._bindings[s].missing(flow.turn)}
                reason = f"no worker came for stage {', '.join(sorted(missing))}"
                self._fail(flow, EngineLost(reason).info())
            else:
                still = ", ".join(sorted(flow.started - flow.ended.keys()))
                reason = f"stage {still} got nothing done for {self._limits.turn_ms / 1000:g} s"
                self._fail(flow, EngineFailed(reason, code="turn_timeout").info())

    def _given_up_at_ms(self, flow: Flow, paused: Callable[[str], bool]) -> float | None:
        if flow.waits_until_ms is not None:
            return flow.waits_until_ms
        return None if paused(flow.lane) else flow.stirred_ms + self._limits.turn_ms

    def forget(self, lane: str) -> None:
        """`lane` sees no further turn: its floor need not be remembered."""
        if lane != DEFAULT_LANE:
            self._lanes.forget(lane)

    def running(self, turn: int) -> bool:
        """Whether the turn is still in progress."""
        return turn in self._flows

    def _waits(self, flow: Flow) -> bool:
        return any(self._bindings[stage].waits(flow.turn) for stage in flow.started)

    def _watch_waiting(self, flow: Flow, now_ms: float) -> None:
        if self._waits(flow):
            flow.waits_until_ms = flow.waits_until_ms or now_ms + self._limits.restore_ms

    def _cut(self, flow: Flow, edge_flow: EdgeFlow) -> None:
        for clause in edge_flow.cut_clauses():
            if edge_flow.told:
                self._emit(ClauseCut(flow.turn, edge_flow.cut, clause))
            edge_flow.cut += 1

    def _advance(self, flow: Flow, edge_flow: EdgeFlow, now_ms: float) -> None:
        """Hand clauses to the consumer while it has credit, then the end."""
        target = edge_flow.edge.target
        try:
            while edge_flow.queue and edge_flow.has_credit:
                payload = text_payload(edge_flow.queue.popleft(), clause=edge_flow.fed)
                edge_flow.fed += 1
                edge_flow.held += 1
                self._hand_over(flow, target, InlineDescriptor(payload))
            if edge_flow.source_ended and not edge_flow.queue and not edge_flow.closed:
                self._close(flow, edge_flow)
        except CapacityExceeded as error:
            self._fail(flow, error.info())
            return
        self._watch_waiting(flow, now_ms)

    def _close(self, flow: Flow, edge_flow: EdgeFlow) -> None:
        """Nothing more crosses the edge; a stage that joins several ends with the last."""
        edge_flow.closed = True
        target = edge_flow.edge.target
        last = all(other.closed for other in flow.edges if other.edge.target == target)
        if target not in flow.started:
            if last or edge_flow.pieces:
                self._run(flow, target, edge_flow.pieces, last=last)
            return
        for descriptor in edge_flow.pieces:
            self._bindings[target].feed(flow.turn, descriptor)
        if last:
            self._bindings[target].feed(flow.turn, None, last=True)

    def _edges_from(self, flow: Flow, stage: str) -> Iterator[EdgeFlow]:
        """The edges that leave `stage`, while the turn goes on."""
        for edge_flow in flow.edges:
            if edge_flow.edge.source == stage and self.running(flow.turn):
                yield edge_flow

    def _relay(
        self, flow: Flow, edge_flow: EdgeFlow, descriptor: Descriptor, now_ms: float
    ) -> None:
        """Pass a piece on as it is: the arena's credits bound what is on its way.

        On an edge that delivers whole it waits for the producer's end.
        """
        if edge_flow.edge.delivery is Delivery.FULL:
            edge_flow.pieces.append(descriptor)
            return
        try:
            self._hand_over(flow, edge_flow.edge.target, descriptor)
        except CapacityExceeded as error:
            self._fail(flow, error.info())
            return
        self._watch_waiting(flow, now_ms)

    def _hand_over(self, flow: Flow, target: str, descriptor: Descriptor) -> None:
        if target in flow.started:
            self._bindings[target].feed(flow.turn, descriptor)
        else:
            self._run(flow, target, [descriptor], last=False)

    def _readers(self, flow: Flow, stage: str) -> dict[str, str]:
        """The stages whose workers read what `stage` makes from its arena, by edge."""
        readers = {}
        for edge_flow in flow.edges:
            edge = edge_flow.edge
            name = edge_name(edge.source, edge.target)
            if edge.source == stage and self._pipeline.connectors.get(name) is ConnectorKind.SHM:
                readers[name] = edge.target
        return readers

    def _in_need_of(self, flow: Flow, stage: str) -> list[str]:
        """The stages at work on the turn that cannot go on without the worker of `stage`."""
        return [
            at_work
            for at_work in flow.started - flow.ended.keys()
            if at_work == stage or stage in self._readers(flow, at_work).values()
        ]

    def _run(self, flow: Flow, stage: str, inputs: list[Descriptor], *, last: bool) -> None:
        self._bindings[stage].run(
            flow.turn,
            flow.lane,
            flow.parameters.get(stage, {}),
            inputs,
            last,
            readers=self._readers(flow, stage),
            to_client=self._for_client(flow, stage),
            step=flow.steps.get(stage),
        )
        flow.started.add(stage)

    def _for_client(self, flow: Flow, stage: str) -> bool:
        """Whether this gateway reads what `stage` makes in this turn."""
        wanted = {self._pipeline.outputs[port] for port in flow.ports} or {stage}
        cut_here = any(
            edge_flow.edge.source == stage and edge_flow.edge.payload is PayloadType.TEXT
            for edge_flow in flow.edges
        )
        return stage in wanted or cut_here

    def _fail(self, flow: Flow, error: ErrorInfo) -> None:
        del self._flows[flow.turn]
        unsettled = set()
        for stage in flow.started:
            if stage not in flow.ended:
                if self._bindings[stage].ready:
                    unsettled.add(stage)
                # A lane of replies runs one turn at a time, and a turn of the input lane has a
                # single stage, which has ended or is gone: no other turn is below this floor.
                self._bindings[stage].raise_floor(flow.lane, flow.turn + 1, {flow.turn})
        self._emit(flow.result(error, frozenset(unsettled)))

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple(self._flows[turn].freeze() for turn in sorted(self._flows))


def _unasked(stage: str, status: TurnStatus) -> ErrorInfo:
    """Why a stage ended a turn that it gives no reason for."""
    if status is TurnStatus.CANCELLED:
        # A worker cancels by itself only what it leaves behind when it is stopped.
        return EngineLost(f"the worker of stage {stage} gave the turn up").info()
    return EngineFailed(f"stage {stage} failed").info()
