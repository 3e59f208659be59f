"""The example clients of the native surface, through a network that breaks."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.config import GatewayConfig
from tests.gateway.real_host import SENTENCES, real_gateway, spoken_as
from tests.gateway.serving import WAIT_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "native"
KEY = "sk-0123456789"
ALL_AUDIO = b"".join(map(spoken_as, SENTENCES))


@asynccontextmanager
async def breaking(port: int, after_bytes: int, times: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A way to `port` on which the first `times` streams break after so many bytes.

    Yields its address and a list that gets the bytes of every stream.
    """
    streams: list[int] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        up = asyncio.create_task(carry(reader, back))
        number: int | None = None
        while data := await there.read(4096):
            writer.write(data)
            if data.startswith(b"HTTP/1.1 101"):
                number = len(streams)
                streams.append(0)
            if number is not None:
                streams[number] += len(data)
                if number < times and streams[number] >= after_bytes:
                    writer.transport.abort()
                    back.transport.abort()
                    break
        writer.close()
        await up

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", streams


async def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """What a program prints; it has to succeed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    async with asyncio.timeout(WAIT_S):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode().strip()


async def test_the_python_client_hears_all_of_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    async with (
        real_gateway(GatewayConfig(keys=(KEY,))) as gateway,
        breaking(gateway.port, after_bytes=20_000, times=2) as (url, streams),
    ):
        arguments = ["How are you?", "--url", url, "--key", KEY, "--out", str(out)]
        printed = await run(sys.executable, str(EXAMPLES / "ask.py"), *arguments)
    assert printed == "".join(SENTENCES)
    with wave.open(str(out)) as heard:
        assert heard.readframes(heard.getnframes()) == ALL_AUDIO
    assert len(streams) == 3


def node() -> list[str]:
    """The command that runs a module with WebSocket in Node."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("there is no node")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    major = int(re.match(r"v(\d+)", version.stdout).group(1))  # type: ignore[union-attr]
    if major < 20:
        pytest.skip("node has no WebSocket")
    return [path] if major >= 22 else [path, "--experimental-websocket"]


async def test_the_javascript_client_hears_all_of_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "answer.pcm"
    command = node()
    async with (
        real_gateway(GatewayConfig(keys=(KEY,))) as gateway,
        breaking(gateway.port, after_bytes=20_000, times=2) as (url, streams),
    ):
        arguments = [str(EXAMPLES / "ask.mjs"), "How are you?", url, str(out)]
        printed = await run(*command, *arguments, environment={"ANTIPHON_KEY": KEY})
    assert printed.splitlines()[-1] == "".join(SENTENCES)
    assert out.read_bytes() == ALL_AUDIO
    assert len(streams) == 3
