"""Clients of a step loop: one step after the other, and whatever else may be asked."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from protocol.errors import AntiphonError, ErrorInfo, InvalidRequest
from sessions.chosen_control import controlled
from sessions.client import Answered, Refused, SessionCreated
from sessions.pipeline import Kind
from sessions.steps.answers import REMEMBERED_ANSWERS
from sessions.steps.changes import StateVerb
from sessions.steps.events import (
    NEXT,
    ActionsReleased,
    Checkpoint,
    CheckpointKept,
    EmergencyStop,
    EmergencyStopped,
    Interrupt,
    Reason,
    ReleaseActions,
    ReleaseStop,
    Reset,
    Restore,
    Rewind,
    SafeAction,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    StoppedBy,
    StopReleased,
    WasReset,
    WasRestored,
    WasRewound,
)
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.steps import HUGE_INPUTS, actions

TOO_LONG = {"prompt": "x" * 70_000}
"""Parameters that are not passed on."""
CONTROLS: list[dict[str, Any]] = [
    {"deadline_ms": 80},
    {"rate_hz": 20},
    {"rate_hz": 5, "safe_action": "hold"},
    {"safe_action": "zero", "deadline_ms": 500},
    {"safe_action": {"actions": "zero"}},
]
BAD_CONTROLS: list[dict[str, Any]] = [{"rate_hz": 0}, {"deadline": 80}, {"safe_action": "fall"}]
TROUBLE = ("fail", "fail_after_output", "fail_in_commit", "stall", "finish_when_cancelled")


class Rollout(Client):
    """The client of a world or a robot."""

    def __init__(self, deployment: Deployment, gateway_place: str, name: str) -> None:
        super().__init__(deployment, gateway_place, name)
        self.patience *= 3
        self.pipeline = deployment.profile.pipeline
        self.deadline_ms: float | None = None
        """That of its loop, which it has once it has asked for its session."""
        self.stopped = False
        self.asked_ms: dict[str, float] = {}
        """When it asked for steps without a number, by the ref of each that is not answered."""
        self.committed = 0
        self.lost = False
        self.restorable = False
        """Whether the session has said that a snapshot of its lost state exists."""
        self.flying: set[int] = set()
        """Steps that it has asked for and was not answered."""
        self.changing: str | None = None
        """The ref of a checkpoint, a rewind or a release of which nothing is known yet."""
        self._kept: list[int] = []
        self._chance = random.Random(f"changes {self.world.seed} {name}")
        self._changes = self.rude > 0 and self._chance.random() < 0.4
        """Whether it ever asks for one. What it asks for takes nothing from other chances."""
        self._answers = 0
        self._last_error: ErrorInfo | None = None
        self._last_step = 0
        self._last_ref = ""

    def choose_control(self) -> None:
        """Takes nothing from the chances of all else. A world has no loop to choose."""
        chance = random.Random(f"control {self.world.seed} {self.name}")
        if self.rude and chance.random() < 0.3:
            if chance.random() < self.rude:
                self.control = chance.choice(BAD_CONTROLS)
            elif self.pipeline.kind is Kind.ROBOT:
                self.control = chance.choice(CONTROLS)
        with contextlib.suppress(InvalidRequest):
            self.deadline_ms = controlled(self.pipeline, self.control).control.deadline_ms

    def choose_source(self) -> None:
        """Takes nothing from the chances of all else."""
        chance = random.Random(f"fork {self.world.seed} {self.name}")
        if self.rude and chance.random() < 0.25:
            others = [
                session
                for session, client in self._deployment.clients.items()
                if client.gateway is self.gateway and not client.over
            ]
            if others:
                self.world.count("forks asked for")
                self.source = chance.choice(others)

    def refused(self, error: AntiphonError) -> None:
        """It gets no session."""
        if self.source is not None:
            self.world.count(f"forks refused: {error.code}")
        super().refused(error)

    @property
    def controlled(self) -> bool:
        """Whether its loop has a deadline."""
        return self.deadline_ms is not None

    def a_patch(self) -> dict[str, Any] | None:
        """Where the state begins."""
        if self.world.chance(self.rude / 4):
            return TOO_LONG
        return {"seed": self.world.random.randrange(3)} if self.world.chance(0.5) else None

    def a_verb(self) -> Interrupt:
        """Something to say that is harmless."""
        return Interrupt()

    def learns(self, output: Any) -> None:
        """Where the loop stands."""
        match output:
            case SessionCreated():
                assert self.hosted is not None
                self.committed = self.hosted.session.facts()["committed_step"]
            case StepDone():
                if output.step <= self.committed:
                    self.verb_ms = self._verb_before_ms  # An answer again is no progress.
                elif self.gateway is not None:
                    self.verb_ms = self.gateway.now_ms
                self.asked_ms.pop(output.ref or "", None)
                self._answered(output.step, output.committed_step, None)
            case SafeAction():
                if output.reason is Reason.STOPPED and self.gateway is not None:
                    self.verb_ms = self.gateway.now_ms
                self.asked_ms.pop(output.ref or "", None)
                self._answered(output.step, output.committed_step, None)
                if output.in_flight:
                    self.flying.add(output.step)
            case EmergencyStopped():
                self.stopped = True
            case StopReleased():
                self.stopped = False
            case StepFailed():
                self.asked_ms.pop(output.ref or "", None)
                if output.ref == f"verb_{self._verbs_said}":
                    self.verb_ms = self._verb_before_ms
                self._answered(output.step, output.committed_step, output.error)
                if output.in_flight:
                    self.flying.add(output.step)
            case Answered(error=error) if error is not None:
                # It may have been a step: then that is no more in flight than before.
                if self._last_step:
                    self.flying.discard(self._last_step)
                self.asked_ms.pop(self._last_ref, None)
                self.changing = None
            case StateLost():
                self.lost = True
                self.committed = output.committed_step
                self.restorable = output.restorable_step is not None
            case WasReset():
                self.lost = False
                self.committed = 0
            case WasRestored():
                self.lost = False
                self.committed = output.committed_step
            case CheckpointKept():
                self.changing = None
                self._kept = output.kept
            case WasRewound():
                self.changing = None
                self.committed = output.committed_step
            case ActionsReleased():
                self.changing = None
            case Refused():
                self._last_error = output.error
                if output.ref == self.changing:
                    self.changing = None

    def _answered(self, step: int, committed: int, error: ErrorInfo | None) -> None:
        self.flying.discard(step)
        # An earlier answer that is given again says what was committed then.
        self.committed = max(self.committed, committed)
        self._answers += 1
        self._last_error = error

    def pending(self) -> list[Any]:
        """Steps in flight, and what is asked of the state between them."""
        changing = [] if self.changing is None else [self.changing]
        return [*sorted(self.flying), *self.asked_ms, *changing]

    def busy(self) -> bool:
        """Most wait for the answer to their last step, up to a point."""
        waits = 0.3 if self.controlled else 0.8
        return bool(self.flying) and self.world.chance(waits)

    def handed_over(self, verb: Any) -> None:
        """A verb is about to reach the session."""
        self._last_step = 0
        self._last_ref = ""
        if isinstance(verb, Step) and verb.step == NEXT:
            assert self.gateway is not None
            self._last_ref = self.next_ref
            self.asked_ms[self._last_ref] = self.gateway.now_ms
        elif isinstance(verb, Step):
            self._last_step = verb.step
            self.flying.add(verb.step)
        elif isinstance(verb, Interrupt | Reset):
            self.interrupted = True
        elif isinstance(verb, StateVerb) and self.changing is None:
            self.changing = self.next_ref

    def act(self) -> None:
        """Do one thing: mostly the next step."""
        world = self.world
        chance = world.random
        if self.lost and self.restorable and world.chance(0.9):
            self.say(Restore())
            return
        if self.lost and world.chance(0.7):
            self.say(Reset({"seed": chance.randrange(3)} if world.chance(0.5) else {}))
            return
        if self._changes and self._chance.random() < 0.3:
            self._change()
            return
        if self.controlled and self._controls():
            return
        if self.flying and world.chance(0.5):
            world.count("steps interrupted")
            self.say(Interrupt())
            return
        if world.chance(self.rude / 3):
            world.count("bad input")
            step = self.committed + 1
            self.say(
                chance.choice([Step(step, HUGE_INPUTS), Step(step, [], TOO_LONG), Reset(TOO_LONG)])
            )
            return
        if self.committed > REMEMBERED_ANSWERS and world.chance(0.3):
            world.count("steps repeated")
            self._step(1)
            return
        roll = chance.random()
        if roll < 0.75:
            self._step(self.committed + 1)
        elif roll < 0.83:
            world.count("steps repeated")
            lately = range(max(1, self.committed - 7), self.committed + 2)
            self._step(chance.choice([1, *lately]) if world.chance(0.7) else 1)
        elif roll < 0.87:
            world.count("steps out of order")
            self._step(self.committed + chance.choice([2, 5]))
        elif roll < 0.92:
            self.say(Interrupt())
        else:
            self.say(Reset({"seed": chance.randrange(3)} if world.chance(0.5) else {}))

    def _change(self) -> None:
        """Ask for something that is done between two steps."""
        roll, chance = self._chance.random(), self._chance
        if roll < 0.5:
            self.say(Checkpoint())
        elif roll < 0.9:
            kept = chance.random() < 0.9
            self.say(Rewind(chance.choice((kept and self._kept) or range(self.committed + 2))))
        else:
            self.say(ReleaseActions())

    def _controls(self) -> bool:
        """Do what robots do: observe without a number, stop, go on."""
        world = self.world
        if self.stopped and world.chance(0.3):
            self.say(ReleaseStop(world.random.choice(list(StoppedBy))))
        elif world.chance(0.05):
            self.interrupted = True
            self.say(EmergencyStop(world.random.choice(list(StoppedBy))))
        elif world.chance(0.8):
            self._step(NEXT)
        else:
            return False
        return True

    def _step(self, step: int) -> None:
        world = self.world
        parameters: dict[str, Any] = {}
        if self.talks and world.chance(self.rude):
            parameters = {world.random.choice(TROUBLE): True}
        count = world.random.choice([1, 1, 2])
        inputs = [actions(world.number("action")) for _ in range(count)]
        self.say(Step(step, inputs, parameters))

    def probe(self) -> None:
        """Take the first step."""
        self._step(1)

    def probed(self) -> tuple[ErrorInfo | None] | None:
        """How that went."""
        return (self._last_error,) if self._answers else None
