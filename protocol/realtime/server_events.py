"""What a Realtime server says, and how it becomes frames.

Optional members are left out, not null, except where the protocol gives null a
meaning. Times are whole milliseconds. `EventWriter` gives every event its id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pybase64
from msgspec import UNSET, UnsetType

from protocol.realtime.audio import split_pcm

Json = dict[str, Any]


class Format(msgspec.Struct, frozen=True):
    """An audio format."""

    type: str = "audio/pcm"
    rate: int = 24_000


class ContentOut(msgspec.Struct, frozen=True):
    """A content part of an item.

    A user's audio part always carries `transcript`, null until it is known.
    """

    type: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: str | UnsetType = UNSET
    transcript: str | UnsetType | None = UNSET
    audio: str | UnsetType = UNSET


class ItemOut(msgspec.Struct, frozen=True):
    """A message item."""

    id: str
    role: str
    status: str
    content: list[ContentOut]
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"


class PartOut(msgspec.Struct, frozen=True):
    """A content part in `response.content_part.*`, where its type has a shorter name."""

    type: Literal["text", "audio"]
    text: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class CachedTokens(msgspec.Struct, frozen=True):
    """Which of the input tokens were resident."""

    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0


class InputTokens(msgspec.Struct, frozen=True):
    """What a response read."""

    text_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokens
    audio_tokens: int = 0
    image_tokens: int = 0


class OutputTokens(msgspec.Struct, frozen=True):
    """What a response wrote."""

    text_tokens: int
    audio_tokens: int = 0


class UsageOut(msgspec.Struct, frozen=True):
    """The tokens of a response."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokens
    output_token_details: OutputTokens


class StatusError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    type: str
    code: str
    message: str


class StatusDetails(msgspec.Struct, frozen=True):
    """Why a response did not complete."""

    type: Literal["cancelled", "incomplete", "failed"]
    reason: str | UnsetType = UNSET
    error: StatusError | UnsetType = UNSET


class ResponseOutput(msgspec.Struct, frozen=True):
    """How a response is spoken."""

    voice: str
    format: Format = Format()


class ResponseAudio(msgspec.Struct, frozen=True):
    """The audio of a response."""

    output: ResponseOutput


class ResponseOut(msgspec.Struct, frozen=True):
    """A response; `conversation_id` is null when it is out-of-band."""

    id: str
    status: str
    status_details: StatusDetails | None
    output: list[ItemOut]
    conversation_id: str | None
    output_modalities: tuple[str, ...]
    max_output_tokens: int | Literal["inf"]
    audio: ResponseAudio
    usage: UsageOut | None
    metadata: dict[str, str] | None
    object: Literal["realtime.response"] = "realtime.response"


class ErrorOut(msgspec.Struct, frozen=True):
    """What went wrong; `event_id` is the client's id of the event that caused it."""

    type: str
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


class DurationUsage(msgspec.Struct, frozen=True):
    """The length of audio that was transcribed."""

    seconds: float
    type: Literal["duration"] = "duration"


class ServerEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """Any event; `EventWriter` fills `event_id`."""

    event_id: str = ""


class SessionCreated(ServerEvent, tag="session.created"):
    """The first event of a connection."""

    session: Json


class SessionUpdated(ServerEvent, tag="session.updated"):
    """A `session.update` was carried out."""

    session: Json


class ErrorEvent(ServerEvent, tag="error"):
    """Something went wrong; the connection stays open unless it closes next."""

    error: ErrorOut


class SpeechStarted(ServerEvent, tag="input_audio_buffer.speech_started"):
    """The user began to speak."""

    item_id: str
    audio_start_ms: int


class SpeechStopped(ServerEvent, tag="input_audio_buffer.speech_stopped"):
    """The user stopped speaking."""

    item_id: str
    audio_end_ms: int


class InputCommitted(ServerEvent, tag="input_audio_buffer.committed"):
    """The buffered audio became an item."""

    item_id: str
    previous_item_id: str | None


class InputCleared(ServerEvent, tag="input_audio_buffer.cleared"):
    """The buffered audio is gone."""


