"""What a client says before its session is open: kept in its order, within bounds."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Receive

AHEAD_MESSAGES = 64
AHEAD_BYTES = 1024 * 1024
"""What is read of a client that waits; who says more is not read on until it is let in."""


class Ahead:
    """The receiving half of a WebSocket that may be read before anybody takes its messages."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._bytes = 0

    async def receive(self) -> Message:
        """The next message of the client: first those that came while it waited."""
        return self._messages.popleft() if self._messages else await self._receive()

    async def until_gone(self) -> None:
        """Read ahead; ends when the client has left."""
        while len(self._messages) < AHEAD_MESSAGES and self._bytes < AHEAD_BYTES:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] == "websocket.disconnect":
                return
            self._bytes += len(message.get("text") or message.get("bytes") or "")
        await asyncio.Event().wait()
