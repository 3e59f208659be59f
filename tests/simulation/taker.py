"""Another gateway that takes a session over at one worker: what a new owner asks for, and what
nobody asks twice."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from protocol.connectors import Descriptor, InlineDescriptor
from protocol.messages import (
    RESET,
    Acknowledge,
    Attach,
    Close,
    Command,
    Configure,
    Feed,
    Fence,
    Open,
    RaiseFloor,
    Replay,
    Run,
    Signal,
    Stop,
)
from protocol.payloads import text_payload
from tests.simulation.steps import latents
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import CommandReceived, GatewayUp

if TYPE_CHECKING:
    from tests.simulation.deployment import Deployment

Choice = TypeVar("Choice")
THIEF = "thief"
"""An incarnation that owns nothing, until it takes it."""
LANE = "taken"
GIVEN_BACK_MS = (1.0, 700.0, 1_500.0, 4_000.0)
ROUNDS_MS = (0.0, 150.0, 300.0, 600.0, 900.0)
"""When it asks for something, whether or not it has closed the session meanwhile."""
MANY = 12
"""More commands than a tight worker lets wait for a session."""


class Taker:
    """Takes sessions over, or opens some, and always closes them in the end."""

    def __init__(self, deployment: Deployment) -> None:
        self._world: World = deployment.world
        self._turns: defaultdict[str, list[int]] = defaultdict(list)
        """By session, those of its turns that are left to run."""
        self._deployment = deployment

    def reopen(self, worker: WorkerProcess, session: str) -> None:
        """Have a session anew; twice at once where one is not patient."""
        fence = self._take(worker, session, "fault: session taken over")
        opens: list[Command] = [Open(fence, self._id()) for _ in range(self._either(1, 1, 2))]
        self._say(worker, opens)
        self._close(worker, fence)

    def adopt(self, worker: WorkerProcess, session: str) -> None:
        """Go on with a session as it is: its output, its steps, its turns."""
        fence = self._take(worker, session, "fault: session adopted")
        here = worker.engine.sessions.get(session)
        if here is None:
            return  # It was its own, and its new link has freed it.
        here.epoch, here.owner = fence.epoch, fence.owner
        worker.run(lambda: worker.inject(CommandReceived(THIEF, Stop(fence, self._turn()))))
        for delay_ms in ROUNDS_MS:
            worker.later(delay_ms, lambda: self._say(worker, self._asks(worker, fence)))
        self._close(worker, fence)

    def open_own(self, worker: WorkerProcess) -> None:
        """A session of its own, at a worker that may not be ready."""
        self._world.count("fault: session of another gateway")
        fence = Fence(f"own-{self._world.number('own')}", 1, THIEF)
        self._deployment.blame(fence.session, "stolen")
        worker.run(lambda: worker.inject(GatewayUp(THIEF)))
        self._say(worker, [Open(fence, self._id())])
        self._close(worker, fence)

    def _take(self, worker: WorkerProcess, session: str, fault: str) -> Fence:
        self._world.count(fault)
        self._deployment.blame(session, "stolen")
        worker.run(lambda: worker.inject(GatewayUp(THIEF)))
        return Fence(session, 2, THIEF)

    def _close(self, worker: WorkerProcess, fence: Fence) -> None:
        delay_ms = self._either(*GIVEN_BACK_MS)
        worker.later(delay_ms, lambda: self._say(worker, [Close(fence, self._id(), "stolen")]))

    def _say(self, worker: WorkerProcess, commands: list[Command]) -> None:
        for command in commands:
            worker.run(partial(worker.inject, CommandReceived(THIEF, command)))

    def _asks(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """What one round of commands may be."""
        asked: list[list[Command]] = [
            self._replay(worker, fence),
            self._replay(worker, fence),
            self._control_then_turn(worker, fence),
            self._turn_given_up(worker, fence),
            self._own_turn(worker, fence),
            self._flood(worker, fence),
        ]
        if worker.stage == "world":
            asked += [self._step(worker, fence) for _ in range(4)]
            asked += [self._step_with_more(worker, fence)]
        self._world.random.shuffle(asked)
        return [command for some in asked[: self._either(1, 3, len(asked))] for command in some]

    def _replay(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        running = [turn for session, turn in worker.engine.turns if session == fence.session]
        turns = [*running, *self._turns[fence.session]] or [1]
        turn, after = self._either(*turns), self._either(0, 0, 1, 5)
        replay = Replay(fence, self._id(), turn, after)
        again: list[Command] = [replay] if self._world.chance(0.3) else []
        taken: list[Command] = [Acknowledge(fence, turn, self._either(1, 100))]
        return [replay, *again, *(taken if self._world.chance(0.3) else [])]

    def _step(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """The next step, one that is committed, or one that is ahead."""
        there = worker.engine.sessions.get(fence.session)
        done = 0 if there is None else there.steps
        step = self._either(done + 1, done + 1, done, done, done, max(1, done - 1), done + 2)
        run = Run(fence, self._turn(), LANE, {}, [_input()], step=step)
        self._turns[fence.session].append(run.turn)
        reset: list[Command] = []
        if self._world.chance(0.1):
            reset = [Signal(fence, self._id(), RESET)]
        return [*reset, run]

    def _step_with_more(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """A step whose input comes after a command that waits for its end."""
        there = worker.engine.sessions.get(fence.session)
        turn, step = self._turn(), 1 if there is None else there.steps + 1
        return [
            Run(fence, turn, LANE, {}, [_input()], last=False, step=step),
            Configure(fence, self._id(), {}),
            Feed(fence, turn, _input()),
            Feed(fence, turn, None, last=True),
        ]

    def _control_then_turn(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """A turn that waits for an operation, and what becomes of it meanwhile."""
        turn = self._turn()
        ends: list[list[Command]] = [
            [],
            [Stop(fence, turn)],
            [Stop(fence, turn)],
            [RaiseFloor(fence, LANE, turn + 1)],
            [RaiseFloor(fence, LANE, turn + 1)],
            [Stop(fence, turn), Run(fence, turn, LANE)],
            [Close(fence, self._id(), "stolen"), Run(fence, turn + 1, LANE)],
        ]
        return [
            Signal(fence, self._id(), "clear"),
            Run(fence, turn, LANE, last=False),
            Feed(fence, turn, None, last=True),
            *self._either(*ends),
        ]

    def _own_turn(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """A turn that is left to run to its end."""
        if worker.stage == "world":
            return self._step(worker, fence)
        turn, clause = self._turn(), InlineDescriptor(text_payload("w0_0 ", clause=0))
        self._turns[fence.session].append(turn)
        return [
            Run(fence, turn, LANE, last=False),
            Feed(fence, turn, clause),
            Feed(fence, turn, None, last=True),
        ]

    def _turn_given_up(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """A turn that runs, is told that it may not, and then that it never could."""
        turn = self._turn()
        if worker.stage == "world":
            return [Attach(fence, "/nowhere"), Stop(fence, turn)]
        clause = InlineDescriptor(text_payload("w0_0 ", clause=0))
        return [
            Run(fence, turn, LANE, last=False),
            Feed(fence, turn, clause),
            Stop(fence, turn),
            Run(fence, turn - 1, LANE),
            RaiseFloor(fence, LANE, turn),
            Run(fence, turn - 2, LANE),
        ]

    def _flood(self, worker: WorkerProcess, fence: Fence) -> list[Command]:
        """More than may wait: a turn without all its input must not run."""
        turn = self._turn()
        feeds = [Feed(fence, turn, None) for _ in range(MANY)]
        return [Signal(fence, self._id(), "clear"), Run(fence, turn, LANE, last=False), *feeds]

    def _turn(self) -> int:
        return 1_000_000 + 10 * self._world.number("taken turn")

    def _id(self) -> str:
        return f"taken-{self._world.number('taken')}"

    def _either(self, *choices: Choice) -> Choice:
        return self._world.random.choice(choices)


def _input() -> Descriptor:
    return InlineDescriptor(latents(b"taken"))
