"""Drives an engine through its interface, as the runtime does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.payloads import Message, Payload, conversation_payload
from workers.engine import Engine, EngineSession, Turn


@dataclass
class Reply:
    """What a turn gave."""

    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole reply."""
        return "".join(self.pieces)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt that were read in this turn."""
        return int(self.usage["input_tokens"] - self.usage["cached_tokens"])


async def inputs_of(*payloads: Payload) -> AsyncIterator[Payload]:
    """The inputs of a turn."""
    for payload in payloads:
        yield payload


def open_session(engine: Engine, name: str = "session") -> EngineSession:
    """A session that reports nothing outside its turns."""
    return engine.open(name, {}, lambda event, arguments: None)


def make_turn(
    messages: list[Message],
    emit: Callable[[Payload], None],
    *,
    instructions: str = "",
    max_output_tokens: int | None = None,
    lane: str = "default",
) -> Turn:
    """A turn that continues `messages`."""
    parameters = {"instructions": instructions, "max_output_tokens": max_output_tokens}
    return Turn(1, lane, parameters, inputs_of(conversation_payload(messages)), emit)


async def ask(session: EngineSession, messages: list[Message], **parameters: Any) -> Reply:
    """Run one turn to its end."""
    reply = Reply()
    turn = make_turn(messages, lambda piece: reply.pieces.append(piece.data.decode()), **parameters)
    reply.usage = (await session.run(turn)).usage
    return reply


async def ask_and_interrupt(
    session: EngineSession, messages: list[Message], *, after_pieces: int, **parameters: Any
) -> Reply:
    """Run one turn, and cancel it as soon as `after_pieces` pieces have come."""
    reply = Reply()
    enough = asyncio.Event()

    def emit(piece: Payload) -> None:
        reply.pieces.append(piece.data.decode())
        if len(reply.pieces) >= after_pieces:
            enough.set()

    task = asyncio.ensure_future(session.run(make_turn(messages, emit, **parameters)))
    await enough.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    return reply


class Conversation:
    """A session and what has been said in it."""

    def __init__(self, session: EngineSession) -> None:
        self.session = session
        self.messages: list[Message] = []

    async def say(self, text: str, **parameters: Any) -> Reply:
        """The user says `text`; the answer joins the conversation."""
        self.messages.append(Message("user", text))
        reply = await ask(self.session, self.messages, **parameters)
        self.messages.append(Message("assistant", reply.text))
        return reply
