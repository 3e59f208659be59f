"""An evaluation: its conditions one after the other, each held against the gateway's count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from antiphon.evaluation.errors import EvaluationFailed
from antiphon.evaluation.fleet import Played, play
from antiphon.evaluation.gateway import completed_turns
from antiphon.evaluation.measures import CLOCK_TOLERANCE, clocks, keeps_time, task_figures
from antiphon.evaluation.plan import Condition, Order


@dataclass
class Evaluation:
    """What was measured so far, and what speaks against it."""

    order: Order
    results: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    """What the robots' program said of the world and the policy."""

    async def run(
        self,
        conditions: Sequence[Condition],
        on_episode: Callable[[Condition, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        """Play all conditions, or up to the first in which a robot or the gateway fails.

        Raises InvalidRequest for what cannot be played.
        """
        url, pipeline = self.order.url, self.order.pipeline
        for condition in conditions:
            try:
                before = completed_turns(url, pipeline)
                played = await play(self.order, condition, partial(on_episode, condition))
                counted = completed_turns(url, pipeline) - before
            except EvaluationFailed as error:
                self.faults.append(f"{condition}: {error.message}")
                return
            self._take(condition, played, counted)

    def _take(self, condition: Condition, played: Played, counted: int) -> None:
        self.about = played.ready
        tasks = dict.fromkeys(episode["task"] for episode in played.episodes)
        figures = [
            task_figures(task, [each for each in played.episodes if each["task"] == task])
            for task in tasks
        ]
        chunks = sum(each["chunks"] for each in figures)
        measured = clocks(played.episodes)
        if chunks != counted:
            self.faults.append(
                f"{condition}: the robots received {chunks} chunks, and the gateway counted "
                f"{counted}: it was started anew, or somebody else uses {self.order.pipeline}"
            )
        if wrong := [clock for clock in measured if not keeps_time(clock)]:
            self.faults.append(
                f"{condition}: a world went on at {wrong[0]:.3f} of its speed, which has to be "
                f"within {CLOCK_TOLERANCE:.0%}: choose fewer robots, or a smaller --slow-motion"
            )
        self.results.append(
            {
                **asdict(condition),
                "clocks": measured,
                "chunks": {"robots": chunks, "gateway": counted},
                "tasks": figures,
                "episodes": [_outcome(episode) for episode in played.episodes],
            }
        )


def _outcome(episode: dict[str, Any]) -> dict[str, Any]:
    """An episode as the report has it: without what the figures were made of."""
    kept = ("task", "seed", "robot", "succeeded", "steps", "elapsed_s", "misses", "fresh")
    return {name: episode[name] for name in kept}
