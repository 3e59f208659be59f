"""What the two ends say over the Unix socket, and how file descriptors travel with it.

The socket keeps message boundaries (SOCK_SEQPACKET). A consumer introduces itself and
passes its outbox; the producer passes the arena, its outbox and the two eventfds. After
that only payloads with memory of their own are passed. The end of the socket is the end
of the peer.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.connector_errors import DescriptorRefused

VERSION = 2
"""Of all that the two ends share: these messages, `records`, and how payloads lie in memory
(`content`). Whoever changes one of them counts on; an end of another version is refused."""

_MESSAGE_BYTES = 4096
_MOST_FDS = 4


_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Slots = Annotated[int, Meta(ge=1, le=2**31)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """From the consumer, with its outbox. `name` is its incarnation."""

    version: int
    name: _Name


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """From the producer, with arena, outbox, the consumer's eventfd and its own."""

    name: _Name
    arena: int
    arena_bytes: _Bytes
    outbox_bytes: _Bytes
    slots: _Slots


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """The producer's first word: how large an outbox the consumer brings."""

    version: int
    outbox_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The producer does not take this consumer; the socket ends."""

    reason: str


class OwnMemory(msgspec.Struct, frozen=True, tag="own_memory"):
    """From the producer, with the memory of one payload."""

    slot: int
    generation: int
    size_bytes: _Bytes


Message = Prepare | Hello | Welcome | Refusal | OwnMemory

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(peer: socket.socket, message: Message, fds: list[int]) -> None:
    """Send without waiting. Raises BlockingIOError when the socket is full, OSError."""
    socket.send_fds(peer, [_encoder.encode(message)], fds)


def receive(peer: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and the file descriptors with it; None at the end of the socket.

    The descriptors are the caller's to close; those for which this process had no room
    are not among them. Raises BlockingIOError when there is no message yet, OSError,
    DescriptorRefused for what is none.
    """
    data, fds, flags, _ = socket.recv_fds(peer, _MESSAGE_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        close_all(fds)
        return None, []
    try:
        if flags & socket.MSG_TRUNC:
            raise DescriptorRefused("a message on the arena's socket is too long")
        return _decoder.decode(data), fds
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        close_all(fds)
        raise DescriptorRefused("a message on the arena's socket cannot be read") from error
    except BaseException:
        close_all(fds)
        raise


def close_all(fds: list[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)
