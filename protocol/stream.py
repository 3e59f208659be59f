"""One direction of one channel of the link: numbered messages, sent until acknowledged.

`Outbox` is the sending half, `Inbox` the receiving half. They know no peer, no frame
and no clock; `protocol.link` moves between them what the peer says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from protocol.errors import CapacityExceeded
from protocol.link_frames import Credit, Mark


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of one direction of one channel.

    `window_*`: what may be sent and not acknowledged, and what a receiver holds; a
    single message above `window_bytes` may travel alone. `queue_*`: what waits for
    the window, of which payloads may fill `payload_*`: the rest is for control. From
    `high_*` on the queue is crowded, until no more than `low_*` waits: who makes payloads
    is to wait meanwhile. `frame_*`: how much is put into one frame. `message_bytes`: the
    longest message.
    """

    window_messages: int = 1024
    window_bytes: int = 8 * 1024 * 1024
    queue_messages: int = 8192
    queue_bytes: int = 32 * 1024 * 1024
    payload_messages: int = 6144
    payload_bytes: int = 24 * 1024 * 1024
    high_messages: int = 2048
    high_bytes: int = 8 * 1024 * 1024
    low_messages: int = 512
    low_bytes: int = 2 * 1024 * 1024
    frame_messages: int = 256
    frame_bytes: int = 256 * 1024
    message_bytes: int = 16 * 1024 * 1024
    retransmit_ms: float = 250.0
    retransmit_ceiling_ms: float = 2000.0
    burst_bytes: int = 1024 * 1024
    gap_ms: float = 20.0

    @property
    def credit(self) -> Credit:
        """What this side grants its peer."""
        return Credit(self.window_messages, self.window_bytes)


@dataclass
class _Sent:
    sequence: int
    message: bytes
    sent_ms: float


@dataclass(frozen=True)
class Batch:
    """Messages of consecutive sequence numbers, to travel in one frame."""

    first: int
    messages: list[bytes]


