"""A step machine under test, with bindings of its own and workers played by the test."""

from __future__ import annotations

from typing import Any

from protocol.connectors import InlineDescriptor
from protocol.errors import EngineFailed, ErrorInfo
from protocol.messages import Answer, Command, Fence, Open, Run, Signal, TurnEnded, TurnStatus
from protocol.payloads import Payload, PayloadType
from sessions.actions import Action, NotFresh, StageProduced, ToStage, TurnMeasured
from sessions.bindings import Binding
from sessions.pipeline import Delivery, Edge, Limits, Pipeline
from sessions.steps.events import Reset, Step, StepOutput, StepVerb
from sessions.steps.machine import StepMachine
from tests.sessions.harness import ask

FRAME = Payload(PayloadType.FRAMES, b"frame", "|u1", (5,), {"index": 0})
MOVE = Payload(PayloadType.ACTIONS, b"move", "|u1", (4,))


def world(**limits: int) -> Pipeline:
    """One stage that keeps the state and makes the frames."""
    return Pipeline("world", ("world",), (), {"frames": "world"}, limits=Limits(**limits))


def chain(**limits: int) -> Pipeline:
    """encode -> world -> decode; the state is in the middle."""
    return Pipeline(
        "chain",
        ("encode", "world", "decode"),
        (
            Edge("encode", "world", PayloadType.LATENTS, Delivery.FULL),
            Edge("world", "decode", PayloadType.LATENTS, Delivery.CHUNK),
        ),
        {"frames": "decode"},
        limits=Limits(**limits),
        state="world",
    )


