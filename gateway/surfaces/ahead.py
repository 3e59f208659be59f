"""What a client says before its session is open: kept in its order, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from starlette.types import Message, Receive

from protocol.errors import InvalidRequest

AHEAD_MESSAGES = 64
AHEAD_BYTES = 1024 * 1024
"""What is kept of a client that waits, or one message that is longer; who says more is refused."""


class Ahead:
    """The receiving half of a WebSocket that may be read before anybody takes its messages.

    What `skip` is true of is not kept: nobody would want it later.
    """

    def __init__(
        self, receive: Receive, skip: Callable[[str | bytes], bool] = lambda said: False
    ) -> None:
        self._receive = receive
        self._skip = skip
        self._messages: deque[Message] = deque()
        self._bytes = 0

    async def receive(self) -> Message:
        """The next message of the client: first those that came while it waited."""
        return self._messages.popleft() if self._messages else await self._receive()

    async def until_gone(self) -> None:
        """Read ahead; ends when the client has left. Raises InvalidRequest when it says too much.

        It is read on all the time: its end, and its pongs, come behind what it says.
        """
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._messages.append(message)
                return
            said = message.get("text") or message.get("bytes") or ""
            if self._skip(said):
                continue
            self._messages.append(message)
            self._bytes += len(said)
            count = len(self._messages)
            if count > AHEAD_MESSAGES or (self._bytes > AHEAD_BYTES and count > 1):
                raise InvalidRequest(
                    f"before its session is open a client says at most {AHEAD_MESSAGES} messages"
                    f" of {AHEAD_BYTES} bytes together",
                    code="too_many_events",
                )
