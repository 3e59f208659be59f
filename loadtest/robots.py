"""Robots over OpenPI, with the official client: what a step costs, and who waits for whom.

    python -m loadtest.robots [--steps 400] [--rounds 5] [--check]
    python -m loadtest.robots --faults

The second is about faults, and described in `loadtest.robot_faults`.

Each robot is a process of its own with pip's openpi-client; servers have one core, robots the
other. Two measurements, in rounds that take turns (A B C A B C ...):

- `null`: one robot, a policy that takes no time, an observation of two 224x224 images, a state
  and a prompt (301 KB), a chunk of 50x32 float32. Against `antiphon serve`, against pip's
  openpi-server, and against a `bound`, which reads the observation and looks at nothing.
- `shared`: ten robots, a policy that takes 30 ms a call, and a probe of /healthz beside them.
  The `bound` there has one call for all ten, once it has heard all.

A step runs from the call of the client's `infer` to its return. `cpu_us` is the processor time
of all processes of the server for one step. Prints one JSON object. With --check the exit
status is 1 when a target is missed: a median of 1.1 times that of the bound and 100 us of
processor time for `null`; 45 ms (median) and 5 ms for the probe (median) for `shared`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.commands.numbers import whole
from loadtest import robot_faults
from loadtest.machine import Disturbance, description
from tests.deployment import Deployment
from tests.official_client.environment import ROOT, openpi_python

STEPS = 400
ROUNDS = 5
ROBOTS = 10
SHARED_MS = 30
WARM = 20
SHARED_STEPS = 20
PROBE_S = 0.05
START_S = 30.0

CONFIG = """
gateway: {{openpi: {{port: {port}, model: robots}}}}
stages:
  act: {{engine: vla, policy: synthetic-any, options: {{infer_ms: {infer_ms}}}}}
pipelines:
  robots:
    kind: robot
    required: true
    outputs: {{actions: act}}
    limits: {{sessions: 32}}
"""


@dataclass
class Server:
    """A server under test; `pids` are those of all its processes."""

    name: str
    port: int
    pids: Callable[[], list[int]]
    taken_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    steps: int = 0
    probed_s: list[float] = field(default_factory=list)
    has_probe: bool = True

    def cpu(self) -> float:
        """Processor time of its processes so far, in seconds."""
        return sum(processor_s(pid) for pid in self.pids())

    def result(self) -> dict[str, Any]:
        """What was measured of it."""
        taken = sorted(self.taken_s)
        measured: dict[str, Any] = {
            "steps": len(taken),
            "p50_ms": round(statistics.median(taken) * 1000, 3),
            "p99_ms": round(taken[int(len(taken) * 0.99)] * 1000, 3),
            "cpu_us": round(self.cpu_s / self.steps * 1e6, 1),
        }
        if self.probed_s:
            measured["healthz_p50_ms"] = round(statistics.median(self.probed_s) * 1000, 2)
            measured["healthz_max_ms"] = round(max(self.probed_s) * 1000, 2)
        return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge. `arguments` are those of the command line."""
    parser = argparse.ArgumentParser(
        "loadtest.robots", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps", type=whole(1, 1_000_000), help=f"of `null`, in each round (default: {STEPS})"
    )
    parser.add_argument("--rounds", type=whole(1, 1_000), help=f"default: {ROUNDS}")
    parser.add_argument("--check", action="store_true", default=None)
    parser.add_argument("--faults", action="store_true", help="what robots see of faults instead")
    robot_faults.add_arguments(parser)
    options = parser.parse_args(arguments)
    for name in ("steps", "rounds", "check") if options.faults else robot_faults.OPTIONS:
        if getattr(options, name) is not None:
            with_or_without = "does not go" if options.faults else "goes"
            parser.error(f"argument --{name.replace('_', '-')}: {with_or_without} with --faults")
    try:
        openpi_python()
    except AssertionError as error:
        parser.error(str(error))
    if options.faults:
        return robot_faults.main(options)
    disturbance = Disturbance()
    rounds = options.rounds or ROUNDS
    null = measure(0, 1, options.steps or STEPS, rounds)
    shared = measure(SHARED_MS, ROBOTS, SHARED_STEPS, rounds)
    bound_ms = null["bound"]["p50_ms"]
    missed = [
        name
        for name, seen, limit in (
            ("null p50", null["antiphon"]["p50_ms"], 1.1 * bound_ms),
            ("null cpu", null["antiphon"]["cpu_us"], 100.0),
            ("shared p50", shared["antiphon"]["p50_ms"], 45.0),
            ("shared healthz", shared["antiphon"]["healthz_p50_ms"], 5.0),
        )
        if seen > limit
    ]
    result = {
        "machine": description(),
        "disturbance": disturbance.result(),
        "null": null,
        "shared": shared,
        "missed": missed,
    }
    print(json.dumps(result, indent=2))
    return 1 if options.check and missed else 0


