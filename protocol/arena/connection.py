"""The producer's end of the connection with one consumer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from protocol.arena import handshake, memory
from protocol.arena.handshake import OwnMemory, Welcome
from protocol.arena.records import Inbox, Outbox, Record
from protocol.connector_errors import DescriptorRefused

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class SharedFile:
    """A file descriptor that several connections have yet to pass on."""

    fd: int
    users: int = 1

    def drop(self) -> None:
        """One user less; the last one closes it."""
        self.users -= 1
        if not self.users:
            os.close(self.fd)


class Connection:
    """Records and memories to one consumer, and its records back.

    `on_records(connection, records)` is called for what it writes, `on_refused(connection,
    error)` for what cannot be understood, and `on_end(connection)` once, when the consumer
    is gone, after all the records that it wrote.
    """

    def __init__(
        self,
        peer: socket.socket,
        name: str,
        outbox_fd: int,
        arena_fd: int,
        welcome: Welcome,
        *,
        on_records: Callable[[Connection, list[Record]], None],
        on_refused: Callable[[Connection, DescriptorRefused], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """Welcome the consumer. Raises DescriptorRefused, OSError; then nothing is left."""
        self.name = name
        self._socket = peer
        self._on_records = on_records
        self._on_refused = on_refused
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        # By slot: what its consumer has not been passed yet and has not given back either.
        self._unsent: dict[int, tuple[OwnMemory, SharedFile]] = {}
        self._closed = False
        inbox = memory.attach(outbox_fd, welcome.outbox_bytes)
        fds: list[int] = []
        try:
            fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            fd, outbox = memory.create("antiphon-outbox", welcome.outbox_bytes)
            fds.append(fd)
            handshake.send(peer, welcome, [arena_fd, fd, *fds[:2]])
        except OSError:
            handshake.close_all(fds)
            raise
        os.close(fds.pop())
        self._wake_fd, self._woken_fd = fds
        self.outbox = Outbox(outbox, self._wake_fd)
        self._inbox = Inbox(inbox, self._woken_fd)
        self._loop.add_reader(peer.fileno(), self._at_socket)
        self._loop.add_reader(self._woken_fd, self._woken)

    def lend(self, about: OwnMemory, file: SharedFile) -> None:
        """Pass a payload's own memory on, when the socket takes it."""
        file.users += 1
        self._unsent[about.slot] = about, file
        self._send_unsent()

    def take_back(self, slot: int) -> None:
        """The slot is free: memory of its payload that has not been passed on stays here."""
        if (unsent := self._unsent.pop(slot, None)) is not None:
            unsent[1].drop()

    def close(self) -> None:
        """End the connection without a word to the callbacks; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._loop.remove_reader(self._woken_fd)
        self._socket.close()
        self.outbox.close()
        self._inbox.close()
        handshake.close_all([self._wake_fd, self._woken_fd])
        for slot in list(self._unsent):
            self.take_back(slot)

    def _send_unsent(self) -> None:
        try:
            for slot, (about, file) in list(self._unsent.items()):
                handshake.send(self._socket, about, [file.fd])
                self.take_back(slot)
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._send_unsent)
            return
        except OSError as error:
            # Its end is about to be read from the socket. Where the system has too many
            # descriptors on their way, some have arrived when the consumer speaks again.
            _log.warning("arena_memory_not_passed", consumer=self.name, reason=str(error))
        self._loop.remove_writer(self._socket.fileno())

    def _woken(self) -> None:
        try:
            records = self._inbox.read()
        except DescriptorRefused as error:
            self._on_refused(self, error)
            return
        if records:
            self._on_records(self, records)
        if self._unsent:
            self._send_unsent()

    def _at_socket(self) -> None:
        try:
            message, fds = handshake.receive(self._socket)
        except BlockingIOError:
            return
        except DescriptorRefused as error:
            self._on_refused(self, error)
            return
        except OSError:
            message, fds = None, []
        handshake.close_all(fds)
        if message is not None:
            spoke = DescriptorRefused("a consumer says nothing after its greeting")
            self._on_refused(self, spoke)
            return
        self._woken()
        self.close()
        self._on_end(self)
