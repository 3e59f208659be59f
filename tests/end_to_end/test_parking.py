"""A deployment with room for three heavy sessions serves thirty, and none loses a step."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.synthetic_step import checksum_after
from protocol.payloads import Payload
from tests.deployment import Deployment
from tests.gateway.native_client import Stream, opened, requests, stream
from tests.gateway.test_native_steps import held, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20
STATE_BYTES = 64 * MIB
CLIENTS = 30
BUDGET_BYTES = (64 + 120) * MIB + 3 * 2 * STATE_BYTES
"""Arena, more than the process takes and less than a session; a step makes a second state."""


def written(folder: Path, **parking: Any) -> Path:
    """A config for heavy states, of which three fit."""
    config = {
        "stages": {
            "world": {
                "engine": "loadtest.synthetic_step:SyntheticStep",
                "state_bytes": STATE_BYTES,
                "budget": {"cpu": BUDGET_BYTES},
                "head_room": 0.0,
            }
        },
        "pipelines": {
            "game": {
                "kind": "world",
                "outputs": {"frames": "world"},
                # Nobody is to end for being away while thirty others take their turns.
                "limits": {"sessions": 64, "grace_s": 600},
            }
        },
        "parking": parking,
    }
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def serving(config: Path) -> Deployment:
    """A deployment that finds the synthetic engine."""
    return Deployment(config, environment={"PYTHONPATH": str(Path.cwd())})


@asynccontextmanager
async def attached(deployment: Deployment, session: dict[str, Any]) -> AsyncIterator[Stream]:
    """A connection to a session; who had it before has gone."""
    url = f"{deployment.ws_url}/v1/sessions/{session['id']}/stream"
    async with stream(
        url, "antiphon.msgpack", role="controller", secret=session["secret"]
    ) as connection:
        frame = await connection.until("attached")
        session["secret"] = frame["secret"]
        yield connection


async def stepped(connection: Stream, inputs: list[list[Payload]]) -> None:
    """One more step, whose checksum is that of all steps so far."""
    action = held(len(inputs), 3)
    inputs.append([action])
    await connection.say("update", input=step(len(inputs), action))
    done = await connection.until("step_done")
    (frame,) = done["outputs"]["frames"]
    assert frame["data"][:32].hex() == checksum_after(inputs)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise FileNotFoundError(f"process {pid} has ended")


async def test_thirty_clients_in_turn_stay_within_a_budget_for_three(tmp_path: Path) -> None:
    with serving(written(tmp_path, memory="4GiB")) as deployment:
        pid = deployment.children()["world-0"]
        most = 0
        sessions: list[tuple[dict[str, Any], list[list[Payload]]]] = []
        async with requests(deployment.base_url) as http:
            for _ in range(CLIENTS):
                sessions.append((await opened(http), []))
            # Each in turn, and then once more: whoever comes has been away since.
            for session, inputs in sessions * 2:
                async with attached(deployment, session) as connection:
                    await stepped(connection, inputs)
                    most = max(most, await asyncio.to_thread(resident_bytes, pid))
            told = await history(http, sessions)
        assert most <= 1.1 * BUDGET_BYTES, f"{most / MIB:.0f} of {BUDGET_BYTES / MIB:.0f} MiB"
        assert told == {2}


class Told:
    """What the clients of one session were told, and the inputs that its state has to know of."""

    def __init__(self, session: dict[str, Any]) -> None:
        self.session = session
        self.inputs: list[list[Payload]] = []
        self.lost = 0
        self.cancelled = 0
        self.done = 0

    async def step(self, connection: Stream, *, cancel: bool) -> None:
        """One more step, or one that is cancelled: what comes is right, or said to be lost."""
        action = held(len(self.inputs), 3)
        said = step(len(self.inputs) + 1, action)
        if cancel:
            said["parameters"] = {"stall": True}
        await connection.say("update", input=said)
        if cancel:
            await connection.say("signal", signal={"type": "interrupt"})
        while True:
            frame = await connection.next()
            match frame["type"]:
                case "step_done":
                    self.inputs.append([action])
                    (output,) = frame["outputs"]["frames"]
                    assert output["data"][:32].hex() == checksum_after(self.inputs)
                    self.done += 1
                    return
                case "step_failed" | "refused" if frame["error"]["code"] == "step_cancelled":
                    assert frame["committed_step"] == len(self.inputs)
                    self.cancelled += 1
                    return
                case "step_failed" | "refused" | "state_lost":
                    # Its worker was killed: it begins anew only when it says so itself.
                    await connection.say("signal", signal={"type": "reset"})
                    await connection.until("was_reset")
                    self.inputs.clear()
                    self.lost += 1
                    return


async def test_cancelled_steps_and_killed_workers_restart_no_session_silently(
    tmp_path: Path,
) -> None:
    """Twelve sessions on bytes for three; every step is right from its first one on, or the
    client was told that the state is gone."""
    drawn = random.Random(12)
    with serving(written(tmp_path, memory="2GiB")) as deployment:
        most = 0
        async with requests(deployment.base_url) as http:
            clients = [Told(await opened(http)) for _ in range(12)]
            for turn in range(40):
                if turn in (14, 27):
                    deployment.kill("world-0")
                told = drawn.choice(clients)
                async with attached(deployment, told.session) as connection:
                    await told.step(connection, cancel=drawn.random() < 0.25)
                    if (pid := deployment.children().get("world-0")) is not None:
                        # It may just have been killed.
                        with contextlib.suppress(FileNotFoundError):
                            most = max(most, await asyncio.to_thread(resident_bytes, pid))
            steps = [
                (await http.get(f"/v1/sessions/{told.session['id']}")).json()["facts"]
                for told in clients
            ]
        assert most <= 1.1 * BUDGET_BYTES, f"{most / MIB:.0f} of {BUDGET_BYTES / MIB:.0f} MiB"
        assert [known["committed_step"] for known in steps] == [len(t.inputs) for t in clients]
        assert sum(told.done for told in clients) > 20
        assert sum(told.cancelled for told in clients) > 3
        # At most the three that were there, each time.
        assert sum(told.lost for told in clients) <= 6


async def history(
    http: httpx.AsyncClient, sessions: list[tuple[dict[str, Any], list[list[Payload]]]]
) -> set[int]:
    """The committed steps of all sessions."""
    found = set()
    for session, _ in sessions:
        status = (await http.get(f"/v1/sessions/{session['id']}")).json()
        found.add(status["facts"]["committed_step"])
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_parking_gives_the_memory_of_a_state_back(tmp_path: Path, where: str) -> None:
    disk = tmp_path / "parked"
    parking = {"memory": 0, "disk": str(disk)} if where == "disk" else {"memory": "1GiB"}
    with serving(written(tmp_path, **parking)) as deployment:
        pid = deployment.children()["world-0"]
        async with requests(deployment.base_url) as http:
            session, inputs = await opened(http), []  # type: tuple[dict[str, Any], list[Any]]
            async with attached(deployment, session) as connection:
                await stepped(connection, inputs)
                before = await asyncio.to_thread(resident_bytes, pid)
                answer = await http.post(f"/v1/admin/sessions/{session['id']}/park")
                assert answer.json() == {"id": session["id"], "parked": ["world"], "kept": {}}
                await connection.until("parked")
                after = await asyncio.to_thread(resident_bytes, pid)
                assert before - after >= 0.8 * STATE_BYTES
                await stepped(connection, inputs)
                restored = next(f for f in connection.frames if f["type"] == "restored")
                assert restored["origin"] == "snapshot"
            await http.delete(f"/v1/sessions/{session['id']}")


async def test_a_worker_that_is_killed_leaves_what_was_parked(tmp_path: Path) -> None:
    with serving(written(tmp_path)) as deployment:
        async with requests(deployment.base_url) as http:
            session, inputs = await opened(http), []  # type: tuple[dict[str, Any], list[Any]]
            async with attached(deployment, session) as connection:
                await stepped(connection, inputs)
                await http.post(f"/v1/admin/sessions/{session['id']}/park")
                await connection.until("parked")
                deployment.kill("world-0")
                await stepped(connection, inputs)
                await connection.say("signal", signal={"type": "reset"})
                await connection.until("was_reset")


def test_another_start_finds_nothing_of_the_last(tmp_path: Path) -> None:
    disk = tmp_path / "parked"
    config = written(tmp_path, memory=0, disk=str(disk))
    with serving(config) as deployment:
        answer = httpx.post(f"{deployment.base_url}/v1/sessions", json={}, timeout=30)
        session = answer.json()["id"]
        address = f"{deployment.base_url}/v1/admin/sessions/{session}"
        assert httpx.post(f"{address}/park", timeout=30).status_code == 200
        deployment.until(lambda: json.loads(httpx.get(address).text)["bytes"] == {"world": {}})
        assert any(path.stat().st_size >= STATE_BYTES for path in disk.iterdir())
        deployment.process.kill()
        deployment.process.wait()
    with serving(config) as deployment:
        deployment.until(lambda: not any(path.name.endswith(".state") for path in disk.iterdir()))
