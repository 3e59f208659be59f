"""A robot's end of an OpenPI connection, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from gateway.surfaces.resume import RESUME_SUBPROTOCOL
from protocol.openpi import pack, unpack

WAIT_S = 30


class Robot:
    """Sends observations and reads answers, in whatever order a test wants."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.metadata: dict[str, Any] = {}

    async def observe(self, prompt: str | None = None, state: float = 0.0, **more: Any) -> None:
        """One observation."""
        said: dict[str, Any] = {"state": np.array([state]), **more}
        if prompt is not None:
            said["prompt"] = prompt
        await self.socket.send(pack(said))

    async def answer(self) -> dict[str, Any]:
        """The next answer, which is a map."""
        async with asyncio.timeout(WAIT_S):
            frame = await self.socket.recv()
        assert isinstance(frame, bytes), frame
        answer = unpack(frame)
        assert isinstance(answer, dict)
        return answer

    async def infer(self, prompt: str | None = None, **more: Any) -> dict[str, Any]:
        """What the client's `infer` does."""
        await self.observe(prompt, **more)
        return await self.answer()

    async def failure(self) -> tuple[str, int]:
        """The one text frame of an error, and the close code behind it."""
        async with asyncio.timeout(WAIT_S):
            frame = await self.socket.recv()
            assert isinstance(frame, str), frame
            return frame, await self.closed()

    async def closed(self) -> int:
        """The close code, before which no frame comes."""
        async with asyncio.timeout(WAIT_S):
            try:
                frame = await self.socket.recv()
            except ConnectionClosed as error:
                return 1006 if error.rcvd is None else error.rcvd.code
        raise AssertionError(frame)


@asynccontextmanager
async def robot(
    url: str, secret: str | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Robot]:
    """A robot that has read its metadata; `secret` is that of the session in `url`."""
    offered = None if secret is None else [Subprotocol(RESUME_SUBPROTOCOL + secret)]
    async with connect(
        url, compression=None, max_size=None, subprotocols=offered, additional_headers=headers
    ) as socket:
        it = Robot(socket)
        it.metadata = await it.answer()
        yield it
