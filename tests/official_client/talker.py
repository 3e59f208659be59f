"""A conversation through the official `openai` package, with every event checked."""

from __future__ import annotations

import asyncio
import base64
import json
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from validate_events import complaints

RATE_HZ = 24_000
CHUNK_MS = 40
CHUNK_BYTES = RATE_HZ * CHUNK_MS // 1000 * 2
WAIT_S = 90.0

Event = dict[str, Any]


class Failure(AssertionError):
    """The server did something else than the protocol says."""


def check(condition: object, message: str) -> None:
    """Raise Failure with `message` unless `condition` holds."""
    if not condition:
        raise Failure(message)


def read_speech(path: Path) -> bytes:
    """The PCM16 of a WAV file, which must be 24 kHz mono."""
    with wave.open(str(path), "rb") as file:
        form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
        check(form == (RATE_HZ, 1, 2), f"{path} is not 24 kHz mono PCM16")
        return file.readframes(file.getnframes())


class Talker:
    """One connection; `events` is everything received, oldest first."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.events: list[Event] = []
        self._ids = 0

    async def send(self, kind: str, **fields: Any) -> str:
        """Send an event; its id."""
        self._ids += 1
        event_id = f"client_{self._ids}"
        await self._connection.send({"type": kind, "event_id": event_id, **fields})
        return event_id

    async def send_raw(self, text: str) -> None:
        """Send a frame as it is."""
        await self._connection.send_raw(text)

    async def receive(self) -> Event:
        """The next event, checked against the package's types."""
        async with asyncio.timeout(WAIT_S):
            event: Event = json.loads(await self._connection.recv_bytes())
        found = complaints(event)
        check(not found, "; ".join(found))
        self.events.append(event)
        return event

    async def until(self, kind: str, accept: Callable[[Event], bool] = lambda event: True) -> Event:
        """Receive until an accepted event of type `kind`. Any other error event is a failure."""
        while True:
            event = await self.receive()
            if event["type"] == kind and accept(event):
                return event
            check(event["type"] != "error", f"waiting for {kind}: {event}")

    async def error(self, event_id: str | None) -> Event:
        """The next error, which must be the answer to the client event `event_id`."""
        event = await self.until("error")
        error: Event = event["error"]
        check(error.get("event_id") == event_id, f"{error} does not answer {event_id}")
        return error

    async def alive(self) -> None:
        """Show that the session still answers."""
        await self.send("input_audio_buffer.clear")
        await self.until("input_audio_buffer.cleared")

    async def say(self, pcm: bytes) -> None:
        """Stream speech in real time, then silence until the server has heard its end."""
        stopped = asyncio.create_task(self.until("input_audio_buffer.speech_stopped"))
        loop = asyncio.get_running_loop()
        due = loop.time()
        position = 0
        try:
            while not stopped.done():
                chunk = pcm[position : position + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0")
                position += CHUNK_BYTES
                await self.send("input_audio_buffer.append", audio=base64.b64encode(chunk).decode())
                due += CHUNK_MS / 1000
                await asyncio.sleep(max(0.0, due - loop.time()))
            await stopped
        finally:
            stopped.cancel()

    async def write(self, text: str, role: str = "user") -> Event:
        """Put a text message into the conversation; the item."""
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        await self.send("conversation.item.create", item=item)
        event = await self.until("conversation.item.done")
        return dict(event["item"])

    async def response(self, **parameters: Any) -> list[Event]:
        """Ask for a response; its events from created to done."""
        await self.send("response.create", response=parameters)
        return await self.whole_response()

    async def whole_response(self) -> list[Event]:
        """The events of the next response, from created to done."""
        created = await self.until("response.created")
        start = len(self.events) - 1
        await self.until(
            "response.done", lambda event: event["response"]["id"] == created["response"]["id"]
        )
        return self.events[start:]


def audio_of(events: list[Event]) -> bytes:
    """The audio of the deltas among `events`."""
    return b"".join(
        base64.b64decode(event["delta"])
        for event in events
        if event["type"] == "response.output_audio.delta"
    )


def kinds(events: list[Event]) -> list[str]:
    """The types of `events`, repeats of deltas left out."""
    found: list[str] = []
    for event in events:
        kind = event["type"]
        if not (kind.endswith(".delta") and kind in found):
            found.append(kind)
    return found


def in_order(events: list[Event], expected: list[str]) -> None:
    """Fail unless the `expected` types come in this order among `events`."""
    position = 0
    for event in events:
        if position < len(expected) and event["type"] == expected[position]:
            position += 1
    check(
        position == len(expected),
        f"no {expected[position:][:1]} in its place among {kinds(events)}",
    )


@asynccontextmanager
async def talking(
    url: str, key: str, model: str = "voice", **session: Any
) -> AsyncIterator[Talker]:
    """A connection with a configured session."""
    client = AsyncOpenAI(api_key=key, base_url=f"{url.rstrip('/')}/v1")
    async with client.realtime.connect(model=model) as connection:
        talker = Talker(connection)
        created = await talker.receive()
        check(created["type"] == "session.created", f"first came {created['type']}")
        await talker.send("session.update", session={"type": "realtime", **session})
        await talker.until("session.updated")
        yield talker
