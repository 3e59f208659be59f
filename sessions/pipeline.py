"""A pipeline as the session core sees it: stages, typed edges, outputs, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.edges import CLIENT, ConnectorKind, OutputEdge, edge_name
from protocol.payloads import PayloadType
from protocol.safe_action import SafeValue


class Delivery(StrEnum):
    """How a payload crosses an edge: piece by piece, or whole when the producer ended."""

    CHUNK = "chunk"
    FULL = "full"


@dataclass(frozen=True)
class Edge:
    """A typed connection from one stage to the next."""

    source: str
    target: str
    payload: PayloadType
    delivery: Delivery


@dataclass(frozen=True)
class Limits:
    """Bounds of a pipeline's sessions.

    `sessions` counts those that are opening or closing too, and so does
    `sessions_per_tenant`; None: a tenant may have all. So many opens as `waiting` wait up to
    `wait_ms` for a place. `grace_ms` is how long a
    session waits for a client that was cut off, and `replay_bytes` what of its output it
    keeps for that client. `lead_ms` is how far audio may be sent ahead of its play-out;
    `stall_ms` how long a client may leave its answer unread before it is let go;
    `restore_ms` how long a turn waits for a stage whose worker was lost, and `turn_ms` how
    long a turn may go on without getting anything done.
    """

    sessions: int = 8
    sessions_per_tenant: int | None = None
    waiting: int = 0
    wait_ms: int = 30_000
    idle_ms: int = 300_000
    max_age_ms: int = 3_600_000
    grace_ms: int = 30_000
    replay_bytes: int = 2 * 1024 * 1024
    lead_ms: int = 2_000
    stall_ms: int = 30_000
    restore_ms: int = 30_000
    turn_ms: int = 120_000
    open_ms: int = 10_000
    close_ms: int = 10_000


@dataclass(frozen=True)
class Control:
    """What a robot's session promises its loop.

    An observation is answered within `deadline_ms` of its arrival, once there has been a fresh
    answer: with `safe_action` where there is nothing fresh. That is for all arrays of an
    answer, or by their keys. `rate_hz` is how fast the robot plays the rows of a chunk: which
    one it is at, and holds, follows from it.
    """

    deadline_ms: float | None = None
    rate_hz: float | None = None
    safe_action: SafeValue | Mapping[str, SafeValue] | None = None
    stopped: frozenset[str] = frozenset()
    """What holds the session still from its beginning, as it does all of its pipeline."""


@dataclass(frozen=True)
class Play:
    """How a world is played: so many frames a second, as long as its player is there."""

    rate_hz: float = 10.0


class Kind(StrEnum):
    """What loop a pipeline's sessions are."""

    DUPLEX = "duplex"
    WORLD = "world"
    ROBOT = "robot"
    ONE_SHOT = "one-shot"


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages with its output ports.

    `stages` is in topological order, `opening_order` the order in which an open binds them
    (empty: the same). `connectors` is by
    the name of an edge, those from and to the client included. `voices`
    maps every name that a client may ask for to the voice that is spoken.
    """

    name: str
    stages: tuple[str, ...]
    edges: tuple[Edge, ...]
    outputs: Mapping[str, str]
    connectors: Mapping[str, ConnectorKind] = field(default_factory=dict)
    limits: Limits = Limits()
    instructions: str = ""
    voice: str = ""
    voices: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = Kind.DUPLEX
    opening_order: tuple[str, ...] = ()
    state: str = ""
    """The stage that keeps the state of a step loop; "" where it is the first one."""
    priority: int = 0
    """Opens of a higher one are let in first; sessions of a lower one are parked first."""
    parks: bool = True
    """Whether the state of its sessions may be parked to make room for others."""
    durable: bool = False
    """Whether their state is in the host's store as it is after each turn."""
    control: Control = Control()
    """Of robots."""
    play: Play = Play()
    """Of worlds."""

    @property
    def entry(self) -> str:
        """The stage without input, where turns begin."""
        targets = {edge.target for edge in self.edges}
        return next(stage for stage in self.stages if stage not in targets)

    def output_edge(self, stage: str) -> OutputEdge:
        """How the output of `stage` reaches this gateway: the edge to its client."""
        name = edge_name(stage, CLIENT)
        return OutputEdge(name, self.connectors.get(name, ConnectorKind.INLINE))

    def edges_from(self, stage: str) -> Iterable[Edge]:
        """The edges that leave `stage`."""
        return (edge for edge in self.edges if edge.source == stage)

    def streams_from(self, stage: str) -> bool:
        """Whether what enters at `stage` comes out bit by bit: no edge behind it holds back.

        Where one does, what goes in cannot wait for what comes out.
        """
        return all(
            edge.delivery is Delivery.CHUNK and self.streams_from(edge.target)
            for edge in self.edges_from(stage)
        )

    def needed(self, entry: str, ports: frozenset[str]) -> frozenset[str]:
        """The stages that a turn which enters at `entry` runs to fill `ports`.

        Those are the stages on a path from `entry` to the stage of a wanted port.
        """
        reachable = {entry}
        for stage in self.stages:
            if stage in reachable:
                reachable.update(edge.target for edge in self.edges_from(stage))
        useful = {self.outputs[port] for port in ports}
        for stage in reversed(self.stages):
            if any(edge.target in useful for edge in self.edges_from(stage)):
                useful.add(stage)
        return frozenset(reachable & useful)


@dataclass(frozen=True)
class StepRoles:
    """Where a step of a world or robot pipeline enters, and which stage keeps the state."""

    enter: str
    state: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> StepRoles:
        """The roles: where turns begin, and the stage that is named."""
        return cls(pipeline.entry, pipeline.state or pipeline.entry)


@dataclass(frozen=True)
class DuplexRoles:
    """Which stage of a duplex pipeline hears, which thinks, which speaks."""

    hear: str
    think: str
    speak: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> DuplexRoles:
        """The roles by position: the stage without input hears; the ports name the others."""
        return cls(pipeline.entry, pipeline.outputs["text"], pipeline.outputs["audio"])
