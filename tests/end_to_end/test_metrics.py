"""A scripted run moves every metric, and what is counted is what the client saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from gateway.egress import LOW_BYTES
from gateway.surfaces.resume import RESUME_SUBPROTOCOL
from tests.deployment import VOICE_CONFIG, Deployment
from tests.end_to_end.conversation import Conversation, listening, speech
from tests.gateway.test_metrics import documented_families

KEY = "client-key-0123456789"
ADMIN_KEY = "admin-key-0123456789"
SESSIONS = 2
RETRIEVALS = 300
"""Of 60 kB each: more than the buffers of two sockets hold."""
LONG = "Answer in ten long sentences."
STORY = "Tell me a long story about a dragon."

MOVED_ELSEWHERE = frozenset(
    {
        "antiphon_opens_waiting",
        "antiphon_observations_superseded_total",
        "antiphon_safe_answers_total",
        "antiphon_deadlines_missed_total",
        "antiphon_emergency_stops_total",
        "antiphon_worker_cores",
        "antiphon_engine_total",
        "antiphon_world_pictures_total",
        "antiphon_picture_encode_seconds",
        "antiphon_world_control_seconds",
        "antiphon_world_late_steps_total",
    }
)
"""Families of a queue, of robots, of worlds, of stages with `cores` and of engines that count,
which this deployment has not: other tests move them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Seen:
    """What the client itself has seen and done."""

    sent: int = 0
    received: int = 0
    opened: int = 0
    resumed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    with_text: int = 0
    with_audio: int = 0

    def take(self, talker: Conversation) -> None:
        """Count a connection that has ended."""
        self.received += len(talker.events)
        for created in talker.of("session.created"):
            resumed = created.get("antiphon", {}).get("resumed", False)
            self.opened += not resumed
            self.resumed += resumed
        self.errors.update(event["error"]["code"] for event in talker.of("error"))
        for event in talker.of("response.done"):
            response = event["response"]
            self.turns[response["status"]] += 1
            mine = [e for e in talker.events if e.get("response_id") == response["id"]]
            kinds = {event["type"] for event in mine}
            self.with_audio += "response.output_audio.delta" in kinds
            self.with_text += bool(
                kinds & {"response.output_text.delta", "response.output_audio_transcript.delta"}
            )


class CountingConnection:
    """A connection that counts the frames sent over it, and can be left unread."""

    def __init__(self, connection: Any, seen: Seen) -> None:
        self.reading = asyncio.Event()
        self.reading.set()
        self._connection = connection
        self._seen = seen

    async def send(self, frame: str) -> None:
        self._seen.sent += 1
        await self._connection.send(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def __aiter__(self) -> AsyncIterator[str]:
        async for frame in self._connection:
            await self.reading.wait()
            yield frame


@contextlib.asynccontextmanager
async def talking(
    deployment: Deployment, seen: Seen, query: str = "", secret: str | None = None
) -> AsyncIterator[Conversation]:
    """A conversation whose frames, events and turns are counted when it ends."""
    headers = {"authorization": f"Bearer {KEY}"}
    if secret is not None:
        headers["sec-websocket-protocol"] = RESUME_SUBPROTOCOL + secret
    async with (
        connect(
            f"{deployment.ws_url}/v1/realtime?{query}",
            additional_headers=headers,
            max_size=None,
            compression=None,
        ) as socket,
        asyncio.TaskGroup() as tasks,
    ):
        talker = Conversation(CountingConnection(socket, seen))  # type: ignore[arg-type]
        reading = tasks.create_task(_receive(talker))
        await talker.until("session.created")
        yield talker
        await socket.close()
        # Also what came between the last wait and the close was received.
        await reading
    seen.take(talker)


async def _receive(talker: Conversation) -> None:
    with contextlib.suppress(ConnectionClosedError):
        await talker.receive()


async def refused(deployment: Deployment, seen: Seen, status: int, **headers: str) -> None:
    """Fail to open a connection."""
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"{deployment.ws_url}/v1/realtime", additional_headers=headers)
    assert caught.value.response.status_code == status
    seen.refused[json.loads(caught.value.response.body or b"")["error"]["code"]] += 1


