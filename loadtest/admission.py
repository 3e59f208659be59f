"""Admission: is what it foretells true?

    python -m loadtest.admission [--seconds 60] [--check]

Three measurements, each over HTTP and WebSocket against `antiphon serve` with synthetic steps:

- `head_room`: sessions whose steps cost 30 % of a core come one after the other to a worker
  with `cores: 1.3`, until one is refused. As many should have been let in as fit, give or
  take one.
- `retry`: three times as many clients as places, each of which holds a session for a while,
  goes and comes again; who is refused comes back after `retry_after_ms`. At least 9 of 10 of
  those should be let in.
- `queue`: 50 clients ask for 3 places at once. They should be let in in the order in which
  they asked, told positions that only fall, and overtaken by nobody when one of ten leaves.

Prints one JSON object. With --check the exit status is 1 when one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from loadtest.machine import description
from tests.deployment import Deployment

ENGINE = "loadtest.synthetic_step:SyntheticStep"
SHARE = 0.3
"""Of a core, that a session's steps cost."""
CORES = 1.3
STEP_S = 0.1
MEASURED_S = 6.0
"""How long a session runs before the next one comes."""
PLACES = 4
ASKING = 50
LEAVING = 10

Measures = dict[str, Any]


def _config(stage: str, limits: str) -> str:
    """One stage with these options, and one pipeline."""
    return f"""
stages:
  world: {{engine: "{ENGINE}", head_room: 0, {stage}}}
pipelines:
  game:
    kind: world
    outputs: {{frames: world}}
    limits: {{{limits}}}
"""


CONFIGS = {
    "head_room": _config(f"cores: {CORES}, step_work_ms: {SHARE * STEP_S * 1000}", "sessions: 64"),
    "retry": _config("state_bytes: 4096", f"sessions: {PLACES}"),
    "queue": _config("state_bytes: 4096", f"sessions: 3, waiting: {ASKING}, wait_s: 120"),
}
"""By part of the measurement."""


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long `retry` runs")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    result: Measures = {"machine": description()}
    with served("head_room") as it:
        result["head_room"] = asyncio.run(head_room(it.base_url))
    with served("retry") as it:
        result["retry"] = asyncio.run(retry(it.base_url, options.seconds))
    with served("queue") as it:
        result["queue"] = asyncio.run(queue(it.base_url))
    missed = [name for name, measured in result.items() if measured.get("missed")]
    result["missed"] = missed
    print(json.dumps(result, indent=2))
    return 1 if options.check and missed else 0


def served(part: str) -> Deployment:
    """The deployment that a part measures."""
    path = Path(tempfile.mkdtemp(prefix="antiphon-admission-")) / "config.yaml"
    path.write_text(CONFIGS[part])
    return Deployment(path, environment={"PYTHONPATH": os.getcwd()})


