"""The step machine and the workers' control side together, in any order of events.

The engine's state is the tuple of all inputs since the beginning. Whatever happens, the
client never sees a state that lacks a step, has one twice, or began from nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.connectors import InlineDescriptor
from protocol.errors import EngineFailed
from protocol.messages import Answer, Command, Fence, Report
from protocol.payloads import Payload, PayloadType
from sessions.actions import Action, StageProduced, ToStage
from sessions.bindings import Binding, BindingState
from sessions.client import Refused
from sessions.steps.events import (
    NEXT,
    Interrupt,
    Reset,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    StepOutput,
    WasReset,
)
from sessions.steps.machine import StepMachine
from tests.sessions.harness import ask
from tests.sessions.steps.harness import world
from workers.control import Control
from workers.control_events import (
    AbandonTurn,
    CancelTurn,
    CommandReceived,
    CommitTurn,
    Emitted,
    EngineReady,
    Event,
    FreeSession,
    GatewayUp,
    OpenSession,
    OperationDone,
    SendOutput,
    SendReport,
    SessionFreed,
    SignalSession,
    StartTurn,
    Tick,
    TurnCommitted,
    TurnFinished,
    TurnOutcome,
)

STAGE = "world"


class SyntheticWorker:
    """A real control side over an engine whose state is a tuple of inputs."""

    def __init__(self, reports: deque[Report | SendOutput]) -> None:
        self.control = Control()
        self.reports = reports
        self.now_ms = 0.0
        self.state: tuple[int, ...] | None = None
        self.running: dict[int, tuple[int, ...]] = {}
        """The state that each running turn comes to."""
        self.tell(EngineReady())
        self.tell(GatewayUp("gateway"))

    def tell(self, event: Event) -> None:
        for action in self.control.handle(event, self.now_ms):
            match action:
                case SendReport():
                    self.reports.append(action.report)
                case SendOutput():
                    self.reports.append(action)
                case OpenSession():
                    self.state = ()
                    self.tell(OperationDone("s"))
                case SignalSession(arguments=arguments):
                    assert not self.running, "a reset in the middle of a step"
                    self.state = (arguments["seed"],) if "seed" in arguments else ()
                    self.tell(OperationDone("s"))
                case StartTurn():
                    assert self.state is not None
                    (descriptor,) = action.inputs
                    assert isinstance(descriptor, InlineDescriptor)
                    self.running[action.turn] = (*self.state, int(descriptor.payload.data))
                case CommitTurn():
                    action.commit()
                case AbandonTurn():
                    del self.running[action.turn]
                case FreeSession():
                    self.state = None
                    self.tell(SessionFreed("s"))
                case CancelTurn():
                    pass

    def emit(self, turn: int) -> None:
        """The turn's one output tells the state that it comes to."""
        data = ",".join(map(str, self.running[turn])).encode()
        self.tell(Emitted("s", turn, Payload(PayloadType.FRAMES, data)))

    def finish(self, turn: int, outcome: TurnOutcome, commits: bool) -> None:
        """The engine ends a turn; only its commit changes the state."""
        if outcome is TurnOutcome.COMPLETED:
            self.emit(turn)
        following = self.running.pop(turn)

        def commit() -> None:
            error = None
            if commits:
                self.state = following
            else:
                self.state = (-1,)
                error = EngineFailed("on purpose").info()
            self.tell(TurnCommitted("s", turn, error))

        self.tell(TurnFinished("s", turn, outcome, None, {}, commit))