class Watch:
    """Every value that each family took while it was watched."""

    def __init__(self, deployment: Deployment) -> None:
        self.values: dict[str, set[tuple[tuple[str, float], ...]]] = {}
        self._deployment = deployment
        self.look()

    def look(self) -> dict[str, float]:
        """Look once; every sample by its name."""
        samples = self._deployment.metrics()
        for family in documented_families():
            mine = tuple(
                sorted(
                    (name, value)
                    for name, value in samples.items()
                    if name.partition("{")[0].removesuffix("_count") == family
                )
            )
            self.values.setdefault(family, set()).add(mine)
        return samples

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Look again and again until the block ends."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.look()

    def unmoved(self) -> set[str]:
        """The families that never changed."""
        return {family for family, values in self.values.items() if len(values) < 2}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """The voice product with keys and room for two sessions."""
    config = yaml.safe_load(VOICE_CONFIG.read_text())
    config["gateway"] |= {"keys": [KEY], "admin_keys": [ADMIN_KEY]}
    config["pipelines"]["voice"]["limits"]["sessions"] = SESSIONS
    path = tmp_path / "voice.yaml"
    path.write_text(yaml.safe_dump(config))
    with Deployment(path, key=ADMIN_KEY) as running:
        yield running


async def turns_and_barge_in(talker: Conversation) -> None:
    """A spoken turn, a written one, one cut short by its limit, and one cut off by speech."""
    await talker.configure(**listening())
    await talker.say(speech("questions/capital_of_france.wav"))
    assert (await talker.reply())[-1]["response"]["status"] == "completed"
    await talker.write("What is the opposite of hot?")
    assert (await talker.respond(output_modalities=["text"]))[-1]["response"][
        "status"
    ] == "completed"
    short = await talker.respond(output_modalities=["text"], max_output_tokens=2)
    assert short[-1]["response"]["status"] == "incomplete"
    await talker.write(STORY)
    await talker.send("response.create", response={"instructions": LONG})
    await talker.until("response.output_audio.delta")
    await talker.say(speech("questions/bees.wav"))
    assert (await talker.until("response.done"))["response"]["status"] == "cancelled"
    assert (await talker.reply())[-1]["response"]["status"] == "completed"


async def bad_input(talker: Conversation) -> None:
    """Events that are refused one by one."""
    await talker.connection.send("{not json")
    assert (await talker.error(None))["code"] == "invalid_json"
    await talker.error(await talker.send("no.such.event"))
    await talker.error(await talker.send("input_audio_buffer.append", audio="???"))
    await talker.error(await talker.send("conversation.item.delete", item_id="none"))
    await talker.error(await talker.send("response.cancel"))


async def taken_up_again(deployment: Deployment, seen: Seen) -> None:
    """A connection that breaks off, and another that goes on with its session."""
    async with talking(deployment, seen, "resume=1") as talker:
        (created,) = talker.of("session.created")
        connection: Any = talker.connection
        connection.transport.abort()
    session, secret = created["session"]["id"], created["antiphon"]["secret"]
    back = f"session={session}&cursor={created['sequence']}"
    async with talking(deployment, seen, back, secret) as talker:
        await talker.write("What is the opposite of hot?")


async def slow_reader(deployment: Deployment, seen: Seen, watch: Watch) -> None:
    """A client that asks for far more than it reads, until its queue at the gateway fills."""
    async with talking(deployment, seen) as talker:
        item = await talker.write("words " * 10_000)
        connection: Any = talker.connection
        connection.reading.clear()
        for _ in range(RETRIEVALS):
            await talker.send("conversation.item.retrieve", item_id=item["id"])
        # Once paced it rests anywhere above the low mark: the kernel takes some of it still.
        await asyncio.to_thread(
            deployment.until,
            lambda: watch.look()["antiphon_egress_queue_bytes"] > LOW_BYTES,
        )
        connection.reading.set()
        for _ in range(RETRIEVALS):
            await talker.until("conversation.item.retrieved")


