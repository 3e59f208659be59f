"""A conversation whose model state was parked goes on as if it had never been away."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.deployment import Deployment
from tests.end_to_end.conversation import Conversation, conversation

pytestmark = pytest.mark.slow

QUESTIONS = ("Do you like the sea?", "Which season is the best?", "What do cats eat?")


async def replies(voice: Deployment, *, parked: bool) -> list[tuple[str, int]]:
    """What is answered, and how much of each prompt was read anew."""
    async with conversation(
        voice.ws_url, output_modalities=["text"], instructions="Answer in one short sentence."
    ) as talker:
        found: list[tuple[str, int]] = []
        for question in QUESTIONS:
            if parked and found:
                await asyncio.to_thread(park, voice, talker)
            await talker.write(question)
            response = (await talker.respond())[-1]["response"]
            assert response["status"] == "completed"
            usage = response["usage"]
            read = usage["input_tokens"] - usage["input_token_details"]["cached_tokens"]
            found.append((text_of(response), read))
        return found


def park(voice: Deployment, talker: Conversation) -> None:
    """Have the operator put its state away, and wait until it holds nothing."""
    (created,) = (event for event in talker.events if event["type"] == "session.created")
    address = f"/v1/admin/sessions/{created['session']['id']}"
    answer = httpx.post(f"{voice.base_url}{address}/park", timeout=10)
    assert answer.json()["parked"] == ["think"]
    voice.until(lambda: voice.get(address).json()["bytes"]["think"] == {})


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's only item."""
    (item,) = response["output"]
    return str(item["content"][0].get("text") or item["content"][0].get("transcript"))


async def test_it_says_the_same_and_reads_nothing_again(voice: Deployment) -> None:
    resident = await replies(voice, parked=False)
    away = await replies(voice, parked=True)
    print(resident, away, sep="\n")
    assert [text for text, _ in away] == [text for text, _ in resident]
    for (_, read_resident), (_, read_away) in list(zip(resident, away, strict=True))[1:]:
        assert read_away <= read_resident + 4
