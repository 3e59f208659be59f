"""What a session has said stays resident: no turn reads the conversation again."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.deployment import Deployment
from tests.end_to_end.conversation import Conversation, conversation

pytestmark = pytest.mark.slow

TURNS = 12
SLACK_TOKENS = 16
TOPICS = ("music", "seasons", "the sea", "winter", "cats", "gardens")


async def test_two_sessions_that_alternate_never_read_their_past_again(voice: Deployment) -> None:
    async with AsyncExitStack() as stack:
        talkers = [
            await stack.enter_async_context(
                conversation(voice.ws_url, output_modalities=["text"], instructions=instructions)
            )
            for instructions in ("Answer in one short sentence.", "Answer in one happy sentence.")
        ]
        known = [0 for _ in talkers]
        for turn in range(TURNS):
            topic = TOPICS[turn % len(TOPICS)]
            for index, talker in enumerate(talkers):
                known[index] = await _turn(talker, f"Do you like {topic}?", known[index])


async def _turn(talker: Conversation, question: str, known_tokens: int) -> int:
    """One turn of a session of which `known_tokens` were read or written before."""
    await talker.write(question)
    response = (await talker.respond())[-1]["response"]
    assert response["status"] == "completed"
    usage = response["usage"]
    cached = usage["input_token_details"]["cached_tokens"]
    new = usage["input_tokens"] - known_tokens
    print(f"{usage['input_tokens']} tokens, {new} new, {usage['input_tokens'] - cached} read")
    assert new > 0
    if known_tokens:
        assert usage["input_tokens"] - cached <= new + SLACK_TOKENS
    return int(usage["input_tokens"] + usage["output_tokens"])
