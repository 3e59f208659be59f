"""What the invariants are told of, and who tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.hosted import Hosted
    from protocol.errors import ErrorInfo
    from protocol.messages import Command, Report
    from sessions.actions import TurnMeasured
    from sessions.duplex.events import ClientOutput, ClientVerb
    from sessions.lifecycle import CloseReason
    from sessions.opening import Position
    from tests.simulation.client import Client
    from tests.simulation.deployment import Deployment
    from tests.simulation.engine import EngineSession, EngineTurn
    from tests.simulation.gateway import GatewayProcess, SimulatedLink
    from tests.simulation.line import Attachment
    from tests.simulation.process import Process
    from tests.simulation.worker import WorkerProcess
    from tests.simulation.world import World
    from workers.control_events import Action, ApplyInput, Event, OpenSession


class Invariant:
    """A property that holds after every step. What is not overridden tells nothing.

    `preconditions` are the counts without which it was never put to the test.
    """

    name = ""
    preconditions: tuple[str, ...] = ()

    def __init__(self, world: World) -> None:
        self.world = world
        self.deployment: Deployment

    def count(self, what: str) -> None:
        """A precondition has occurred."""
        self.world.counts[f"{self.name}: {what}"] += 1

    def check(self, holds: bool, message: str) -> None:
        """Fail unless it `holds`."""
        if not holds:
            self.world.fail(self.name, message)

    # A worker's control side

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """The control side has taken `event` in; `actions` are about to be carried out."""

    def input_applied(
        self, worker: WorkerProcess, session: EngineSession, action: ApplyInput
    ) -> None:
        """An engine is about to hear a piece of input."""

    def session_made(
        self, worker: WorkerProcess, session: EngineSession, action: OpenSession
    ) -> None:
        """An engine has a session from now on, anew or from what was parked."""

    def turn_started(self, worker: WorkerProcess, turn: EngineTurn) -> None:
        """An engine has begun a turn."""

    # A gateway's side of a link

    def sent(self, gateway: GatewayProcess, link: SimulatedLink, command: Command) -> None:
        """A link has taken a command."""

    def reported(self, gateway: GatewayProcess, link: SimulatedLink, report: Report) -> None:
        """A worker's report has come."""

    # Sessions and clients

    def asked(self, client: Client) -> None:
        """A client is about to ask for a session."""

    def stands(self, client: Client, position: Position) -> None:
        """A client is told where its open stands."""

    def begins(self, client: Client) -> None:
        """A client's session is about to be opened, for the first time or again."""

    def unqueued(self, client: Client) -> None:
        """A client has its session, or will get none."""

    def opened(self, client: Client) -> None:
        """A session is hosted from now on."""

    def said(self, client: Client, verb: ClientVerb) -> None:
        """A client's verb is about to be handed over."""

    def taken(self, client: Client, verb: ClientVerb) -> None:
        """A verb has been handed over, and what follows from it at once has come."""

    def told(self, client: Client, sequence: int, output: ClientOutput) -> None:
        """A client is about to learn of `output`."""

    def delivered(self, client: Client, attachment: Attachment, sequence: int, output: Any) -> None:
        """An output is sent over an attachment, which may be dead."""

    def attach_refused(self, client: Client, attachment: Attachment, error: ErrorInfo) -> None:
        """A client that wanted to attach does not."""

    def commanded(self, client: Client, command: str, first: bool) -> None:
        """A verb with an id is about to be handed over, for the first time or again."""

    def answered(self, client: Client, command: str) -> None:
        """It has been handed over, and should have been answered."""

    def evicted(self, gateway: GatewayProcess, victim: Hosted) -> None:
        """A session is about to be ended to make room for another."""

    def measured(self, gateway: GatewayProcess, hosted: Hosted, turn: TurnMeasured) -> None:
        """A turn has ended."""

    def released(self, client: Client, reason: CloseReason) -> None:
        """A session is gone from its gateway."""

    def gateway_died(self, gateway: GatewayProcess) -> None:
        """A gateway is gone, and its sessions with it."""

    # Time

    def stepped(self, process: Process) -> None:
        """A turn of a process's loop has ended."""

    def settled(self) -> None:
        """All sessions have ended and GONE_MS have passed since."""


HOOKS = tuple(
    name
    for name, value in vars(Invariant).items()
    if callable(value) and name not in ("__init__", "count", "check")
)


class Watch:
    """Tells every invariant of what it asks to know."""

    handled: Callable[..., None]
    input_applied: Callable[..., None]
    session_made: Callable[..., None]
    turn_started: Callable[..., None]
    sent: Callable[..., None]
    reported: Callable[..., None]
    asked: Callable[..., None]
    stands: Callable[..., None]
    begins: Callable[..., None]
    unqueued: Callable[..., None]
    opened: Callable[..., None]
    said: Callable[..., None]
    taken: Callable[..., None]
    told: Callable[..., None]
    delivered: Callable[..., None]
    attach_refused: Callable[..., None]
    commanded: Callable[..., None]
    answered: Callable[..., None]
    evicted: Callable[..., None]
    measured: Callable[..., None]
    released: Callable[..., None]
    gateway_died: Callable[..., None]
    stepped: Callable[..., None]
    settled: Callable[..., None]

    def __init__(self, invariants: list[Invariant]) -> None:
        self.invariants = invariants
        for hook in HOOKS:
            own = [
                getattr(invariant, hook)
                for invariant in invariants
                if getattr(type(invariant), hook) is not getattr(Invariant, hook)
            ]
            setattr(self, hook, _each(own))

    def watches(self, deployment: Deployment) -> None:
        """From now on they are told of `deployment`."""
        for invariant in self.invariants:
            invariant.deployment = deployment


def _each(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    if len(hooks) == 1:
        return hooks[0]

    def tell(*arguments: Any) -> None:
        for hook in hooks:
            hook(*arguments)

    return tell
