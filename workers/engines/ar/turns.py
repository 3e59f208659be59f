"""What a turn asks of an AR engine, whichever back end serves it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from protocol.errors import InvalidRequest
from protocol.payloads import Message, read_conversation
from workers.engine import Turn


@dataclass(frozen=True)
class TurnRequest:
    """A conversation to continue, and how."""

    messages: list[Message]
    instructions: str
    max_output_tokens: int


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    instructions: str = ""
    max_output_tokens: int | None = None


async def read_turn(turn: Turn, default_output_tokens: int) -> TurnRequest:
    """The request in `turn`: one conversation payload and the parameters.

    Raises InvalidRequest naming what is wrong.
    """
    payloads = [payload async for payload in turn.inputs]
    if len(payloads) != 1 or payloads[0].attributes.get("schema") != "conversation":
        raise InvalidRequest("a turn takes exactly one conversation", field="input")
    try:
        messages = read_conversation(payloads[0])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the conversation cannot be read: {error}", field="input") from error
    try:
        parameters = msgspec.convert(turn.parameters, _Parameters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field="parameters") from error
    most = parameters.max_output_tokens
    if most is not None and most < 1:
        raise InvalidRequest("must be at least 1", field="max_output_tokens")
    return TurnRequest(
        messages, parameters.instructions, default_output_tokens if most is None else most
    )
