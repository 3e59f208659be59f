"""A conversation whose worker is killed goes on from the prefix that had been stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment import VOICE_CONFIG, Deployment
from tests.end_to_end.conversation import Conversation, conversation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def usage_of(talker: Conversation, question: str) -> dict[str, Any]:
    """What the answer to a question took."""
    await talker.write(question)
    response = (await talker.respond())[-1]["response"]
    assert response["status"] == "completed"
    usage: dict[str, Any] = response["usage"]
    return usage


async def test_only_what_was_not_stored_is_read_anew(tmp_path: Path) -> None:
    config = yaml.safe_load(VOICE_CONFIG.read_text())
    config["pipelines"]["voice"]["durability"] = "turn"
    path = tmp_path / "voice.yaml"
    path.write_text(yaml.safe_dump(config))
    with Deployment(path) as deployment:
        async with conversation(
            deployment.ws_url, output_modalities=["text"], instructions="Answer in one sentence."
        ) as talker:
            await usage_of(talker, "Do you like the sea?")
            known = await usage_of(talker, "Which season is the best?")
            # The state after a turn is in the store before the next one begins.
            await talker.write("Tell me a long story about a dragon.")
            await talker.send("response.create")
            await talker.until("response.output_text.delta")
            await asyncio.to_thread(deployment.kill, "think-0")
            done = await talker.until("response.done")
            assert done["response"]["status"] == "failed"
            after = await usage_of(talker, "What do cats eat?")
        print(known, after)
        cached = after["input_token_details"]["cached_tokens"]
        assert cached >= known["input_tokens"]
