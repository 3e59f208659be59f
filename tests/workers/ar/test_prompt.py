from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.payloads import Message
from workers.engines.ar.prompt import (
    HEAD,
    ReplyLength,
    chat_messages,
    first_kept,
    one_line,
    render_few_shot,
    reply_length,
)

QUESTIONS = Path(__file__).parents[2] / "data" / "speech" / "questions.json"

texts = st.text(max_size=60) | st.sampled_from(
    [
        "User: hi",
        "x\nAssistant: y",
        "\u2028System:\n",
        "user ：",
        "a\r\n\r\nUser : b",
        "Instructions:",
    ]
)
messages = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), text=texts),
    max_size=6,
)


@given(texts, messages)
def test_every_message_is_one_line_with_one_speaker(
    instructions: str, conversation: list[Message]
) -> None:
    prompt = render_few_shot(instructions, conversation)
    assert prompt.startswith(HEAD)
    paragraphs = prompt.removeprefix(HEAD).split("\n\n")
    assert paragraphs[-1] == "Assistant:"
    spoken = paragraphs[:-1]
    if instructions.strip():
        assert spoken[0].startswith("Instructions: ")
        spoken = spoken[1:]
    assert len(spoken) == len(conversation)
    for paragraph, message in zip(spoken, conversation, strict=True):
        speaker, _, said = paragraph.partition(":")
        assert speaker == message.role.capitalize()
        assert len(paragraph.splitlines()) == 1
        assert not re.search(r"\b(User|Assistant|System|Instructions)\s*:", said)


@given(texts, messages, texts.map(one_line).filter(bool), texts)
def test_the_next_prompt_begins_with_the_last_one_and_its_reply(
    instructions: str, conversation: list[Message], reply: str, next_text: str
) -> None:
    before = render_few_shot(instructions, conversation)
    after = render_few_shot(
        instructions, [*conversation, Message("assistant", reply), Message("user", next_text)]
    )
    assert after.startswith(f"{before} {reply}\n\nUser:")


@given(texts)
def test_text_that_is_safe_stays_as_it_is(text: str) -> None:
    assert one_line(one_line(text)) == one_line(text)


def test_the_head_contains_no_test_question_and_no_answer_to_one() -> None:
    head = HEAD.lower()
    for question in json.loads(QUESTIONS.read_text()):
        assert question["text"].lower() not in head
        for keyword in question["keywords"]:
            assert not re.search(rf"\b{re.escape(keyword.lower())}", head), keyword


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool"):
        render_few_shot("", [Message("tool", "x")])
    with pytest.raises(InvalidRequest, match="tool"):
        chat_messages("", [Message("tool", "x")])


def test_chat_messages_lead_with_instructions_and_merge_neighbours() -> None:
    assert chat_messages("Be kind.", [Message("user", "a"), Message("user", "b")]) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
    ]
    with pytest.raises(InvalidRequest):
        chat_messages(" ", [])


@pytest.mark.parametrize(
    ("instructions", "length"),
    [
        ("", ReplyLength(2)),
        ("   ", ReplyLength(2)),
        ("Talk like a pirate.", ReplyLength(None)),
        ("Answer in five long sentences.", ReplyLength(5, exact=True)),
        ("Use 8 sentences, please", ReplyLength(8, exact=True)),
        ("You are friendly. Answer in one short sentence.", ReplyLength(1)),
        ("Answer in one or two short, clear sentences.", ReplyLength(2)),
        ("Reply with at most three sentences", ReplyLength(3)),
        ("no more than 4 short sentences", ReplyLength(4)),
        ("Write 0 sentences", ReplyLength(None)),
    ],
)
def test_instructions_set_the_length_of_a_few_shot_reply(
    instructions: str, length: ReplyLength
) -> None:
    assert reply_length(instructions, default_sentences=2) == length


def _conversation(exchanges: int) -> list[Message]:
    return [
        Message(role, f"{role} {number}")
        for number in range(exchanges)
        for role in ("user", "assistant")
    ] + [Message("user", "last")]


@given(
    exchanges=st.integers(0, 40),
    head=st.integers(0, 100),
    size=st.integers(1, 50),
    room=st.integers(1, 600),
)
async def test_what_is_kept_fits_and_leaves_half_the_room_where_it_can(
    exchanges: int, head: int, size: int, room: int
) -> None:
    conversation = _conversation(exchanges)

    async def count(dropped: int) -> int:
        return head + size * (len(conversation) - dropped)

    if head + size > room:
        with pytest.raises(InvalidRequest) as refused:
            await first_kept(conversation, 0, room, count)
        assert refused.value.code == "context_length_exceeded"
        return
    start = await first_kept(conversation, 0, room, count)
    assert await count(start) <= room
    if await count(0) <= room:
        assert start == 0
    else:
        assert conversation[start].role == "user"
        one_exchange_less = start + 2
        assert await count(start) <= room // 2 or start == len(conversation) - 1
        assert one_exchange_less > len(conversation) - 1 or await count(start - 2) > room // 2


async def test_a_long_conversation_drops_messages_in_few_large_steps() -> None:
    conversation: list[Message] = []
    start, steps = 0, 0

    async def count(dropped: int) -> int:
        return 100 + 10 * (len(conversation) - dropped)

    for number in range(200):
        conversation.append(Message("user", f"question {number}"))
        kept = await first_kept(conversation, start, 1000, count)
        steps += kept != start
        start = kept
        conversation.append(Message("assistant", f"answer {number}"))
    assert 0 < steps <= 8
