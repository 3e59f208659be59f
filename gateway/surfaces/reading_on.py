"""The receiving half of a client's WebSocket, which is read on where its session has no room.

Whoever does not read does not learn that the client has left, nor what cannot wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from starlette.types import Message, Receive

READ_ON_MESSAGES = 64
READ_ON_BYTES = 16 * 1024 * 1024
"""What is read of a client beyond what its session has room for. The message that reaches either
is the last: no further one is read until there is room."""
PAUSE_S = 0.5
_TURNS = 3
"""How long nothing comes of a client whose messages are all read: so long, which is more than a
network takes to go on where it was held up, and so many turns of the loop, of which each looks at
the socket. A slow turn is no pause."""
LEFT_S = 5.0
"""How long what a client that has left said before may wait for room."""

Said = TypeVar("Said")


class ReadingOn(Generic[Said]):
    """What a client says, in its order.

    `read` makes of a message what is kept of it, as soon as it has come, given the earliest
    that it may have been said (monotonic, ms); None: it is dealt with.
    Of a client that has left what it said before is dropped after `left_s` (`LEFT_S`) without
    room.
    """

    def __init__(
        self,
        receive: Receive,
        read: Callable[[Message, float], Said | None],
        left_s: float | None = None,
    ) -> None:
        self.gone: Message | None = None
        """How the client left, once that was read."""
        self._receive = receive
        self._read = read
        self._left_s = LEFT_S if left_s is None else left_s
        self._until_s = 0.0
        self._kept: deque[tuple[Said, int]] = deque()
        self._bytes = 0
        self._unread_ms: float | None = None
        """Since when more has come, for all that is known, than was read."""

    async def next(self) -> Said | None:
        """The next that the client says; None once it has left, behind all that it has said."""
        while not self._kept:
            if self.gone is not None:
                return None
            self._take(await (self._receive() if self._unread_ms is None else self._caught_up()))
        said, size = self._kept.popleft()
        self._bytes -= size
        return said

    async def wait_for(self, room: Coroutine[Any, Any, object]) -> bool:
        """Wait until `room` ends, and read on meanwhile; False: the client has left, and there is
        still no room."""
        waiting = asyncio.create_task(room)
        reading: asyncio.Task[Message] | None = None
        try:
            while not waiting.done():
                if self.gone is not None:
                    left_s = self._until_s - asyncio.get_running_loop().time()
                    await asyncio.wait({waiting}, timeout=max(left_s, 0.0))
                    break
                if reading is None and self._has_place:
                    reading = asyncio.create_task(self._message())
                if reading is None and self._unread_ms is None:
                    self._unread_ms = _now_ms()
                either: set[asyncio.Task[Any]] = (
                    {waiting} if reading is None else {waiting, reading}
                )
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    message, reading = reading.result(), None
                    self._take(message)
                    del message
            if waiting.done():
                waiting.result()
            return waiting.done()
        finally:
            waiting.cancel()
            if reading is not None:
                # What it would have read stays where it is.
                reading.cancel()
            # An error that leaves here holds this frame, and its task the error.
            del waiting, reading

    async def _caught_up(self) -> Message:
        """The next message; a pause before it says that all was read that had come."""
        reading = asyncio.create_task(self._message())
        try:
            await asyncio.wait({reading}, timeout=PAUSE_S)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not reading.done():
                self._unread_ms = None
            return await reading
        finally:
            reading.cancel()
            del reading

    @property
    def _has_place(self) -> bool:
        return len(self._kept) < READ_ON_MESSAGES and self._bytes < READ_ON_BYTES

    async def _message(self) -> Message:
        return await self._receive()

    def _take(self, message: Message) -> None:
        if message["type"] == "websocket.disconnect":
            self.gone = message
            self._until_s = asyncio.get_running_loop().time() + self._left_s
            return
        size = len(message.get("text") or message.get("bytes") or "")
        said = self._read(message, _now_ms() if self._unread_ms is None else self._unread_ms)
        if said is not None:
            self._kept.append((said, size))
            self._bytes += size


def _now_ms() -> float:
    return time.monotonic() * 1000.0
