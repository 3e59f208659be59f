"""I5 and I7 of step loops: every step runs on the state after the one before it, once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from sessions.client import Answered, Refused, SessionCreated
from sessions.lifecycle import CloseReason
from sessions.steps.answers import REMEMBERED_ANSWERS
from sessions.steps.events import (
    NEXT,
    ActionsReleased,
    CheckpointKept,
    Reset,
    SafeAction,
    StateLost,
    Step,
    StepDone,
    StepFailed,
    WasReset,
    WasRestored,
    WasRewound,
)
from tests.simulation.client import Client
from tests.simulation.engine import EngineSession
from tests.simulation.rollout import Rollout
from tests.simulation.steps import begun, checksum_of, folded
from tests.simulation.told import value_of
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import OpenSession

LOSERS = frozenset({"lost", "stolen", "stopped", "engine", "full", "snapshot"})
"""What must have been done to a session before its state is lost."""

REFUSED = frozenset(
    {"step_committed", "step_out_of_order", "reset_in_progress", "change_in_progress"}
)
"""Codes of a step that was not taken up: the step whose answer is still to come may be
committed already."""


@dataclass
class _Loop:
    """What is known of a loop: which checksums its state may have after each step."""

    possible: dict[int, set[bytes]]
    sent: defaultdict[int, list[tuple[bytes, ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    answers: dict[int, Any] = field(default_factory=dict)
    committed: int = 0
    lost: bool = False
    restorable: int | None = None
    seed: int = 0
    seeds: list[int] = field(default_factory=list)
    commands: set[str] = field(default_factory=set)
    checkpoints: dict[int, set[bytes]] = field(default_factory=dict)
    """The checksums that a kept state may have, by its step."""
    rewound: bool = False
    resetting: bool = False
    """Whether a reset was asked for since the last one that came about."""
    behind: list[tuple[bytes, ...]] = field(default_factory=list)
    """The inputs of the steps without a number that were asked for behind that: one of them may
    wait for it, and be the first after it."""


class I5Steps(Invariant):
    """The output of a step tells the state that it ran on: it is that of all committed steps
    since the last beginning, or the session has said that its state is lost. What is
    committed stays so until a reset; a step that is asked for again gets its first answer,
    but for where the loop is now."""

    name = "I5 steps"
    preconditions = (
        "steps done",
        "steps done after a failed one",
        "steps answered again",
        "steps asked for again too late",
        "steps cancelled",
        "steps failed",
        "steps refused",
        "committed steps whose output was lost",
        "states lost",
        "states lost in a commit",
        "resets",
        "resets of a lost state",
        "steps refused for a lost state",
        "lost states restored to an earlier step",
        "checkpoints kept",
        "rewinds",
        "rewinds to what is not kept",
        "steps done after a rewind",
        "actions released",
        "forks",
        "forks of what has made steps",
        "steps done by forks",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._loops: dict[str, _Loop] = {}
        self._failed: set[str] = set()
        self._forked: dict[str, tuple[int, bytes]] = {}
        """With which state sessions have begun that began as others."""

    def opened(self, client: Client) -> None:
        """A loop begins where its settings say."""
        if isinstance(client, Rollout):
            assert client.hosted is not None
            seed = client.hosted.session.settings.get("seed", 0)
            self._loops[client.session] = _Loop({0: {begun(seed)}}, seed=seed)

    def session_made(
        self, worker: WorkerProcess, session: EngineSession, action: OpenSession
    ) -> None:
        """A fork begins as the other is between two of its steps."""
        if action.fork is None:
            return
        self.count("forks")
        source = worker.engine.sessions[action.fork.session]
        self._forked[session.name] = (session.steps, session.checksum)
        same = (source.steps, source.checksum) == self._forked[session.name]
        self.check(same and not session.checkpoints, f"{session} is a fork of {source}")
        self.check(source.owner == session.owner, f"{session} is a fork of another's: {source}")
        running = [
            turn
            for (name, _), turn in worker.engine.turns.items()
            if name == source.name and turn.action.step is not None
        ]
        self.check(not running, f"{session.name} is forked while {running} run")

    def _begun_as_fork(self, client: Client) -> None:
        """What its client is told is true."""
        assert client.hosted is not None
        step, checksum = self._forked[client.session]
        loop = self._loops[client.session]
        loop.possible, loop.committed = {step: {checksum}}, step
        told = client.hosted.session.facts()["committed_step"]
        self.check(told == step, f"{client.session} says {told}, and began after {step}")
        if step:
            self.count("forks of what has made steps")

    def said(self, client: Client, verb: Any) -> None:
        """What may come to be the input of a step."""
        loop = self._loops.get(client.session)
        if loop is None:
            return
        if isinstance(verb, Step):
            data = tuple(bytes(p.data) for p in verb.inputs)
            # Without a number it follows whatever is committed by then: the step in flight, or not.
            ahead = (1, 2) if verb.step == NEXT else ()
            for step in [loop.committed + more for more in ahead] or [verb.step]:
                loop.sent[step].append(data)
            if verb.step == NEXT and loop.resetting:
                loop.behind.append(data)
        elif isinstance(verb, Reset):
            loop.resetting = True
            loop.seeds.append(verb.parameters.get("seed", loop.seed))

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """Hold an answer against what may be."""
        loop = self._loops.get(client.session)
        if loop is None:
            return
        match output:
            case SessionCreated() if client.session in self._forked:
                self._begun_as_fork(client)
            case StepDone():
                self._done(client, loop, output)
            case StepFailed():
                self._failed_step(client, loop, output)
            case SafeAction() if (
                not output.in_flight and output.step == output.committed_step == loop.committed + 1
            ):
                # The state moved on; a stage behind it failed, or the worker that had the output.
                self.count("committed steps whose output was lost")
                self._commit(loop, output.step)
            case StateLost():
                self.count("states lost")
                causes = self.deployment.causes[client.session]
                self.check(bool(causes & LOSERS), f"{client.session} has lost its state: {causes}")
                if "engine" in causes:
                    self.count("states lost in a commit")
                self.check(
                    output.committed_step == loop.committed,
                    f"{client.session} has lost {output}, but {loop.committed} was committed",
                )
                loop.lost = True
                loop.restorable = output.restorable_step
            case WasRestored(committed_step=step):
                self.count("lost states restored to an earlier step")
                self.check(
                    loop.lost and step == loop.restorable,
                    f"{client.session} is restored to {step}, and was told {loop.restorable}",
                )
                self._go_back(loop, step)
                loop.answers.clear()
            case CheckpointKept():
                self._kept(client, loop, output)
            case WasRewound(committed_step=step):
                self._rewound(client, loop, step)
            case ActionsReleased(committed_step=step):
                self.count("actions released")
                self.check(step == loop.committed, f"{output}, but {loop.committed} was committed")
            case Refused(error=error) if error.code == "no_checkpoint":
                self.count("rewinds to what is not kept")
                for step in loop.checkpoints:
                    wrong = error.message.startswith(f"no checkpoint of step {step} ")
                    self.check(not wrong or self._was_lost(client), f"{step} was kept: {error}")
            case WasReset():
                self.count("resets of a lost state" if loop.lost else "resets")
                begins = {begun(seed) for seed in loop.seeds}
                fresh = _Loop({0: begins}, seed=loop.seed)
                fresh.seeds, fresh.commands = loop.seeds, loop.commands
                fresh.sent[1] += loop.behind
                self._loops[client.session] = fresh
            case Answered() if output.command not in loop.commands:
                loop.commands.add(output.command)
                told = output.result.get("committed_step")
                self.check(
                    told is None or told <= loop.committed + 1 or output.error is not None,
                    f"{client.session} says {told} is committed, but {loop.committed} is",
                )

    def _go_back(self, loop: _Loop, step: int) -> None:
        """The state is the one after `step`: what came later never was.

        That is a step that was committed, or one more of which nobody was told.
        """
        if step > loop.committed:
            self._commit(loop, step)
        loop.committed, loop.lost = step, False
        for known in (loop.possible, loop.checkpoints):
            for later in [number for number in known if number > step]:
                del known[later]

    def _was_lost(self, client: Client) -> bool:
        """Whether its worker may have gone, and with it a checkpoint that was not stored yet."""
        return bool(self.deployment.causes[client.session] & LOSERS)

    def _kept(self, client: Client, loop: _Loop, kept: CheckpointKept) -> None:
        self.count("checkpoints kept")
        step = kept.committed_step
        self.check(step == loop.committed, f"{kept}, but {loop.committed} was committed")
        self.check(step in kept.kept and not loop.lost, f"{client.session} says {kept}")
        loop.checkpoints[step] = loop.possible[step]
        unknown = set(kept.kept) - loop.checkpoints.keys()
        self.check(not unknown or self._was_lost(client), f"{unknown} were never kept")
        known = {**loop.possible, **loop.checkpoints}
        loop.checkpoints = {step: known[step] for step in kept.kept if step in known}

    def _rewound(self, client: Client, loop: _Loop, step: int) -> None:
        self.count("rewinds")
        there = step in loop.checkpoints or self._was_lost(client)
        self.check(there and not loop.lost, f"{client.session} went back to {step}")
        loop.possible[step] = loop.checkpoints.get(step, loop.possible[step])
        self._go_back(loop, step)
        loop.rewound = True
        for known in (loop.answers, loop.sent):
            for later in [number for number in known if number > step]:
                del known[later]

    def _done(self, client: Client, loop: _Loop, answer: StepDone) -> None:
        step, pieces = answer.step, answer.outputs.get("frames", [])
        value = value_of((answer.outputs, answer.step))
        if step in loop.answers:
            self.count("steps answered again")
            self.check(value == loop.answers[step], f"step {step} was answered otherwise before")
            self._says_where_it_is(client, loop, answer)
            return
        self.check(not loop.lost, f"{client.session} answers {step}, but its state is lost")
        self.check(
            answer.committed_step == step == loop.committed + 1,
            f"{client.session} commits {answer.committed_step} after {loop.committed}",
        )
        self.count("steps done")
        if client.session in self._forked:
            self.count("steps done by forks")
        if loop.rewound:
            self.count("steps done after a rewind")
        if client.session in self._failed:
            self.count("steps done after a failed one")
        self._commit(loop, step)
        self.check(bool(pieces), f"step {step} of {client.session} has no output")
        numbers = [piece.attributes["piece"] for piece in pieces]
        self.check(numbers == list(range(len(pieces))), f"step {step} has pieces {numbers}")
        for piece in pieces:
            checksum = checksum_of(piece)
            self.check(
                checksum in loop.possible[step],
                f"step {step} of {client.session} ran on another state than the one before it",
            )
            loop.possible[step] = {checksum}
        loop.answers[step] = value

    def _says_where_it_is(self, client: Client, loop: _Loop, answer: StepDone | StepFailed) -> None:
        """An answer that is given again tells of now: one step may be committed that nobody was
        told of yet."""
        self.check(
            answer.committed_step in (loop.committed, loop.committed + 1),
            f"{client.session} says {answer} again, but {loop.committed} was committed",
        )

    def _commit(self, loop: _Loop, step: int) -> None:
        loop.committed = step
        after: set[bytes] = set()
        for checksum in loop.possible[step - 1]:
            for inputs in loop.sent[step]:
                following = checksum
                for data in inputs:
                    following = folded(following, data)
                after.add(following)
        loop.possible[step] = after

    def _failed_step(self, client: Client, loop: _Loop, answer: StepFailed) -> None:
        code = answer.error.code
        if answer.in_flight or code == "emergency_stopped":
            return  # What became of it is still to come; or nothing is told while it is stopped.
        if 1 <= answer.step <= loop.committed - REMEMBERED_ANSWERS:
            self.count("steps asked for again too late")
            return
        if answer.step in loop.answers:
            self.count("steps answered again")
            first = loop.answers[answer.step]
            self.check(_apart(answer) == first, f"{answer} was {first} before")
            self._says_where_it_is(client, loop, answer)
            return
        self.count("steps failed")
        if code == "step_cancelled":
            self.count("steps cancelled")
        elif code in REFUSED:
            self.count("steps refused")
        elif code == "session_state_lost" and loop.lost:
            self.count("steps refused for a lost state")
        else:
            self._failed.add(client.session)
        self.check(
            answer.committed_step in (loop.committed, loop.committed + 1),
            f"{client.session} says {answer}, but {loop.committed} was committed",
        )
        if answer.committed_step > loop.committed and answer.step != answer.committed_step:
            # It is committed, and something is still to come of it.
            self.check(
                isinstance(client, Rollout)
                and bool(answer.committed_step in client.flying or client.asked_ms),
                f"{answer} commits another step",
            )
        elif answer.committed_step > loop.committed and code not in REFUSED:
            self.count("committed steps whose output was lost")
            self._commit(loop, answer.step)
            loop.answers[answer.step] = _apart(answer)

    def released(self, client: Client, reason: CloseReason) -> None:
        """Nothing more to hold it against."""
        self._loops.pop(client.session, None)
        self._forked.pop(client.session, None)


def _apart(answer: StepFailed) -> Any:
    """What an answer always says: not where the loop is as it is given."""
    return value_of(replace(answer, committed_step=answer.step))