def measure(infer_ms: int, robots: int, steps: int, rounds: int) -> dict[str, Any]:
    """Rounds with a policy that takes `infer_ms`; what was seen of each server."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as running:
        os.sched_setaffinity(0, cores[:1])
        servers = [
            running.enter_context(antiphon(infer_ms)),
            running.enter_context(official(infer_ms)),
        ]
        servers.append(running.enter_context(bound(infer_ms, robots)))
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            for _ in range(rounds):
                for server in servers:
                    one_round(server, robots, steps, together=infer_ms > 0)
        finally:
            os.sched_setaffinity(0, cores)
    return {server.name: server.result() for server in servers}


def one_round(server: Server, robots: int, steps: int, *, together: bool) -> None:
    """All robots take their steps at once; `together`: they share a slow policy."""
    command = [openpi_python(), ROOT / "loadtest" / "openpi_robot.py"]
    arguments = [f"ws://127.0.0.1:{server.port}", str(steps), str(2 if together else WARM)]
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(robots)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        before_s = server.cpu()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        if together and server.has_probe:
            while any(process.poll() is None for process in processes):
                server.probed_s.append(healthz(server.port))
                time.sleep(PROBE_S)
        for process in processes:
            output, _ = process.communicate()
            server.taken_s += json.loads(output)
    server.cpu_s += server.cpu() - before_s
    server.steps += robots * steps


def healthz(port: int) -> float:
    """How long GET /healthz takes, in seconds."""
    begun = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=START_S) as answer:
        assert answer.read() == b"OK\n"
    return time.perf_counter() - begun


@contextlib.contextmanager
def antiphon(infer_ms: int) -> Iterator[Server]:
    """`antiphon serve` with the synthetic policy."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="antiphon-robots-") as folder:
        config = Path(folder) / "robots.yaml"
        config.write_text(CONFIG.format(port=port, infer_ms=infer_ms))
        with Deployment(config) as deployment:
            pids = [deployment.process.pid, *deployment.children().values()]
            yield Server("antiphon", port, lambda: pids)


@contextlib.contextmanager
def official(infer_ms: int) -> Iterator[Server]:
    """pip's openpi-server."""
    with other("openpi-server", openpi_python(), "openpi_official.py", str(infer_ms)) as server:
        yield server


@contextlib.contextmanager
def bound(infer_ms: int, robots: int) -> Iterator[Server]:
    """The least that a server can do."""
    arguments = (str(infer_ms), str(robots)) if infer_ms else ()
    with other("bound", Path(sys.executable), "openpi_bound.py", *arguments) as server:
        server.has_probe = False
        yield server


@contextlib.contextmanager
def other(name: str, python: Path, program: str, *arguments: str) -> Iterator[Server]:
    """A server that is one program."""
    port = free_port()
    process = subprocess.Popen(
        [python, ROOT / "loadtest" / program, str(port), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        until_open(port)
        yield Server(name, port, lambda: [process.pid])
    finally:
        process.terminate()
        process.wait()


def until_open(port: int) -> None:
    """Wait until somebody listens there."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def processor_s(pid: int) -> float:
    """Processor time of a process, threads that have ended included, in seconds."""
    # What clock_getcpuclockid(3) gives: the scheduler's clock of that process.
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    sys.exit(main())
