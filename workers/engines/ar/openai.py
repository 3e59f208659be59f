"""The remote back end: any server with an OpenAI-compatible chat completions API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest
from protocol.payloads import text_payload
from workers.engine import DeviceUse, EngineSession, Turn, TurnResult
from workers.engines.ar.options import ArOptions
from workers.engines.ar.prompt import chat_messages
from workers.engines.ar.stopping import ReplyCutter
from workers.engines.ar.turns import read_turn

_EXCERPT_CHARACTERS = 300
_LONGEST_LINE_CHARACTERS = 1 << 20


class OpenAiBackend:
    """A connection pool to one server. The server keeps its own prefix cache."""

    def __init__(self, options: ArOptions) -> None:
        self.options = options
        self._open = 0
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """The connection pool. Raises EngineFailed before `load` and after `shutdown`."""
        if self._client is None:
            raise EngineFailed("the engine is not loaded")
        return self._client

    async def load(self) -> None:
        """Make the connection pool. The server may still be starting: it is not asked."""
        options = self.options
        assert options.base_url is not None
        headers = {}
        if options.api_key is not None:
            headers["Authorization"] = f"Bearer {options.api_key.get_secret_value()}"
        self._client = httpx.AsyncClient(
            base_url=options.base_url,
            headers=headers,
            timeout=httpx.Timeout(options.connect_timeout_s, read=options.read_timeout_s),
            limits=httpx.Limits(max_connections=2 * options.sessions),
        )

    def devices(self) -> dict[str, DeviceUse]:
        """Nothing here: the memory is the other server's."""
        return {}

    def declare(self) -> dict[str, int]:
        """Nothing here: the memory is the other server's."""
        return {}

    def open(self) -> OpenAiSession:
        """A session; it holds nothing but its place.

        Raises CapacityExceeded when all places are taken.
        """
        if self._open >= self.options.sessions:
            raise CapacityExceeded(f"all {self.options.sessions} sessions of this model are in use")
        self._open += 1
        return OpenAiSession(self)

    def weights(self) -> str:
        """Its sessions hold nothing that could be parked."""
        return ""

    async def restore(self, path: Path) -> OpenAiSession:
        """Raises InvalidRequest: nothing of it was ever parked."""
        raise InvalidRequest("a session of a remote model is not parked", code="unsupported")

    def release(self) -> None:
        """A session has closed."""
        self._open -= 1

    async def shutdown(self) -> None:
        """Close all connections."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


class OpenAiSession(EngineSession):
    """One conversation; each turn sends all of it."""

    def __init__(self, backend: OpenAiBackend) -> None:
        self._backend = backend

    async def run(self, turn: Turn) -> TurnResult:
        """Stream one reply of the server.

        Raises InvalidRequest for an input that is no conversation, EngineFailed for
        whatever goes wrong at the server or on the way. Cancelling closes the stream.
        """
        options = self._backend.options
        request = await read_turn(turn, options.max_output_tokens)
        body: dict[str, Any] = {
            "model": options.model,
            "messages": chat_messages(request.instructions, request.messages),
            "max_tokens": request.max_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in ("temperature", "top_p", "seed"):
            if (value := getattr(options, name)) is not None:
                body[name] = value

        cutter = ReplyCutter()
        finish_reason: str | None = None
        usage: dict[str, Any] = {}
        async with aclosing(self._chunks(body)) as chunks:
            async for chunk in chunks:
                await turn.room()
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or []:
                    text = (choice.get("delta") or {}).get("content") or ""
                    if piece := cutter.feed(text):
                        turn.emit(text_payload(piece))
                    finish_reason = choice.get("finish_reason") or finish_reason
        if finish_reason is None:
            raise EngineFailed("the server ended its stream in mid-reply")
        if piece := cutter.finish():
            turn.emit(text_payload(piece))
        return TurnResult(_usage(usage, finish_reason))

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with self._backend.client.stream("POST", "chat/completions", json=body) as answer:
                if answer.is_error:
                    content = (await answer.aread()).decode(errors="replace")
                    raise EngineFailed(
                        f"the server answered {answer.status_code}: {content[:_EXCERPT_CHARACTERS]}"
                    )
                async for line in answer.aiter_lines():
                    if len(line) > _LONGEST_LINE_CHARACTERS:
                        raise EngineFailed("the server sent an event of unreasonable size")
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield _parse(data)
        except httpx.HTTPError as error:
            raise EngineFailed(f"cannot reach the server: {error!r}") from error

    def close(self) -> None:
        """Give the place back."""
        self._backend.release()


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise EngineFailed(
            f"the server sent what is not JSON: {data[:_EXCERPT_CHARACTERS]}"
        ) from error
    if not isinstance(chunk, dict):
        raise EngineFailed(f"the server sent what is no chunk: {data[:_EXCERPT_CHARACTERS]}")
    if chunk.get("error"):
        raise EngineFailed(f"the server failed: {str(chunk['error'])[:_EXCERPT_CHARACTERS]}")
    return chunk


def _usage(reported: dict[str, Any], finish_reason: str) -> dict[str, Any]:
    usage: dict[str, Any] = {"finish_reason": "length" if finish_reason == "length" else "stop"}
    if "prompt_tokens" in reported:
        details = reported.get("prompt_tokens_details") or {}
        usage["input_tokens"] = reported["prompt_tokens"]
        usage["cached_tokens"] = details.get("cached_tokens") or 0
        usage["output_tokens"] = reported.get("completion_tokens", 0)
    return usage
