"""The robots of one condition: processes that begin together, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.evaluation.errors import EvaluationFailed
from antiphon.evaluation.plan import Condition, Order
from protocol.errors import InvalidRequest

PROGRAM = Path(__file__).parent / "robot"
LINE_BYTES = 16 * 1024 * 1024
END_S = 5.0


@dataclass(frozen=True)
class Played:
    """What one condition came to: what the robots' program says of world and policy (`ready`),
    and of each episode, with the number of its `robot`."""

    ready: dict[str, Any]
    episodes: list[dict[str, Any]]


async def play(
    order: Order, condition: Condition, on_episode: Callable[[dict[str, Any]], None]
) -> Played:
    """Have the robots of `condition` play their episodes.

    Raises EvaluationFailed when one of them cannot go on, and InvalidRequest for tasks or seeds
    that the simulation does not allow; then all of them are ended.
    """
    robots = [_Robot(order, condition, index) for index in range(condition.robots)]
    try:
        ready = (await asyncio.gather(*(robot.prepare() for robot in robots)))[0]
        episodes = _episodes(order, ready)
        shares = [episodes[index :: len(robots)] for index in range(len(robots))]
        played = await asyncio.gather(
            *(robot.play(share, on_episode) for robot, share in zip(robots, shares, strict=True))
        )
    finally:
        await asyncio.gather(*(robot.end() for robot in robots))
    return Played(ready, [episode for share in played for episode in share])


def _episodes(order: Order, ready: dict[str, Any]) -> list[tuple[str, int]]:
    """Task and seed of each. The same seeds under every condition."""
    known = ready["tasks"]
    tasks = order.tasks or tuple(known)
    if unknown := [task for task in tasks if task not in known]:
        raise InvalidRequest(
            f"the simulation has no task {unknown[0]}; it has {', '.join(known)}", field="tasks"
        )
    seeds = range(order.seed, order.seed + order.episodes)
    first, end = ready["training_seeds"]
    if max(seeds.start, first) < min(seeds.stop, end):
        raise InvalidRequest(
            f"seeds {seeds.start} to {seeds.stop - 1} touch those of the training, "
            f"{first} to {end - 1}: choose others",
            field="seed",
        )
    return [(task, seed) for seed in seeds for task in tasks]


class _Robot:
    """One process. What it prints on standard error goes to ours."""

    def __init__(self, order: Order, condition: Condition, index: int) -> None:
        self._order = order
        self._plan = order.robot(condition, index)
        self._index = index
        self._process: asyncio.subprocess.Process | None = None

    async def prepare(self) -> dict[str, Any]:
        """Start it; what it says when it is ready."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._order.python, PROGRAM, stdin=pipe, stdout=pipe, limit=LINE_BYTES
            )
        except OSError as error:
            raise InvalidRequest(f"{self._order.python} cannot be run: {error}") from None
        await self._write(self._plan)
        return await self._read("ready")

    async def play(
        self, episodes: list[tuple[str, int]], on_episode: Callable[[dict[str, Any]], None]
    ) -> list[dict[str, Any]]:
        """Have it play; what came of each episode."""
        await self._write(episodes)
        played = []
        for _ in episodes:
            episode = {**await self._read("episode"), "robot": self._index}
            on_episode(episode)
            played.append(episode)
        return played

    async def end(self) -> None:
        """It has to go, whatever it does."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _write(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        # Who has ended already has said why, or has no answer.
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def _read(self, expected: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            said: dict[str, Any] = json.loads(line) if line else {}
            event = said.pop("event", None)
        except (ValueError, AttributeError):
            # A library that writes past `sys.stdout`, or a line above LINE_BYTES.
            raise EvaluationFailed(f"robot {self._index} said what it should not") from None
        if not line:
            status = await self._process.wait()
            raise EvaluationFailed(f"robot {self._index} ended with status {status}")
        if event == "refused":
            raise InvalidRequest(f"robot {self._index}: {said['message']}")
        if event == "failed":
            raise EvaluationFailed(f"robot {self._index}: {said['message']}")
        if event != expected:
            raise EvaluationFailed(f"robot {self._index} said {event} instead of {expected}")
        return said
