"""What is kept of a client that waits for its session."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message

from gateway.surfaces.ahead import AHEAD_BYTES, AHEAD_MESSAGES, Ahead
from protocol.errors import InvalidRequest

GONE: Message = {"type": "websocket.disconnect", "code": 1006}


def said(text: str | bytes) -> Message:
    return {"type": "websocket.receive", "text" if isinstance(text, str) else "bytes": text}


def ahead(*messages: Message, longest_bytes: int = AHEAD_BYTES) -> Ahead:
    """Reads these; what begins with "a" it need not keep."""
    coming = iter(messages)

    async def receive() -> Message:
        return next(coming)

    return Ahead(receive, lambda text: text[:1] in ("a", b"a"), longest_bytes)


async def refused(*messages: Message, longest_bytes: int = AHEAD_BYTES) -> str:
    it = ahead(*messages, GONE, longest_bytes=longest_bytes)
    with pytest.raises(InvalidRequest) as error:
        await it.until_gone()
    assert not it._messages
    return error.value.code


@pytest.mark.parametrize("what", ["x", b"x", "é", "\N{GRINNING FACE}"])
async def test_it_is_bounded_in_bytes_in_one_message_as_in_many(what: Any) -> None:
    size = len(what.encode() if isinstance(what, str) else what)
    full = what * (AHEAD_BYTES // size)
    it = ahead(said(full), GONE)
    await it.until_gone()
    assert await it.receive() == said(full)
    assert await it.receive() == GONE
    assert await refused(said(full + what[:1])) == "event_too_large"
    half = what * (AHEAD_BYTES // size // 2)
    assert await refused(said(half), said(half), said(what)) == "too_many_events"


async def test_it_is_bounded_in_messages() -> None:
    await ahead(*[said("x")] * AHEAD_MESSAGES, GONE).until_gone()
    assert await refused(*[said("x")] * (AHEAD_MESSAGES + 1)) == "too_many_events"


async def test_what_is_not_kept_may_be_as_long_as_a_message_ever_may() -> None:
    sound = "a" * 2 * AHEAD_BYTES
    it = ahead(*[said(sound)] * 3, said("x"), GONE, longest_bytes=2 * AHEAD_BYTES)
    await it.until_gone()
    assert await it.receive() == said("x")
    assert await refused(said(sound + "a"), longest_bytes=2 * AHEAD_BYTES) == "event_too_large"
