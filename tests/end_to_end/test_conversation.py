"""What a conversation can do beside plain spoken turns, with the real models."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from tests.deployment import Deployment
from tests.end_to_end.conversation import (
    Conversation,
    Event,
    audio_of,
    conversation,
    listening,
    of_response,
    speech,
    spoken_ms,
    transcript_of,
)
from tests.word_errors import normalise

pytestmark = pytest.mark.slow

FRANCE = "questions/capital_of_france.wav"
BEES = "questions/bees.wav"
LONG = "Answer in ten sentences."
TOPIC = "Tell me about the sea."
TRANSCRIBED = "conversation.item.input_audio_transcription.completed"


def manual() -> dict[str, Any]:
    """Settings of a spoken conversation in which the client says when it has spoken."""
    return {"audio": {"input": {"transcription": {"model": "x"}, "turn_detection": None}}}


def texts_of(events: list[Event]) -> str:
    """The text of a text response."""
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def transcripts(talker: Conversation) -> list[str]:
    """What the server understood, turn by turn."""
    return [event["transcript"] for event in talker.of(TRANSCRIBED)]


async def test_words_of_two_speakers_never_mix(voice: Deployment) -> None:
    spoken = {FRANCE: "france", BEES: "bees"}

    async def talk(files: list[str]) -> Conversation:
        async with conversation(voice.ws_url, **listening()) as talker:
            for file in files:
                await talker.say_in_real_time(speech(file))
                reply = await talker.reply()
                assert reply[-1]["response"]["status"] == "completed"
                assert audio_of(reply)
            return talker

    # Each says at the same time what the other does not.
    orders = [[FRANCE, BEES], [BEES, FRANCE]]
    async with asyncio.TaskGroup() as tasks:
        talks = [tasks.create_task(talk(order)) for order in orders]
    for order, talker in zip(orders, (talk.result() for talk in talks), strict=True):
        assert len(transcripts(talker)) == 2
        for file, heard in zip(order, transcripts(talker), strict=True):
            said = set(normalise(heard)) & set(spoken.values())
            assert said == {spoken[file]}, heard
    ids = [
        {event[name] for event in talk.result().events for name in ("event_id", "item_id")
         if event.get(name)}
        for talk in talks
    ]  # fmt: skip
    assert not ids[0] & ids[1]


async def test_a_written_question_is_answered_in_text(voice: Deployment) -> None:
    async with conversation(voice.ws_url, output_modalities=["text"]) as talker:
        await talker.write("What is the capital of France?")
        reply = await talker.respond()
    assert "Paris" in texts_of(reply)
    assert audio_of(reply) == b""
    (item,) = reply[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": texts_of(reply)}]


async def test_a_client_that_commits_by_itself_is_answered_when_it_asks(
    voice: Deployment,
) -> None:
    async with conversation(voice.ws_url, **manual()) as talker:
        await talker.say(speech(FRANCE), silence_ms=0)
        await talker.send("input_audio_buffer.commit")
        committed = await talker.until("input_audio_buffer.committed")
        reply = await talker.respond()
        assert "Paris" in transcript_of(reply)
        # What is said without a commit is no turn, and can be thrown away.
        await talker.say(speech(BEES))
        await talker.alive()
        await talker.error(await talker.send("input_audio_buffer.commit"))
        assert len(transcripts(talker)) == 1
        assert not talker.of("input_audio_buffer.speech_started")
        item = await talker.retrieve(committed["item_id"])
    assert "France" in item["content"][0]["transcript"]


async def test_a_user_s_spoken_item_holds_its_words(voice: Deployment) -> None:
    # Whether or not the client asked to be told of them.
    async with conversation(voice.ws_url) as talker:
        await talker.say(speech(FRANCE))
        committed = await talker.until("input_audio_buffer.committed")
        reply = await talker.reply()
        assert "Paris" in transcript_of(reply)
        item = await talker.retrieve(committed["item_id"])
    assert (item["role"], item["status"]) == ("user", "completed")
    (part,) = item["content"]
    assert part["type"] == "input_audio"
    assert "France" in part["transcript"]
    assert not talker.of(TRANSCRIBED)


async def test_sound_in_an_item_is_understood(voice: Deployment) -> None:
    async with conversation(voice.ws_url, **manual(), output_modalities=["text"]) as talker:
        audio = base64.b64encode(speech(BEES)).decode()
        content = [{"type": "input_audio", "audio": audio}]
        item = {"type": "message", "role": "user", "id": "sound", "content": content}
        await talker.send("conversation.item.create", item=item)
        # At once: the answer waits for the words.
        reply = await talker.respond()
        assert "honey" in texts_of(reply).lower()
        (heard,) = talker.of(TRANSCRIBED)
    assert (heard["item_id"], heard["content_index"]) == ("sound", 0)
    assert "bees" in heard["transcript"].lower()
    assert heard["usage"]["seconds"] == pytest.approx(len(speech(BEES)) / 48_000, abs=0.01)


async def test_an_aside_runs_beside_a_spoken_reply(voice: Deployment) -> None:
    async with conversation(voice.ws_url, instructions=LONG) as talker:
        await talker.write(TOPIC)
        await talker.send("response.create")
        main = (await talker.until("response.created"))["response"]["id"]
        await talker.until("response.output_audio.delta")
        question = {"type": "input_text", "text": "What is the capital of France?"}
        await talker.send(
            "response.create",
            response={
                "conversation": "none",
                "output_modalities": ["text"],
                "instructions": "Answer in one short sentence.",
                "input": [{"type": "message", "role": "user", "content": [question]}],
                "metadata": {"aside": "yes"},
            },
        )
        created = (await talker.until("response.created"))["response"]
        done = (await talker.until("response.done"))["response"]
        assert done["id"] == created["id"] != main
        assert (done["status"], done["metadata"]) == ("completed", {"aside": "yes"})
        assert done["conversation_id"] is None
        assert "Paris" in texts_of(of_response(talker.events, done["id"]))
        # The spoken one goes on, and does not know of it.
        seen = len(talker.events)
        await talker.until("response.output_audio.delta", lambda e: e["response_id"] == main)
        await talker.send("response.cancel", response_id=main)
        ended = (await talker.until("response.done"))["response"]
        assert (ended["id"], ended["status"]) == (main, "cancelled")
        assert audio_of(talker.events[seen:])
        added = [event["item"]["id"] for event in talker.of("conversation.item.added")]
        assert done["output"][0]["id"] not in added


async def test_settings_change_while_a_reply_is_spoken(voice: Deployment) -> None:
    async with conversation(voice.ws_url, instructions=LONG) as talker:
        await talker.write(TOPIC)
        await talker.send("response.create")
        await talker.until("response.output_audio.delta")
        brief = "Answer in one short sentence."
        settings = await talker.configure(instructions=brief, output_modalities=["text"])
        assert (settings["instructions"], settings["output_modalities"]) == (brief, ["text"])
        voice_error = await talker.error(
            await talker.send(
                "session.update",
                session={"type": "realtime", "audio": {"output": {"voice": "nobody"}}},
            )
        )
        assert voice_error["param"] == "session.audio.output.voice"
        # The reply that runs goes on as it began.
        seen = len(talker.events)
        await talker.until("response.output_audio.delta")
        await talker.send("response.cancel")
        await talker.until("response.done")
        assert not [e for e in talker.events[seen:] if e["type"] == "response.output_text.delta"]
        await talker.write("What is the capital of France?")
        reply = await talker.respond()
        assert "Paris" in texts_of(reply)
        assert audio_of(reply) == b""


async def test_hanging_up_in_a_reply_frees_the_session(voice: Deployment) -> None:
    def held() -> set[str]:
        return {entry["id"] for entry in voice.get("/v1/admin/sessions").json()["sessions"]}

    async with conversation(voice.ws_url, instructions=LONG) as talker:
        created = talker.events[0]["session"]["id"]
        await talker.write(TOPIC)
        await talker.send("response.create")
        await talker.until("response.output_audio.delta")
        assert created in held()
        talker.connection.transport.abort()
    await asyncio.to_thread(voice.until, lambda: created not in held())
    await asyncio.to_thread(
        voice.until, lambda: not any(worker["waiting"] for worker in voice.workers())
    )


async def test_a_second_turn_knows_the_first(voice: Deployment) -> None:
    async with conversation(voice.ws_url, output_modalities=["text"]) as talker:
        await talker.write("My dog is called Bruno.")
        await talker.respond()
        await talker.write("What is my dog called?")
        assert "Bruno" in texts_of(await talker.respond())


async def test_a_reply_that_reaches_its_limit_says_so(voice: Deployment) -> None:
    async with conversation(voice.ws_url, instructions=LONG) as talker:
        await talker.write(TOPIC)
        reply = await talker.respond(max_output_tokens=8)
        done = reply[-1]["response"]
        assert done["status"] == "incomplete"
        assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert done["usage"]["output_tokens"] == 8
        # What was written is spoken to its end.
        assert spoken_ms(audio_of(reply)) > 300
        assert transcript_of(reply) == done["output"][0]["content"][0]["transcript"]


async def test_sound_right_after_a_command_is_heard_whole(voice: Deployment) -> None:
    # Sound and commands reach the worker by different ways, and must not overtake each other.
    detection = {"type": "server_vad", "create_response": False}
    async with conversation(voice.ws_url, **manual()) as talker:
        for _ in range(5):
            await talker.append(speech(FRANCE))
            await talker.send("input_audio_buffer.clear")
            await talker.configure(audio={"input": {"turn_detection": detection}})
            await talker.say(speech(BEES))
            heard = await talker.until(TRANSCRIBED)
            assert heard["transcript"] == "What do bees make?"
            await talker.configure(audio={"input": {"turn_detection": None}})
            await talker.append(speech(BEES))
            await talker.send("input_audio_buffer.clear")
            await talker.append(speech(FRANCE))
            await talker.send("input_audio_buffer.commit")
            await talker.append(speech(BEES))
            heard = await talker.until(TRANSCRIBED)
            assert heard["transcript"] == "What is the capital of France?"
            await talker.alive()
