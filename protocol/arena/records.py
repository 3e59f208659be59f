"""What the two ends of an arena write for each other.

Each connection has two outboxes, rings of fixed records in memory that one end writes
and the other only reads. Writing a record makes no system call; one write to an eventfd
then says how many there are. The reader reads as many as the eventfd counted, so no
position is shared and no memory order is relied upon beyond the kernel's.

The rings cannot overflow. A consumer has a bounded number of claims and unanswered
abandons; each stands for at most one record on its way there and one back.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct

from protocol.connector_errors import DescriptorRefused

RECORD = struct.Struct("<IIQQQ")
_RECORD_BYTES = RECORD.size
_pack_into = RECORD.pack_into

OFFER = 1
"""From the producer: a payload is there."""
ABANDON = 2
"""From the producer: it takes the payload back."""
RELEASE = 3
"""From the consumer: it needs the payload no longer."""
ABANDON_SEEN = 4
"""From the consumer: it has seen one ABANDON."""

Record = tuple[int, int, int, int, int]
"""One record: kind, slot, generation, offset, key."""

GIANT = 2**64 - 1
"""The offset of a payload with memory of its own."""


def outbox_bytes(claims: int) -> int:
    """The size of an outbox for a consumer with at most `claims` claims."""
    return 2 * claims * RECORD.size


class Outbox:
    """The writing end of a ring of records, used on the running loop.

    What is told first in a turn of the loop wakes the reader at once, what is told beside
    it wakes it once more at the end of the turn. For a release it is woken only then: nobody
    waits for each. After `close` nothing is told.
    """

    def __init__(self, memory: mmap.mmap, wake_fd: int) -> None:
        self._memory = memory
        self._size = len(memory)
        self._wake_fd = wake_fd
        self._position = 0
        self._unsaid = 0
        self._end_due = False
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def tell(self, kind: int, slot: int, generation: int, offset: int, key: int) -> None:
        """Write a record and wake the reader."""
        if self._closed:
            return
        position = self._position
        _pack_into(self._memory, position, kind, slot, generation, offset, key)
        position += _RECORD_BYTES
        self._position = position if position != self._size else 0
        if self._end_due or kind == RELEASE:
            self._unsaid += 1
        else:
            os.eventfd_write(self._wake_fd, 1)
        if not self._end_due:
            self._end_due = True
            self._loop.call_soon(self._end_of_turn)

    def flush(self) -> None:
        """Wake the reader now for what it has not been woken for."""
        if self._unsaid and not self._closed:
            unsaid, self._unsaid = self._unsaid, 0
            os.eventfd_write(self._wake_fd, unsaid)

    def close(self) -> None:
        """Unmap the ring. Idempotent."""
        self._closed = True
        self._memory.close()

    def _end_of_turn(self) -> None:
        self._end_due = False
        self.flush()


class Inbox:
    """The reading end of a ring of records."""

    def __init__(self, memory: mmap.mmap, wake_fd: int) -> None:
        self._memory = memory
        self._size = len(memory)
        self._wake_fd = wake_fd
        self._position = 0

    def read(self) -> list[Record]:
        """The records that the writer has flushed since the last time; none without any.

        Raises DescriptorRefused when the writer claims more than the ring holds.
        """
        try:
            count = os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        if count * RECORD.size > self._size:
            raise DescriptorRefused("the peer counts more records than there can be")
        begin = self._position
        end = begin + count * _RECORD_BYTES
        written = self._memory[begin:end]
        if end >= self._size:
            end -= self._size
            written += self._memory[:end]
        self._position = end
        return list(RECORD.iter_unpack(written))

    def close(self) -> None:
        """Unmap the ring."""
        self._memory.close()
