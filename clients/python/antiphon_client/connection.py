"""The connections of a session, one after the other, for as long as its lease."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from antiphon_client.errors import AntiphonError, ConnectionLost, ProtocolError, Refused
from antiphon_client.stream import SUBPROTOCOL, Event, StreamMachine

MAX_ANSWER_BYTES = 96 * 1024 * 1024
"""The answer to a step has up to 64 MiB."""
CONNECT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
LEASE_MARGIN_S = 2.0
"""The lease begins when the gateway learns of the loss, which is later than here."""


@dataclass(frozen=True)
class Line:
    """How to reach the sessions of a gateway. A connection over which no answer to a ping came
    for `ping_s` is given up. While nobody reads there are no pings, as their answers would not be
    read either."""

    ws_url: str
    key: str | None
    tls: ssl.SSLContext | None
    ping_s: float

    def connect(self, session: str, kind: str = "sessions") -> connect:
        """A connection of a session, or of a world (`worlds`), to be entered."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        tls: dict[str, Any] = {"ssl": self.tls} if self.tls is not None else {}
        return connect(
            f"{self.ws_url}/v1/{kind}/{session}/stream",
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=headers,
            compression=None,
            max_size=MAX_ANSWER_BYTES,
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=1.0,
            ping_interval=None,  # A session has pings of its own.
            **tls,
        )


class Connections:
    """Keeps a session connected. `handle` is told what came of a frame of so many bytes, or of
    the end of a connection."""

    def __init__(
        self, line: Line, machine: StreamMachine, handle: Callable[[list[Event], int], None]
    ) -> None:
        self._line = line
        self._machine = machine
        self._handle = handle
        self.to_send = asyncio.Event()
        """There may be a frame to send."""
        self.room_to_read = asyncio.Event()
        """While it is not set nothing is taken off the network."""
        self.room_to_read.set()

    async def run(self) -> None:
        """Keep a connection, until the session is over. Never raises but CancelledError: whoever
        waits has to know that nothing more will come."""
        try:
            await self._keep()
        except Exception as error:
            fault = AntiphonError(f"the session cannot be kept up: {error!r}")
            self._handle(self._machine.give_up(fault), 0)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RETRY_S
        lost_s = loop.time()
        while self._machine.over is None:
            before = self._machine.attachments
            code, reason = await self._connection()
            if self._machine.attachments > before:
                delay_s, lost_s = FIRST_RETRY_S, loop.time()
            self._handle(self._machine.dropped(code, reason), 0)
            lease_s = float(self._machine.limits.get("grace_s", CONNECT_TIMEOUT_S))
            if loop.time() - lost_s > lease_s + LEASE_MARGIN_S:
                error = ConnectionLost(f"no connection within the lease of {lease_s:g} s: {reason}")
                self._handle(self._machine.give_up(error), 0)
            if self._machine.over is None:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, LAST_RETRY_S)

    async def _connection(self) -> tuple[int | None, str]:
        """One connection, from the upgrade to its end: close code and reason."""
        try:
            async with self._line.connect(self._machine.session) as socket:
                await self._carry(socket)
                return socket.close_code, socket.close_reason or ""
        except InvalidStatus as error:
            if 400 <= error.response.status_code < 500:
                refused = Refused(f"status {error.response.status_code}", code="upgrade_refused")
                self._handle(self._machine.give_up(refused), 0)
            return None, str(error)
        except ProtocolError as error:
            self._handle(self._machine.give_up(error), 0)
            return None, error.message
        except (OSError, InvalidHandshake, ConnectionClosed) as error:
            return None, str(error) or type(error).__name__
        except Exception as error:
            odd = not_understood(error)
            self._handle(self._machine.give_up(odd), 0)
            return None, odd.message

    async def _carry(self, socket: ClientConnection) -> None:
        """Frames both ways, until the connection is at its end."""
        await socket.send(self._machine.attach())
        sides = [asyncio.create_task(side(socket)) for side in (self._send, self._ping)]
        try:
            while self._machine.over is None:
                await self.room_to_read.wait()
                message = await socket.recv()
                self._handle(self._machine.receive(message), len(message))
        except ConnectionClosed:
            pass
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _send(self, socket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.to_send.wait()
                self.to_send.clear()
                while (frame := self._machine.take()) is not None:
                    await socket.send(frame)

    async def _ping(self, socket: ClientConnection) -> None:
        """Break a connection that has fallen silent, which TCP tells after many minutes."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.sleep(self._line.ping_s)
                await self.room_to_read.wait()
                pong = await socket.ping()
                try:
                    async with asyncio.timeout(self._line.ping_s):
                        await pong
                except TimeoutError:
                    if self.room_to_read.is_set():
                        socket.transport.abort()


def not_understood(error: Exception) -> ProtocolError:
    """Of a connection that ended by what nobody foresees, such as a redirection to nowhere."""
    return ProtocolError(f"an answer that is none of a gateway: {error!r:.200}")