class Outbox:
    """The sending half.

    A message waits in a bounded queue until the peer's credit lets it go, then it is
    kept until it is acknowledged. When the queue is full `put` raises, and nothing
    that was accepted before is lost. It is full for payloads before it is for control.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._credit = limits.credit
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._sent: deque[_Sent] = deque()
        self._sent_bytes = 0
        self._next = 1
        self._patience_ms = limits.retransmit_ms
        self.crowded = False
        """Whether the queue has reached its high mark and not yet fallen to its low one."""

    @property
    def waits(self) -> bool:
        """Whether a message was accepted and has not been sent."""
        return bool(self._waiting)

    @property
    def unacknowledged(self) -> int:
        """Messages that were accepted and not acknowledged."""
        return len(self._waiting) + len(self._sent)

    @property
    def sendable(self) -> bool:
        """Whether a waiting message may go now."""
        return bool(self._waiting) and self._admits(len(self._waiting[0]))

    def grant(self, credit: Credit) -> None:
        """The peer holds this much beyond what it has acknowledged."""
        self._credit = credit

    def put(self, message: bytes, *, payload: bool = False) -> None:
        """Accept `message` for sending; `payload` says that it is not control.

        Raises CapacityExceeded when the queue is full and ValueError when the
        message is longer than any may be.
        """
        limits = self._limits
        size = len(message)
        if size > limits.message_bytes:
            raise ValueError(f"a message of {size} bytes is above {limits.message_bytes}")
        most_messages, most_bytes = limits.queue_messages, limits.queue_bytes
        if payload:
            most_messages = min(most_messages, limits.payload_messages)
            most_bytes = min(most_bytes, limits.payload_bytes)
        if len(self._waiting) >= most_messages or self._waiting_bytes + size > most_bytes:
            raise CapacityExceeded("the peer does not keep up: the queue to it is full")
        self._waiting.append(message)
        self._waiting_bytes += size
        if len(self._waiting) >= limits.high_messages or self._waiting_bytes >= limits.high_bytes:
            self.crowded = True

    def take(self, now_ms: float) -> Batch | None:
        """The next batch that may be sent for the first time, None if there is none."""
        limits = self._limits
        messages: list[bytes] = []
        total = 0
        while self._waiting and len(messages) < limits.frame_messages:
            message = self._waiting[0]
            size = len(message)
            if messages and total + size > limits.frame_bytes:
                break
            if not self._admits(size):
                break
            self._waiting.popleft()
            self._waiting_bytes -= size
            self._sent_bytes += size
            self._sent.append(_Sent(self._next, message, now_ms))
            self._next += 1
            messages.append(message)
            total += size
        if not messages:
            return None
        if len(self._waiting) <= limits.low_messages and self._waiting_bytes <= limits.low_bytes:
            self.crowded = False
        return Batch(self._next - len(messages), messages)

    def acknowledged(self, mark: Mark, now_ms: float) -> list[Batch]:
        """The peer has everything through `mark.through`; what to send again at once.

        A mark above what was sent is impossible and ignored.
        """
        if mark.through >= self._next:
            return []
        sent = self._sent
        progress = False
        while sent and sent[0].sequence <= mark.through:
            self._sent_bytes -= len(sent.popleft().message)
            progress = True
        if progress:
            self._patience_ms = self._limits.retransmit_ms
        if mark.held <= mark.through + 1 or mark.held >= self._next:
            return []
        return self._again(mark.held, now_ms, self._limits.gap_ms)

    def overdue(self, now_ms: float) -> list[Batch]:
        """What was sent so long ago that it is sent again; doubles the patience."""
        deadline_ms = self.deadline_ms
        if deadline_ms is None or now_ms < deadline_ms:
            return []
        batches = self._again(self._next, now_ms, self._patience_ms)
        self._patience_ms = min(self._patience_ms * 2, self._limits.retransmit_ceiling_ms)
        return batches

    @property
    def deadline_ms(self) -> float | None:
        """When `overdue` has something to say."""
        if not self._sent:
            return None
        return self._sent[0].sent_ms + self._patience_ms

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self._next,
            tuple((item.sequence, item.message) for item in self._sent),
            tuple(self._waiting),
            self.crowded,
        )

    def _admits(self, size: int) -> bool:
        if not self._sent:
            return True
        credit = self._credit
        return len(self._sent) < credit.messages and self._sent_bytes + size <= credit.bytes

    def _again(self, below: int, now_ms: float, age_ms: float) -> list[Batch]:
        limits = self._limits
        batches: list[Batch] = []
        open_batch: list[bytes] = []
        first = total = burst = 0
        for item in self._sent:
            size = len(item.message)
            if item.sequence >= below or (burst and burst + size > limits.burst_bytes):
                break
            if item.sent_ms + age_ms > now_ms:
                continue
            item.sent_ms = now_ms
            burst += size
            full = len(open_batch) >= limits.frame_messages or total + size > limits.frame_bytes
            if open_batch and (item.sequence != first + len(open_batch) or full):
                batches.append(Batch(first, open_batch))
                open_batch = []
            if not open_batch:
                first, total = item.sequence, 0
            open_batch.append(item.message)
            total += size
        if open_batch:
            batches.append(Batch(first, open_batch))
        return batches


class Inbox:
    """The receiving half: gives messages out once and in order.

    What arrives ahead of a gap is held, within the credit granted; what does not fit
    is dropped and comes again.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._through = 0
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self.duplicates = 0
        self.dropped = 0

    @property
    def mark(self) -> Mark:
        """What has arrived."""
        return Mark(self._through, min(self._held) if self._held else 0)

    @property
    def has_gap(self) -> bool:
        """Whether something is held beyond a gap."""
        return bool(self._held)

    def receive(self, first: int, messages: list[bytes]) -> list[bytes]:
        """The messages that are now in order, from those numbered from `first` on."""
        if first == self._through + 1 and not self._held:
            self._through += len(messages)
            return messages
        ready: list[bytes] = []
        for sequence, message in enumerate(messages, first):
            if sequence == self._through + 1:
                ready.append(message)
                self._through = sequence
                self._release(ready)
            elif sequence <= self._through or sequence in self._held:
                self.duplicates += 1
            elif (
                sequence <= self._through + self._limits.window_messages
                and self._held_bytes + len(message) <= self._limits.window_bytes
            ):
                self._held[sequence] = message
                self._held_bytes += len(message)
            else:
                self.dropped += 1
        return ready

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (self._through, tuple(sorted(self._held.items())))

    def _release(self, ready: list[bytes]) -> None:
        """Move what is held and now in order to `ready`; a late copy of it is dropped."""
        while (message := self._held.pop(self._through + 1, None)) is not None:
            self._held_bytes -= len(message)
            self._through += 1
            ready.append(message)
