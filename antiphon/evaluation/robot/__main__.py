"""One robot: plays episodes in a simulation whose clock waits for nobody.

    python antiphon/evaluation/robot < PLAN

The first line of standard input is the plan. When all is loaded it says `ready`, and with that
which tasks there are; the second line has the episodes, each `[task, seed]`, and it says what
came of each. All lines are JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

if TYPE_CHECKING:
    from antiphon.evaluation.robot.asking import Answered, Asking, Network, NoAnswer
    from antiphon.evaluation.robot.control import WAYS, Control
    from antiphon.evaluation.robot.sensing import (
        Action,
        Eyes,
        Recording,
        Simulation,
        replayed,
        simulated,
    )
else:  # Run by its path these lie beside it.
    from asking import Answered, Asking, Network, NoAnswer
    from control import WAYS, Control
    from sensing import Action, Eyes, Recording, Simulation, replayed, simulated

PREFIX = "action_prefix"
"""In metadata the shape of the frozen prefix that the policy takes; in an observation, the
prefix."""


class Robot:
    """What the plan says, and what it needs."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        recorded = plan["recorded"]
        self._world = simulated(plan["simulation"]) if recorded is None else replayed(recorded)
        self._judges = recorded is None
        self._network = Network(**plan["network"])
        self._period_s = 1.0 / (self._world.rate_hz * plan["slow_motion"])
        self._recording: Recording | None = None
        self._max_steps = self._see_all()
        if plan["record"] is not None:
            self._recording = Recording(plan["record"], self._world.rate_hz, self._max_steps)

    def _see_all(self) -> int:
        """Make all worlds, and see each once; how many steps the longest has. Raises ValueError
        for what is no simulation."""
        try:
            worlds = [self._world.at(task, self._plan["seed"]) for task in self._world.tasks]
            for world in worlds:
                world.observe()
            return max(world.max_steps for world in worlds)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self._plan['simulation']} cannot be played: {problem}") from error

    def warm(self) -> dict[str, Any]:
        """Connect once; what the policy says of itself, and the simulation."""
        asking = self._connect(0)
        asking.finish()
        training = self._world.training_seeds
        return {
            "metadata": asking.metadata,
            "tasks": self._world.tasks,
            "training_seeds": [training.start, training.stop],
            "rate_hz": self._world.rate_hz,
            "max_steps": self._max_steps,
        }

    def play(self, task: str, seed: int) -> dict[str, Any]:
        """One episode. Raises NoAnswer."""
        world = self._world.at(task, seed)
        asking = self._connect(seed)
        episode = Episode(world, asking, self._control(), Eyes(self._plan["images"]))
        episode.repeats = self._plan["while_waiting"] == "last"
        episode.records = self._recording is not None
        shape = asking.metadata.get(PREFIX)
        if self._plan["control"] == "real-time-chunking" and shape is not None:
            episode.prefix = np.zeros(shape, np.float32)
        episode.play(self._period_s)
        if self._recording is not None:
            self._recording.add([{"task": task, "seed": seed, **each} for each in episode.answers])
        succeeded = bool(world.succeeded) if self._judges else None
        return {"task": task, "seed": seed, "succeeded": succeeded, **episode.result()}

    def _connect(self, seed: int) -> Asking:
        plan = self._plan
        seeds = [plan["seed"], plan["robot"], seed]
        return Asking(plan["uri"], plan["key"], self._network, seeds, plan["timeout_s"])

    def _control(self) -> Control:
        return WAYS[self._plan["control"]](self._plan["actions"], self._plan["ask_ahead"])


