"""The supervisor with the real gateway and synthetic workers: who lives, who dies, who returns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.exit_status import ExitStatus
from protocol.messages import Answer, Command, Fence, Open, Run
from tests.environments import lent_python
from workers.child import RestartPolicy
from workers.control import Control
from workers.control_events import (
    Action,
    CommandReceived,
    ControlLimits,
    EngineReady,
    GatewayUp,
    OpenSession,
    OperationDone,
    SendReport,
    StartTurn,
)
from workers.runtime_directory import runtime_directory, sweep
from workers.supervisor import worker_specs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A place for runtime directories, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as name:
        yield Path(name)


def write_config(directory: Path, **think: Any) -> Path:
    engine = "tests.synthetic_engine:SyntheticEngine"
    config = {
        "stages": {"think": {"engine": engine, **think}, "speak": {"engine": engine}},
        "pipelines": {
            "voice": {
                "kind": "duplex",
                "required": True,
                "edges": [{"from": "think", "to": "speak", "payload": "text", "delivery": "chunk"}],
                "outputs": {"text": "think", "audio": "speak"},
            }
        },
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Deployment:
    """A running `python -m workers.supervisor`; reads its log as it is written."""

    def __init__(self, process: asyncio.subprocess.Process, runtime: Path) -> None:
        self.process = process
        self.runtime = runtime
        self.lines: list[str] = []

    @classmethod
    async def start(cls, config: Path, runtime: Path, *arguments: str) -> Deployment:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers.supervisor", "-c", str(config), *arguments),
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "ANTIPHON_LOG_FORMAT": "json"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Under nohup the tests ignore a hang-up, which children would inherit.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        return cls(process, runtime)

    async def ready(self) -> str:
        """The line that it prints when all is ready."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def event(self, **wanted: Any) -> dict[str, Any]:
        """The next line of the log that has all of `wanted`."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.lines.append(line)
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and wanted.items() <= entry.items():
                return entry
        raise AssertionError(f"no {wanted} in:\n{''.join(self.lines)}")

    async def pids(self, *names: str) -> dict[str, int]:
        """The process ids of children that are being started, in any order."""
        found: dict[str, int] = {}
        while set(found) != set(names):
            entry = await self.event(event="child_started")
            found[entry["child"]] = entry["pid"]
        return found

    async def ended(self) -> tuple[int, str]:
        """The exit status, and all that was written to standard error."""
        assert self.process.stderr is not None
        rest = await self.process.stderr.read()
        return await self.process.wait(), "".join(self.lines) + rest.decode()


CHILDREN = ("think-0", "speak-0", "gateway")


@pytest.fixture
async def deployment(directory: Path) -> AsyncIterator[Deployment]:
    running = await Deployment.start(write_config(directory), directory, "--port", "0")
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.wait()


def alive(pid: int) -> bool:
    """Whether the process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def interpreter(pid: int) -> str:
    """What the process was started as."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


async def gone(pid: int) -> None:
    """Wait until the process has ended, on its process file descriptor."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def test_it_says_where_it_is_ready_and_ends_in_order(deployment: Deployment) -> None:
    pids = await deployment.pids(*CHILDREN)
    line = await deployment.ready()
    assert line.startswith("Antiphon is ready: http://127.0.0.1:")
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(line.removeprefix("Antiphon is ready: ") + "readyz")
    assert answer.status_code == 200
    deployment.process.send_signal(signal.SIGTERM)
    status, _ = await deployment.ended()
    assert status == ExitStatus.OK
    assert not any(alive(pid) for pid in pids.values())
    assert list(deployment.runtime.glob("antiphon-*")) == []


@pytest.mark.parametrize("victim", ["think-0", "gateway"])
async def test_a_killed_child_returns_and_touches_no_other(
    deployment: Deployment, victim: str
) -> None:
    pids = await deployment.pids(*CHILDREN)
    line = await deployment.ready()
    os.kill(pids[victim], signal.SIGKILL)
    ended = await deployment.event(event="child_ended")
    assert (ended["child"], ended["status"]) == (victim, "SIGKILL")
    again = await deployment.pids(victim)
    assert again[victim] != pids[victim]
    if victim == "gateway":
        # It was started on any free port; clients come back to the one they know.
        await deployment.event(event="worker_up")
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(line.removeprefix("Antiphon is ready: ") + "healthz")
        assert answer.status_code == 200
    else:
        # The gateway that stayed meets the new worker at the old endpoint.
        await deployment.event(event="worker_up", worker=victim)
    assert all(alive(pid) for name, pid in pids.items() if name != victim)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_an_interrupt_or_a_hang_up_ends_it_in_order(
    deployment: Deployment, number: signal.Signals
) -> None:
    pids = await deployment.pids(*CHILDREN)
    await deployment.ready()
    deployment.process.send_signal(number)
    status, _ = await deployment.ended()
    assert status == ExitStatus.OK
    assert not any(alive(pid) for pid in pids.values())


