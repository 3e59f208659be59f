"""What surfaces and the operator's endpoints ask of the gateway's session host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from gateway.cameras import Seen
from protocol.compute_use import ComputeUse
from protocol.errors import ErrorInfo
from sessions.client import Answered, Attached, Role, Verb
from sessions.opening import Position
from sessions.pipeline import Control, Limits, Pipeline

OnOutput = Callable[[int, Any], None]
"""Takes (sequence, output): an output of `sessions.client` or of the session's kind."""

OnPosition = Callable[[Position], None]
"""Takes where an open stands that has to wait."""


class Attachment(Protocol):
    """A client's hold on its session."""

    @property
    def session(self) -> str:
        """The session's id."""

    def send(self, verb: Verb, command: str | None = None) -> None:
        """Hand a verb to the session, in order. Bad input is answered by a `Refused` output.

        With a `command` id either outcome is answered by `Answered`.
        """

    def misspoke(self, command: str, error: ErrorInfo) -> None:
        """The client said something that is no verb, with a command id: it is the answer, if
        that id has none yet."""

    def has(self, through: int) -> None:
        """The client has all outputs up to number `through`: they need not be kept for it."""

    @property
    def has_room(self) -> bool:
        """Whether the session takes more verbs: who sends a client's asks first."""

    async def room(self) -> None:
        """Wait until it does."""

    def set_blocked(self, blocked: bool) -> None:
        """The client's egress queue is full, or has room again."""

    def superseded(self, count: int) -> None:
        """So many of the client's inputs were answered with what a newer one gave."""

    def detach(self) -> None:
        """The client is gone. Its session waits for it, or closes if it cannot come back."""

    def close(self, reason: str) -> None:
        """Close the session, if this client has control; clean-up goes on after the call."""


class StageHealth(StrEnum):
    """What can be said of the replicas of a stage, taken together."""

    READY = "ready"
    STARTING = "starting"
    LOST = "lost"
    WEDGED = "wedged"
    """Work waits and nothing gets done."""


@dataclass(frozen=True)
class PipelineHealth:
    """Whether a pipeline works, and how full it is."""

    name: str
    required: bool
    stages: dict[str, StageHealth]
    sessions: int
    session_limit: int
    full: bool
    """Whether one more session would be refused, of whichever tenant."""
    stopped: bool = False
    """Whether an operator has stopped all its robots."""

    @property
    def ready(self) -> bool:
        """Whether a replica of every stage makes progress."""
        return all(health is StageHealth.READY for health in self.stages.values())


@dataclass(frozen=True)
class SessionSummary:
    """A session as operators see it. Times in seconds."""

    id: str
    pipeline: str
    kind: str
    tenant: str
    state: str
    epoch: int
    turns: int
    age_s: float
    idle_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    """What the session's kind has to say, such as `committed_step`."""
    parked: tuple[str, ...] = ()
    """The stages whose state is in the store, or on its way there or back."""
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """What workers have reserved for it, by stage and device."""
    idle_left_s: float | None = None
    """What is left until it ends because nothing is done in it; None: it is not open."""
    age_left_s: float | None = None
    """The same for its age."""
    grace_left_s: float | None = None
    """The same because its client does not come back; None: it is not detached."""
    stopped: bool = False
    """Whether it stands still after an emergency stop."""
    noted: int = 0
    """How many entries its timeline has had."""
    steps: dict[str, Any] | None = None
    """Of one that moves by steps: as `gateway.step_figures.StepFigures.described` has it."""


@dataclass(frozen=True)
class SessionHistory:
    """A session and what became of it."""

    summary: SessionSummary
    timeline: dict[str, Any]
    """As `gateway.timeline.Timeline.described` has it."""


@dataclass(frozen=True)
class SessionDescription:
    """A session as its tenant may see it. `expires_at_s` is Unix time."""

    summary: SessionSummary
    settings: Any
    limits: Limits
    expires_at_s: int
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the engine of each stage says of its model."""
    control: Control = field(default_factory=Control)
    """Of a robot's loop."""


@dataclass(frozen=True)
class WaitingSummary:
    """An open that is not a session yet, as operators see it. Times in seconds."""

    pipeline: str
    tenant: str
    priority: int
    position: int
    """Among those of its pipeline; 1 is the next."""
    opening: bool
    """Whether workers have been asked, and have not answered yet."""
    waited_s: float
    estimate_ms: int | None
    reason: str | None
    """What it lacks; None where it was not tried before, and is now."""


@dataclass(frozen=True)
class WorkerSummary:
    """A worker as operators see it; counts are its own, as of its last heartbeat."""

    stage: str
    worker: str
    incarnation: str
    state: str
    sessions: int
    waiting: int
    progress: int
    resident_bytes: int
    devices: dict[str, dict[str, int | None]] = field(default_factory=dict)
    """What it has reserved of each device: the fields of
    `protocol.device_bytes.DeviceBytes`, with `reserved` and `free`."""
    compute: ComputeUse = field(default_factory=ComputeUse)
    """What it was measured to take of the processor."""