class TranscriptionCompleted(
    ServerEvent, tag="conversation.item.input_audio_transcription.completed"
):
    """What the user said."""

    item_id: str
    content_index: int
    transcript: str
    usage: DurationUsage


class TranscriptionFailed(ServerEvent, tag="conversation.item.input_audio_transcription.failed"):
    """Why it is not known what the user said."""

    item_id: str
    content_index: int
    error: Json


class ItemAdded(ServerEvent, tag="conversation.item.added"):
    """An item entered the conversation."""

    item: ItemOut
    previous_item_id: str | None


class ItemDone(ServerEvent, tag="conversation.item.done"):
    """An item is complete."""

    item: ItemOut
    previous_item_id: str | None


class ItemRetrieved(ServerEvent, tag="conversation.item.retrieved"):
    """An item, as it was asked for."""

    item: ItemOut


class ItemDeleted(ServerEvent, tag="conversation.item.deleted"):
    """An item left the conversation."""

    item_id: str


class ItemTruncated(ServerEvent, tag="conversation.item.truncated"):
    """An item was cut to what had been heard."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ResponseCreated(ServerEvent, tag="response.created"):
    """A response began."""

    response: ResponseOut


class ResponseDone(ServerEvent, tag="response.done"):
    """A response ended, on whatever path."""

    response: ResponseOut


class OutputItemAdded(ServerEvent, tag="response.output_item.added"):
    """A response has a new item."""

    response_id: str
    output_index: int
    item: ItemOut


class OutputItemDone(ServerEvent, tag="response.output_item.done"):
    """An item of a response is complete."""

    response_id: str
    output_index: int
    item: ItemOut


class PartEvent(ServerEvent):
    """What names a content part of a response."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int


class ContentPartAdded(PartEvent, tag="response.content_part.added"):
    """An item has a new, empty part."""

    part: PartOut


class ContentPartDone(PartEvent, tag="response.content_part.done"):
    """A part is complete."""

    part: PartOut


class TextDelta(PartEvent, tag="response.output_text.delta"):
    """More text."""

    delta: str


class TextDone(PartEvent, tag="response.output_text.done"):
    """All of the text."""

    text: str


class TranscriptDelta(PartEvent, tag="response.output_audio_transcript.delta"):
    """More of what the audio says."""

    delta: str


class TranscriptDone(PartEvent, tag="response.output_audio_transcript.done"):
    """All of what the audio says."""

    transcript: str


class AudioDone(PartEvent, tag="response.output_audio.done"):
    """No more audio of this part follows."""


_encoder = msgspec.json.Encoder()


class EventWriter:
    """Encodes the events of one connection, each with an id that is never repeated.

    `prefix` makes the ids of connections differ; it is the caller's randomness.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"event_{prefix}_"
        self._count = 0
        self._part: tuple[str, str, int, int] | None = None
        self._head = ""

    def write(self, event: ServerEvent) -> str:
        """The frame of an event, compact JSON."""
        self._count += 1
        event.event_id = f"{self._prefix}{self._count:x}"
        return _encoder.encode(event).decode()

    def write_audio(
        self, response_id: str, item_id: str, output_index: int, content_index: int, pcm: bytes
    ) -> list[str]:
        """The frames of `response.output_audio.delta` for PCM16 audio, 24 kHz, mono.

        Each holds at most 200 ms. The parts that stay the same are encoded once a
        content part, since these are most of what a server sends.
        """
        part = (response_id, item_id, output_index, content_index)
        if part != self._part:
            self._part = part
            ids = _encoder.encode(
                {
                    "type": "response.output_audio.delta",
                    "response_id": response_id,
                    "item_id": item_id,
                    "output_index": output_index,
                    "content_index": content_index,
                }
            ).decode()
            self._head = f'{ids[:-1]},"event_id":"{self._prefix}'
        frames = []
        for piece in split_pcm(pcm):
            self._count += 1
            encoded = pybase64.b64encode_as_string(piece)
            frames.append(f'{self._head}{self._count:x}","delta":"{encoded}"}}')
        return frames