def test_a_worker_takes_all_sessions_that_its_pipelines_allow(directory: Path) -> None:
    path = write_config(directory, replicas=2)
    config = yaml.safe_load(path.read_text())
    config["pipelines"]["voice"]["limits"] = {"sessions": 600}
    config["pipelines"]["text"] = {
        "kind": "one-shot",
        "outputs": {"text": "think"},
        "limits": {"sessions": 100},
    }
    path.write_text(yaml.safe_dump(config))
    specs = worker_specs(load_config(path), directory)
    # Each replica takes them all: the other may be lost.
    sessions = {spec.name: spec.sessions for spec in specs}
    assert sessions == {"think-0": 700, "think-1": 700, "speak-0": 600}


def test_workers_without_a_budget_share_what_the_others_leave(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.memory_shares.host_memory_bytes", lambda: 1000 << 20)
    specs = worker_specs(load_config(write_config(directory, replicas=2)), directory)
    assert {spec.name: spec.budget for spec in specs} == {
        # An eighth is for parked state.
        "think-0": {"cpu": (875 << 20) // 3},
        "think-1": {"cpu": (875 << 20) // 3},
        "speak-0": {"cpu": (875 << 20) // 3},
    }
    named = {"budget": {"cpu": "300MiB", "cuda:0": "2GiB"}, "head_room": 0.2, "tenant_share": 0.5}
    named["cores"] = 1.5
    path = write_config(directory, replicas=2, **named)
    speak, think, _ = worker_specs(load_config(path), directory)
    assert think.budget == {"cpu": 300 << 20, "cuda:0": 2 << 30}
    assert (think.head_room, think.tenant_share, think.options) == (0.2, 0.5, {})
    assert (think.cores, speak.cores) == (1.5, None)
    assert (speak.budget, speak.head_room, speak.tenant_share) == ({"cpu": 275 << 20}, 0.05, 1.0)


def test_budgets_that_the_machine_does_not_have_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.memory_shares.host_memory_bytes", lambda: 1000 << 20)
    path = write_config(directory, replicas=2, budget={"cpu": "501MiB"})
    with pytest.raises(ConfigError, match="more than this machine has \\(1000 MiB\\)") as refused:
        worker_specs(load_config(path), directory)
    assert refused.value.field == "stages.think.budget.cpu"


@pytest.mark.parametrize("sessions", [1, 600, 10_000])
def test_what_a_config_allows_is_opened_and_run_by_its_worker(
    directory: Path, sessions: int
) -> None:
    path = write_config(directory)
    config = yaml.safe_load(path.read_text())
    config["pipelines"]["voice"]["limits"] = {"sessions": sessions}
    path.write_text(yaml.safe_dump(config))
    spec = worker_specs(load_config(path), directory)[0]
    limits = ControlLimits.serving(spec.sessions, owner_gone_ms=0.0)
    control = Control(limits)
    control.handle(EngineReady(), 0.0)
    control.handle(GatewayUp("g"), 0.0)

    def command(command: Command) -> list[Action]:
        return control.handle(CommandReceived("g", command), 0.0)

    for number in range(sessions):
        fence = Fence(f"s{number}", 1, "g")
        assert [type(a) for a in command(Open(fence, "open", {}))] == [OpenSession]
        control.handle(OperationDone(fence.session), 0.0)
        for turn in (1, 2):
            started = command(Run(fence, turn, f"lane-{turn}"))
            assert [type(action) for action in started] == [StartTurn]
    assert control.sessions == sessions
    while control.sessions < limits.sessions:
        command(Open(Fence(f"more{control.sessions}", 1, "g"), "open", {}))
    (refused,) = command(Open(Fence("too many", 1, "g"), "open", {}))
    assert isinstance(refused, SendReport)
    assert isinstance(refused.report, Answer)
    assert refused.report.error is not None
    assert refused.report.error.code == "capacity_exceeded"


async def test_no_child_outlives_a_killed_supervisor(deployment: Deployment) -> None:
    pids = await deployment.pids(*CHILDREN)
    await deployment.ready()
    deployment.process.kill()
    await deployment.process.wait()
    for pid in pids.values():
        await gone(pid)
    (left,) = deployment.runtime.glob("antiphon-*")
    assert sweep(deployment.runtime) == [left]


async def test_a_second_deployment_leaves_the_first_ones_directory(
    deployment: Deployment,
) -> None:
    await deployment.ready()
    (first,) = deployment.runtime.glob("antiphon-*")
    assert sweep(deployment.runtime) == []
    assert first.is_dir()
    assert first.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (
            {"load": "no_model"},
            ExitStatus.MODEL,
            "antiphon: think-0 cannot start: the synthetic model is missing: fetch it",
        ),
        ({"no_such_option": 1}, ExitStatus.CONFIG, "no_such_option"),
    ],
)
async def test_what_cannot_ever_start_ends_the_deployment_in_words(
    directory: Path, options: dict[str, Any], status: ExitStatus, message: str
) -> None:
    config = write_config(directory, **options)
    deployment = await Deployment.start(config, directory, "--port", "0")
    code, log = await deployment.ended()
    assert code == status
    assert message in log
    assert "Traceback" not in log


async def test_a_stage_runs_in_the_environment_that_it_names(directory: Path) -> None:
    python = lent_python(directory / "lent")
    config = write_config(directory, python=str(python))
    deployment = await Deployment.start(config, directory, "--port", "0")
    try:
        pids = await deployment.pids(*CHILDREN)
        assert await deployment.ready()
        assert {name: interpreter(pid) for name, pid in pids.items()} == {
            "think-0": str(python),
            "speak-0": sys.executable,
            "gateway": sys.executable,
        }
        # One that cannot be started any more touches no other, and comes back when it can.
        aside = python.rename(python.with_name("aside"))
        os.kill(pids["think-0"], signal.SIGKILL)
        ended = await deployment.event(child="think-0", event="child_ended")
        assert ended["status"] == "SIGKILL"
        ended = await deployment.event(child="think-0", event="child_ended")
        assert ended["message"] == f"{python} cannot be started: No such file or directory"
        aside.rename(python)
        back = await deployment.pids("think-0")
        assert back["think-0"] != pids["think-0"]
        assert all(alive(pids[name]) for name in ("speak-0", "gateway"))
    finally:
        deployment.process.terminate()
        await deployment.ended()


async def test_an_interpreter_that_is_not_there_ends_the_deployment_in_words(
    directory: Path,
) -> None:
    config = write_config(directory, python="/nowhere/python")
    deployment = await Deployment.start(config, directory, "--port", "0")
    status, log = await deployment.ended()
    assert status == ExitStatus.CONFIG
    reason = "/nowhere/python cannot be started: No such file or directory"
    assert f"antiphon: think-0 cannot start: {reason}" in log
    assert "Traceback" not in log


async def test_a_port_in_use_is_said_before_anything_starts(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = await Deployment.start(write_config(directory), directory, "--port", str(port))
        status, log = await deployment.ended()
    assert status == ExitStatus.CONFIG
    assert log.startswith(f"antiphon: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert len(log.splitlines()) == 1


async def test_an_open_door_is_refused(directory: Path) -> None:
    deployment = await Deployment.start(
        write_config(directory), directory, "--port", "0", "--host", "0.0.0.0"
    )
    status, log = await deployment.ended()
    assert status == ExitStatus.CONFIG
    assert "--insecure" in log


def test_the_wait_before_a_restart_doubles_to_a_ceiling_and_starts_over() -> None:
    policy = RestartPolicy()
    waits = [policy.next_wait_s(0.0, 0.0)]
    for _ in range(7):
        waits.append(policy.next_wait_s(waits[-1], 1.0))
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert policy.next_wait_s(10.0, 30.0) == 0.2


def test_the_runtime_directory_is_removed_at_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with runtime_directory() as created:
        assert created.parent == directory
        (created / "0-0.sock").touch()
    assert list(directory.iterdir()) == []


def test_a_sweep_leaves_what_is_no_supervisors(directory: Path) -> None:
    (directory / "antiphon-something").mkdir()
    assert sweep(directory) == []


def test_more_for_parked_state_than_there_is_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.memory_shares.host_memory_bytes", lambda: 1000 << 20)
    path = write_config(directory)
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "parking": {"memory": "1GiB"}}))
    with pytest.raises(ConfigError) as refused:
        worker_specs(load_config(path), directory)
    assert refused.value.field == "parking.memory"


async def test_a_disk_that_another_deployment_parks_on_is_refused(directory: Path) -> None:
    path = write_config(directory)
    config = yaml.safe_load(path.read_text())
    parking = {"memory": 0, "disk": str(directory / "parked")}
    path.write_text(yaml.safe_dump({**config, "parking": parking}))
    first = await Deployment.start(path, directory, "--port", "0")
    try:
        await first.ready()
        second = await Deployment.start(path, directory, "--port", "0")
        status, log = await second.ended()
        assert status == ExitStatus.CONFIG
        assert "parking.disk: another deployment parks its sessions in" in log
    finally:
        first.process.terminate()
        await first.process.wait()


async def test_a_disk_that_others_can_read_is_refused(directory: Path) -> None:
    path = write_config(directory)
    (directory / "parked").mkdir()
    (directory / "parked").chmod(0o755)
    config = yaml.safe_load(path.read_text())
    parking = {"memory": 0, "disk": str(directory / "parked")}
    path.write_text(yaml.safe_dump({**config, "parking": parking}))
    started = await Deployment.start(path, directory, "--port", "0")
    status, log = await started.ended()
    assert status == ExitStatus.CONFIG
    assert "parking.disk: others than its owner can use" in log
