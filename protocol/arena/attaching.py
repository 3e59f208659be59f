"""Attaching to another process's arena."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable

from protocol.arena import handshake, memory
from protocol.arena.attachment import Arrival, Attachment
from protocol.arena.handshake import Hello, Prepare, Refusal, Welcome
from protocol.arena.records import Inbox, Outbox, outbox_bytes
from protocol.connector_errors import DescriptorRefused, PeerLost, TransferTimeout
from protocol.connectors import Traffic
from protocol.errors import ConfigError
from protocol.unix_listener import is_same_user

_MOST_CLAIMS = 1 << 20
"""The largest outbox that a producer may ask for, in claims."""


async def attach(
    path: str,
    name: str,
    *,
    on_arrival: Callable[[Arrival], None],
    on_lost: Callable[[Attachment], None],
    traffic: dict[str, Traffic] | None = None,
    copied_bytes: int = 0,
    timeout_s: float = 5.0,
) -> Attachment:
    """Attach to the arena that listens at `path`; `name` is this process's incarnation.

    What is taken is counted in `traffic`, by edge. Payloads of up to `copied_bytes` are
    copied when they are taken.
    Raises ConfigError without sealed memory, TransferTimeout, PeerLost when nobody
    listens or the producer goes, DescriptorRefused when it refuses or cannot be understood.
    """
    if (reason := memory.unavailable()) is not None:
        raise ConfigError(reason)
    # A map holds a file open until it is closed or collected, which may be much later.
    with contextlib.ExitStack() as opened:
        peer = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            peer.setblocking(False)
            async with asyncio.timeout(timeout_s):
                # A Unix socket connects at once, or not at all when too many are waiting there.
                peer.connect(path)
                if not is_same_user(peer):
                    raise DescriptorRefused(f"{path} belongs to a process of another user")
                prepare, fds = await _receive(peer)
                handshake.close_all(fds)
                if not isinstance(prepare, Prepare):
                    raise _refusal(prepare)
                if prepare.version != handshake.VERSION:
                    raise DescriptorRefused(f"the arena speaks version {prepare.version}")
                if not 0 < prepare.outbox_bytes <= outbox_bytes(_MOST_CLAIMS):
                    raise DescriptorRefused("the arena asks for an outbox that is too large")
                outbox_fd, outbox = memory.create("antiphon-outbox", prepare.outbox_bytes)
                opened.enter_context(outbox)
                try:
                    handshake.send(peer, Hello(handshake.VERSION, name), [outbox_fd])
                finally:
                    os.close(outbox_fd)
                welcome, fds = await _receive(peer)
            callbacks = (on_arrival, on_lost, {} if traffic is None else traffic, copied_bytes)
            attachment = _attached(peer, name, welcome, fds, outbox, callbacks)
        except TimeoutError:
            raise TransferTimeout(f"the arena at {path} did not answer in time") from None
        except OSError as error:
            raise PeerLost(f"no arena at {path}: {error}") from error
        opened.pop_all()
        return attachment


def _attached(
    peer: socket.socket,
    name: str,
    welcome: handshake.Message | None,
    fds: list[int],
    outbox: mmap.mmap,
    callbacks: tuple[
        Callable[[Arrival], None], Callable[[Attachment], None], dict[str, Traffic], int
    ],
) -> Attachment:
    with contextlib.ExitStack() as opened:
        opened.callback(handshake.close_all, fds)
        if not isinstance(welcome, Welcome) or len(fds) != 4:
            raise _refusal(welcome)
        arena = opened.enter_context(memory.attach(fds[0], welcome.arena_bytes))
        inbox = opened.enter_context(memory.attach(fds[1], welcome.outbox_bytes))
        woken_fd, wake_fd = fds[2:]
        attachment = Attachment(
            peer,
            name,
            welcome,
            arena,
            Outbox(outbox, wake_fd),
            Inbox(inbox, woken_fd),
            (wake_fd, woken_fd),
            *callbacks,
        )
        opened.pop_all()
    handshake.close_all(fds[:2])
    return attachment


async def _receive(peer: socket.socket) -> tuple[handshake.Message | None, list[int]]:
    """The next message of a handshake, waiting for it on the loop."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(peer.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(peer.fileno())
    return handshake.receive(peer)


def _refusal(message: handshake.Message | None) -> DescriptorRefused | PeerLost:
    if message is None:
        return PeerLost("the producer went during the greeting")
    if isinstance(message, Refusal):
        return DescriptorRefused(f"the arena refuses this consumer: {message.reason}")
    return DescriptorRefused("the arena's greeting cannot be understood")
