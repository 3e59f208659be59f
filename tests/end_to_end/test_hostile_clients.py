"""Clients that mean harm, or know no better: they get an answer, others notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.deployment import Deployment
from tests.end_to_end.conversation import (
    Conversation,
    audio_of,
    conversation,
    listening,
    of_response,
    speech,
    transcript_of,
)

pytestmark = pytest.mark.slow

BEES = "questions/bees.wav"
LONG = "Answer in ten sentences."
TOPIC = "Tell me about the sea."
SESSIONS = 8
MINUTE = bytes(48_000 * 60)


@pytest.fixture(autouse=True)
def unharmed(voice: Deployment) -> Iterator[None]:
    """Afterwards nothing is held, and every worker is the process that it was."""
    before = {worker["worker"]: worker["incarnation"] for worker in voice.workers()}
    yield
    voice.until(lambda: not voice.get("/v1/admin/sessions").json()["sessions"])
    assert before == {worker["worker"]: worker["incarnation"] for worker in voice.workers()}
    assert voice.get("/readyz").status_code == 200


async def is_answered(voice: Deployment) -> None:
    """Another client, meanwhile: it speaks, is understood and is answered."""
    async with conversation(voice.ws_url, **listening()) as talker:
        await talker.say(speech(BEES))
        reply = await talker.reply()
        assert reply[-1]["response"]["status"] == "completed"
        assert "honey" in transcript_of(reply).lower()


async def test_coming_and_going_fifty_times_leaves_nothing(voice: Deployment) -> None:
    for cycle in range(50):
        async with connect(f"{voice.ws_url}/v1/realtime") as socket:
            if cycle % 3 == 0:
                await socket.recv()
            if cycle % 3 == 1:
                await socket.send(json.dumps({"type": "response.create"}))
            if cycle % 2 == 0:
                socket.transport.abort()
    await asyncio.to_thread(voice.until, lambda: sum(_sessions_by_state(voice).values()) == 0)
    states = _sessions_by_state(voice)
    assert len(states) >= 3
    assert set(states.values()) == {0}
    metrics = voice.metrics()
    assert metrics["antiphon_connections"] == 0
    assert metrics["antiphon_egress_queue_bytes"] == 0
    await is_answered(voice)


def _sessions_by_state(voice: Deployment) -> dict[str, float]:
    return {name: value for name, value in voice.metrics().items() if "antiphon_sessions{" in name}


async def test_one_session_too_many_is_refused(voice: Deployment) -> None:
    url = f"{voice.ws_url}/v1/realtime"
    async with AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(connect(url)) for _ in range(SESSIONS)]
        for socket in sockets:
            assert json.loads(await socket.recv())["type"] == "session.created"
        with pytest.raises(InvalidStatus) as refused:
            await connect(url)
        response = refused.value.response
        assert response.status_code == 503
        assert json.loads(response.body)["error"]["code"] == "capacity_exceeded"
        # A page cannot read a status: it gets the same in events, and is told to try later.
        async with connect(url, subprotocols=[Subprotocol("realtime")]) as page:
            assert json.loads(await page.recv())["error"]["code"] == "capacity_exceeded"
            with pytest.raises(ConnectionClosed) as closed:
                await page.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        # Those that are in stay in.
        await sockets[0].send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert json.loads(await sockets[0].recv())["type"] == "input_audio_buffer.cleared"
    await asyncio.to_thread(
        voice.until, lambda: not voice.get("/v1/admin/sessions").json()["sessions"]
    )
    await is_answered(voice)


async def test_a_flood_of_sound_waits_and_others_are_heard(voice: Deployment) -> None:
    async def flood(talker: Conversation) -> None:
        frame = json.dumps({"type": "input_audio_buffer.append", "audio": "AAA="})
        for _ in range(20_000):
            await talker.connection.send(frame)
        for _ in range(3):
            await talker.append(MINUTE)
        for _ in range(500):
            await talker.send("input_audio_buffer.clear")

    async with conversation(voice.ws_url) as talker, asyncio.TaskGroup() as tasks:
        flooding = tasks.create_task(flood(talker))
        await is_answered(voice)
        await flooding
        while len(talker.of("input_audio_buffer.cleared")) < 500:
            await talker.next_event()
        # More than is kept of what nobody has listened to yet may be lost, with notice.
        codes = {event["error"]["code"] for event in talker.of("error")}
        assert codes <= {"input_audio_buffer_overflow"}
        talker.skip()
        await talker.write("What do bees make?")
        reply = await talker.respond(output_modalities=["text"])
        assert reply[-1]["response"]["status"] == "completed"


async def test_a_storm_of_creates_and_cancels_has_an_end_for_each(voice: Deployment) -> None:
    moves = random.Random(2)
    async with conversation(voice.ws_url) as talker:
        await talker.write(TOPIC)
        for _ in range(200):
            match moves.randrange(5):
                case 0 | 1:
                    await talker.send("response.create")
                case 2 | 3:
                    await talker.send("response.cancel")
                case 4:
                    aside = {"conversation": "none", "output_modalities": ["text"]}
                    await talker.send("response.create", response=aside)
        last = await talker.send("response.cancel", response_id="nobody")
        while not any(e["error"]["event_id"] == last for e in talker.of("error")):
            await talker.next_event()
        while len(talker.of("response.created")) > len(talker.of("response.done")):
            await talker.next_event()
        created = [event["response"]["id"] for event in talker.of("response.created")]
        done = [event["response"] for event in talker.of("response.done")]
        assert len(created) > 20
        assert sorted(created) == sorted(response["id"] for response in done)
        assert {response["status"] for response in done} <= {"cancelled", "completed"}
        for response in created:
            assert of_response(talker.events, response)[-1]["type"] == "response.done"
        codes = Counter(event["error"]["code"] for event in talker.of("error"))
        assert codes.keys() <= {
            "conversation_already_has_active_response",
            "response_cancel_not_active",
            "rate_limit_exceeded",
        }
        talker.skip()
        reply = await talker.respond()
        assert reply[-1]["response"]["status"] == "completed"


async def test_garbage_is_answered_frame_by_frame(voice: Deployment) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    long_text = [{"type": "input_text", "text": "word " * 20_000}]
    frames: list[str | bytes] = [
        "",
        "null",
        "[]",
        '"text"',
        b"\xff\xfe",
        "[" * 50_000,
        '{"a":' * 50_000,
        '{"type":1}',
        '{"type":"session.update","session":null}',
        '{"type":"session.update","session":{"type":"realtime","instructions":"\\ud800"}}',
        '{"type":"input_audio_buffer.append","audio":null}',
        '{"type":"input_audio_buffer.commit","event_id":5}',
        '{"type":"conversation.item.create","item":{}}',
        '{"type":"conversation.item.truncate","item_id":"x","content_index":0,"audio_end_ms":1e30}',
        json.dumps({"type": "conversation.item.create", "item": {**item, "content": long_text}}),
        json.dumps({"type": "response.create", "response": {"instructions": "word " * 2_000_000}}),
        json.dumps({"type": "response.create", "response": {"input": [item] * 20_000}}),
        json.dumps(
            {
                "type": "response.create",
                "response": {"input": [{"type": "item_reference", "id": "x"}] * 100_000},
            }
        ),
    ]
    async with conversation(voice.ws_url) as talker:
        for frame in frames:
            await talker.connection.send(frame)
            error = (await talker.until("error"))["error"]
            assert error["type"] == "invalid_request_error" or error["code"] == "conversation_full"
            assert len(error["message"]) < 1_000
        await talker.alive()
        # A frame that is too long to be an event ends its connection and no other.
        with pytest.raises(ConnectionClosed) as closed:
            await _send_too_much(voice)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await talker.alive()
    await is_answered(voice)


async def _send_too_much(voice: Deployment) -> None:
    async with connect(f"{voice.ws_url}/v1/realtime") as socket:
        await socket.send("x" * 30_000_000)
        while True:
            await socket.recv()


async def test_a_client_that_stops_reading_gets_all_of_its_reply_later(voice: Deployment) -> None:
    async with conversation(voice.ws_url, instructions="Answer in three sentences.") as talker:
        await talker.write(TOPIC)
        await talker.send("response.create")
        await talker.until("response.output_audio.delta")
        talker.connection.transport.pause_reading()
        await is_answered(voice)
        talker.connection.transport.resume_reading()
        done = (await talker.until("response.done"))["response"]
        assert done["status"] == "completed"
        reply = of_response(talker.events, done["id"])
        assert transcript_of(reply) == done["output"][0]["content"][0]["transcript"]
        item = done["output"][0]["id"]
        audio_ms = len(audio_of(reply)) // 48
        # Truncating to just what arrived is possible, and to more is not.
        await talker.error(
            await talker.send(
                "conversation.item.truncate",
                item_id=item,
                content_index=0,
                audio_end_ms=audio_ms + 2,
            )
        )
        await talker.send(
            "conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=audio_ms
        )
        await talker.until("conversation.item.truncated")
