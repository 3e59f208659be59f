"""The remote back end against a synthetic server of chat completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pytest

from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest
from protocol.payloads import Message, text_payload
from tests.workers.ar.driving import ask, ask_and_interrupt, inputs_of, open_session
from workers.engine import Turn
from workers.engines.ar import ArEngine, ArOptions

HELLO = [Message("user", "Hello")]

Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]
"""Writes the whole response to the request whose JSON body it is given."""


@dataclass
class SyntheticServer:
    """Answers one request a connection with whatever `answer` writes."""

    answer: Answer
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length:")
            )
            self.headers.append(head)
            body = json.loads(await reader.readexactly(length))
            self.requests.append(body)
            gone = asyncio.ensure_future(reader.read())
            answering = asyncio.ensure_future(self.answer(writer, body))
            await asyncio.wait([gone, answering], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.disconnected.set()
            for task in (gone, answering):
                task.cancel()
            await asyncio.wait([gone, answering])
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    answer: Answer, **options: Any
) -> AsyncIterator[tuple[SyntheticServer, ArEngine]]:
    synthetic = SyntheticServer(answer)
    server = await asyncio.start_server(synthetic.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    synthetic.url = f"http://127.0.0.1:{port}/v1"
    engine = ArEngine.create(
        ArOptions(backend="openai", model="some-model", base_url=synthetic.url, **options)
    )
    await engine.load()
    try:
        yield synthetic, engine
    finally:
        await engine.shutdown()
        server.close()


def head(status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def raw(*blocks: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        for block in blocks:
            writer.write(block)
            await writer.drain()

    return answer


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}}\n\n'  # noqa: E501
DONE = b"data: [DONE]\n\n"


async def test_a_reply_streams_piece_by_piece_with_its_usage() -> None:
    whole = raw(
        head(),
        b": ping\n\n",
        event(""),
        event(" Grüß"),
        event(" dich 🦖. "),
        event(finish="stop"),
        USAGE,
        DONE,
    )
    async with serving(whole, api_key="secret", temperature=0.3, seed=7) as (server, engine):
        session = open_session(engine)
        reply = await ask(
            session,
            [Message("system", "Note"), *HELLO],
            instructions="Be kind.",
            max_output_tokens=50,
        )
        session.close()
    assert reply.pieces == ["Grüß", " dich 🦖."]
    assert reply.usage == {
        "input_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 3,
        "finish_reason": "stop",
    }
    assert server.requests == [
        {
            "model": "some-model",
            "messages": [
                {"role": "system", "content": "Be kind.\nNote"},
                {"role": "user", "content": "Hello"},
            ],
            "max_tokens": 50,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.3,
            "seed": 7,
        }
    ]
    assert server.headers[0].startswith("POST /v1/chat/completions ")
    assert "Bearer secret" in server.headers[0]


async def test_the_limit_is_reported_also_without_usage() -> None:
    async with serving(raw(head(), event("One two"), event(finish="length"), DONE)) as (_, engine):
        reply = await ask(open_session(engine), HELLO)
    assert reply.text == "One two"
    assert reply.usage == {"finish_reason": "length"}


@pytest.mark.parametrize(
    ("blocks", "cause"),
    [
        ([head("503 Service Unavailable", "application/json"), b'{"error": "busy"}'], "503.*busy"),
        ([head(), event("One"), b"data: {nonsense\n\n"], "not JSON"),
        ([head(), b"data: 7\n\n"], "no chunk"),
        (
            [head(), event("One"), b'data: {"error": {"message": "out of memory"}}\n\n'],
            "out of memory",
        ),
        ([head(), event("One")], "mid-reply"),
        ([b"garbage\r\n\r\n"], "cannot reach"),
    ],
)
async def test_whatever_goes_wrong_is_an_engine_failure_with_its_cause(
    blocks: list[bytes], cause: str
) -> None:
    async with serving(raw(*blocks)) as (_, engine):
        session = open_session(engine)
        with pytest.raises(EngineFailed, match=cause):
            await ask(session, HELLO)


async def test_a_server_that_is_not_there_is_an_engine_failure() -> None:
    async with serving(raw()) as (server, _):
        url = server.url
    engine = ArEngine.create(ArOptions(backend="openai", model="m", base_url=url))
    await engine.load()
    with pytest.raises(EngineFailed, match="cannot reach"):
        await ask(open_session(engine), HELLO)
    await engine.shutdown()


async def test_a_server_that_falls_silent_is_an_engine_failure() -> None:
    async def stall(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(head() + event("One"))
        await asyncio.Event().wait()

    async with serving(stall, read_timeout_s=0.05) as (_, engine):
        with pytest.raises(EngineFailed, match="ReadTimeout"):
            await ask(open_session(engine), HELLO)


async def test_cancelling_closes_the_stream() -> None:
    async def stall(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(head() + event("One"))
        await asyncio.Event().wait()

    async with serving(stall) as (server, engine):
        reply = await ask_and_interrupt(open_session(engine), HELLO, after_pieces=1)
        await server.disconnected.wait()
    assert reply.text == "One"


async def test_two_sessions_at_once_get_their_own_words() -> None:
    async def echo(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        said = body["messages"][-1]["content"]
        writer.write(head())
        for _ in range(20):
            writer.write(event(f"{said} "))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(event(finish="stop") + DONE)
        await writer.drain()

    async with serving(echo) as (_, engine):
        sessions = [open_session(engine) for _ in range(2)]
        replies = await asyncio.gather(
            *(
                ask(session, [Message("user", word)])
                for session, word in zip(sessions, ("red", "blue"), strict=True)
            )
        )
    assert set(replies[0].text.split()) == {"red"}
    assert set(replies[1].text.split()) == {"blue"}


async def test_sessions_beyond_the_limit_are_refused_until_one_closes() -> None:
    async with serving(raw(), sessions=1) as (_, engine):
        session = open_session(engine)
        with pytest.raises(CapacityExceeded):
            open_session(engine)
        session.close()
        open_session(engine).close()


async def test_wrong_turns_are_refused_by_field() -> None:
    async with serving(raw()) as (server, engine):
        session = open_session(engine)
        with pytest.raises(InvalidRequest):
            engine.open("s", {"rate": 1}, lambda name, arguments: None)
        with pytest.raises(InvalidRequest) as refused:
            await session.run(Turn(1, "default", {}, inputs_of(text_payload("hi")), print))
        assert refused.value.field == "input"
        with pytest.raises(InvalidRequest) as refused:
            await ask(session, HELLO, max_output_tokens=0)
        assert refused.value.field == "max_output_tokens"
        assert server.requests == []


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "openai", "model": "m"},
        {"backend": "openai", "base_url": "http://127.0.0.1:1/v1"},
        {"backend": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1", "threads": 2},
        {"base_url": "http://127.0.0.1:1/v1"},
        {"temperatur": 1.0},
        {"context_tokens": 10},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        ArOptions(**options)