class StepHarness:
    """One step loop. It does with stages and answers what a session does."""

    def __init__(self, pipeline: Pipeline | None = None, **settings: Any) -> None:
        self.now_ms = 1_000.0
        self.pipeline = pipeline or world()
        self.outputs: list[StepOutput] = []
        self.commands: list[tuple[str, Command]] = []
        self.measured: list[TurnMeasured] = []
        self.not_fresh: list[NotFresh] = []
        self.progressed = 0
        self._sequences: dict[tuple[str, int], int] = {}
        self.bindings: dict[str, Binding] = {}
        self.machine = StepMachine(
            self.pipeline,
            self.bindings,
            emit=self.outputs.append,
            measured=self._measured,
            progress=self._progress,
            settings_changed=lambda: None,
            new_id=lambda prefix: prefix,
        )
        self.machine.prepare(settings)
        for stage in self.pipeline.stages:
            self.bindings[stage] = Binding(
                stage,
                lambda: Fence("s", 1, "gateway"),
                lambda stage=stage: self.machine.stage_settings(stage),  # type: ignore[misc]
                self._act,
                tenant="somebody",
                priority=0,
                durable_until_s=None,
                peer=lambda other: self.bindings[other],
            )
            self.bindings[stage].bind()
            self.come_back(stage, told=False)

    def _measured(self, action: TurnMeasured | NotFresh) -> None:
        if isinstance(action, NotFresh):
            self.not_fresh.append(action)
        else:
            self.measured.append(action)

    def _progress(self) -> None:
        self.progressed += 1

    def _act(self, action: Action) -> None:
        if isinstance(action, ToStage):
            self.commands.append((action.stage, action.command))

    # The client

    def say(self, verb: StepVerb) -> None:
        """The client says `verb`."""
        ask(self.machine, verb, self.now_ms, self.outputs.append)

    def step(self, number: int, **parameters: Any) -> None:
        """The client asks for a step."""
        self.say(Step(number, [MOVE], parameters, ref=f"step-{number}"))

    def later(self, ms: float) -> None:
        """`ms` pass; deadlines that come due are handled in order."""
        until = self.now_ms + ms
        while (due := self.machine.deadline()) is not None and due <= until:
            self.now_ms = max(self.now_ms, due)
            self.machine.tick(self.now_ms)
            if self.machine.deadline() == due:
                raise AssertionError(f"the deadline at {due} was not handled")
        self.now_ms = until

    # The workers

    def lose(self, stage: str = "world", *, restorable: bool = False) -> None:
        """The worker of `stage` dies; what it had stored last may be what comes back."""
        unapplied = self.bindings[stage].lost()
        self.machine.stage_lost(stage, unapplied, self.now_ms, restorable=restorable)
        self.bindings[stage].bind()

    def restore(self, step: int, **result: Any) -> None:
        """A new worker has the state after `step`, from the store."""
        self.machine.stage_restored("world", step, self.now_ms)
        self.come_back(result=result)

    def come_back(
        self, stage: str = "world", *, told: bool = True, result: dict[str, Any] | None = None
    ) -> None:
        """A new worker of `stage` opens the session."""
        binding = self.bindings[stage]
        binding.bound(f"{stage}-worker")
        opened = self.sent(Open, stage)[-1].command
        binding.answered(Answer("s", opened, None, result or {}))
        if told:
            self.machine.stage_ready(stage, self.now_ms)

    def produce(self, stage: str = "world", payload: Payload = FRAME) -> None:
        """The stage makes a piece of its last turn."""
        turn = self.run(stage).turn
        key = (stage, turn)
        self._sequences[key] = self._sequences.get(key, 0) + 1
        descriptor = InlineDescriptor(payload)
        piece = StageProduced(stage, turn, self._sequences[key], payload, descriptor)
        self.machine.produced(piece, self.now_ms)

    def end(
        self,
        committed: int | None = None,
        stage: str = "world",
        status: TurnStatus = TurnStatus.COMPLETED,
        error: ErrorInfo | None = None,
    ) -> None:
        """The stage says its last word about its last turn."""
        ended = TurnEnded(
            "s", self.run(stage).turn, status, error, {}, {"done": 3.0}, committed_step=committed
        )
        self.bindings[stage].reported(ended)
        self.machine.report(stage, ended, self.now_ms)

    def fail(self, committed: int | None = None, stage: str = "world", code: str = "") -> None:
        """The stage's last turn fails."""
        error = EngineFailed("on purpose", code=code or "engine_failed").info()
        self.end(committed, stage, TurnStatus.FAILED, error)

    def answer(
        self,
        command: str | None = None,
        error: ErrorInfo | None = None,
        result: dict[str, Any] | None = None,
    ) -> None:
        """The state's worker answers a signal: the last one, or the one with this id."""
        answer = Answer("s", command or self.last_signal().command, error, result or {})
        self.bindings["world"].reported(answer)
        self.machine.report("world", answer, self.now_ms)

    # Whole stretches

    def done(self, number: int) -> None:
        """A step is asked for and done."""
        self.step(number)
        self.produce()
        self.end(number)

    def after(self, steps: int) -> StepHarness:
        """`steps` are done, and what came of it is forgotten."""
        for number in range(1, steps + 1):
            self.done(number)
        self.clear()
        return self

    def reset(self, *, said_ms: float | None = None, **parameters: Any) -> None:
        """The client resets, and the worker does."""
        self.say(Reset(parameters, ref="reset", said_ms=said_ms))
        self.answer(self.last_signal().command)

    # What came out

    def clear(self) -> None:
        """Forget what came out so far."""
        self.outputs.clear()
        self.commands.clear()
        self.measured.clear()
        self.not_fresh.clear()
        self.progressed = 0

    def take(self) -> list[StepOutput]:
        """The outputs since the last call."""
        outputs, self.outputs[:] = list(self.outputs), []
        return outputs

    def sent(self, kind: type[Any], stage: str = "world") -> list[Any]:
        """All commands of a type to a stage."""
        return [c for to, c in self.commands if to == stage and isinstance(c, kind)]

    def run(self, stage: str = "world") -> Run:
        """The last turn started on `stage`."""
        run: Run = self.sent(Run, stage)[-1]
        return run

    def last_signal(self) -> Any:
        """The last signal to the state's worker."""
        return self.sent(Signal)[-1]