class Episode:
    """One episode on the clock. Step n is due n + 1 periods after its begin: the policy has one
    period for what it sees before a step."""

    def __init__(self, world: Simulation, asking: Asking, control: Control, eyes: Eyes) -> None:
        self.prefix: Any = None
        """Where the frozen prefix is put, if the policy takes one."""
        self.repeats = False
        """Whether without an action it takes the last one again."""
        self.records = False
        self.answers: list[dict[str, Any]] = []
        """What was asked and answered, for a recording."""
        self._world, self._asking, self._control, self._eyes = world, asking, control, eyes
        self._asked: dict[str, Any] = {}
        self._asked_step = 0
        self._took_ms: list[float] = []
        self._fresh = self._unused = self._misses = 0
        self._not_fresh: Counter[str] = Counter()
        self._ticks_s: list[float] = []

    def play(self, period_s: float) -> None:
        """Until the task is done, or time is up."""
        world, control = self._world, self._control
        last: Action | None = None
        step = 0
        begun_s = time.perf_counter()
        self._ticks_s.append(begun_s)
        self._ask(step)
        while step < world.max_steps and not world.succeeded:
            _sleep_until(begun_s + (step + 1) * period_s)
            self._ticks_s.append(time.perf_counter())
            answered = self._asking.take()
            if answered is not None:
                self._heard(answered, step)
            action, fresh = control.action(step)
            self._misses += action is None or not fresh
            if action is None:
                action = last if self.repeats and last is not None else world.hold(last)
            world.step(action)
            last = action
            step += 1
            if control.wants(step) and step < world.max_steps and not world.succeeded:
                self._ask(step)
        answered = self._asking.finish()
        if answered is not None:
            self._unused += 1
            self._heard(answered, step)
        self._period_s = period_s

    def _ask(self, step: int) -> None:
        observation = self._eyes.see(self._world.observe())
        if self.prefix is not None:
            frozen = self._control.prefix(step, len(self.prefix))
            prefix = np.zeros_like(self.prefix)
            if len(frozen):
                prefix[: len(frozen)] = frozen
            observation = {**observation, PREFIX: prefix, f"{PREFIX}_length": len(frozen)}
        self._asked, self._asked_step = observation, step
        self._control.asked(step)
        self._asking.ask(observation)

    def _heard(self, answered: Answered, step: int) -> None:
        said = answered.answer
        about = said.get("antiphon", {})
        fresh = bool(about.get("fresh", True))
        if fresh:
            self._fresh += 1
        else:
            self._not_fresh[str(about.get("reason"))] += 1
        self._took_ms.append(answered.took_s * 1000.0)
        self._control.answered(said["actions"], step, fresh)
        if self.records:
            self.answers.append(
                {"step": self._asked_step, "observation": self._asked, "actions": said["actions"]}
            )

    def result(self) -> dict[str, Any]:
        """What was measured. `late_ms` is how much longer, or shorter, each period was."""
        intervals_s = np.diff(self._ticks_s)
        return {
            "steps": len(intervals_s),
            "elapsed_s": self._ticks_s[-1] - self._ticks_s[0],
            "period_s": self._period_s,
            "misses": self._misses,
            "fresh": self._fresh,
            "not_fresh": self._not_fresh,
            "unused": self._unused,
            "took_ms": [round(each, 3) for each in self._took_ms],
            "late_ms": [round(each, 3) for each in (intervals_s - self._period_s) * 1000.0],
        }


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


def main(commands: TextIO, say: TextIO) -> int:
    """Follow the plan; 0 when all of it was played."""

    def tell(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, **more}, default=_plain), file=say, flush=True)

    plan = json.loads(commands.readline())
    try:
        try:
            robot = Robot(plan)
        except (ImportError, OSError, ValueError) as error:
            tell("refused", message=" ".join(str(error).split()))
            return 1
        tell("ready", **robot.warm())
        for task, seed in json.loads(commands.readline() or "[]"):
            tell("episode", **robot.play(task, seed))
    except NoAnswer as error:
        tell("failed", message=str(error))
        return 1
    return 0


def _plain(value: Any) -> Any:
    """What JSON has no form of: arrays of a policy's metadata, and their scalars."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


if __name__ == "__main__":
    # What libraries print must not be taken for what the robot says.
    say, sys.stdout = sys.stdout, sys.stderr
    sys.exit(main(sys.stdin, say))
