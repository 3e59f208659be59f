"""The link's frames over Unix sockets, both ends on one loop."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protocol import unix_socket
from protocol.errors import ConfigError
from protocol.link_frames import MAX_FRAME_BYTES
from protocol.unix_socket import UnixClient, UnixServer


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        yield f"{directory}/worker.sock"


class Served:
    """A server, and what it was told."""

    def __init__(self, path: str) -> None:
        self.frames: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.server = UnixServer(
            path,
            on_frame=lambda name, frame: self.frames.put_nowait((name, frame)),
            on_lost=self.lost.put_nowait,
        )


class Connecting:
    """A client, and what it was told."""

    def __init__(self, path: str, name: str = "one") -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.connected: asyncio.Queue[None] = asyncio.Queue()
        self.lost: asyncio.Queue[None] = asyncio.Queue()
        self.client = UnixClient(
            path,
            name,
            on_frame=self.frames.put_nowait,
            on_connected=lambda: self.connected.put_nowait(None),
            on_lost=lambda: self.lost.put_nowait(None),
        )


@pytest.fixture
async def served(path: str) -> AsyncIterator[Served]:
    served = Served(path)
    yield served
    served.server.close()


def stranger(path: str, *frames: bytes) -> socket.socket:
    """A client that writes by hand."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(path)
    for frame in frames:
        peer.sendall(len(frame).to_bytes(4, "big") + frame)
    return peer


async def test_frames_of_any_size_arrive_whole_and_in_order(served: Served, path: str) -> None:
    # Some fill the socket's buffer many times, some lie together in what is read at once.
    frames = [bytes([n]) * size for n, size in enumerate((0, 1, 9, 3_000_000, 5, 70_000, 0, 2))]
    one = Connecting(path)
    await one.connected.get()
    for frame in frames:
        one.client.send(frame)
    assert [await served.frames.get() for _ in frames] == [("one", frame) for frame in frames]
    for frame in frames:
        served.server.send("one", frame)
    assert [await one.frames.get() for _ in frames] == frames
    one.client.close()
    assert await served.lost.get() == "one"


async def test_a_client_comes_back_to_who_listens_next(path: str) -> None:
    one = Connecting(path)
    first = Served(path)
    await one.connected.get()
    first.server.close()
    await one.lost.get()
    one.client.send(b"to nobody")
    second = Served(path)
    await one.connected.get()
    one.client.send(b"to the second")
    assert await second.frames.get() == ("one", b"to the second")
    one.client.close()
    second.server.close()


async def test_who_comes_again_takes_the_place_of_the_one_before(served: Served, path: str) -> None:
    before = stranger(path, b"one", b"x")
    assert await served.frames.get() == ("one", b"x")
    again = stranger(path, b"one", b"y")
    assert await served.frames.get() == ("one", b"y")
    assert before.recv(1) == b""
    assert served.lost.empty()
    again.close()
    assert await served.lost.get() == "one"
    before.close()


async def test_what_was_said_before_the_end_is_heard_before_it(served: Served, path: str) -> None:
    stranger(path, b"one", b"last words").close()
    assert await served.frames.get() == ("one", b"last words")
    assert await served.lost.get() == "one"


@pytest.mark.parametrize("name", [b"", b"x" * 65])
async def test_who_has_no_proper_name_is_put_out(served: Served, path: str, name: bytes) -> None:
    peer = stranger(path, name, b"x")
    peer.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""
    assert served.frames.empty()
    peer.close()


async def test_a_frame_that_is_too_long_ends_its_connection_only(served: Served, path: str) -> None:
    other = Connecting(path, "other")
    await other.connected.get()
    peer = stranger(path, b"one")
    peer.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert await served.lost.get() == "one"
    other.client.send(b"x")
    assert await served.frames.get() == ("other", b"x")
    peer.close()
    other.client.close()


async def test_what_a_peer_does_not_read_is_bounded(served: Served, path: str) -> None:
    peer = stranger(path, b"one", b"x")
    await served.frames.get()
    frame = bytes(MAX_FRAME_BYTES)
    for _ in range(4):
        served.server.send("one", frame)
    received = 0
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    served.server.send("one", b"after")
    while received < 2 * (4 + MAX_FRAME_BYTES):
        received += len(await loop.sock_recv(peer, 1 << 20))
    served.server.send("one", b"end")
    rest = b""
    while not rest.endswith(b"end"):
        rest += await loop.sock_recv(peer, 1 << 20)
    assert rest == b"\0\0\0\x03end"
    peer.close()


async def test_a_path_in_use_is_refused_and_one_left_behind_is_taken(
    served: Served, path: str
) -> None:
    with pytest.raises(ConfigError, match="in use"):
        Served(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{path}.left")
    left = Served(f"{path}.left")
    left.server.close()


async def test_what_is_no_socket_stays_where_it_is(path: str) -> None:
    in_the_way(path)
    with pytest.raises(ConfigError, match="no socket"):
        Served(path)
    assert in_the_way(path)


def in_the_way(path: str) -> bool:
    """Have a file at `path`; whether there was one."""
    there = Path(path).is_file()
    Path(path).touch()
    return there


async def test_who_says_no_name_is_not_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "_NAME_S", 0.0)
    loop, server = asyncio.get_running_loop(), Served(path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.setblocking(False)
        await loop.sock_connect(silent, path)
        assert await loop.sock_recv(silent, 1) == b""
    assert server.lost.empty()
    server.server.close()
