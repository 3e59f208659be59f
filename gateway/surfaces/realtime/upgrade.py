"""The upgrade of a Realtime connection whose session may have to wait for a place.

It is accepted when there is something to say: that the session is open, or where it stands in
the queue. What the client says meanwhile is kept in its order, but for audio, which nobody
hears; when it leaves, its open is given up at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Send

from gateway.surfaces.ahead import Ahead
from gateway.surfaces.while_waiting import while_waiting
from protocol.realtime import MAX_EVENT_BYTES
from sessions.opening import Position

Result = TypeVar("Result")


class _Typed(msgspec.Struct):
    """What kind of event a frame is."""

    type: str = ""


_decoder = msgspec.json.Decoder(_Typed)


def _is_audio(said: str | bytes) -> bool:
    try:
        return _decoder.decode(said).type == "input_audio_buffer.append"
    except msgspec.DecodeError:
        # The session says what is wrong with it.
        return False


class Upgrade:
    """One connection before it has a session."""

    def __init__(self, subprotocol: str | None, receive: Receive, send: Send) -> None:
        self.subprotocol = subprotocol
        self.accepted = False
        self._ahead = Ahead(receive, skip=_is_audio, longest_bytes=MAX_EVENT_BYTES)
        self._send = send
        self._position: Position | None = None
        self._moved = asyncio.Event()

    async def accept(self) -> None:
        """Accept the upgrade, if that has not been done. Raises OSError."""
        if not self.accepted:
            self.accepted = True
            await self._send(
                {"type": "websocket.accept", "subprotocol": self.subprotocol, "headers": []}
            )

    async def receive(self) -> Message:
        """The next message of the client: first those that came while it waited."""
        return await self._ahead.receive()

    def stands(self, position: Position) -> None:
        """Its open waits, and stands there now."""
        self._position = position
        self._moved.set()

    async def hold(
        self, opening: Coroutine[Any, Any, Result], undo: Callable[[Result], None]
    ) -> Result:
        """The result of `opening`, which is cancelled, or undone, when the client leaves first.

        Raises what `opening` raises, OSError when the client has left, and InvalidRequest when it
        says too much.
        """
        return await while_waiting(opening, self._ahead.until_gone(), self._tell(), undo=undo)

    async def _tell(self) -> None:
        """Say where the open stands, the newest position only. Ends when nobody takes it."""
        try:
            while True:
                await self._moved.wait()
                self._moved.clear()
                await self.accept()
                await self._send({"type": "websocket.send", "text": self._event()})
        except (OSError, RuntimeError):
            # The client has left, or the server has closed by itself.
            return

    def _event(self) -> str:
        position = self._position
        assert position is not None
        return msgspec.json.encode(
            {
                "type": "antiphon.queued",
                "event_id": f"event_{secrets.token_hex(12)}",
                "position": position.position,
                "estimate_ms": position.estimate_ms,
            }
        ).decode()