class SessionHost(Protocol):
    """Opens sessions and knows what runs."""

    @property
    def pipelines(self) -> Mapping[str, Pipeline]:
        """The pipelines by name, the default one first."""

    @property
    def draining(self) -> bool:
        """Whether this gateway takes no more sessions."""

    @property
    def holds_lease(self) -> bool:
        """Whether this gateway may act on its sessions."""

    @property
    def overview_changed(self) -> asyncio.Event:
        """Set when something of what operators see has changed; its one reader clears it."""

    def resolve(self, model: str | None) -> str:
        """The pipeline that a client's `model` names; None: the default. Raises NotFound."""

    async def open(
        self,
        *,
        pipeline: str,
        tenant: str,
        settings_patch: dict[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        priority: int | None = None,
        control: Mapping[str, Any] | None = None,
        secret: str | None = None,
        on_output: OnOutput | None = None,
        on_position: OnPosition | None = None,
        fork: str | None = None,
    ) -> Attachment:
        """Open a session. Raises AntiphonError, and then holds nothing.

        With `fork` its state begins as that of a session of this tenant and pipeline is, once
        the step in flight there is over.

        Where there is no room it waits, if its pipeline has room for that: `on_position` gets
        where it stands, whenever that changes. `priority` is at most that of the pipeline.

        `on_output` gets (sequence, output) on the event loop; SessionEnded is the last.
        With a `secret` the session outlives its client's connection, and who presents the
        secret has it again; without `on_output` it waits for that from the start. `limits`
        are those that the client chooses, in seconds by name, and so is `control` of the loop of
        a robot.
        """

    async def attach(
        self,
        session: str,
        *,
        tenant: str,
        role: Role,
        secret: str | None,
        cursor: int | None,
        on_output: OnOutput,
    ) -> tuple[Attachment, Attached]:
        """Come to a session that is open. Raises AntiphonError.

        Who presents its `secret`, or none, gets control of it, and a new secret with
        `Attached`, which is the first that `on_output` gets.
        """

    async def command(self, session: str, tenant: str, verb: Verb, command: str) -> Answered:
        """Have a verb carried out without an attachment. Raises AntiphonError."""

    def summary(self, session: str, tenant: str | None) -> SessionSummary:
        """One session, of this tenant if one is given. Raises NotFound."""

    def history(self, session: str) -> SessionHistory:
        """One session with its timeline, also one of those that ended last. Raises NotFound."""

    def describe(self, session: str, tenant: str) -> SessionDescription:
        """One session of this tenant, with its settings and limits. Raises NotFound."""

    def ended(self, session: str, tenant: str) -> bool:
        """Whether there was such a session of this tenant, as long as that is remembered."""

    def close_session(self, session: str, tenant: str | None = None) -> None:
        """Close a session: for the operator, or for its tenant. Raises NotFound.

        A tenant's that has ended is closed, as long as that is remembered.
        """

    def evict_session(self, session: str) -> None:
        """End a session to make room for others. Raises NotFound, and SessionBusy while a turn
        is in flight."""

    async def park_session(self, session: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Put the state of a session away: the stages where it is once that is done, and why
        it is not at the others.

        Where it is at none it raises why: NotFound, SessionBusy, InvalidRequest where it can
        never be, and CapacityExceeded where the store has no room.
        """

    async def restore_session(self, session: str) -> tuple[dict[str, str], dict[str, str]]:
        """Have what is parked of a session brought back: the `origin` of what the stages have
        once that is done, and why the others have nothing of it.

        Where it is none of several it raises why; NotFound.
        """

    def stop_session(self, session: str, stopped: bool) -> bool:
        """Have a robot's session stand still, or go on; whether it stands still.

        Raises NotFound, and InvalidRequest for one that is no robot's.
        """

    def stop_robots(self, pipeline: str | None, stopped: bool) -> dict[str, list[str]]:
        """The same for all of a robot pipeline, or of all; the ids of their sessions.

        Raises NotFound.
        """

    async def seen(self, session: str) -> Seen:
        """What the cameras of a robot saw last. Raises NotFound, and InvalidRequest where that is
        not allowed."""

    def health(self) -> list[PipelineHealth]:
        """The state of every pipeline."""

    def sessions(self, most: int | None = None) -> list[SessionSummary]:
        """All sessions that hold anything; at most so many, those with the most bytes."""

    def waiting(self, most: int | None = None) -> list[WaitingSummary]:
        """The opens that are not sessions yet, by pipeline, in their order; of each at most so
        many."""

    def workers(self) -> list[WorkerSummary]:
        """All workers that the config names or that were seen."""

    def drain(self) -> None:
        """Take no more sessions and close all with reason `drained`."""
