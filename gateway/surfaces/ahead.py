"""What a client says before its session is open: kept in its order, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from starlette.types import Message, Receive

from protocol.errors import InvalidRequest

AHEAD_MESSAGES = 64
AHEAD_BYTES = 1024 * 1024
"""What is kept of a client that waits; who says more is refused, be it in one message."""


class Ahead:
    """The receiving half of a WebSocket that may be read before anybody takes its messages.

    What `skip` is true of is not kept: nobody would want it later. `longest_bytes` is how long
    that may be.
    """

    def __init__(
        self,
        receive: Receive,
        skip: Callable[[str | bytes], bool] = lambda said: False,
        longest_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._receive = receive
        self._skip = skip
        self._longest_bytes = longest_bytes
        self._messages: deque[Message] = deque()
        self._bytes = 0

    async def receive(self) -> Message:
        """The next message of the client: first those that came while it waited."""
        return self._messages.popleft() if self._messages else await self._receive()

    async def until_gone(self) -> None:
        """Read ahead; ends when the client has left. Raises InvalidRequest when it says too much.

        It is read on all the time: its end, and its pongs, come behind what it says. What is
        refused, and all before it, is dropped.
        """
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._messages.append(message)
                return
            said = message.get("text") or message.get("bytes") or ""
            try:
                self._keep(said, message)
            except InvalidRequest:
                self._messages.clear()
                raise
            finally:
                # Whoever waits for the next one holds what it has read.
                del said, message

    def _keep(self, said: str | bytes, message: Message) -> None:
        size = _bytes(said)
        if size > self._longest_bytes:
            raise _too_long(self._longest_bytes)
        if self._skip(said):
            return
        if size > AHEAD_BYTES:
            raise _too_long(AHEAD_BYTES)
        self._bytes += size
        if len(self._messages) >= AHEAD_MESSAGES or self._bytes > AHEAD_BYTES:
            raise InvalidRequest(
                f"before its session is open a client says at most {AHEAD_MESSAGES} messages"
                f" of {AHEAD_BYTES} bytes together",
                code="too_many_events",
            )
        self._messages.append(message)


def _bytes(said: str | bytes) -> int:
    if isinstance(said, bytes) or said.isascii():
        return len(said)
    return len(said.encode())


def _too_long(most: int) -> InvalidRequest:
    return InvalidRequest(
        f"before its session is open a client's message has at most {most} bytes",
        code="event_too_large",
    )
