"""A way to a server that breaks, or carries nothing more, when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Carries bytes between clients and a port. `streams` counts upgrades to WebSocket."""

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self.streams = 0
        self.break_after_bytes: int | None = None
        """The next stream breaks once so many bytes of it came back; None: none does."""
        self._to_port = to_port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where the clients go."""
        return f"http://127.0.0.1:{self.port}"

    def partition(self) -> None:
        """Nothing is carried from now on, either way, and no connection is closed."""
        self._open.clear()

    def heal(self) -> None:
        """What waited is carried, and what comes."""
        self._open.set()

    def drop(self) -> None:
        """All connections break."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers |= {writer, back}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, back, counted=False))
                both.create_task(self._carry(there, writer, counted=True))
        finally:
            self._writers -= {writer, back}

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        left: int | None = None
        try:
            while data := await reader.read(4096):
                await self._open.wait()
                if counted and data.startswith(b"HTTP/1.1 101"):
                    self.streams += 1
                    left, self.break_after_bytes = self.break_after_bytes, None
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        self.drop()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def relay(to_port: int) -> AsyncIterator[Relay]:
    """A relay to `to_port` of this machine."""
    it = Relay(to_port)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    async with server:
        it.port = server.sockets[0].getsockname()[1]
        try:
            yield it
        finally:
            it.heal()
            it.drop()
