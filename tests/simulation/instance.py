"""A session, its worker and its directory, each of whose next steps can be chosen.

The real `Session` of a step loop, the real control side of one worker, and between them two
queues; what the engine, the directory and the clients do next is one of `choices`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.connectors import InlineDescriptor
from protocol.errors import CapacityExceeded, EngineFailed, ErrorKind
from protocol.messages import (
    Close,
    Command,
    Fence,
    Output,
    Report,
    decode_command,
    decode_report,
    encode,
)
from protocol.payloads import Payload, PayloadType
from sessions import actions as core
from sessions.client import Answered, Attached, LetGo, Role
from sessions.directory import MemoryDirectory, Outcome, Reply, Request
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Kind, Limits, Pipeline
from sessions.resume_secret import digest
from sessions.session import Identity, Session
from sessions.steps.events import Interrupt, Reset, StateLost, Step, StepDone, StepFailed, WasReset
from workers import control_events as work
from workers.control import Control

FENCE = Fence("session", 1, "gateway")
STAGE = "world"
LIMITS = Limits(idle_ms=60_000, max_age_ms=600_000, grace_ms=5_000, open_ms=2_000, close_ms=2_000)
PIPELINE = Pipeline("world", (STAGE,), (), {"frames": STAGE}, limits=LIMITS, kind=Kind.WORLD)
BEGUN_MS = 1_000.0


class Broken(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Bounds:
    """How much may happen in all: what clients do, what goes wrong, what is in flight when
    a client does something."""

    client: int = 2
    faults: int = 2
    messages: int = 2


@dataclass
class _Running:
    step: int
    value: int
    cancelled: bool = False


class Instance:
    """Everything there is, and what is known of it from outside."""

    def __init__(self, bounds: Bounds) -> None:
        self.now_ms = BEGUN_MS
        self.bounds = bounds
        self.client_left, self.faults_left = bounds.client, bounds.faults
        self.directory = MemoryDirectory()
        self.asked: deque[Request] = deque()
        self.to_worker: deque[bytes] = deque()
        self.to_gateway: deque[bytes] = deque()
        self.bound = False
        self.wants_worker = False
        self.released = False
        self.begin_worker()
        identity = Identity("session", 1, "gateway", "tenant", "world", 0)
        self.session = Session(
            identity,
            PIPELINE,
            lambda prefix: prefix,
            self.now_ms,
            controller="one",
            secret_digest=digest("secret-0"),
        )
        # Of the clients.
        self.present: dict[str, int] = {"one": 1}
        """Attachments, with the number of the output that comes next."""
        self.secret = "secret-0"
        self.last = 0
        self.said = 0
        self.flying: set[int] = set()
        self.known: tuple[int, ...] | None = ()
        """The state as it was last told; None once it is said to be lost."""
        self.committed = 0
        self.command: Step | None = None
        self.first: Any = None
        self.answers: list[Answered] = []
        self.feed(core.OpenRequested())

    def begin_worker(self) -> None:
        """A worker process begins, and is linked."""
        self.up = True
        self.control = Control()
        self.engine: tuple[int, ...] | None = None
        self.operation: Any = None
        self.running: dict[int, _Running] = {}
        self.at_worker(work.EngineReady())
        self.at_worker(work.GatewayUp("gateway"))

    def value(self) -> tuple[object, ...]:
        """The canonical value of everything, with times as seen from now."""
        return (
            self._since(self.session.freeze()),
            self._since(self.control.freeze()),
            tuple(self.to_worker),
            tuple(self.to_gateway),
            tuple(map(repr, self.asked)),
            (self.bound, self.wants_worker, self.up, self.released),
            (self.engine, repr(self.operation), repr(self.running)),
            (self.client_left, self.faults_left, self.said, self.secret, repr(self.command)),
            (tuple(self.present.items()), self.last, tuple(sorted(self.flying)), self.known),
            (self.committed, len(self.directory)),
        )

    def _since(self, value: Any) -> Any:
        if isinstance(value, float):
            return round(value - self.now_ms)
        if isinstance(value, tuple):
            return tuple(self._since(entry) for entry in value)
        return repr(value) if isinstance(value, msgspec.Struct) else value

    # What may happen next

    def choices(self) -> list[str]:
        """Everything that may happen now."""
        names = []
        if self.to_worker and self.up:
            names.append("worker receives")
        if self.to_gateway:
            names.append("gateway receives")
        if self.asked:
            names.append("directory answers")
        if self.operation is not None:
            names.append("operation done")
        for turn, running in self.running.items():
            names.append(f"finish {turn}")
            if running.cancelled:
                names.append(f"stop {turn}")
        if not self.up:
            names.append("worker comes")
        if not names and (times := self._deadlines()):
            names.append("time passes" if min(times) < float("inf") else "")
        if self.faults_left:
            names += self._faults()
        state = self.session.state
        in_flight = len(self.to_worker) + len(self.to_gateway)
        if self.client_left and state is not State.CLOSED and in_flight < self.bounds.messages:
            names += self._client_choices()
        return names

    def _faults(self) -> list[str]:
        names = []
        if self.asked:
            names += ["directory in doubt, done", "directory in doubt, not done"]
        if self.operation is not None:
            names.append("operation fails")
        for turn in self.running:
            names += [f"fail {turn}", f"spoil {turn}"]
        if self.up:
            names.append("worker dies")
            if self.bound:
                names.append("link lost")
        return names

    def _client_choices(self) -> list[str]:
        live = self.session.state in (State.ACTIVE, State.DETACHED)
        names = ["close"]
        names += [f"{name} leaves" for name in self.present]
        if live:
            if "two" not in self.present:
                names.append("two comes")
            names += ["step", "interrupt", "reset"]
            if self.command is not None:
                names.append("repeat")
        return names

    def _deadlines(self) -> list[float]:
        times = (self.session.deadline(), self.control.deadline_ms)
        return [time for time in times if time is not None]

    def do(self, choice: str) -> None:
        """Let it happen."""
        name, _, rest = choice.partition(" ")
        match choice:
            case "worker receives":
                command = decode_command(self.to_worker.popleft())
                self.at_worker(work.CommandReceived("gateway", command))
            case "gateway receives":
                self._report(decode_report(self.to_gateway.popleft()))
            case "directory answers":
                self._answer(self.directory.call(self.asked.popleft()))
            case "operation done":
                self._operate(None)
            case "worker comes":
                self.begin_worker()
                self._bind()
            case "time passes":
                self._pass_time()
            case "worker dies" | "link lost":
                self._lose(link_only=choice == "link lost")
            case "directory in doubt, done" | "directory in doubt, not done":
                self.faults_left -= 1
                request = self.asked.popleft()
                if choice.endswith(" done") and "not" not in choice:
                    self.directory.call(request)
                self._answer(Reply(Outcome.UNKNOWN))
            case "operation fails":
                self.faults_left -= 1
                self._operate(EngineFailed("on purpose"))
            case _ if name in ("finish", "stop", "fail", "spoil"):
                self._end_turn(int(rest), name)
            case _:
                self.client_left -= 1
                self._client(choice)

    # The worker and its engine

    def at_worker(self, event: work.Event) -> None:
        """Something happens at the worker, with all that follows by itself."""
        events = deque([event])
        while events:
            for action in self.control.handle(events.popleft(), self.now_ms):
                match action:
                    case work.SendReport():
                        if action.gateway == "gateway":
                            self.to_gateway.append(encode(action.report))
                    case work.SendOutput():
                        piece = InlineDescriptor(action.payload)
                        output = Output(action.session, action.turn, action.sequence, piece)
                        self.to_gateway.append(encode(output))
                    case work.OpenSession() | work.SignalSession():
                        self.operation = action
                    case work.StartTurn():
                        self._start(action)
                    case work.CancelTurn():
                        if action.turn in self.running:
                            self.running[action.turn].cancelled = True
                    case work.AbandonTurn():
                        self.running.pop(action.turn, None)
                    case work.CommitTurn():
                        events.append(self._commit(action))
                    case work.FreeSession():
                        if self.running:
                            raise Broken(f"I4: freed while {self.running} run")
                        self.engine = self.operation = None
                        events.append(work.SessionFreed("session"))

    def _operate(self, error: EngineFailed | None) -> None:
        self.operation = None
        if error is None:
            self.engine = ()
        self.at_worker(work.OperationDone("session", error.info() if error else None))

    def _start(self, action: work.StartTurn) -> None:
        if self.engine is None or action.step != len(self.engine) + 1:
            raise Broken(f"I5: step {action.step} is run on {self.engine}")
        descriptor = action.inputs[0]
        assert isinstance(descriptor, InlineDescriptor)
        self.running[action.turn] = _Running(action.step, descriptor.payload.data[0])

    def _end_turn(self, turn: int, how: str) -> None:
        running = self.running.pop(turn)
        if how in ("fail", "spoil"):
            self.faults_left -= 1
        assert self.engine is not None
        after = (*self.engine, running.value)
        if how in ("finish", "spoil") and not running.cancelled:
            piece = Payload(PayloadType.FRAMES, bytes(after), "|u1", (len(after),))
            self.at_worker(work.Emitted("session", turn, piece))

        def commit() -> None:
            if how == "spoil":
                raise EngineFailed("on purpose")
            self.engine = after

        outcomes = {"stop": work.TurnOutcome.CANCELLED, "fail": work.TurnOutcome.FAILED}
        outcome = outcomes.get(how, work.TurnOutcome.COMPLETED)
        self.at_worker(work.TurnFinished("session", turn, outcome, commit=commit))

    @staticmethod
    def _commit(action: work.CommitTurn) -> work.TurnCommitted:
        try:
            action.commit()
        except EngineFailed as error:
            return work.TurnCommitted(action.session, action.turn, error.info())
        return work.TurnCommitted(action.session, action.turn)

    # The gateway

    def feed(self, event: core.Event) -> None:
        """Something happens to the session, with all that follows by itself."""
        events = deque([event])
        while events:
            for action in self.session.handle(events.popleft(), self.now_ms):
                match action:
                    case core.ToStage():
                        if self.bound:
                            self._send(action.command)
                    case core.BindStage():
                        self.wants_worker = True
                        if self.up:
                            self.wants_worker, self.bound = False, True
                            events.append(core.StageBound(STAGE, "worker"))
                        else:
                            error = CapacityExceeded("none").info()
                            events.append(core.StageUnavailable(STAGE, error))
                    case core.AskDirectory():
                        self.asked.append(action.request)
                    case core.ToClient():
                        self._told(action)
                    case core.AttachRefused():
                        if action.error.kind is ErrorKind.CLIENT:
                            raise Broken(f"the secret that was given last: {action.error}")
                        self.present.pop(action.attachment, None)
                    case core.Released():
                        self.released = True
                        self.bound = self.wants_worker = False

    def _send(self, command: Command) -> None:
        self.to_worker.append(encode(command))
        if isinstance(command, Close):
            self.wants_worker = False

    def _report(self, report: Report) -> None:
        if not self.bound or self.released:
            return
        if isinstance(report, Output):
            descriptor = report.payload
            assert isinstance(descriptor, InlineDescriptor)
            piece = (STAGE, report.turn, report.sequence, descriptor.payload, descriptor)
            self.feed(core.StageProduced(*piece))
        else:
            self.feed(core.Reported(STAGE, report))

    def _answer(self, reply: Reply) -> None:
        self.feed(core.DirectoryAnswered(reply))

    def _bind(self) -> None:
        if self.wants_worker and not self.released:
            self.wants_worker, self.bound = False, True
            self.feed(core.StageBound(STAGE, "worker"))

    def _lose(self, *, link_only: bool) -> None:
        self.faults_left -= 1
        self.to_worker.clear()
        self.to_gateway.clear()
        bound, self.bound = self.bound, False
        if link_only:
            self.at_worker(work.GatewayDown("gateway"))
            self.at_worker(work.GatewayUp("gateway"))
            self.to_gateway.clear()
        else:
            self.up = False
            self.control = Control()
            self.engine = self.operation = None
            self.running = {}
        if bound:
            self.feed(core.StageLost(STAGE))

    def _pass_time(self) -> None:
        self.now_ms = max(self.now_ms, min(self._deadlines()))
        if (due := self.session.deadline()) is not None and due <= self.now_ms:
            self.feed(core.Tick())
        if (due := self.control.deadline_ms) is not None and due <= self.now_ms:
            self.at_worker(work.Tick())

    # The clients

    @property
    def _controller(self) -> str:
        return "two" if self.present.get("two") else "one"

    def _client(self, choice: str) -> None:
        match choice:
            case "close":
                self.feed(core.CloseRequested(CloseReason.CLIENT))
            case "one leaves" | "two leaves":
                name = choice.split()[0]
                del self.present[name]
                self.feed(core.Detached(name))
            case "two comes":
                self.present["two"] = 0
                new = f"secret-{self.client_left}"
                asked = core.AttachRequested("two", Role.CONTROLLER, 0, self.secret, new)
                self.feed(asked)
            case "step":
                self.said += 1
                data = bytes([self.said])
                payload = Payload(PayloadType.ACTIONS, data, "|u1", (1,))
                self.command = Step(self.committed + 1, [payload])
                self._say(self.command, f"command-{self.said}")
            case "repeat":
                self._say(self.command, f"command-{self.said}", again=True)
            case "interrupt":
                self.feed(core.ClientSaid(Interrupt(), self._controller))
            case "reset":
                self.feed(core.ClientSaid(Reset(), self._controller))

    def _say(self, verb: Any, command: str, *, again: bool = False) -> None:
        """Without an attachment, so that it counts; it is answered once, and at once."""
        self.answers = []
        flying = set(self.flying)
        if not again:
            self.flying.add(verb.step)
        self.feed(core.ClientSaid(verb, None, command))
        if len(self.answers) != 1:
            raise Broken(f"I7: {command} is answered with {self.answers}")
        if again and self.answers[0] != self.first:
            raise Broken(f"I7: {self.answers[0]} was {self.first}")
        self.first = self.answers[0]
        if self.first.error is not None and not again:
            self.flying = flying

    def _told(self, action: core.ToClient) -> None:
        sequence, output = action.sequence, action.output
        if action.to is not None:
            self._told_one(action.to, sequence, output)
            return
        if sequence != self.last + 1:
            raise Broken(f"I7: output {sequence} follows {self.last}")
        self.last = sequence
        for name, following in self.present.items():
            if following:
                self._told_one(name, sequence, output)
        match output:
            case Answered():
                self.answers.append(output)
            case StepDone():
                self._done(output)
            case StepFailed():
                self.flying.discard(output.step)
                if output.committed_step > self.committed:
                    self.committed = output.committed_step
                    self.known = None
            case StateLost():
                if output.committed_step != self.committed:
                    raise Broken(f"I7: {output}, but {self.committed} was committed")
                self.known = None
            case WasReset():
                self.known, self.committed = (), 0

    def _done(self, output: StepDone) -> None:
        self.flying.discard(output.step)
        if output.step <= self.committed:
            return
        state = tuple(output.outputs["frames"][0].data)
        if self.known is None or state[:-1] != self.known or len(state) != output.step:
            raise Broken(f"I5: step {output.step} ran on {state[:-1]}, not on {self.known}")
        self.known, self.committed = state, output.committed_step

    def _told_one(self, name: str, sequence: int, output: Any) -> None:
        if name not in self.present:
            return
        if isinstance(output, Attached):
            if output.lost is not None:
                raise Broken(f"I7: {name} has missed {output.lost}")
            self.present[name] = 1
            assert output.secret is not None
            self.secret = output.secret
        elif isinstance(output, LetGo):
            del self.present[name]
        else:
            if sequence != self.present[name]:
                raise Broken(f"I7: {name} is told {sequence}, not {self.present[name]}")
            self.present[name] = sequence + 1

    # What always holds

    def check(self) -> None:
        """Raise Broken unless this state is as states must be."""
        held = len(self.directory)
        if held > 1 or self.control.sessions > 1:
            raise Broken("I4: one session is held more than once")
        if self.control.kept_bytes < 0 or self.control.waiting < 0:
            raise Broken("I4: less than nothing is held")
        if not self.choices():
            self._check_end(held)
        before, queued = self.control.freeze(), self.to_gateway.copy()
        for epoch, owner in ((1, "thief"), (0, "gateway")):
            stranger = Close(Fence("session", epoch, owner), "theft", "")
            if self.control.sessions:
                self.at_worker(work.CommandReceived(owner, stranger))
        forged = Close(Fence("session", 1, "gateway"), "theft", "")
        if self.control.sessions:
            self.at_worker(work.CommandReceived("thief", forged))
        if self.control.freeze() != before:
            raise Broken("I1: a stranger is let in")
        self.to_gateway = queued

    def _check_end(self, held: int) -> None:
        if not self.released or self.session.state is not State.CLOSED:
            raise Broken(f"I4: nothing will happen any more, but it is {self.session.state}")
        if held or self.control.sessions or self.engine is not None or self.running:
            raise Broken(f"I4: left: {held} records, {self.control.sessions} sessions")
        if self.flying:
            raise Broken(f"I7: steps {self.flying} were never answered")
