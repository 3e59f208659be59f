"""One turn on its way across a pipeline: what crosses each edge, and what its machine is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.connectors import Descriptor
from protocol.errors import ErrorInfo
from protocol.messages import TurnEnded
from protocol.payloads import Payload
from sessions.clauses import Clauses
from sessions.pipeline import Delivery, Edge

CLAUSES_IN_FLIGHT = 2
"""Credits of a clause edge: clauses the voice may hold whose audio has not all been taken."""


class Produced(msgspec.Struct, frozen=True):
    """A piece of output on a port that the turn asked for.

    It is number `sequence` of what `stage` makes in this turn, and is kept there until
    `acknowledge` names it.
    """

    turn: int
    port: str
    stage: str
    sequence: int
    payload: Payload


class ClauseCut(msgspec.Struct, frozen=True):
    """Clause number `index` (from 0) of the turn's text is `text`."""

    turn: int
    index: int
    text: str


class FlowEnded(msgspec.Struct, frozen=True):
    """All stages of the turn have ended, or it failed; nothing follows for it.

    `unsettled` are the stages of a failed turn whose last word is still to come.
    """

    turn: int
    error: ErrorInfo | None
    usage: dict[str, dict[str, Any]]
    timelines: dict[str, dict[str, float]]
    unsettled: frozenset[str] = frozenset()


FlowEvent = Produced | ClauseCut | FlowEnded


@dataclass
class EdgeFlow:
    """What crosses one edge for one turn. `held` counts clauses whose credit is out."""

    edge: Edge
    clauses: Clauses = field(default_factory=Clauses)
    queue: deque[str] = field(default_factory=deque)
    pieces: list[Descriptor] = field(default_factory=list)
    cut: int = 0
    fed: int = 0
    held: int = 0
    source_ended: bool = False
    closed: bool = False
    paced: bool = True
    """Whether credits bound it: not before an edge that waits for the end."""
    told: bool = False
    """Whether its clauses are told of: text may go to several stages, its clauses once."""

    @property
    def has_credit(self) -> bool:
        """Whether the consumer may be handed one more clause."""
        return not self.paced or self.held < CLAUSES_IN_FLIGHT

    def cut_clauses(self) -> list[str]:
        """The clauses that are queued now, as the edge's text allows: more eagerly while the
        consumer has nothing to say."""
        before = len(self.queue)
        if self.edge.delivery is Delivery.CHUNK:
            while len(self.queue) < CLAUSES_IN_FLIGHT or self.source_ended:
                clause = self.clauses.cut(buffered=self.held + len(self.queue) > 0)
                if clause is None:
                    break
                self.queue.append(clause)
        if self.source_ended and (rest := self.clauses.rest()) is not None:
            self.queue.append(rest)
        return list(self.queue)[before:]


@dataclass
class Flow:
    """One turn in progress."""

    turn: int
    lane: str
    ports: frozenset[str]
    stages: frozenset[str]
    parameters: Mapping[str, dict[str, Any]]
    edges: list[EdgeFlow]
    steps: Mapping[str, int]
    started: set[str] = field(default_factory=set)
    ended: dict[str, TurnEnded] = field(default_factory=dict)
    waits_until_ms: float | None = None
    stirred_ms: float = 0.0
    """When a stage last got anything of it done, or was given more to do."""

    def result(self, error: ErrorInfo | None, unsettled: frozenset[str] = frozenset()) -> FlowEnded:
        """The last word about it."""
        usage = {stage: dict(ended.usage) for stage, ended in self.ended.items()}
        timelines = {stage: dict(ended.timeline) for stage, ended in self.ended.items()}
        return FlowEnded(self.turn, error, usage, timelines, unsettled)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.turn,
            self.lane,
            tuple(sorted(self.started)),
            tuple(sorted(self.ended)),
            self.waits_until_ms,
            self.stirred_ms,
            tuple((e.cut, e.fed, e.held, e.source_ended, e.closed) for e in self.edges),
        )