async def stopped_worker(deployment: Deployment, talker: Conversation, watch: Watch) -> None:
    """A command for a worker that does not take it: its link's queue fills, then empties."""
    name = 'antiphon_link_queue_messages{worker="listen-0"}'
    pid = deployment.children()["listen-0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await talker.send("input_audio_buffer.clear")
        await asyncio.to_thread(deployment.until, lambda: watch.look()[name] > 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(deployment.until, lambda: watch.look()[name] == 0)


async def killed_worker(deployment: Deployment, talker: Conversation) -> None:
    """A worker dies under a reply, and another one answers."""
    await talker.write(STORY)
    await talker.send("response.create", response={"instructions": LONG})
    await talker.until("response.output_audio.delta")
    deployment.kill("speak-0")
    assert (await talker.until("response.done"))["response"]["status"] == "failed"
    await talker.write("What is the opposite of hot?")
    assert (await talker.respond())[-1]["response"]["status"] == "completed"


async def test_every_family_moves_and_the_counts_are_the_clients(deployment: Deployment) -> None:
    seen = Seen()
    watch = Watch(deployment)
    with watch.running():
        await refused(deployment, seen, 401)
        await refused(deployment, seen, 401, authorization="Bearer another-key-0123456789")
        await refused(
            deployment, seen, 403, authorization=f"Bearer {KEY}", origin="https://elsewhere.example"
        )
        await slow_reader(deployment, seen, watch)
        await taken_up_again(deployment, seen)
        async with talking(deployment, seen) as talker, talking(deployment, seen) as other:
            await refused(deployment, seen, 503, authorization=f"Bearer {KEY}")
            await turns_and_barge_in(talker)
            await bad_input(talker)
            await stopped_worker(deployment, talker, watch)
            await killed_worker(deployment, talker)
            (entry, _) = deployment.get("/v1/admin/sessions").json()["sessions"]
            (other_id,) = (e["session"]["id"] for e in other.of("session.created"))
            assert entry["id"] != other_id
            async with httpx.AsyncClient(base_url=deployment.base_url) as client:
                address = f"/v1/admin/sessions/{other_id}"
                closed = await client.delete(
                    address, headers={"authorization": f"Bearer {ADMIN_KEY}"}
                )
            assert closed.status_code == 202
            await other.error(None)
        await asyncio.to_thread(
            deployment.until,
            lambda: deployment.get("/v1/admin/sessions").json()["sessions"] == [],
        )
    assert watch.unmoved() <= MOVED_ELSEWHERE
    metrics = deployment.metrics()

    def count(family: str, label: str) -> Counter[str]:
        """The values of a family by one of its labels."""
        found: Counter[str] = Counter()
        for name, value in metrics.items():
            if name.startswith(family + "{"):
                found[name.split(f'{label}="')[1].split('"')[0]] += int(value)
        return found

    assert count("antiphon_sessions_opened_total", "pipeline") == {"voice": seen.opened}
    assert count("antiphon_sessions_closed_total", "reason") == {
        "client": seen.opened - 1,
        "admin": 1,
    }
    assert count("antiphon_attaches_total", "result") == {"controller": seen.resumed}
    assert count("antiphon_sessions", "state") == {
        "opening": 0,
        "active": 0,
        "detached": 0,
        "closing": 0,
    }
    assert count("antiphon_opens_refused_total", "reason") == seen.refused
    assert count("antiphon_turns_total", "status") == seen.turns
    assert count("antiphon_server_ttft_seconds_count", "pipeline") == {"voice": seen.with_text}
    assert count("antiphon_server_ttfp_seconds_count", "pipeline") == {"voice": seen.with_audio}
    assert count("antiphon_errors_total", "code") == seen.errors
    assert count("antiphon_worker_restarts_total", "worker") == {
        "listen-0": 0,
        "think-0": 0,
        "speak-0": 1,
    }
    assert count("antiphon_worker_up", "worker") == dict.fromkeys(
        ("listen-0", "think-0", "speak-0"), 1
    )
    assert count("antiphon_frames_total", "direction") == {
        "received": seen.sent,
        "sent": seen.received,
    }
    assert metrics["antiphon_connections"] == metrics["antiphon_egress_queue_bytes"] == 0
