"""Processes of the voice product are killed or stopped in mid-conversation."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.deployment import STOP_S, VOICE_CONFIG, Deployment
from tests.end_to_end.conversation import (
    Conversation,
    audio_of,
    conversation,
    listening,
    loudness,
    speech,
    transcript_of,
)
from tests.ports import free_port
from tests.test_error_codes import documented

LONG = "Answer in ten long sentences."
STORY = "Tell me a long story about a dragon."
QUESTION = "questions/capital_of_france.wav"
WHAT = "What do you know?"
GONE_S = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as running:
        yield running


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> int:
    """The tokens that the answer to WHAT is made from where nothing was said before."""

    async def ask() -> int:
        async with conversation(deployment.ws_url) as stranger:
            return await text_tokens(stranger, WHAT)

    return asyncio.run(ask())


@asynccontextmanager
async def swap(deployment: Deployment, child: str) -> AsyncIterator[None]:
    """Kill `child` and run the block while it is away; then all is ready, and only it is new."""
    before = deployment.children()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(deployment.until_ready, False))
        deployment.kill(child)
        yield
    await asyncio.to_thread(deployment.until_ready)
    after = deployment.children()
    assert {name for name in before if before[name] != after[name]} == {child}


def failure(done: dict[str, Any]) -> str:
    """The code of a response that failed, which docs/errors.md explains."""
    response = done["response"]
    assert response["status"] == "failed", response
    code: str = response["status_details"]["error"]["code"]
    assert code in documented()
    return code


async def text_tokens(talker: Conversation, text: str) -> int:
    """Say `text`, be answered with text; the tokens that the answer was made from."""
    await talker.write(text)
    done = (await talker.respond(output_modalities=["text"]))[-1]["response"]
    assert done["status"] == "completed", done
    assert done["output"][0]["content"][0]["text"]
    tokens: int = done["usage"]["input_tokens"]
    return tokens


async def knows(alone: int, talker: Conversation, *said: str) -> None:
    """The next answer is made from all that was `said` before, not from its question alone."""
    words = sum(len(text.split()) for text in said)
    assert await text_tokens(talker, WHAT) >= alone + words


async def test_think_is_killed_while_it_writes(deployment: Deployment, alone: int) -> None:
    fact = "My name is Alice and I live in Lisbon."
    async with (
        conversation(deployment.ws_url) as talker,
        conversation(deployment.ws_url, **listening()) as other,
    ):
        await text_tokens(talker, fact)
        half = len(speech(QUESTION)) // 4 * 2
        await other.append(speech(QUESTION)[:half])
        await other.until("input_audio_buffer.speech_started")
        await talker.write(STORY)
        await talker.send(
            "response.create", response={"instructions": LONG, "output_modalities": ["text"]}
        )
        await talker.until("response.output_text.delta")
        async with swap(deployment, "think-0"):
            assert failure(await talker.until("response.done")) == "engine_lost"
            # Asked while nobody is there, answered by who comes.
            await knows(alone, talker, fact, STORY)
            # Who was speaking meanwhile has lost nothing.
            await other.say(speech(QUESTION)[half:])
            heard = await other.until("conversation.item.input_audio_transcription.completed")
            assert "france" in heard["transcript"].lower()
            reply = await other.reply()
            assert reply[-1]["response"]["status"] == "completed"


async def test_speak_is_killed_while_it_is_heard(deployment: Deployment, alone: int) -> None:
    async with (
        conversation(deployment.ws_url) as talker,
        conversation(deployment.ws_url, output_modalities=["text"]) as other,
    ):
        await talker.write(STORY)
        await other.write(STORY)
        await talker.send("response.create", response={"instructions": LONG})
        await talker.until("response.output_audio.delta")
        await other.send("response.create", response={"instructions": LONG})
        await other.until("response.output_text.delta")
        async with swap(deployment, "speak-0"):
            done = await talker.until("response.done")
            assert failure(done) == "engine_lost"
            assert done["response"]["output"][0]["status"] == "incomplete"
            unharmed = await other.until("response.done")
            assert unharmed["response"]["status"] == "completed"
            await talker.write("What is the opposite of hot?")
            spoken = await talker.respond()
            assert spoken[-1]["response"]["status"] == "completed"
            assert loudness(audio_of(spoken)) > 0.01
        await knows(alone, talker, STORY, transcript_of(spoken))


async def test_listen_is_killed_while_the_user_speaks(deployment: Deployment, alone: int) -> None:
    fact = "My name is Alice and I live in Lisbon."
    async with (
        conversation(deployment.ws_url, **listening()) as talker,
        conversation(deployment.ws_url) as other,
    ):
        await text_tokens(talker, fact)
        await other.write(STORY)
        await other.send("response.create", response={"instructions": LONG})
        await other.until("response.output_audio.delta")
        half = len(speech(QUESTION)) // 4 * 2
        await talker.append(speech(QUESTION)[:half])
        await talker.until("input_audio_buffer.speech_started")
        async with swap(deployment, "listen-0"):
            stopped = await talker.until("input_audio_buffer.speech_stopped")
            lost = await talker.until("conversation.item.input_audio_transcription.failed")
            assert lost["error"]["code"] == "session_state_lost"
            assert failure(await talker.until("response.done")) == "session_state_lost"
            # What is said while nobody listens is lost too, and that is said.
            await talker.append(speech(QUESTION)[half:])
            assert (await talker.error(None))["code"] == "input_audio_lost"
        await talker.say(speech(QUESTION))
        started = await talker.until("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] >= stopped["audio_end_ms"]
        heard = await talker.until("conversation.item.input_audio_transcription.completed")
        assert "france" in heard["transcript"].lower()
        reply = await talker.reply()
        assert reply[-1]["response"]["status"] == "completed"
        await knows(alone, talker, fact, heard["transcript"])
        unharmed = await other.until("response.done")
        assert unharmed["response"]["status"] == "completed"


async def test_a_stopped_worker_is_lost_and_returns(deployment: Deployment, alone: int) -> None:
    pid = deployment.children()["think-0"]
    (before,) = (w for w in deployment.workers() if w["worker"] == "think-0")
    async with conversation(deployment.ws_url) as talker:
        await text_tokens(talker, "My name is Alice.")
        await talker.write(STORY)
        await talker.send(
            "response.create", response={"instructions": LONG, "output_modalities": ["text"]}
        )
        await talker.until("response.output_text.delta")
        os.kill(pid, signal.SIGSTOP)
        try:
            assert failure(await talker.until("response.done")) == "engine_lost"
            assert deployment.get("/readyz").json()["reasons"] == ["voice: stage think is lost"]
        finally:
            os.kill(pid, signal.SIGCONT)
        await knows(alone, talker, "My name is Alice.", STORY)
        # It is the same process, which has freed what it held and begun anew.
        (after,) = (w for w in deployment.workers() if w["worker"] == "think-0")
        assert deployment.children()["think-0"] == pid
        assert after["incarnation"] != before["incarnation"]
        await asyncio.to_thread(deployment.until, lambda: held(deployment) == [1, 1, 1])
    await asyncio.to_thread(deployment.until, lambda: held(deployment) == [0, 0, 0])


def held(deployment: Deployment) -> list[int]:
    """How many sessions each worker says that it holds."""
    return [worker["sessions"] for worker in deployment.workers()]


async def test_a_killed_gateway_touches_no_worker(deployment: Deployment) -> None:
    async with connect(f"{deployment.ws_url}/v1/realtime") as client:
        assert json.loads(await client.recv())["type"] == "session.created"
        await asyncio.to_thread(deployment.until, lambda: held(deployment) == [1, 1, 1])
        async with swap(deployment, "gateway"):
            await client.wait_closed()
    # With the directory in memory its sessions have ended with it, everywhere.
    await asyncio.to_thread(deployment.until, lambda: held(deployment) == [0, 0, 0])
    async with conversation(deployment.ws_url) as stranger:
        await text_tokens(stranger, "What is the opposite of hot?")


def test_nothing_outlives_a_killed_supervisor() -> None:
    port = free_port()
    with Deployment(VOICE_CONFIG, "--port", str(port)) as deployment:
        processes = deployment.processes()
        assert {deployment.process.pid, *deployment.children().values()} <= processes
        ends = [os.pidfd_open(pid) for pid in processes]
        deployment.process.kill()
        deadline = time.monotonic() + GONE_S
        for end in ends:
            assert select.select([end], [], [], max(0.0, deadline - time.monotonic()))[0]
            os.close(end)
        assert deployment.processes() == set()
    with Deployment(VOICE_CONFIG, "--port", str(port)) as again:
        assert again.base_url == f"http://127.0.0.1:{port}"
        assert again.get("/readyz").status_code == 200


async def test_a_termination_tells_the_clients_and_leaves_nothing() -> None:
    with Deployment() as deployment:
        async with conversation(deployment.ws_url) as talker:
            await talker.write(STORY)
            await talker.send("response.create", response={"instructions": LONG})
            await talker.until("response.output_audio.delta")
            deployment.process.send_signal(signal.SIGTERM)
            done = await talker.until("response.done")
            assert done["response"]["status"] == "cancelled"
            await talker.connection.wait_closed()
            assert talker.connection.close_code == 1001
        assert await asyncio.to_thread(deployment.process.wait, STOP_S) == 0
        assert deployment.processes() == set()
