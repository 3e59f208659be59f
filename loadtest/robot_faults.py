"""What robots see of faults: is every tick answered in time, and when is the policy back?

    python -m loadtest.robots --faults [--robots 4] [--margin-ms 50]
    antiphon bench robots --faults

Real processes: `antiphon serve` with a policy that takes 20 ms, a deadline of 100 ms and a safe
action, and robots that observe 20 times a second. Two seconds after they begin something fails,
and two seconds later it is mended:

- `stalled-worker`: the worker is stopped (SIGSTOP), and goes on;
- `killed-worker`: kill -9; its supervisor starts another, which has the state of the sessions;
- `killed-gateway-openpi`: kill -9. Who has pip's openpi-client finds its connection broken;
- `killed-gateway`: the own client's watchdog goes on for as long as its robot wants. The
  sessions end with their gateway;
- `partition`: a relay between the own client and the gateway carries nothing more, and closes
  nothing either.

With one tick that is not answered within its deadline and the margin (or, where the gateway is
killed, one connection that is not broken within a period and the margin) the exit status is 1.
Prints one JSON object: for each fault the ticks, those that were missed, how long answers took
before, in and after it, why they were not fresh, how long it took from the mending to a fresh
answer, and the curve of all that in bins of 0.1 s around the fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.commands.numbers import number, whole
from loadtest.machine import Disturbance, description
from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python

RATE_HZ = 20.0
DEADLINE_MS = 100.0
PERIOD_MS = 1000.0 / RATE_HZ
FAULT_S = 2.0
"""From the first tick to the fault, and from that to its mending."""
SECONDS = 10.0
BIN_S = 0.1
START_S = 60.0
ROBOTS = 4
MARGIN_MS = 50.0
SESSIONS = 32
"""As many robots as the gateway serves."""
OPTIONS = ("robots", "margin_ms", "fault")
"""Those that only `--faults` has; None where they are not given."""
OWN_CLIENT = ROOT / "clients" / "python"

CONFIG = """
gateway: {{openpi: {{port: {port}, model: robots}}}}
stages:
  act: {{engine: vla, policy: synthetic-any, options: {{infer_ms: 20}}}}
pipelines:
  robots:
    kind: robot
    required: true
    outputs: {{actions: act}}
    durability: turn
    control: {{rate_hz: 20, deadline_ms: {deadline_ms}, safe_action: hold}}
    limits: {{sessions: {sessions}}}
"""


@dataclass
class Robot:
    """One process, and what it says: (when, how long in ms, why it was not fresh)."""

    process: subprocess.Popen[str]
    ticks: list[tuple[float, float, str | None]] = field(default_factory=list)
    broken_s: float | None = None
    """When it found its connection broken."""

    def start(self) -> None:
        """Its loop begins."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Read what it has said until it ended. Raises RuntimeError where that was too early."""
        output, _ = self.process.communicate(timeout=SECONDS + START_S)
        for line in output.splitlines():
            at_s, took, reason = json.loads(line)
            if reason == "broken":
                self.broken_s = at_s
            else:
                self.ticks.append((at_s, took, reason))
        if self.process.returncode:
            raise RuntimeError(f"a robot ended with status {self.process.returncode}")


@dataclass(frozen=True)
class Fault:
    """What fails, and how it is mended; both are told the deployment and the relay."""

    own_client: bool
    strike: Callable[[Deployment, Relay], None]
    mend: Callable[[Deployment, Relay], None]
    breaks: bool = False
    """Whether connections are to break."""
    ends: bool = False
    """Whether the sessions end by it, so that their policy does not come back."""
    relayed: bool = False