class Together:
    """One session, its worker and the two queues between them, and what the client knows."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.commands: deque[Command] = deque()
        self.reports: deque[Report | SendOutput] = deque()
        self.worker: SyntheticWorker | None = None
        self.bindings: dict[str, Binding] = {}
        self.machine = StepMachine(
            world(),
            self.bindings,
            emit=self.said,
            measured=lambda _: None,
            progress=lambda: None,
            settings_changed=lambda: None,
            new_id=lambda prefix: prefix,
        )
        self.binding = Binding(
            STAGE,
            lambda: Fence("s", 1, "gateway"),
            dict,
            self.act,
            tenant="somebody",
            priority=0,
            durable_until_s=None,
            peer=lambda other: self.bindings[other],
        )
        self.bindings[STAGE] = self.binding
        self.binding.bind()
        # What the client knows.
        self.state: tuple[int, ...] | None = ()
        """The state by its answers; None when it was told that it is lost."""
        self.steps = 0
        self.tokens = 0
        self.asked: dict[int, int] = {}
        """Answers that are owed: step -> how often it was asked since its last answer."""
        self.next: str | None = None
        """The last that was asked for without a number, until it is answered."""
        self.resets = 0
        self.seeds: deque[int | None] = deque()
        self.answered: dict[int, bytes] = {}

    def act(self, action: Action) -> None:
        if isinstance(action, ToStage):
            self.commands.append(action.command)

    # What the client sees

    def said(self, output: StepOutput) -> None:
        match output:
            case StepDone():
                (piece,) = output.outputs["frames"]
                self.asked.pop(output.step, None)
                if output.step in self.answered:
                    assert self.answered[output.step] == piece.data
                    assert output.committed_step == self.steps
                    return
                assert output.committed_step == output.step
                assert self.state is not None, "a step was done on state that is lost"
                assert output.step == self.steps + 1
                state = tuple(map(int, piece.data.split(b",")))
                assert state[:-1] == self.state
                if self.next == f"next-{state[-1]}":
                    self.next = None
                self.state, self.steps = state, output.step
                self.answered[output.step] = piece.data
            case StepFailed():
                if output.ref == self.next:
                    self.next = None
                self.asked.pop(output.step, None)
                if output.committed_step == output.step == self.steps + 1:
                    # It was committed after it had been given up: only its output is lost.
                    assert self.worker is not None
                    assert self.worker.state is not None
                    assert self.worker.state[:-1] == self.state
                    self.state, self.steps = self.worker.state, output.step
                assert output.committed_step == self.steps
            case StateLost():
                assert output.committed_step == self.steps
                assert self.state is not None
                self.state = None
            case WasReset():
                seed = self.seeds.popleft()
                self.resets -= 1
                self.state, self.steps = () if seed is None else (seed,), 0
                self.answered.clear()
            case Refused(ref="reset"):
                self.seeds.popleft()
                self.resets -= 1
            case Refused():
                assert output.ref == "interrupt"

    # What may happen

    def step(self, offset: int) -> None:
        number = self.steps + 1 + offset
        if number == NEXT:
            return
        self.tokens += 1
        self.asked[number] = self.asked.get(number, 0) + 1
        payload = Payload(PayloadType.ACTIONS, str(self.tokens).encode())
        ask(self.machine, Step(number, [payload]), self.now_ms, self.said)

    def step_after_that(self) -> None:
        """One that waits for whatever is in flight; only the newest does."""
        self.tokens += 1
        ref = f"next-{self.tokens}"
        self.next = ref
        payload = Payload(PayloadType.ACTIONS, str(self.tokens).encode())
        ask(self.machine, Step(NEXT, [payload], ref=ref), self.now_ms, self.said)

    def reset(self, seeded: bool) -> None:
        if self.resets:
            return
        self.resets += 1
        self.tokens += 1
        seed = self.tokens if seeded else None
        self.seeds.append(seed)
        parameters = {} if seed is None else {"seed": seed}
        ask(self.machine, Reset(parameters, ref="reset"), self.now_ms, self.said)

    def interrupt(self) -> None:
        ask(self.machine, Interrupt(ref="interrupt"), self.now_ms, self.said)

    def deliver_command(self) -> None:
        if self.worker is not None and self.commands:
            self.worker.tell(CommandReceived("gateway", self.commands.popleft()))

    def deliver_report(self) -> None:
        if not self.reports:
            return
        report = self.reports.popleft()
        if isinstance(report, SendOutput):
            descriptor = InlineDescriptor(report.payload)
            piece = StageProduced(STAGE, report.turn, report.sequence, report.payload, descriptor)
            self.machine.produced(piece, self.now_ms)
            return
        self.binding.reported(report)
        was_opening = self.binding.state is BindingState.OPENING
        if isinstance(report, Answer):
            assert self.binding.answered(report) is None
        if was_opening and self.binding.ready:
            self.machine.stage_ready(STAGE, self.now_ms)
        elif self.binding.ready:
            self.machine.report(STAGE, report, self.now_ms)

    def finish(self, outcome: TurnOutcome, commits: bool) -> None:
        if self.worker is not None and self.worker.running:
            self.worker.finish(min(self.worker.running), outcome, commits)

    def die(self) -> None:
        if self.worker is None:
            return
        self.worker = None
        self.commands.clear()
        self.reports.clear()
        self.machine.stage_lost(STAGE, self.binding.lost(), self.now_ms)
        self.binding.bind()

    def come(self) -> None:
        if self.worker is None:
            self.worker = SyntheticWorker(self.reports)
            self.binding.bound("worker")

    def later(self, ms: float) -> None:
        self.now_ms += ms
        if self.worker is not None:
            self.worker.now_ms = self.now_ms
            self.worker.tell(Tick())
        if (due := self.machine.deadline()) is not None and due <= self.now_ms:
            self.machine.tick(self.now_ms)

    def rest(self) -> None:
        """Everything that is under way comes to its end."""
        self.come()
        while self.commands or self.reports or (self.worker and self.worker.running):
            self.deliver_command()
            self.deliver_report()
            self.finish(TurnOutcome.COMPLETED, True)


plans = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("step"), st.integers(-2, 2)),
        st.tuples(st.just("finish"), st.just(TurnOutcome.COMPLETED), st.just(True)),
        st.tuples(st.just("finish"), st.sampled_from(TurnOutcome), st.booleans()),
        *(
            st.tuples(st.just(name))
            for name in (
                *("deliver_command", "deliver_report") * 3,
                *("interrupt", "die", "come", "step_after_that"),
            )
        ),
        st.tuples(st.just("rest")),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("later"), st.sampled_from([1.0, 10_000.0, 30_000.0])),
    ),
    max_size=60,
)


@settings(max_examples=600, deadline=None)
@given(plans)
@example([("step", 0), *[("later", 30_000.0)] * 4])
def test_no_step_is_lost_doubled_or_done_on_nothing_whatever_happens(
    plan: list[tuple[Any, ...]],
) -> None:
    together = Together()
    together.rest()
    for name, *arguments in plan:
        getattr(together, name)(*arguments)
    together.rest()
    # Every step that was asked for has its answer, and every reset.
    assert together.asked == {}
    assert together.next is None
    assert together.resets == 0
    if together.state is None:
        together.reset(False)
        together.rest()
    # And the loop goes on.
    together.step(0)
    together.rest()
    assert together.worker is not None
    assert together.worker.state == together.state
    assert together.asked == {}
    assert together.answered[together.steps]


def test_a_step_that_waits_for_a_worker_is_answered_when_it_is_given_up() -> None:
    together = Together()
    together.step(0)
    together.machine.give_up("stalled", together.now_ms)
    assert together.asked == {}
    together.rest()
    together.step(0)
    together.rest()
    assert together.steps == 1
