"""One open link at one end: both channels of both directions, and the times."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.link_events import Action, Crowded, Deliver, LinkSettings, PeerStatus, Transmit
from protocol.link_frames import (
    Acknowledge,
    Address,
    Credit,
    Data,
    Frame,
    Heartbeat,
    Marks,
    encode_frame,
)
from protocol.stream import Batch, Inbox, Outbox


class OpenLink:
    """The streams and the times of one link; how it opens and ends is not its business."""

    def __init__(
        self, address: Address, peer: str, credit: Credit, settings: LinkSettings, now_ms: float
    ) -> None:
        self.address = address
        self.peer = peer
        self._settings = settings
        self._ordered_out = Outbox(settings.ordered)
        self._urgent_out = Outbox(settings.urgent)
        self._ordered_out.grant(credit)
        self._ordered_in = Inbox(settings.ordered)
        self._urgent_in = Inbox(settings.urgent)
        self._heard_ms = now_ms
        self.beat_ms = now_ms + settings.heartbeat_ms
        """When the next heartbeat is due."""
        self._acknowledge_ms: float | None = None
        self._unanswered = 0
        self._beat = 0
        self._peer_beat = 0
        self._crowded = False

    def send(self, message: bytes, urgent: bool, payload: bool) -> list[Action]:
        """Accept `message`. Raises CapacityExceeded when the queue is full."""
        (self._urgent_out if urgent else self._ordered_out).put(message, payload=payload)
        return self._crowding()

    def flush(self, now_ms: float) -> list[Action]:
        """Let go what the credit admits."""
        actions: list[Action] = []
        for urgent, outbox in ((True, self._urgent_out), (False, self._ordered_out)):
            while outbox.waits and (batch := outbox.take(now_ms)) is not None:
                actions.append(self._data(urgent, batch))
        actions += self._crowding()
        return actions

    def receive(self, frame: Data | Acknowledge | Heartbeat, now_ms: float) -> list[Action]:
        """Take in a frame of this very link."""
        self._heard_ms = now_ms
        actions: list[Action] = []
        for urgent, outbox, mark in (
            (True, self._urgent_out, frame.marks.urgent),
            (False, self._ordered_out, frame.marks.ordered),
        ):
            if outbox.unacknowledged:
                actions += self._datas(urgent, outbox.acknowledged(mark, now_ms))
        match frame:
            case Data():
                actions += self._receive_data(frame, now_ms)
            case Heartbeat() if frame.beat > self._peer_beat:
                self._peer_beat = frame.beat
                if frame.status:
                    actions.append(PeerStatus(self.peer, frame.status))
        if self._ordered_out.sendable or self._urgent_out.sendable:
            actions += self.flush(now_ms)
        return actions

    def heard(self, now_ms: float) -> None:
        """The peer has given a sign of life other than a frame of this link."""
        self._heard_ms = now_ms

    def tick(self, status: bytes, now_ms: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        actions += self._datas(True, self._urgent_out.overdue(now_ms))
        actions += self._datas(False, self._ordered_out.overdue(now_ms))
        if now_ms >= self.beat_ms:
            actions.append(self.beat(status, now_ms))
        if self._acknowledge_ms is not None and now_ms >= self._acknowledge_ms:
            actions.append(self._transmit(Acknowledge(self.address, self._marks())))
        return actions

    def beat(self, status: bytes, now_ms: float) -> Transmit:
        """A heartbeat, now."""
        self._beat += 1
        self.beat_ms = now_ms + self._settings.heartbeat_ms
        return self._transmit(Heartbeat(self.address, self._marks(), self._beat, status))

    def silent(self, now_ms: float) -> bool:
        """Whether the peer has said nothing for too long."""
        return now_ms >= self._heard_ms + self._settings.silence_ms

    @property
    def deadline_ms(self) -> float:
        """When `tick` or `silent` has something to say."""
        first_ms = min(self._heard_ms + self._settings.silence_ms, self.beat_ms)
        for other_ms in (
            self._acknowledge_ms,
            self._ordered_out.deadline_ms,
            self._urgent_out.deadline_ms,
        ):
            if other_ms is not None and other_ms < first_ms:
                first_ms = other_ms
        return first_ms

    @property
    def crowded(self) -> bool:
        """Whether what waits has passed its high mark and not come back to the low one."""
        return self._crowded

    @property
    def unacknowledged(self) -> int:
        """Messages that were accepted and not acknowledged."""
        return self._ordered_out.unacknowledged + self._urgent_out.unacknowledged

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            (self.address.gateway, self.address.worker, self.address.attempt),
            self._ordered_out.freeze(),
            self._urgent_out.freeze(),
            self._ordered_in.freeze(),
            self._urgent_in.freeze(),
            self._acknowledge_ms is not None,
        )

    def _crowding(self) -> list[Action]:
        """What changes for who makes payloads."""
        if self._ordered_out.crowded is self._crowded:
            return []
        self._crowded = self._ordered_out.crowded
        return [Crowded(self.peer, self._crowded)]

    def _receive_data(self, frame: Data, now_ms: float) -> list[Action]:
        inbox = self._urgent_in if frame.urgent else self._ordered_in
        ready = inbox.receive(frame.first, frame.messages)
        actions: list[Action] = [Deliver(self.peer, message) for message in ready]
        self._unanswered += len(ready)
        # A repeat or a gap means that the sender guesses: tell it at once what is here.
        telling = len(ready) < len(frame.messages) or inbox.has_gap
        if telling or self._unanswered >= self._settings.acknowledge_messages:
            actions.append(self._transmit(Acknowledge(self.address, self._marks())))
        elif self._acknowledge_ms is None:
            self._acknowledge_ms = now_ms + self._settings.acknowledge_ms
        return actions

    def _marks(self) -> Marks:
        self._acknowledge_ms = None
        self._unanswered = 0
        return Marks(self._ordered_in.mark, self._urgent_in.mark)

    def _data(self, urgent: bool, batch: Batch) -> Transmit:
        return self._transmit(
            Data(self.address, self._marks(), urgent, batch.first, batch.messages)
        )

    def _datas(self, urgent: bool, batches: Iterable[Batch]) -> list[Transmit]:
        return [self._data(urgent, batch) for batch in batches]

    def _transmit(self, frame: Frame) -> Transmit:
        return Transmit(self.peer, encode_frame(frame))
