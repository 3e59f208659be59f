"""A synthetic Realtime server: the GA event sequence with a tone for a voice.

It lets clients be tested without models. Speech is what is loud, the answer is a
tone, and the transcripts are fixed words; the order of the events, the pacing and the
interruption are those of the protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

RATE_HZ = 24_000
FRAME = RATE_HZ // 50
LOUD = 0.01
STARTS_AFTER_FRAMES = 3
STOPS_AFTER_FRAMES = 25
DELTA_MS = 100
HEARD = "synthetic question"


@dataclass
class Script:
    """How the server behaves; `reply_ms` is one duration an answer, the last repeats."""

    reply_ms: tuple[int, ...] = (1500,)
    lead_ms: int = 2000
    amplitude: float = 0.3
    key: str | None = None
    close_1008_without_key: bool = False
    deaf: bool = False
    fails: bool = False
    breaks_off: bool = False
    server_rtf: float | None = None
    instructions: str = ""
    received: list[dict[str, Any]] = field(default_factory=list)
    """Every client event but the audio, in order, of all connections."""
    protocols: list[str] = field(default_factory=list)
    appended: int = 0
    """Input samples received, of all connections."""


class _Connection:
    def __init__(self, socket: WebSocket, script: Script, ids: Iterator[int]) -> None:
        self._socket = socket
        self._script = script
        self._ids = ids
        self._settings: dict[str, Any] = {
            "id": f"sess_{next(ids)}",
            "object": "realtime.session",
            "type": "realtime",
            "instructions": script.instructions,
        }
        self._pending = np.zeros(0, np.int16)
        self._frames = 0
        self._loud = 0
        self._quiet = 0
        self._speech: str | None = None
        self._last_item: str | None = None
        self._answers = 0
        self._reply: asyncio.Task[None] | None = None
        self._transcripts: dict[str, str] = {}

    async def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{next(self._ids)}", **fields}
        await self._socket.send_text(json.dumps(event))

    async def run(self) -> None:
        await self.send("session.created", session=self._settings)
        try:
            while True:
                await self._take(json.loads(await self._socket.receive_text()))
        except WebSocketDisconnect:
            pass
        finally:
            await self._stop_reply()

    async def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "input_audio_buffer.append":
            await self._hear(np.frombuffer(base64.b64decode(event["audio"]), "<i2"))
            return
        self._script.received.append(event)
        match event["type"]:
            case "session.update":
                self._settings = {**self._settings, **event["session"]}
                await self.send("session.updated", session=self._settings)
            case "response.cancel":
                if self._reply is None or self._reply.done():
                    await self._refuse(event, "response_cancel_not_active")
                await self._stop_reply()
            case "conversation.item.truncate":
                await self.send(
                    "conversation.item.truncated",
                    item_id=event["item_id"],
                    content_index=event["content_index"],
                    audio_end_ms=event["audio_end_ms"],
                )
                said = self._transcripts.get(event["item_id"], "")
                self._transcripts[event["item_id"]] = said[: event["audio_end_ms"] // 20]
            case "conversation.item.retrieve":
                await self.send(
                    "conversation.item.retrieved",
                    item={
                        "id": event["item_id"],
                        "object": "realtime.item",
                        "type": "message",
                        "role": "assistant",
                        "status": "incomplete",
                        "content": [
                            {
                                "type": "output_audio",
                                "transcript": self._transcripts.get(event["item_id"], ""),
                            }
                        ],
                    },
                )
            case "conversation.item.create":
                item = {"id": f"item_{next(self._ids)}", "status": "completed", **event["item"]}
                await self._item(item)
            case "response.create":
                if self._reply is not None and not self._reply.done():
                    await self._refuse(event, "conversation_already_has_active_response")
                else:
                    self._answer()
            case unknown:
                await self._refuse(event, "invalid_value", f"unknown event {unknown}")

    async def _refuse(self, event: dict[str, Any], code: str, message: str | None = None) -> None:
        await self.send(
            "error",
            error={
                "type": "invalid_request_error",
                "code": code,
                "message": message or code,
                "param": None,
                "event_id": event.get("event_id"),
            },
        )

    async def _item(self, item: dict[str, Any]) -> None:
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self.send(kind, item=item, previous_item_id=self._last_item)
        self._last_item = item["id"]

    async def _hear(self, pcm: np.ndarray[Any, Any]) -> None:
        self._script.appended += len(pcm)
        if self._script.deaf:
            return
        self._pending = np.concatenate([self._pending, pcm])
        while len(self._pending) >= FRAME:
            frame, self._pending = self._pending[:FRAME], self._pending[FRAME:]
            self._frames += 1
            loud = float(np.sqrt(np.mean(np.square(frame / 32768.0)))) > LOUD
            self._loud = self._loud + 1 if loud else 0
            self._quiet = 0 if loud else self._quiet + 1
            if self._speech is None and self._loud >= STARTS_AFTER_FRAMES:
                await self._speech_started()
            elif self._speech is not None and self._quiet >= STOPS_AFTER_FRAMES:
                await self._speech_stopped()

    async def _speech_started(self) -> None:
        self._speech = f"item_{next(self._ids)}"
        start_ms = max(0, (self._frames - STARTS_AFTER_FRAMES) * 20 - 300)
        await self.send(
            "input_audio_buffer.speech_started", item_id=self._speech, audio_start_ms=start_ms
        )
        await self._stop_reply("turn_detected")

    async def _speech_stopped(self) -> None:
        item_id, self._speech = self._speech or "", None
        await self.send(
            "input_audio_buffer.speech_stopped", item_id=item_id, audio_end_ms=self._frames * 20
        )
        await self.send(
            "input_audio_buffer.committed", item_id=item_id, previous_item_id=self._last_item
        )
        await self._item(
            {
                "id": item_id,
                "object": "realtime.item",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_audio", "transcript": None}],
            }
        )
        await self.send(
            "conversation.item.input_audio_transcription.completed",
            item_id=item_id,
            content_index=0,
            transcript=HEARD,
            usage={"type": "duration", "seconds": 1.0},
        )
        if self._script.breaks_off:
            await self._socket.close(1011, "synthetic fault")
            raise WebSocketDisconnect(1011)
        self._answer()

    def _answer(self) -> None:
        durations = self._script.reply_ms
        duration_ms = durations[min(self._answers, len(durations) - 1)]
        self._answers += 1
        self._reply = asyncio.create_task(self._speak(duration_ms))

    async def _stop_reply(self, reason: str = "client_cancelled") -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.cancel(reason)
            with suppress(asyncio.CancelledError):
                await self._reply

    async def _speak(self, duration_ms: int) -> None:
        response_id, item_id = f"resp_{next(self._ids)}", f"item_{next(self._ids)}"
        ids = {"response_id": response_id, "item_id": item_id, "output_index": 0}
        response: dict[str, Any] = {
            "id": response_id,
            "object": "realtime.response",
            "status": "in_progress",
            "status_details": None,
            "output": [],
            "output_modalities": ["audio"],
            "usage": None,
        }
        item: dict[str, Any] = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        await self.send("response.created", response=response)
        previous, self._last_item = self._last_item, item_id
        await self.send(
            "response.output_item.added", response_id=response_id, output_index=0, item=item
        )
        await self.send("conversation.item.added", item=item, previous_item_id=previous)
        await self.send(
            "response.content_part.added",
            **ids,
            content_index=0,
            part={"type": "audio", "transcript": ""},
        )
        status = "completed"
        details: dict[str, Any] | None = None
        try:
            if self._script.fails:
                status = "failed"
                error = {"type": "server_error", "code": "engine_lost", "message": "worker died"}
                details = {"type": "failed", "error": error}
            else:
                await self._deltas(ids, duration_ms)
        except asyncio.CancelledError as cancelled:
            status = "cancelled"
            reason = cancelled.args[0] if cancelled.args else "client_cancelled"
            details = {"type": "cancelled", "reason": reason}
        said = self._transcripts.get(item_id, "")
        await self.send("response.output_audio.done", **ids, content_index=0)
        await self.send(
            "response.output_audio_transcript.done", **ids, content_index=0, transcript=said
        )
        part = {"type": "audio", "transcript": said}
        await self.send("response.content_part.done", **ids, content_index=0, part=part)
        whole = "completed" if status == "completed" else "incomplete"
        content = [{"type": "output_audio", "transcript": said}]
        item |= {"status": whole, "content": content}
        await self.send(
            "response.output_item.done", response_id=response_id, output_index=0, item=item
        )
        await self.send("conversation.item.done", item=item, previous_item_id=previous)
        response = {**response, "status": status, "status_details": details, "output": [item]}
        extra = {} if self._script.server_rtf is None else {"server_rtf": self._script.server_rtf}
        await self.send("response.done", response=response, **extra)

    async def _deltas(self, ids: dict[str, Any], duration_ms: int) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        for number, at_ms in enumerate(range(0, duration_ms, DELTA_MS)):
            ahead_s = at_ms / 1000 - (clock() - begun) - self._script.lead_ms / 1000
            await asyncio.sleep(max(0.0, ahead_s))
            if number % 3 == 0:
                word = f"word {number // 3}. "
                item_id = ids["item_id"]
                self._transcripts[item_id] = self._transcripts.get(item_id, "") + word
                await self.send(
                    "response.output_audio_transcript.delta", **ids, content_index=0, delta=word
                )
            pcm = _tone(at_ms, min(DELTA_MS, duration_ms - at_ms), self._script.amplitude)
            await self.send(
                "response.output_audio.delta",
                **ids,
                content_index=0,
                delta=base64.b64encode(pcm).decode(),
            )


def _tone(at_ms: int, duration_ms: int, amplitude: float) -> bytes:
    times = (np.arange(duration_ms * 24) + at_ms * 24) / RATE_HZ
    return (np.sin(2 * np.pi * 440 * times) * amplitude * 32767).astype("<i2").tobytes()


def realtime_routes(script: Script) -> list[BaseRoute]:
    """The routes of the synthetic server: the socket and `/healthz`."""
    ids = count(1)

    async def realtime(socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        script.protocols.extend(offered)
        keys = [name.removeprefix("openai-insecure-api-key.") for name in offered]
        keys.append(socket.headers.get("authorization", "").removeprefix("Bearer "))
        admitted = script.key is None or script.key in keys
        if not admitted and not script.close_1008_without_key:
            refusal = {"error": {"code": "invalid_api_key", "message": "this key is not accepted"}}
            await socket.send_denial_response(JSONResponse(refusal, status_code=401))
            return
        await socket.accept(subprotocol="realtime" if "realtime" in offered else None)
        if not admitted:
            error = {
                "type": "invalid_request_error",
                "code": "invalid_api_key",
                "message": "this key is not accepted",
            }
            event = {"type": "error", "event_id": f"event_{next(ids)}", "error": error}
            await socket.send_text(json.dumps(event))
            await socket.close(1008, "invalid_api_key")
            return
        await _Connection(socket, script, ids).run()

    async def health(request: Any) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def models(request: Any) -> JSONResponse:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if script.key not in (None, key):
            return JSONResponse({"error": {"code": "invalid_api_key"}}, status_code=401)
        return JSONResponse({"object": "list", "data": []})

    return [
        WebSocketRoute("/v1/realtime", realtime),
        Route("/healthz", health),
        Route("/v1/models", models),
    ]


@contextmanager
def serving(script: Script, routes: list[BaseRoute] | None = None) -> Iterator[str]:
    """Serve the script (and more routes) on an ephemeral port; yields the base URL."""
    app = Starlette(routes=[*realtime_routes(script), *(routes or [])])
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
