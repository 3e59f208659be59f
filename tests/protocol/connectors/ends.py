"""This process's side of the conformance suite: far ends, and a connector of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.connectors import Connector, Descriptor
from protocol.shm_connector import ShmConnector
from tests.protocol.connectors.far_end import (
    LARGEST_FRAME_BYTES,
    frame,
    make_connector,
    read_frame,
)

ROOT = Path(__file__).parents[3]
LIMITS = {"size_bytes": 8 << 20, "session_cap_bytes": 8 << 20, "giant_bytes": 300 << 20}
WINDOW_BYTES = 1 << 20

_descriptors: msgspec.msgpack.Decoder[Descriptor] = msgspec.msgpack.Decoder(Descriptor)


class Refused(Exception):
    """The far end answered with an error of this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class FarProcess:
    """A process that runs `far_end`, and the calls that are on their way to it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.path = str(directory / f"{name}.arena")
        self.ended = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def start(self, kind: str, limits: dict[str, int]) -> None:
        near, far = socket.socketpair()
        with far:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.protocol.connectors.far_end",
                str(far.fileno()),
                pass_fds=[far.fileno()],
                cwd=ROOT,
            )
        self._reader, self._writer = await asyncio.open_connection(
            sock=near, limit=LARGEST_FRAME_BYTES
        )
        self._reading = asyncio.create_task(self._read())
        await self.call("start", kind, self.path, self.name, limits)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Tell the far end to do something. Raises Refused, ConnectionError at its end."""
        return await self.begin(verb, *arguments)

    def begin(self, verb: str, *arguments: Any) -> asyncio.Future[Any]:
        """`call`, without waiting for the answer."""
        if self.ended.is_set():
            raise ConnectionError("the far end is gone")
        self._number += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        self._writer.write(frame(msgspec.msgpack.encode([self._number, verb, arguments])))
        return answer

    async def put(self, turn: int, size: int, seed: int) -> Descriptor:
        """Let it put a payload; the descriptor as it crosses to this process."""
        return descriptor_of(await self.call("put", turn, size, seed))

    def stop(self) -> None:
        """Stop it, so that it reads nothing and holds on to everything."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.ended.wait()

    async def end(self) -> None:
        """Close its connector, let it end, and leave nothing of it here."""
        if self.process.returncode is None and not self.ended.is_set():
            await self.call("close")
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                number, code, result = msgspec.msgpack.decode(await read_frame(self._reader))
                answer = self._answers.pop(number)
                if answer.done():
                    continue
                if code is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(Refused(code, result))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the far end is gone"))
                    answer.exception()


@dataclass
class Ends:
    """A connector in this process and far ends, each attached to it in both directions."""

    kind: str
    directory: Path
    path: str
    near: Connector[Any]
    lost: asyncio.Queue[str]
    far: list[FarProcess] = field(default_factory=list)

    async def add(self, name: str, limits: dict[str, int] | None = None) -> FarProcess:
        """Start a far end and attach both to each other."""
        far = FarProcess(name, self.directory)
        await far.start(self.kind, limits or LIMITS)
        self.far.append(far)
        if isinstance(self.near, ShmConnector):
            await self.near.attach(far.path)
            await far.call("attach", self.path)
            await far.call("consumer", "near")
        return far

    async def one_lost(self, far: FarProcess) -> None:
        """Wait until the connector has told of the end of `far`, in both directions.

        Inline payloads have no path of their own: there the message's path tells.
        """
        await far.ended.wait()
        if isinstance(self.near, ShmConnector):
            assert [await self.lost.get(), await self.lost.get()] == [far.name, far.name]

    def flow(self, turn: int, *far: FarProcess, window: int = WINDOW_BYTES) -> Any:
        """A turn's output from here to `far`."""
        return self.near.open("s", turn, {f"to-{end.name}": end.name for end in far}, window)

    async def end(self) -> None:
        for far in self.far:
            await far.end()
        if isinstance(self.near, ShmConnector):
            self.near.close()


def start_ends(kind: str, directory: Path, limits: dict[str, int] | None = None) -> Ends:
    """The near end alone."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    path = str(directory / "near.arena")
    near = make_connector(kind, path, "near", limits or LIMITS, lost.put_nowait)
    return Ends(kind, directory, path, near, lost)


def wire(descriptor: Descriptor) -> bytes:
    """The descriptor as it lies in a control message."""
    return msgspec.msgpack.encode(descriptor)


def descriptor_of(builtins: Any) -> Descriptor:
    """The descriptor in an answer of a far end."""
    descriptor: Descriptor = msgspec.convert(builtins, Descriptor)
    return descriptor


def open_files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))
