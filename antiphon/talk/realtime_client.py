"""A client of the Realtime WebSocket protocol (GA dialect) for asyncio.

It moves events and stamps their times; it keeps no state of the conversation.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pybase64
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from antiphon.talk.errors import CallRefused, CannotConnect, ConnectionEnded
from protocol.addresses import is_loopback

MAX_EVENT_BYTES = 16 * 1024 * 1024

_decoder = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode
_FORBIDDEN_CLOSE = {1008, 4001, 4003}


@dataclass(frozen=True)
class Received:
    """One server event and the monotonic second at which it came."""

    at: float
    event: dict[str, Any]

    @property
    def type(self) -> str:
        """The event's `type`; empty where the server sent none."""
        return str(self.event.get("type", ""))


def endpoint(url: str, model: str) -> str:
    """The WebSocket address of the Realtime endpoint at a server's `url`.

    `url` is http(s):// or ws(s)://HOST[:PORT], with or without a path that ends in
    `/v1` or `/v1/realtime`. Raises CannotConnect when it is none of these.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise CannotConnect(f"{url}: not an http or https address")
    base = parts.path.rstrip("/").removesuffix("/realtime").removesuffix("/v1")
    return f"{scheme}://{parts.netloc}{base}/v1/realtime?model={quote(model, safe='')}"


class RealtimeClient:
    """One open connection. Iterating over it yields each server event as `Received`.

    The queue of events that were received and not yet taken is bounded (16); when it
    is full the connection is not read, and the server has to wait.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, *, model: str = "voice", key: str | None = None, open_timeout_s: float = 10.0
    ) -> AsyncIterator[RealtimeClient]:
        """Connect to the server at `url`; closed when the block ends.

        Raises CannotConnect when nothing answers or it does not speak WebSocket, and
        CallRefused when it answers with an HTTP error status.
        """
        address = endpoint(url, model)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        opening = connect(
            address,
            additional_headers=headers,
            compression=None,
            max_size=MAX_EVENT_BYTES,
            open_timeout=open_timeout_s,
            close_timeout=2.0,
            proxy=None if is_loopback(urlsplit(address).hostname or "") else True,
        )
        try:
            connection = await opening
        except InvalidStatus as refusal:
            raise _refusal(url, refusal) from refusal
        except (InvalidHandshake, InvalidURI, EOFError) as problem:
            raise CannotConnect(f"{url}: no WebSocket server answers there") from problem
        except TimeoutError as problem:
            raise CannotConnect(f"{url}: no answer within {open_timeout_s:g} s") from problem
        except (OSError, ValueError) as problem:
            raise CannotConnect(f"{url}: cannot connect ({_reason(problem)})") from problem
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def send(self, event: dict[str, Any]) -> None:
        """Send one client event. Raises ConnectionEnded when the connection is closed."""
        try:
            await self._connection.send(_encode(event).decode())
        except ConnectionClosed as closed:
            raise _ended(closed) from closed

    async def append(self, pcm: bytes) -> None:
        """Send input audio: PCM16 little-endian mono at 24 kHz."""
        await self.send({"type": "input_audio_buffer.append", "audio": encode_audio(pcm)})

    async def receive(self) -> Received:
        """The next server event. Raises ConnectionEnded when the connection is closed."""
        try:
            message = await self._connection.recv()
        except ConnectionClosed as closed:
            raise _ended(closed) from closed
        now = time.monotonic()
        try:
            return Received(now, _decoder.decode(message))
        except msgspec.DecodeError as problem:
            raise ConnectionEnded("the server sent what is not a JSON object") from problem

    async def __aiter__(self) -> AsyncIterator[Received]:
        """Every server event until the server closes normally (code 1000)."""
        while True:
            try:
                received = await self.receive()
            except ConnectionEnded as ended:
                if ended.code == "closed":
                    return
                raise
            yield received


def encode_audio(pcm: bytes) -> str:
    """PCM bytes as the protocol carries them."""
    return pybase64.b64encode(pcm).decode("ascii")


def decode_audio(delta: str) -> bytes:
    """The PCM bytes of an audio delta. Raises ConnectionEnded when it is not base64."""
    try:
        return pybase64.b64decode(delta, validate=True)
    except ValueError as problem:
        raise ConnectionEnded("the server sent audio that is not base64") from problem


def _reason(problem: OSError | ValueError) -> str:
    """The system's own words; asyncio puts its own in their place."""
    if isinstance(problem, ConnectionRefusedError):
        return os.strerror(errno.ECONNREFUSED)
    return getattr(problem, "strerror", None) or str(problem)


def _refusal(url: str, refusal: InvalidStatus) -> CallRefused | CannotConnect:
    status = refusal.response.status_code
    said = _message(refusal.response.body)
    if status == 401:
        hint = said or "a key is needed (--key), or this one is not accepted"
        return CallRefused(f"{url}: refused with 401: {hint}", code="http_401")
    if status == 403:
        hint = said or "not allowed, or there is no Realtime endpoint at this address"
        return CallRefused(f"{url}: refused with 403: {hint}", code="http_403")
    if status in (429, 503):
        return CallRefused(
            f"{url}: refused with {status}: {said or 'no room or not ready, try again later'}",
            code=f"http_{status}",
        )
    return CannotConnect(
        f"{url}: answered {status}{f': {said}' if said else ''}; no Realtime endpoint there?",
        code=f"http_{status}",
    )


def _message(body: bytes | bytearray | None) -> str:
    """The message in an error answer, when it is one of ours or short plain text."""
    text = (body or b"").decode("utf-8", "replace").strip()
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text if len(text) <= 200 and "\n" not in text and "<" not in text else ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _ended(closed: ConnectionClosed) -> ConnectionEnded | CallRefused:
    if closed.rcvd is None:
        return ConnectionEnded("the connection was lost")
    code, reason = closed.rcvd.code, closed.rcvd.reason
    words = f"the server closed the connection ({code}{f': {reason}' if reason else ''})"
    if code in _FORBIDDEN_CLOSE:
        return CallRefused(words, code=f"close_{code}")
    if code == 1000:
        return ConnectionEnded(words, code="closed")
    return ConnectionEnded(words, code=f"close_{code}")