class Session:
    """A session with its stream."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._steps = 0

    async def step(self) -> None:
        """One step, to its answer."""
        self._steps += 1
        said = {"type": "step", "step": self._steps, "inputs": []}
        await self._socket.send(
            json.dumps({"type": "update", "id": f"{self._steps}", "input": said})
        )
        await self._until("step_done")

    async def close(self) -> None:
        """End it, and wait until that is told."""
        await self._socket.send(json.dumps({"type": "close"}))
        await self._until("session_ended")

    async def _until(self, kind: str) -> None:
        while (frame := json.loads(await self._socket.recv()))["type"] != kind:
            if frame["type"] in ("step_failed", "refused", "session_ended"):
                raise RuntimeError(f"instead of {kind} came {frame}")


@asynccontextmanager
async def attached(url: str, opened: dict[str, Any]) -> AsyncIterator[Session]:
    """The stream of a session that was just opened."""
    address = f"{url.replace('http', 'ws', 1)}/v1/sessions/{opened['id']}/stream"
    async with connect(address, max_size=None) as socket:
        await socket.send(
            json.dumps({"type": "attach", "role": "controller", "secret": opened["secret"]})
        )
        yield Session(socket)


async def head_room(url: str) -> Measures:
    """How many are let in whose steps cost SHARE of a core each."""
    predicted = math.floor(CORES / SHARE)
    stop = asyncio.Event()
    reason = ""
    opened = 0
    async with httpx.AsyncClient(base_url=url, timeout=30) as http, asyncio.TaskGroup() as tasks:
        while opened < 4 * predicted:
            answer = await http.post("/v1/sessions", json={})
            if answer.status_code != 201:
                reason = answer.json()["error"]["message"]
                break
            opened += 1
            tasks.create_task(_loop(url, answer.json(), stop))
            await asyncio.sleep(MEASURED_S)
        compute = (await http.get("/v1/admin/workers")).json()["workers"][0]["compute"]
        stop.set()
    return {
        "cores": CORES,
        "predicted": predicted,
        "let_in": opened,
        "refused_for": reason,
        "measured": compute,
        "missed": abs(opened - predicted) > 1 or "of a core" not in reason,
    }


async def _loop(url: str, opened: dict[str, Any], stop: asyncio.Event) -> None:
    """A step every STEP_S, as long as it may."""
    async with attached(url, opened) as session:
        due_s = time.monotonic()
        while not stop.is_set():
            await session.step()
            due_s = max(due_s + STEP_S, time.monotonic() - STEP_S)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await session.close()


async def retry(url: str, seconds: float) -> Measures:
    """How many are let in who come back when they were told to."""
    drawn = random.Random(1)
    told: list[bool] = []
    unknown = 0
    until_s = time.monotonic() + seconds
    warm_s = time.monotonic() + seconds / 4

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal unknown
        await asyncio.sleep(drawn.uniform(0, 2))
        promised = False
        while time.monotonic() < until_s:
            answer = await http.post("/v1/sessions", json={})
            if promised and time.monotonic() > warm_s:
                told.append(answer.status_code == 201)
            if answer.status_code == 201:
                async with attached(url, answer.json()) as session:
                    await asyncio.sleep(drawn.uniform(0.5, 3.0))
                    await session.close()
                promised = False
                await asyncio.sleep(drawn.expovariate(1 / 1.5))
                continue
            after_ms = answer.json()["error"].get("retry_after_ms")
            promised = after_ms is not None
            unknown += not promised
            await asyncio.sleep(after_ms / 1000 if promised else drawn.uniform(0.2, 1.5))

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(3 * PLACES):
            tasks.create_task(client(http))
    share = sum(told) / len(told) if told else 0.0
    return {
        "came_back": len(told),
        "let_in": round(share, 3),
        "refused_without_a_time": unknown,
        "missed": share < 0.9 or len(told) < 20,
    }


async def queue(url: str) -> Measures:
    """In which order those are let in who wait, and what they are told."""
    order: list[int] = []
    positions: dict[int, list[int]] = {}
    waits_ms: list[float] = []
    errors_ms: list[float] = []

    async def client(http: httpx.AsyncClient, number: int, asked: asyncio.Event) -> None:
        begun_s = time.monotonic()
        estimates: list[tuple[float, int]] = []
        headers = {"accept": "text/event-stream"}
        request = http.stream("POST", "/v1/sessions", json={}, headers=headers)
        session: dict[str, Any] | None = None
        async with request as answer:
            asked.set()
            name = ""
            async for line in answer.aiter_lines():
                if answer.status_code == 201:
                    session = json.loads(line)
                    break
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    said = json.loads(line.removeprefix("data: "))
                    if name == "session":
                        session = said
                        break
                    positions.setdefault(number, []).append(said["position"])
                    if said["estimate_ms"] is not None:
                        estimates.append((time.monotonic(), said["estimate_ms"]))
                    if number % LEAVING == LEAVING - 1:
                        return
        assert session is not None
        now_s = time.monotonic()
        order.append(number)
        waits_ms.append(1000 * (now_s - begun_s))
        errors_ms.extend(abs(1000 * (now_s - at_s) - told_ms) for at_s, told_ms in estimates)
        async with attached(url, session) as stream:
            await asyncio.sleep(0.3)
            await stream.close()

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(ASKING):
            # One after the other has asked: who waits has its first event by then.
            asked = asyncio.Event()
            tasks.create_task(client(http, number, asked))
            await asked.wait()
    staying = [n for n in range(ASKING) if n % LEAVING != LEAVING - 1]
    falling = all(told == sorted(set(told), reverse=True) for told in positions.values())
    # Three are let in at a time: who comes next may be heard of in another order.
    slips = sum(abs(order.index(n) - at) > 2 for at, n in enumerate(staying))
    return {
        "let_in": len(order),
        "out_of_order": slips,
        "positions_only_fall": falling,
        "waited_ms": {
            "median": round(sorted(waits_ms)[len(waits_ms) // 2]),
            "most": round(max(waits_ms)),
        },
        "estimate_off_ms": round(sum(errors_ms) / len(errors_ms)) if errors_ms else None,
        "missed": slips > 0 or not falling or sorted(order) != staying,
    }


if __name__ == "__main__":
    sys.exit(main())
