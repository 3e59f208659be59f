"""The sending half of a client's WebSocket: what waits for it, and how it ends.

It knows its connection only while it carries: of a connection that has ended, or never got its
session, nothing holds the rest, and its memory is free at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Send

from gateway.egress import Egress, EgressOverflow
from gateway.metrics import FrameCounts
from gateway.surfaces.farewell import CLOSE_INTERNAL, CLOSE_POLICY
from gateway.surfaces.faults import fault
from protocol.errors import AntiphonError

_GOODBYE_S = 1.0


class Outlet:
    """Frames to one client through a bounded queue, and a close code behind them."""

    def __init__(self, send: Send, frames: FrameCounts) -> None:
        self.egress = Egress()
        self._send = send
        self._on_sent: Callable[[str | bytes], None] = _untold
        self._frames = frames
        self._close = (1000, "client")

    def finish(self, code: int, reason: str) -> None:
        """Close with `code` once all that waits has been sent; nothing is queued any more."""
        self._close = code, reason
        self.egress.finish()

    async def run(self) -> None:
        """Send until `finish`. Raises EgressOverflow, and OSError when the client is gone."""
        await self.egress.drain(self._send_frame)
        await self._close_with(*self._close)

    async def carry(
        self,
        reading: Coroutine[Any, Any, None],
        session: str,
        on_stalled: Callable[[], None],
        on_failed: Callable[[AntiphonError], None],
        on_blocked: Callable[[bool], None],
        on_sent: Callable[[str | bytes], None] | None = None,
    ) -> None:
        """Send beside `reading`, which ends when the client has gone.

        `on_stalled` is called when the client has not read for so long that it is cut off,
        `on_failed` when the connection fails, to say so and `finish`, `on_blocked` when the session
        is to stop and to go on, `on_sent` behind every frame. The session is left to the caller.
        """
        self.egress.tell(on_blocked)
        self._on_sent = on_sent or _untold
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self.run())
                await reading
                writer.cancel()
        except* EgressOverflow:
            on_stalled()
            await self.goodbye(CLOSE_POLICY, "session_stalled")
        except* OSError:
            pass  # The client is gone.
        except* Exception:
            await self._fail(on_failed, fault(session))
        finally:
            self.egress.close()
            self._on_sent = _untold

    async def _fail(self, on_failed: Callable[[AntiphonError], None], error: AntiphonError) -> None:
        """Say it behind all that waits, if the client takes that within a moment."""
        try:
            on_failed(error)
            async with asyncio.timeout(_GOODBYE_S):
                await self.run()
        except OSError:
            pass  # It does not read, or has hung up.
        except Exception:
            # What failed may be the sending, or the saying.
            await self.goodbye(CLOSE_INTERNAL, error.code)

    async def goodbye(self, code: int, reason: str) -> None:
        """Close with a reason, if the client takes it within a moment."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._close_with(code, reason)
        except OSError:
            pass  # It does not read, or has hung up: the server drops the connection.

    async def _close_with(self, code: int, reason: str) -> None:
        await self._tell({"type": "websocket.close", "code": code, "reason": reason})

    async def _send_frame(self, frame: str | bytes) -> None:
        if isinstance(frame, str):
            await self._tell({"type": "websocket.send", "text": frame})
        else:
            await self._tell({"type": "websocket.send", "bytes": frame})
        self._frames.sent += 1
        self._on_sent(frame)

    async def _tell(self, message: Message) -> None:
        try:
            await self._send(message)
        except RuntimeError:
            # The server has closed by itself: a frame was too long, or no pong came.
            raise ConnectionAbortedError from None


def _untold(frame: str | bytes) -> None:
    """Nobody wants to know what was sent."""