class Relay:
    """Carries bytes to a port, in a thread of its own, or for a while none."""

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self._to_port = to_port
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])
        self._over = asyncio.Event()

    def __enter__(self) -> Relay:
        self._thread.start()
        self._ready.wait(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    def carry(self, carries: bool) -> None:
        """Whether anything passes from now on; no connection is closed by that."""
        change = self._open.set if carries else self._open.clear
        self._loop.call_soon_threadsafe(change)

    async def _run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            try:
                await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
            finally:
                back.close()
                writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


def _signal(child: str, number: signal.Signals) -> Callable[[Deployment, Relay], None]:
    def send(deployment: Deployment, _: Relay) -> None:
        os.kill(deployment.children()[child], number)

    return send


def _nothing(_: Deployment, __: Relay) -> None:
    """The supervisor mends it."""


WORKER, GATEWAY = "act-0", "gateway"

FAULTS = {
    "stalled-worker": Fault(
        False, _signal(WORKER, signal.SIGSTOP), _signal(WORKER, signal.SIGCONT)
    ),
    "killed-worker": Fault(False, _signal(WORKER, signal.SIGKILL), _nothing),
    "killed-gateway-openpi": Fault(False, _signal(GATEWAY, signal.SIGKILL), _nothing, breaks=True),
    "killed-gateway": Fault(True, _signal(GATEWAY, signal.SIGKILL), _nothing, ends=True),
    "partition": Fault(
        True,
        lambda _, relay: relay.carry(False),
        lambda _, relay: relay.carry(True),
        relayed=True,
    ),
}


def measure(robots: int, margin_ms: float, names: list[str]) -> dict[str, Any]:
    """Every fault in turn, on a deployment of its own."""
    disturbance = Disturbance()
    results = {name: _measure(FAULTS[name], robots, margin_ms) for name in names}
    return {
        "machine": description(),
        "disturbance": disturbance.result(),
        "deadline_ms": DEADLINE_MS,
        "margin_ms": margin_ms,
        "rate_hz": RATE_HZ,
        "robots": robots,
        "faults": results,
        "missed": sum(result["missed"] for result in results.values()),
    }


def _measure(fault: Fault, robots: int, margin_ms: float) -> dict[str, Any]:
    with _deployment() as (deployment, port), Relay(deployment.port) as relay:
        if fault.own_client:
            http = relay.port if fault.relayed else deployment.port
            command = [sys.executable, ROOT / "loadtest" / "client_ticks.py"]
            command += [f"http://127.0.0.1:{http}"]
            environment = {**os.environ, "PYTHONPATH": str(OWN_CLIENT)}
        else:
            command = [openpi_python(), ROOT / "loadtest" / "openpi_ticks.py"]
            command += [f"ws://127.0.0.1:{port}"]
            environment = {**os.environ}
        running = [_robot(command, environment) for _ in range(robots)]
        try:
            for robot in running:
                assert robot.process.stdout is not None
                if robot.process.stdout.readline() != "ready\n":
                    raise RuntimeError("a robot did not get ready")
            for robot in running:
                robot.start()
            begun_s = time.monotonic()
            time.sleep(FAULT_S)
            struck_s = time.monotonic()
            fault.strike(deployment, relay)
            time.sleep(FAULT_S)
            fault.mend(deployment, relay)
            mended_s = time.monotonic()
            for robot in running:
                robot.finish()
        finally:
            for robot in running:
                robot.process.kill()
                robot.process.wait()
    allowed_ms = (PERIOD_MS if fault.own_client else DEADLINE_MS) + margin_ms
    return judged(fault, running, (begun_s, struck_s, mended_s), allowed_ms, margin_ms)


def judged(
    fault: Fault,
    robots: list[Robot],
    times: tuple[float, float, float],
    allowed_ms: float,
    margin_ms: float,
) -> dict[str, Any]:
    """What became of all ticks; `times` are begin, fault and mending (s)."""
    _, struck_s, mended_s = times
    ticks = sorted(tick for robot in robots for tick in robot.ticks)
    missed = sum(took > allowed_ms for _, took, _ in ticks)
    result: dict[str, Any] = {"ticks": len(ticks)}
    if fault.breaks:
        found = [robot.broken_s for robot in robots]
        noticed = [None if at is None else (at - struck_s) * 1000.0 for at in found]
        missed += sum(ms is None or ms > PERIOD_MS + margin_ms for ms in noticed)
        result["broken_after_ms"] = [None if ms is None else round(ms, 1) for ms in noticed]
    elif not fault.ends:
        fresh = [at for at, _, reason in ticks if reason is None and at >= mended_s]
        result["fresh_after_s"] = round(min(fresh) - mended_s, 2) if fresh else None
        missed += not fresh
    phases = {
        "before": [tick for tick in ticks if tick[0] < struck_s],
        "fault": [tick for tick in ticks if struck_s <= tick[0] < mended_s],
        "after": [tick for tick in ticks if tick[0] >= mended_s],
    }
    for phase, those in phases.items():
        result[phase] = _summary(those)
    result["missed"] = missed
    result["curve"] = _curve(ticks, struck_s, allowed_ms)
    return result


def _summary(ticks: list[tuple[float, float, str | None]]) -> dict[str, Any]:
    took = sorted(ms for _, ms, _ in ticks)
    if not took:
        return {"ticks": 0}
    return {
        "ticks": len(took),
        "p50_ms": round(took[len(took) // 2], 1),
        "p99_ms": round(took[int(len(took) * 0.99)], 1),
        "max_ms": round(took[-1], 1),
        "not_fresh": dict(Counter(reason for *_, reason in ticks if reason is not None)),
    }


def _curve(
    ticks: list[tuple[float, float, str | None]], struck_s: float, allowed_ms: float
) -> list[dict[str, Any]]:
    """Bins of `BIN_S`, `at_s` from the fault."""
    bins: dict[int, list[tuple[float, float, str | None]]] = {}
    for tick in ticks:
        bins.setdefault(int((tick[0] - struck_s) // BIN_S), []).append(tick)
    return [
        {
            "at_s": round(number * BIN_S, 1),
            "ticks": len(those),
            "max_ms": round(max(took for _, took, _ in those), 1),
            "not_fresh": sum(reason is not None for *_, reason in those),
            "missed": sum(took > allowed_ms for _, took, _ in those),
        }
        for number, those in sorted(bins.items())
    ]


def _robot(command: list[Any], environment: dict[str, str]) -> Robot:
    return Robot(
        subprocess.Popen(
            [*command, str(RATE_HZ), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    )


@contextlib.contextmanager
def _deployment() -> Iterator[tuple[Deployment, int]]:
    """`antiphon serve`, and the port of the policy."""
    from loadtest.robots import free_port

    port, own = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="antiphon-faults-") as folder:
        config = Path(folder) / "robots.yaml"
        config.write_text(CONFIG.format(port=port, deadline_ms=DEADLINE_MS, sessions=SESSIONS))
        # A gateway that is started again takes the port that it was told.
        with Deployment(config, "--port", str(own)) as deployment:
            yield deployment, port


def main(options: argparse.Namespace) -> int:
    """Measure, print, judge. 1 on a miss, and where a robot did not get through."""
    margin_ms = MARGIN_MS if options.margin_ms is None else options.margin_ms
    try:
        result = measure(options.robots or ROBOTS, margin_ms, options.fault or list(FAULTS))
    except RuntimeError as error:
        print(f"loadtest.robots: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    return 1 if result["missed"] else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `--faults`."""
    parser.add_argument("--robots", type=whole(1, SESSIONS), help=f"default: {ROBOTS}")
    parser.add_argument(
        "--margin-ms", type=number(0.0, 60_000.0, least=True), help=f"default: {MARGIN_MS:g}"
    )
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one")
