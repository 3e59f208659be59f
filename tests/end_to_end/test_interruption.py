"""A long reply is interrupted by voice: it stops, it is cut to what was heard, talk goes on."""

from __future__ import annotations

import asyncio
import re

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

pytestmark = pytest.mark.slow

LONG = "Answer in ten sentences."
TOPIC = "Tell me about the sea."
LONG_MS = 10_000
HEARD_MS = 1_500
"""How much of the reply has been played when the user speaks into it."""

_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")


async def left_alone(voice: Deployment) -> list[Event]:
    """The long reply from its beginning to its end."""
    async with conversation(voice.ws_url, instructions=LONG) as talker:
        await talker.write(TOPIC)
        return await talker.respond()


async def until_played(talker: Conversation, ms: int) -> Event:
    """Until a player that began with the first audio has played `ms`; the first delta."""
    first = await talker.until("response.output_audio.delta")
    await asyncio.sleep(first["received_at"] + ms / 1000 - asyncio.get_running_loop().time())
    return first


async def test_speaking_into_a_long_reply_stops_it(voice: Deployment) -> None:
    async with asyncio.TaskGroup() as tasks:
        whole_task = tasks.create_task(left_alone(voice))
        interrupted = tasks.create_task(_interrupted(voice))
    whole, (cut, kept) = whole_task.result(), interrupted.result()
    assert spoken_ms(audio_of(whole)) >= LONG_MS
    assert spoken_ms(audio_of(cut)) < spoken_ms(audio_of(whole)) / 2
    full = transcript_of(whole)
    assert len(kept) < len(transcript_of(cut)) < len(full)
    # The same model on the same text says the same, up to where it was stopped.
    assert full.startswith(kept)
    _speech_runs_ahead_of_the_text(whole)


def _speech_runs_ahead_of_the_text(reply: list[Event]) -> None:
    """The first audio comes at least two clauses before the last of the transcript."""
    kinds = [event["type"] for event in reply]
    first_audio = kinds.index("response.output_audio.delta")
    clauses = len(_SENTENCE_END.findall(transcript_of(reply)))
    spoken_before = len(_SENTENCE_END.findall(transcript_of(reply[:first_audio])))
    assert clauses >= 3
    assert clauses - spoken_before >= 2


async def _interrupted(voice: Deployment) -> tuple[list[Event], str]:
    """The events of a reply that was spoken into, and its transcript after the truncation."""
    async with conversation(voice.ws_url, instructions=LONG, **listening()) as talker:
        await talker.write(TOPIC)
        await talker.send("response.create")
        response = (await talker.until("response.created"))["response"]["id"]
        first = await until_played(talker, HEARD_MS)
        speaking = asyncio.create_task(talker.say_in_real_time(speech("questions/bees.wav")))
        try:
            started = await talker.until("input_audio_buffer.speech_started")
            done = (await talker.until("response.done"))["response"]
            played_ms = int((started["received_at"] - first["received_at"]) * 1000)
            assert (done["id"], done["status"]) == (response, "cancelled")
            assert done["status_details"]["reason"] == "turn_detected"
            (item,) = done["output"]
            assert item["status"] == "incomplete"
            await talker.send(
                "conversation.item.truncate",
                item_id=item["id"],
                content_index=0,
                audio_end_ms=min(played_ms, spoken_ms(audio_of(talker.events))),
            )
            await talker.until("conversation.item.truncated")
            kept = (await talker.retrieve(item["id"]))["content"][0]["transcript"]
            await talker.configure(instructions="Answer in one short sentence.")
            await speaking
        finally:
            speaking.cancel()
        answer = await talker.reply()
        assert answer[-1]["response"]["status"] == "completed"
        assert spoken_ms(audio_of(answer)) > 300
        assert "bees" in transcript_of(answer).lower()
        own = of_response(talker.events, response)
        assert own[-1]["type"] == "response.done"
        assert item["content"][0]["transcript"] == transcript_of(own)
        return own, kept
