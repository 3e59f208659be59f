"""What is to be played: conditions that differ, and what all of them share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTROLS = ("synchronous", "chunked", "real-time-chunking")
IMAGES = ("seen", "blank", "frozen")


@dataclass(frozen=True)
class Condition:
    """Under what episodes are played. `control` is one of CONTROLS, and behind a colon how many
    actions of a chunk are played, if it is not as many as usual. `robot/asking.py` defines
    latency, jitter and loss, `robot/sensing.py` what is done to images."""

    control: str = CONTROLS[0]
    robots: int = 1
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    images: str = IMAGES[0]

    @property
    def way(self) -> str:
        """The way of playing chunks."""
        return self.control.partition(":")[0]

    @property
    def actions(self) -> int | None:
        """How many actions of a chunk are played; None: as many as usual."""
        number = self.control.partition(":")[2]
        return int(number) if number else None

    def __str__(self) -> str:
        robots = "1 robot" if self.robots == 1 else f"{self.robots} robots"
        words = [self.control, robots]
        if self.latency_ms:
            words.append(f"latency {self.latency_ms:g} ms")
        if self.jitter_ms:
            words.append(f"jitter {self.jitter_ms:g} ms")
        if self.loss:
            words.append(f"loss {self.loss:g}")
        if self.images != IMAGES[0]:
            words.append(f"images {self.images}")
        return ", ".join(words)


def conditions(
    controls: Sequence[str],
    robots: Sequence[int],
    latencies_ms: Sequence[float],
    jitters_ms: Sequence[float],
    losses: Sequence[float],
    images: Sequence[str],
) -> list[Condition]:
    """Every combination, the first list changing slowest."""
    combined = itertools.product(controls, robots, latencies_ms, jitters_ms, losses, images)
    return [Condition(*each) for each in combined]


@dataclass(frozen=True)
class Order:
    """What all conditions of an evaluation share; docs/evaluating-robots.md says what each is."""

    url: str
    pipeline: str
    key: str | None
    python: Path
    simulation: str | None
    recorded: Path | None
    tasks: tuple[str, ...] | None
    episodes: int
    seed: int
    slow_motion: float
    ask_ahead: int | None
    while_waiting: str
    loss_ms: float
    timeout_s: float
    record: Path | None

    @property
    def uri(self) -> str:
        """Where robots connect."""
        address = self.url if "://" in self.url else f"http://{self.url}"
        return f"ws{address.removeprefix('http').rstrip('/')}/v1/openpi/{self.pipeline}"

    def robot(self, condition: Condition, index: int) -> dict[str, Any]:
        """The plan of one robot, as its program reads it."""
        record = None if self.record is None else self.record / f"robot-{index}.observations"
        return {
            "simulation": self.simulation,
            "recorded": None if self.recorded is None else str(self.recorded.absolute()),
            "record": None if record is None else str(record.absolute()),
            "uri": self.uri,
            "key": self.key,
            "robot": index,
            "seed": self.seed,
            "control": condition.way,
            "actions": condition.actions,
            "ask_ahead": self.ask_ahead,
            "while_waiting": self.while_waiting,
            "images": condition.images,
            "network": {
                "latency_ms": condition.latency_ms,
                "jitter_ms": condition.jitter_ms,
                "loss": condition.loss,
                "loss_ms": self.loss_ms,
            },
            "slow_motion": self.slow_motion,
            "timeout_s": self.timeout_s,
        }
