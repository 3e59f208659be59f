"""One response in the making: from the first text to the last word to the client.

The transcript runs at most one clause ahead of the speech, and the speech at most
`lead_ms` ahead of its play-out: an interruption always has something to stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from protocol.errors import ErrorInfo
from sessions.duplex.events import (
    AudioDelta,
    ClientOutput,
    ContentPartAdded,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputItemAdded,
    OutputItemDone,
    Part,
    PartDone,
    PartKind,
    Response,
    ResponseDone,
    ResponseProgress,
    ResponseStatus,
    Role,
    TextDelta,
)
from sessions.duplex.playback import Playback

OUTPUT_INDEX = 0
CONTENT_INDEX = 0


@dataclass
class _Audio:
    sequence: int
    clause: int
    pcm: bytes
    last: bool


@dataclass(frozen=True)
class Taken:
    """What `pump` has sent: clauses of which all audio went, and the last pieces gone.

    `text` and `audio` are sequence numbers of the stages that made them; 0 for none.
    """

    clauses: list[int]
    text: int
    audio: int


class Generation:
    """The state of one response.

    `insert_item` puts the output item into the conversation and returns the id
    before it; it is None for an out-of-band response.
    """

    def __init__(
        self,
        response: Response,
        lane: str,
        item_id: str,
        lead_ms: int,
        asked_at_ms: float,
        emit: Callable[[ClientOutput], None],
        insert_item: Callable[[Item], str | None] | None,
    ) -> None:
        self.response = response
        self.lane = lane
        self.turn: int | None = None
        self.playback = Playback()
        self.asked_at_ms = asked_at_ms
        self.first_text_at_ms: float | None = None
        self.first_audio_at_ms: float | None = None
        self.finish_reason: str | None = None
        self.timelines: dict[str, dict[str, float]] = {}
        self.synthesis_ms: float | None = None
        self.spoken = "audio" in response.output_modalities
        self._item_id = item_id
        self._lead_ms = lead_ms
        self._emit = emit
        self._insert_item = insert_item
        self._item: Item | None = None
        self._previous_id: str | None = None
        self._text = ""
        self._released = 0
        self._boundaries: list[int] = []
        self._audio: deque[_Audio] = deque()
        self._text_pieces: deque[tuple[int, int]] = deque()
        self._audible_clause = -1
        self._drained = False

    @property
    def item(self) -> Item | None:
        """The output item, once there is one."""
        return self._item

    def progress(self) -> ResponseProgress:
        """What the client was told of it so far."""
        text = None if self._item is None else self._item.parts[CONTENT_INDEX].text
        item_id = None if self._item is None else self._item_id
        return ResponseProgress(
            replace(self.response, output=[]), item_id, text or "", self.playback.sent_ms
        )

    @property
    def done(self) -> bool:
        """Whether `ResponseDone` has been said."""
        return self.response.status is not ResponseStatus.IN_PROGRESS

    def text(self, sequence: int, text: str, now_ms: float) -> None:
        """The reply goes on with `text`, the text stage's piece number `sequence`."""
        self._text += text
        self._text_pieces.append((sequence, len(self._text)))
        if self.first_text_at_ms is None and text:
            self.first_text_at_ms = now_ms

    def clause(self, text: str) -> None:
        """The next clause of the text is `text`."""
        start = self._boundaries[-1] if self._boundaries else 0
        self._boundaries.append(start + len(text))
        self.playback.clause(text)

    def audio(self, sequence: int, clause: int, pcm: bytes, last: bool) -> None:
        """The voice said `pcm` (PCM16, 24 kHz), its piece `sequence`; `last` ends the clause."""
        self._audio.append(_Audio(sequence, clause, pcm, last))

    def drained(self) -> None:
        """All stages have ended: when everything is sent, the response is complete."""
        self._drained = True

    def pump(self, now_ms: float, blocked: bool) -> Taken:
        """Send what may be sent now; what of it has been taken."""
        clauses: list[int] = []
        audio = 0
        if blocked or self.done:
            return Taken(clauses, 0, 0)
        self._release_text()
        while self._audio and self.playback.may_send_at_ms(self._lead_ms) <= now_ms:
            piece = self._audio.popleft()
            audio = piece.sequence
            if piece.pcm:
                self._start_item()
                self.playback.sent(piece.clause, len(piece.pcm) // 2, now_ms)
                if self.first_audio_at_ms is None:
                    self.first_audio_at_ms = now_ms
                self._emit(
                    AudioDelta(
                        self.response.id, self._item_id, OUTPUT_INDEX, CONTENT_INDEX, piece.pcm
                    )
                )
            self._audible_clause = max(self._audible_clause, piece.clause)
            self._release_text()
            if piece.last:
                clauses.append(piece.clause)
        text = 0
        while self._text_pieces and self._text_pieces[0][1] <= self._released:
            text, _ = self._text_pieces.popleft()
        return Taken(clauses, text, audio)

    def unsent(self) -> Taken:
        """What waits and never will be sent, as if it had been taken."""
        text = self._text_pieces[-1][0] if self._text_pieces else 0
        audio = self._audio[-1].sequence if self._audio else 0
        return Taken([], text, audio)

    def deadline(self) -> float | None:
        """When more audio may be sent."""
        return self.playback.may_send_at_ms(self._lead_ms) if self._audio else None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to make or to send."""
        return self._drained and not self._audio and self._released == len(self._text)

    def finish(
        self, status: ResponseStatus, reason: str | None = None, error: ErrorInfo | None = None
    ) -> None:
        """Say the closing events. What was not sent never will be."""
        self._audio.clear()
        self.response.status = status
        self.response.reason = reason
        self.response.error = error
        if self._item is not None:
            part = self._item.parts[CONTENT_INDEX]
            part.audio_ms = self.playback.sent_ms
            if self._item.status is ItemStatus.IN_PROGRESS:
                completed = status is ResponseStatus.COMPLETED
                self._item.status = ItemStatus.COMPLETED if completed else ItemStatus.INCOMPLETE
            self._emit(
                PartDone(
                    self.response.id, self._item_id, OUTPUT_INDEX, CONTENT_INDEX, replace(part)
                )
            )
            done = self._item.copy()
            self._emit(OutputItemDone(self.response.id, OUTPUT_INDEX, done))
            if self._insert_item is not None:
                self._emit(ItemDone(done, self._previous_id))
            self.response.output = [done]
        self._emit(ResponseDone(self.response))

    def _release_text(self) -> None:
        """Send the text that the speech has come near to: all of it in a text response."""
        end = len(self._text)
        following = self._audible_clause + 1
        if self.spoken and following < len(self._boundaries):
            end = self._boundaries[following]
        if end <= self._released:
            return
        self._start_item()
        assert self._item is not None
        delta = self._text[self._released : end]
        self._released = end
        part = self._item.parts[CONTENT_INDEX]
        part.text = (part.text or "") + delta
        self._emit(
            TextDelta(
                self.response.id, self._item_id, OUTPUT_INDEX, CONTENT_INDEX, part.kind, delta
            )
        )

    def _start_item(self) -> None:
        if self._item is not None:
            return
        kind = PartKind.OUTPUT_AUDIO if self.spoken else PartKind.OUTPUT_TEXT
        self._item = Item(self._item_id, Role.ASSISTANT, ItemStatus.IN_PROGRESS)
        # What is told is the item as it is added: it grows before the client can read it.
        added = replace(self._item, parts=[])
        self._emit(OutputItemAdded(self.response.id, OUTPUT_INDEX, added))
        if self._insert_item is not None:
            self._previous_id = self._insert_item(self._item)
            self._emit(ItemAdded(added, self._previous_id))
        part = Part(kind, "")
        self._item.parts.append(part)
        self._emit(
            ContentPartAdded(
                self.response.id, self._item_id, OUTPUT_INDEX, CONTENT_INDEX, replace(part)
            )
        )

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.response.status.value,
            self._text,
            self._released,
            tuple(self._boundaries),
            tuple((piece.clause, len(piece.pcm), piece.last) for piece in self._audio),
            self._audible_clause,
            self._drained,
        )
