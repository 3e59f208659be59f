"""How a conversation becomes the text that a base model continues.

A base model follows examples, not orders: the head shows it what an assistant's
answers look like, and that they use what the user has said. The session's
instructions follow, then the conversation. The examples come first because they are
the same for every session: a slot that has read them once never reads them again.

Everything is one line a message. What a user says cannot start a new line, and the
words that mark a speaker lose their colon, so no text can pose as another speaker.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from protocol.errors import InvalidRequest
from protocol.payloads import Message

HEAD = """\
A conversation between a user and a friendly voice assistant. The assistant answers every \
question in one or two short, clear sentences.

User: Hello there!
Assistant: Hello! How can I help you today?

User: How many legs does a spider have?
Assistant: A spider has eight legs.

User: What do we use an umbrella for?
Assistant: We use an umbrella to keep dry in the rain.

User: What is the tallest animal?
Assistant: The tallest animal is the giraffe.

User: Which month comes after March?
Assistant: April comes after March.

User: Who wrote Romeo and Juliet?
Assistant: William Shakespeare wrote Romeo and Juliet.

User: My favourite fruit is the apple.
Assistant: Apples are very tasty!

User: What is my favourite fruit?
Assistant: Your favourite fruit is the apple.

"""

_SPEAKERS = {"user": "User", "assistant": "Assistant", "system": "System"}
_INSTRUCTIONS = "Instructions"
MARKERS = tuple(f"{name}:" for name in (*_SPEAKERS.values(), _INSTRUCTIONS))
"""A reply that reaches one of these has begun to speak for somebody else."""

_BREAKS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_POSING = re.compile(rf"\b({'|'.join((*_SPEAKERS, _INSTRUCTIONS))})\s*[:：]", re.IGNORECASE)


def one_line(text: str) -> str:
    """`text` on one line, with nothing in it that could pass for a speaker's name.

    Text that is already so is returned as it is: a reply that was generated reads
    the same when it comes back as part of the conversation.
    """
    return _POSING.sub(r"\1,", _BREAKS.sub(" ", text).strip())


def render_few_shot(instructions: str, messages: Sequence[Message]) -> str:
    """The prompt that makes a base model say the assistant's next words.

    Raises InvalidRequest for a role that is not system, user or assistant.
    """
    lines = [HEAD]
    if instructions.strip():
        lines.append(f"{_INSTRUCTIONS}: {one_line(instructions)}\n\n")
    for message in messages:
        lines.append(f"{_speaker(message)}: {one_line(message.text)}\n\n")
    lines.append("Assistant:")
    return "".join(lines)


def _speaker(message: Message) -> str:
    try:
        return _SPEAKERS[message.role]
    except KeyError:
        raise InvalidRequest(f"no such role: {message.role!r}", field="input") from None


def chat_messages(instructions: str, messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages of a chat API: instructions lead as a system message.

    Neighbours with the same role become one message, as most templates demand.

    Raises InvalidRequest for a role that is not system, user or assistant, and when
    there is nothing to answer.
    """
    if not messages and not instructions.strip():
        raise InvalidRequest("there is nothing to answer", field="input")
    merged: list[dict[str, str]] = []
    if instructions.strip():
        merged.append({"role": "system", "content": instructions})
    for message in messages:
        _speaker(message)
        if merged and merged[-1]["role"] == message.role:
            merged[-1]["content"] += f"\n{message.text}"
        else:
            merged.append({"role": message.role, "content": message.text})
    return merged


@dataclass(frozen=True)
class ReplyLength:
    """How long a few-shot reply is.

    It ends with sentence `most` (None: where the model ends the line). With `exact`
    the model may not end the line before that.
    """

    most: int | None
    exact: bool = False


_NUMBERS = {
    name: number
    for number, name in enumerate(
        "one two three four five six seven eight nine ten eleven twelve".split(), start=1
    )
}
_NUMBER = rf"(\d{{1,2}}|{'|'.join(_NUMBERS)})"
_LENGTH = re.compile(
    rf"(?P<bound>at most |up to |no more than |(?:{_NUMBER}\s*(?:to|or|-|–)\s*))?"
    rf"\b(?P<number>\d{{1,2}}|{'|'.join(_NUMBERS)})\s+(?:[a-z-]+,?\s+){{0,3}}?sentences?\b",
    re.IGNORECASE,
)


def reply_length(instructions: str, default_sentences: int) -> ReplyLength:
    """How long a few-shot reply should be under `instructions`.

    A base model cannot follow such an instruction, so it is read here: "in five long
    sentences" makes the reply exactly five, "in one sentence", "at most three
    sentences" and "two or three sentences" cap it; up to `default_sentences` there is
    no need to force the model. Other instructions lift the cap: the reply ends where the
    model ends its line. Without instructions it is capped at `default_sentences`.
    """
    found = _LENGTH.search(instructions)
    if found is not None:
        word = found["number"].lower()
        number = _NUMBERS[word] if word in _NUMBERS else int(word)
        if number > 0:
            return ReplyLength(number, exact=found["bound"] is None and number > default_sentences)
    return ReplyLength(None if instructions.strip() else default_sentences)


async def first_kept(
    messages: Sequence[Message],
    start: int,
    room_tokens: int,
    count: Callable[[int], Awaitable[int]],
) -> int:
    """The first message to keep, from `start` on, so that the prompt fits.

    `count(k)` is the size in tokens of a prompt that leaves out the first `k`
    messages. When it does not fit into `room_tokens`, the oldest exchanges go until
    it fills at most half of that, so that the next overflow is a long way off. What
    is kept begins with a user's message; the last message always stays.

    Raises InvalidRequest (`context_length_exceeded`) when it alone does not fit.
    """
    if await count(start) <= room_tokens:
        return start
    exchanges = [
        index
        for index, message in enumerate(messages)
        if index > start and (message.role == "user" or index == len(messages) - 1)
    ]
    if exchanges and await count(exchanges[-1]) <= room_tokens:
        return await _longest_tail(exchanges, room_tokens // 2, count)
    raise InvalidRequest(
        f"instructions and message do not fit into {room_tokens} tokens",
        field="input",
        code="context_length_exceeded",
    )


async def _longest_tail(
    exchanges: Sequence[int], room_tokens: int, count: Callable[[int], Awaitable[int]]
) -> int:
    """The earliest of `exchanges` from which the prompt fits; the last if none does."""
    low, high = 0, len(exchanges) - 1
    while low < high:
        middle = (low + high) // 2
        if await count(exchanges[middle]) <= room_tokens:
            high = middle
        else:
            low = middle + 1
    return exchanges[low]
