"""The input side of a duplex session: the audio clock, the buffer, what is being heard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.errors import CapacityExceeded, ErrorInfo, InvalidRequest, SessionStateLost
from protocol.messages import StageEvent
from protocol.payloads import Payload, audio_payload
from sessions.client import Refused
from sessions.duplex.context import DuplexContext
from sessions.duplex.events import (
    InputCleared,
    InputCommitted,
    InputTranscribed,
    InputTranscriptionFailed,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemStatus,
    Part,
    PartKind,
    Role,
    SpeechStarted,
    SpeechStopped,
)
from sessions.duplex.replies import Replies
from sessions.duplex.settings import INPUT_RATE_HZ
from sessions.flow import FlowEnded, Produced
from sessions.lanes import INPUT_LANE

MAX_HEARINGS = 8
"""Items whose transcripts may be under way at once."""
MINIMUM_COMMIT_MS = 100
"""A commit of less audio than this is refused as empty."""


@dataclass
class _Hearing:
    """An item whose transcript is being made; `answer`: a response follows by itself. Its audio
    is with the worker (`buffered`), or goes there with the turn."""

    item_id: str
    content_index: int
    answer: bool
    buffered: bool = False


class Input:
    """Turns the user's audio into items. Times of audio are ms received since open."""

    def __init__(self, context: DuplexContext, replies: Replies) -> None:
        self._context = context
        self._replies = replies
        self._samples = 0
        self._start_ms = 0
        self._speaking: str | None = None
        self._speech_start_ms = 0
        self._hearings: dict[int, _Hearing] = {}
        self._unheard_samples = 0
        """Audio that no worker has taken, and of which the client has not been told."""

    @property
    def clock_ms(self) -> int:
        """The end of the audio received so far."""
        return self._samples * 1000 // INPUT_RATE_HZ

    @property
    def speaking(self) -> bool:
        """Whether the user is in the middle of an utterance."""
        return self._speaking is not None

    @property
    def speaking_item(self) -> str | None:
        """The id of the item that the user is saying."""
        return self._speaking

    @property
    def hearing(self) -> bool:
        """Whether transcripts are under way, so that a response must wait for them."""
        return bool(self._hearings)

    def stage_settings(self) -> dict[str, Any]:
        """The settings with which the hearing stage opens its part of the session."""
        audio = self._context.settings.audio.input
        detection = audio.turn_detection
        return {
            "input_rate_hz": INPUT_RATE_HZ,
            "clock_ms": self.clock_ms,
            "turn_detection": None
            if detection is None
            else {
                "threshold": detection.threshold,
                "prefix_padding_ms": detection.prefix_padding_ms,
                "silence_duration_ms": detection.silence_duration_ms,
                "minimum_speech_ms": detection.minimum_speech_ms,
            },
            "language": audio.transcription.language if audio.transcription else None,
        }

    # Verbs

    def append(self, pcm: bytes) -> None:
        """More audio. Without turn detection it counts as progress of the session."""
        context = self._context
        self._samples += len(pcm) // 2
        if not context.bindings[context.roles.hear].update(audio_payload(pcm, INPUT_RATE_HZ)):
            self._start_ms = self.clock_ms
            self._unheard_samples += len(pcm) // 2
        elif context.settings.audio.input.turn_detection is None:
            context.progress()

    def commit(self) -> str:
        """The client says that the buffer is one message; its item's id.

        Raises InvalidRequest when the buffer is empty.
        """
        buffered_ms = self.clock_ms - self._start_ms
        if buffered_ms < MINIMUM_COMMIT_MS:
            raise InvalidRequest(
                f"the buffer holds {buffered_ms} ms of audio; a commit needs {MINIMUM_COMMIT_MS}",
                code="input_audio_buffer_commit_empty",
            )
        self.check_room()
        context = self._context
        end_ms = self.clock_ms
        context.bindings[context.roles.hear].signal("cut", {"end_ms": end_ms})
        detection = context.settings.audio.input.turn_detection
        answer = detection is not None and detection.create_response
        item_id = self._speaking or context.new_id("item")
        self._committed(item_id, self._start_ms, end_ms, answer)
        return item_id

    def clear(self) -> None:
        """Throw the buffer away."""
        self._drop_buffer()
        self._context.emit(InputCleared())

    def reset(self) -> None:
        """Throw the buffer away, and the transcripts that are under way."""
        self._drop_buffer()
        self._context.orchestrator.cancel(INPUT_LANE)
        self._hearings.clear()

    def hear_item(self, item: Item, content_index: int, pcm: bytes) -> None:
        """Transcribe audio that the client put into an item itself."""
        hearing = _Hearing(item.id, content_index, answer=False)
        self._hear(hearing, {}, [audio_payload(pcm, INPUT_RATE_HZ)])

    def reconfigured(self) -> None:
        """Turn detection was changed: what was being said is in the buffer, not a turn."""
        if self._context.settings.audio.input.turn_detection is None:
            self._speaking = None
            self._no_words()

    def check_room(self) -> None:
        """Raise CapacityExceeded when no further transcript can be begun now."""
        if len(self._hearings) >= MAX_HEARINGS:
            raise CapacityExceeded(
                f"{MAX_HEARINGS} transcripts are under way", code="rate_limit_exceeded"
            )

    # What the hearing stage says

    def stage_event(self, event: StageEvent) -> None:
        """The stage noticed speech or silence."""
        context = self._context
        detection = context.settings.audio.input.turn_detection
        match event.name:
            case "speech_started" if detection is not None:
                context.progress()
                self._speaking = context.new_id("item")
                self._speech_start_ms = int(event.arguments["audio_start_ms"])
                context.emit(SpeechStarted(self._speaking, self._speech_start_ms))
                if detection.interrupt_response and detection.interrupt_on == "words":
                    self._replies.hold()
                elif detection.interrupt_response:
                    self._replies.interrupt_current("turn_detected")
            case "speech_stopped" if detection is not None and self._speaking is not None:
                context.progress()
                start_ms = int(event.arguments["audio_start_ms"])
                end_ms = int(event.arguments["audio_end_ms"])
                item_id = self._speaking
                context.emit(SpeechStopped(item_id, end_ms))
                self._committed(item_id, start_ms, end_ms, detection.create_response)
            case "input_lost" | "input_failed":
                lost = SessionStateLost(
                    str(event.arguments.get("message", "a stretch of the input audio was lost")),
                    code="input_audio_lost",
                )
                context.emit(Refused(lost.info(), None))
            case "input_dropped":
                lost_ms = int(event.arguments["ms"])
                error = CapacityExceeded(
                    f"the input buffer is full: its oldest {lost_ms} ms were dropped",
                    code="input_audio_buffer_overflow",
                )
                self._start_ms = min(self.clock_ms, self._start_ms + lost_ms)
                context.emit(Refused(error.info(), None))

    def produced(self, event: Produced) -> bool:
        """A piece of a transcript; False when the turn is not one of ours."""
        hearing = self._hearings.get(event.turn)
        if hearing is None:
            return False
        part = self._part(hearing)
        if part is not None:
            part.text = (part.text or "") + bytes(event.payload.data).decode()
        self._context.orchestrator.acknowledge(event.turn, event.stage, event.sequence)
        return True

    def ended(self, event: FlowEnded) -> bool:
        """The end of a transcript; False when the turn is not one of ours."""
        hearing = self._hearings.pop(event.turn, None)
        if hearing is None:
            return False
        if event.error is not None:
            self._not_heard(hearing, event.error)
        else:
            self._heard(hearing)
        if not self._hearings:
            self._replies.think_waiting()
        return True

    def lost(self, unapplied_bytes: int) -> None:
        """The worker that held the audio is gone: say what of it is lost.

        What it had not applied may have been speech that it never noticed.
        """
        context = self._context
        error = SessionStateLost("the worker that held the input audio was lost").info()
        detection = context.settings.audio.input.turn_detection
        end_ms = self.clock_ms
        buffered_ms = end_ms - self._start_ms
        if self._speaking is not None:
            item_id, start_ms = self._speaking, self._speech_start_ms
            context.emit(SpeechStopped(item_id, end_ms))
            self._insert(item_id, max(0, end_ms - start_ms))
            self._cut(end_ms)
            answer = detection is not None and detection.create_response
            self._not_heard(_Hearing(item_id, 0, answer), error)
        elif detection is None and buffered_ms >= MINIMUM_COMMIT_MS:
            context.emit(Refused(error, None))
            context.emit(InputCleared())
        else:
            self._unheard_samples += unapplied_bytes // 2
        self._cut(end_ms)
        hear = context.bindings[context.roles.hear]
        for turn, hearing in list(self._hearings.items()):
            # It waited for a worker that had been sent its audio already: the next has not.
            if hearing.buffered and hear.waits(turn):
                context.orchestrator.fail(turn, error)

    def found(self) -> None:
        """A new worker hears from now on: say what came before it did."""
        unheard_ms = self._unheard_samples * 1000 // INPUT_RATE_HZ
        self._unheard_samples = 0
        if unheard_ms:
            error = SessionStateLost(
                f"{unheard_ms} ms of audio came while no worker heard them",
                code="input_audio_lost",
            )
            self._context.emit(Refused(error.info(), None))

    # Items

    def _committed(self, item_id: str, start_ms: int, end_ms: int, answer: bool) -> None:
        self._cut(end_ms)
        self._insert(item_id, end_ms - start_ms)
        hearing = _Hearing(item_id, 0, answer, buffered=True)
        self._hear(hearing, {"start_ms": start_ms, "end_ms": end_ms}, [])

    def _drop_buffer(self) -> None:
        context = self._context
        context.bindings[context.roles.hear].signal("clear", {})
        self._cut(self.clock_ms)
        self._no_words()

    def _cut(self, end_ms: int) -> None:
        """Audio up to `end_ms` belongs to no later commit."""
        self._start_ms = max(self._start_ms, end_ms)
        self._speaking = None

    def _insert(self, item_id: str, audio_ms: int) -> None:
        context = self._context
        part = Part(PartKind.INPUT_AUDIO, None, audio_ms)
        item = Item(item_id, Role.USER, ItemStatus.COMPLETED, [part])
        context.emit(InputCommitted(item_id, context.conversation.last_id))
        previous = context.conversation.insert(item)
        context.emit(ItemAdded(item.copy(), previous))
        context.emit(ItemDone(item.copy(), previous))
        for dropped in context.conversation.shrink():
            context.emit(ItemDeleted(dropped))

    def _hear(self, hearing: _Hearing, parameters: dict[str, Any], inputs: list[Payload]) -> None:
        context = self._context
        hear = context.roles.hear
        self._replies.user_turn_ended()
        try:
            self.check_room()
            turn = context.orchestrator.start(
                INPUT_LANE, hear, frozenset(), inputs, {hear: parameters}, context.now_ms
            )
        except CapacityExceeded as error:
            self._not_heard(hearing, error.info())
            return
        self._hearings[turn] = hearing

    def _heard(self, hearing: _Hearing) -> None:
        context = self._context
        part = self._part(hearing)
        text = ""
        if part is not None:
            part.text = text = (part.text or "").strip()
            if context.settings.audio.input.transcription is not None:
                audio_s = part.audio_ms / 1000
                context.emit(
                    InputTranscribed(hearing.item_id, hearing.content_index, text, audio_s)
                )
        if text:
            self._replies.words_came()
            if hearing.answer:
                self._replies.answer(user_speaks=self.speaking)
        else:
            self._no_words()

    def _not_heard(self, hearing: _Hearing, error: ErrorInfo) -> None:
        """There will be no transcript, and no answer to what was not understood."""
        if (part := self._part(hearing)) is not None:
            part.text = None  # What came of it before it failed is no transcript.
        if self._context.settings.audio.input.transcription is not None:
            self._context.emit(
                InputTranscriptionFailed(hearing.item_id, hearing.content_index, error)
            )
        self._replies.unheard(error, answer=hearing.answer)
        self._no_words()

    def _no_words(self) -> None:
        """What was taken for speech had no words: a reply that waits for them goes on."""
        if not self.speaking and not self._hearings:
            self._replies.let_go()

    def _part(self, hearing: _Hearing) -> Part | None:
        """The part that the transcript is for, unless its item was deleted meanwhile."""
        item = self._context.conversation.find(hearing.item_id)
        return None if item is None else item.parts[hearing.content_index]

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        hearings = tuple((turn, h.item_id, h.answer) for turn, h in sorted(self._hearings.items()))
        return (
            self._samples,
            self._unheard_samples,
            self._start_ms,
            self._speaking,
            self._speech_start_ms,
            hearings,
        )
