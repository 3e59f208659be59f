"""The other process of the conformance suite: a connector that carries out what it is told.

`python -m tests.protocol.connectors.far_end FD` speaks frames of msgpack over the stream
socket FD: [number, verb, arguments] in, [number, error code or None, result] out. What a
put made, its descriptor, goes back as a result, as it would in a control message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.arena import ArenaLimits, Arrival
from protocol.arrays import array_of, array_payload
from protocol.connectors import Connector, Descriptor, InlineConnector
from protocol.errors import AntiphonError
from protocol.payloads import Payload, PayloadType
from protocol.shm_connector import ShmConnector

LENGTH_BYTES = 4
LARGEST_FRAME_BYTES = 300 << 20

_descriptors: msgspec.msgpack.Decoder[Descriptor] = msgspec.msgpack.Decoder(Descriptor)


def content_of(size: int, seed: int) -> npt.NDArray[np.uint8]:
    """`size` bytes that differ from those of another seed, wherever they are cut."""
    block = np.random.default_rng(seed).integers(0, 256, 65521, np.uint8)
    return np.resize(block, size)


def payload_of(size: int, seed: int) -> Payload:
    """A payload of `size` bytes."""
    return array_payload(PayloadType.FRAMES, content_of(size, seed), seed=seed)


def make_connector(
    kind: str,
    path: str,
    name: str,
    limits: dict[str, int],
    on_lost: Callable[[str], None] | None = None,
) -> Connector[Any]:
    """A connector of `kind` as a process of a deployment would have it."""
    if kind == "inline":
        return InlineConnector()
    return ShmConnector(path, name, ArenaLimits(**limits), on_lost=on_lost)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """One frame. Raises IncompleteReadError at the end of the stream."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return await reader.readexactly(size)


def frame(data: bytes) -> bytes:
    """`data` with its length before it."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class FarEnd:
    """Carries out verbs on one connector."""

    def __init__(self) -> None:
        self._connector: Connector[Any] = InlineConnector()
        self._flows: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}
        self._heard: list[list[Any]] = []

    async def start(self, kind: str, path: str, name: str, limits: dict[str, int]) -> None:
        self._connector = make_connector(kind, path, name, limits)

    async def attach(self, path: str) -> str:
        assert isinstance(self._connector, ShmConnector)
        return await self._connector.attach(path)

    async def consumer(self, name: str) -> None:
        assert isinstance(self._connector, ShmConnector)
        await self._connector.consumer(name, 10.0)

    async def open(self, turn: int, consumers: dict[str, str], window: int) -> int:
        self._flows[turn] = self._connector.open("s", turn, consumers, window)
        return turn

    async def put(self, turn: int, size: int, seed: int) -> Descriptor:
        return self._connector.put(payload_of(size, seed), self._flows[turn])

    async def tell(self, turn: int, size: int, seed: int) -> Descriptor:
        """Put, so that it arrives without a message."""
        assert isinstance(self._connector, ShmConnector)
        return self._connector.put(payload_of(size, seed), self._flows[turn], tell=True)

    async def put_when_ready(self, turn: int, size: int, seed: int) -> Descriptor:
        return await self._connector.put_when_ready(payload_of(size, seed), self._flows[turn], 30.0)

    async def abandon(self, descriptor: bytes) -> None:
        self._connector.abandon(_descriptors.decode(descriptor))

    async def close_flow(self, turn: int) -> None:
        self._connector.close_flow(self._flows.pop(turn))

    async def drained(self, turn: int) -> None:
        async with asyncio.timeout(10.0):
            await self._connector.drained(self._flows[turn])

    async def listen(self) -> None:
        """Read arrivals from now on."""
        assert isinstance(self._connector, ShmConnector)
        self._connector.on_arrival = self._hear

    def _hear(self, arrival: Arrival) -> None:
        about = [arrival.producer, arrival.edge, arrival.session, arrival.turn]
        self._heard.append([*about, arrival.note.decode(), zlib.crc32(arrival.payload.data)])
        self._connector.release(arrival.descriptor)

    async def heard(self) -> list[Any]:
        """What has arrived."""
        return self._heard

    async def receive(self, descriptor: bytes, timeout_s: float | None = None) -> int:
        """Read every byte and let go of them; their checksum."""
        known = _descriptors.decode(descriptor)
        return zlib.crc32((await self._connector.receive(known, timeout_s)).data)

    async def consume(self, descriptor: bytes) -> int:
        """Receive and release."""
        checksum = await self.receive(descriptor)
        await self.release(descriptor)
        return checksum

    async def release(self, descriptor: bytes) -> None:
        self._connector.release(_descriptors.decode(descriptor))

    async def discard(self, descriptor: bytes) -> None:
        self._connector.discard(_descriptors.decode(descriptor))

    async def keep(self, descriptor: bytes, key: int) -> None:
        """Keep an array of the payload, beyond its release."""
        self._kept[key] = array_of(self._connector.get(_descriptors.decode(descriptor)))

    async def read_kept(self, key: int) -> int:
        return zlib.crc32(self._kept[key])

    async def drop_kept(self, key: int) -> None:
        del self._kept[key]

    async def void(self, turn: int) -> None:
        self._connector.void("s", turn)

    async def health(self) -> dict[str, Any]:
        builtins: dict[str, Any] = msgspec.to_builtins(self._connector.health())
        return builtins

    async def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    async def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def close(self) -> None:
        self._kept.clear()
        if isinstance(self._connector, ShmConnector):
            self._connector.close()


async def serve(control: socket.socket) -> None:
    """Carry out verbs, several at a time, until the other side closes the socket."""
    reader, writer = await asyncio.open_connection(sock=control, limit=LARGEST_FRAME_BYTES)
    far_end = FarEnd()

    async def carry_out(number: int, verb: str, arguments: list[Any]) -> None:
        call: Callable[..., Awaitable[Any]] = getattr(far_end, verb)
        try:
            answer = [number, None, await call(*arguments)]
        except AntiphonError as error:
            answer = [number, error.code, error.message]
        writer.write(frame(msgspec.msgpack.encode(answer)))

    async with asyncio.TaskGroup() as tasks:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, verb, arguments = msgspec.msgpack.decode(await read_frame(reader))
                tasks.create_task(carry_out(number, verb, arguments))


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
