"""One Realtime connection as a test drives it: everything received is kept and can be awaited."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from antiphon.talk.wav import RATE_HZ, read_wav

SPEECH = Path(__file__).parents[1] / "data" / "speech"
CHUNK_MS = 40
CHUNK_BYTES = RATE_HZ * CHUNK_MS // 1000 * 2
WAIT_S = 60.0

Event = dict[str, Any]


def speech(name: str) -> bytes:
    """A recorded sentence or question as PCM16 at 24 kHz."""
    return read_wav(SPEECH / name).astype("<i2").tobytes()


def spoken_ms(pcm: bytes) -> int:
    """The length of PCM16 at 24 kHz in ms."""
    return len(pcm) // 2 * 1000 // RATE_HZ


class Conversation:
    """A connection to `WS /v1/realtime`. `events` holds all server events, oldest first.

    Each event has the monotonic second of its arrival under "received_at".
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self._arrived = asyncio.Condition()
        self._ended = False
        self._read = 0
        self._ids = 0

    # Sending

    async def send(self, kind: str, **fields: Any) -> str:
        """Send an event; its id."""
        self._ids += 1
        event_id = f"client_{self._ids}"
        await self.connection.send(json.dumps({"type": kind, "event_id": event_id, **fields}))
        return event_id

    async def append(self, pcm: bytes) -> None:
        """Send audio."""
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def say(self, pcm: bytes, *, silence_ms: int = 800) -> None:
        """Speak as fast as the connection takes it, then be silent."""
        whole = pcm + bytes(RATE_HZ * silence_ms // 1000 * 2)
        for start in range(0, len(whole), CHUNK_BYTES):
            await self.append(whole[start : start + CHUNK_BYTES])

    async def say_in_real_time(self, pcm: bytes) -> None:
        """Speak at the pace of a person, then send silence until the server heard the end."""
        loop = asyncio.get_running_loop()
        before = len(self.events)
        due = loop.time()
        position = 0
        while not any(
            event["type"] == "input_audio_buffer.speech_stopped" for event in self.events[before:]
        ):
            await self.append(pcm[position : position + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0"))
            position += CHUNK_BYTES
            due += CHUNK_MS / 1000
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def write(self, text: str, role: str = "user", **fields: Any) -> Event:
        """Put a text message into the conversation; the item."""
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        await self.send("conversation.item.create", item=item, **fields)
        done: Event = (await self.until("conversation.item.done"))["item"]
        return done

    async def configure(self, **session: Any) -> Event:
        """Change the session's settings; the effective ones."""
        await self.send("session.update", session={"type": "realtime", **session})
        updated: Event = (await self.until("session.updated"))["session"]
        return updated

    async def retrieve(self, item_id: str) -> Event:
        """An item as it stands."""
        await self.send("conversation.item.retrieve", item_id=item_id)
        item: Event = (
            await self.until("conversation.item.retrieved", lambda e: e["item"]["id"] == item_id)
        )["item"]
        return item

    # Receiving

    async def next_event(self) -> Event:
        """The next event that was not read yet. Fails when none comes, or none can come."""
        async with asyncio.timeout(WAIT_S), self._arrived:
            await self._arrived.wait_for(lambda: self._read < len(self.events) or self._ended)
        assert self._read < len(self.events), f"the connection ended: {self.connection.close_code}"
        self._read += 1
        return self.events[self._read - 1]

    async def until(
        self, kind: str, accept: Callable[[Event], object] = lambda event: True
    ) -> Event:
        """Read on to an accepted event of type `kind`. Any other error event is a failure."""
        while True:
            event = await self.next_event()
            if event["type"] == kind and accept(event):
                return event
            assert event["type"] != "error", f"waiting for {kind}: {event}"

    async def error(self, event_id: str | None) -> Event:
        """The next error, which must answer the client event `event_id`."""
        error: Event = (await self.until("error"))["error"]
        assert error.get("event_id") == event_id, error
        return error

    async def respond(self, **parameters: Any) -> list[Event]:
        """Ask for a response; its events from created to done."""
        await self.send("response.create", response=parameters)
        return await self.reply()

    async def reply(self) -> list[Event]:
        """The events of the next response, from created to done, and what came between."""
        created = await self.until("response.created")
        start = self._read - 1
        await self.until(
            "response.done", lambda e: e["response"]["id"] == created["response"]["id"]
        )
        return self.events[start : self._read]

    async def alive(self) -> None:
        """Show that the session still answers."""
        await self.send("input_audio_buffer.clear")
        await self.until("input_audio_buffer.cleared")

    def of(self, kind: str, since: int = 0) -> list[Event]:
        """All events of a type that have arrived."""
        return [event for event in self.events[since:] if event["type"] == kind]

    def skip(self) -> None:
        """Take what has arrived for read."""
        self._read = len(self.events)

    async def receive(self) -> None:
        """Receive until the connection ends, however it ends."""
        with contextlib.suppress(ConnectionClosed):
            async for frame in self.connection:
                event = json.loads(frame)
                event["received_at"] = time.monotonic()
                async with self._arrived:
                    self.events.append(event)
                    self._arrived.notify_all()
        async with self._arrived:
            self._ended = True
            self._arrived.notify_all()


@asynccontextmanager
async def conversation(
    ws_url: str, model: str = "voice", **session: Any
) -> AsyncIterator[Conversation]:
    """A connection with a configured session; closed at the end."""
    async with (
        connect(f"{ws_url}/v1/realtime?model={model}", max_size=None, compression=None) as socket,
        asyncio.TaskGroup() as tasks,
    ):
        talker = Conversation(socket)
        reader = tasks.create_task(talker.receive())
        try:
            await talker.until("session.created")
            if session:
                await talker.configure(**session)
            yield talker
        finally:
            reader.cancel()


def listening(**turn_detection: Any) -> dict[str, Any]:
    """Settings of a spoken conversation with transcripts, by server_vad."""
    return {
        "audio": {
            "input": {
                "transcription": {"model": "whisper-1"},
                "turn_detection": {"type": "server_vad", **turn_detection},
            }
        }
    }


def audio_of(events: list[Event]) -> bytes:
    """The audio of the deltas among `events`."""
    return b"".join(
        base64.b64decode(event["delta"])
        for event in events
        if event["type"] == "response.output_audio.delta"
    )


def transcript_of(events: list[Event]) -> str:
    """The words of the transcript deltas among `events`."""
    return "".join(
        event["delta"]
        for event in events
        if event["type"] == "response.output_audio_transcript.delta"
    )


def of_response(events: list[Event], response: str) -> list[Event]:
    """Those of `events` that belong to a response."""
    return [
        event
        for event in events
        if event.get("response_id", event.get("response", {}).get("id")) == response
    ]


def loudness(pcm: bytes) -> float:
    """Root mean square of PCM16, from 0 to 1."""
    samples = np.frombuffer(pcm, "<i2").astype(np.float64) / 32768
    return float(np.sqrt(np.mean(samples**2))) if samples.size else 0.0
