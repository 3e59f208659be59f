"""A client of the native surface, for tests: both encodings, one way to use them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

WAIT_S = 30


class Stream:
    """One connection. Frames are maps; bytes are bytes in either encoding."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.frames: list[dict[str, Any]] = []
        """All that came, in order."""

    @property
    def cursor(self) -> str:
        """How far this client has read."""
        cursor: str = self.frames[-1]["cursor"]
        return cursor

    async def say(self, kind: str, **fields: Any) -> None:
        frame = {"type": kind, **fields}
        if self.socket.subprotocol == "antiphon.msgpack":
            await self.socket.send(msgspec.msgpack.encode(frame))
        else:
            await self.socket.send(msgspec.json.encode(frame).decode())

    async def next(self) -> dict[str, Any]:
        """The next frame, with what is audio as bytes."""
        async with asyncio.timeout(WAIT_S):
            received = await self.socket.recv()
        if isinstance(received, bytes):
            frame: dict[str, Any] = msgspec.msgpack.decode(received)
        else:
            frame = msgspec.json.decode(received)
            if "pcm" in frame:
                frame["pcm"] = base64.b64decode(frame["pcm"], validate=True)
        self.frames.append(frame)
        return frame

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next frame of a type that has these values."""
        while True:
            frame = await self.next()
            if frame["type"] == kind and fields.items() <= frame.items():
                return frame

    async def closed(self) -> tuple[int, str]:
        """How the connection ends, once everything has been read."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        assert self.socket.close_code is not None
        return self.socket.close_code, self.socket.close_reason or ""

    @property
    def pcm(self) -> bytes:
        """All audio that came."""
        return b"".join(frame["pcm"] for frame in self.frames if frame["type"] == "audio_delta")

    @property
    def kinds(self) -> list[str]:
        """The types of all that came."""
        return [frame["type"] for frame in self.frames]


@asynccontextmanager
async def stream(
    url: str,
    subprotocol: str | None = "antiphon.json",
    key: str | None = None,
    **attach: Any,
) -> AsyncIterator[Stream]:
    """A connection; it has said `attach` if there is anything to say in it."""
    async with connect(
        url,
        subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
        additional_headers=bearer(key),
        compression=None,
        max_size=None,
    ) as socket:
        client = Stream(socket)
        if attach:
            await client.say("attach", **attach)
        yield client


def bearer(key: str | None) -> dict[str, str]:
    """The header that a key is presented in."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def requests(base_url: str, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client for requests."""
    async with httpx.AsyncClient(
        base_url=base_url, headers=bearer(key), timeout=WAIT_S, trust_env=False
    ) as client:
        yield client


async def opened(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A new session, as the answer to the open has it."""
    answer = await client.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    session: dict[str, Any] = answer.json()
    return session
