"""What goes into and comes out of a duplex session, free of any wire format.

A surface translates its protocol to the verbs below and the outputs back; it
owns no conversation state of its own. `ref` is whatever the client wants echoed
in the refusal of a verb (the Realtime `event_id`); it has no other meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from protocol.errors import ErrorInfo
from sessions.client import SessionOutput

FRONT = "root"
"""`CreateItem.after` for the front of the conversation."""


class Role(StrEnum):
    """Who said a message item."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class PartKind(StrEnum):
    """What a content part of an item is."""

    INPUT_TEXT = "input_text"
    INPUT_AUDIO = "input_audio"
    OUTPUT_TEXT = "output_text"
    OUTPUT_AUDIO = "output_audio"


class ItemStatus(StrEnum):
    """How far an item has come."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class ResponseStatus(StrEnum):
    """How far a response has come."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


@dataclass
class Part:
    """One content part. `text` is the text, or the transcript of an audio part.

    An input_audio part has `text` None until its transcript is known. `audio` is
    set only on a part that a client hands in (PCM16, 24 kHz, mono).
    """

    kind: PartKind
    text: str | None = None
    audio_ms: int = 0
    audio: bytes | None = None


@dataclass
class Item:
    """A message of the conversation."""

    id: str
    role: Role
    status: ItemStatus
    parts: list[Part] = field(default_factory=list)

    def copy(self) -> Item:
        """The item as it is now: what is told does not change any more."""
        return replace(self, parts=[replace(part) for part in self.parts])


@dataclass(frozen=True)
class Usage:
    """Tokens of a response as the AR engine counted them.

    `input_tokens` includes the `cached_tokens` that were resident and not read again.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass
class Response:
    """One response; `conversation` is None for an out-of-band one."""

    id: str
    status: ResponseStatus
    conversation: str | None
    output_modalities: tuple[str, ...]
    voice: str
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    output: list[Item] = field(default_factory=list)
    reason: str | None = None
    """Why it is not completed: turn_detected, client_cancelled, max_output_tokens, stalled ..."""
    error: ErrorInfo | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class ResponseProgress:
    """A response in progress, and what its client was told of it: the text or transcript,
    and ms of audio. `item_id` is None as long as it has no output."""

    response: Response
    item_id: str | None
    text: str
    audio_ms: int


@dataclass(frozen=True)
class DuplexSnapshot:
    """What a client that comes back has to know of the conversation.

    `speaking` is the item that the user is saying; `input_ms` the end of the input clock.
    """

    items: list[Item]
    responses: list[ResponseProgress]
    speaking: str | None
    input_ms: int


# Verbs: update


@dataclass(frozen=True)
class AppendAudio:
    """Stream input: PCM16 little-endian mono at 24 kHz."""

    pcm: bytes
    ref: str | None = None


@dataclass(frozen=True)
class PatchSettings:
    """Deep-merge `patch` into the settings; all or nothing.

    The patch has the shape of `DuplexSettings`; None switches a feature off.
    """

    patch: dict[str, Any]
    ref: str | None = None


@dataclass(frozen=True)
class CreateItem:
    """Put a message into the conversation, after item `after` (None: at the end)."""

    item: Item
    after: str | None = None
    ref: str | None = None


@dataclass(frozen=True)
class DeleteItem:
    """Take an item out of the conversation."""

    item_id: str
    ref: str | None = None


@dataclass(frozen=True)
class RetrieveItem:
    """Ask for an item as it stands."""

    item_id: str
    ref: str | None = None


@dataclass(frozen=True)
class TruncateItem:
    """The user heard only the first `audio_end_ms` of an assistant's audio item."""

    item_id: str
    content_index: int
    audio_end_ms: int
    ref: str | None = None


# Verbs: signal


@dataclass(frozen=True)
class CommitInput:
    """The buffered input audio is one user message."""

    ref: str | None = None


@dataclass(frozen=True)
class ClearInput:
    """Throw the buffered input audio away."""

    ref: str | None = None


@dataclass(frozen=True)
class CreateResponse:
    """Start a response. None means: as the session's settings say.

    `conversation` False makes it out-of-band: it runs in a lane of its own,
    beside the default one, and leaves the conversation alone. `input` replaces the
    conversation as what the response sees: items, or ids of items to look up.
    """

    conversation: bool = True
    input: list[Item | str] | None = None
    instructions: str | None = None
    output_modalities: tuple[str, ...] | None = None
    voice: str | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    metadata: dict[str, str] | None = None
    ref: str | None = None


@dataclass(frozen=True)
class CancelResponse:
    """Stop a response; None: the one that runs in the default lane."""

    response_id: str | None = None
    ref: str | None = None


@dataclass(frozen=True)
class Reset:
    """Begin anew: every response and transcript is cancelled, buffer and conversation are
    emptied. Settings and workers stay."""

    ref: str | None = None


ClientVerb = (
    AppendAudio
    | PatchSettings
    | CreateItem
    | DeleteItem
    | RetrieveItem
    | TruncateItem
    | CommitInput
    | ClearInput
    | CreateResponse
    | CancelResponse
    | Reset
)


# Outputs


@dataclass(frozen=True)
class SpeechStarted:
    """The user began to speak (`audio_start_ms` of the input clock, padding included)."""

    item_id: str
    audio_start_ms: int


@dataclass(frozen=True)
class SpeechStopped:
    """The user stopped speaking (`audio_end_ms` of the input clock)."""

    item_id: str
    audio_end_ms: int


@dataclass(frozen=True)
class InputCommitted:
    """The buffered audio became the user item `item_id`."""

    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True)
class InputCleared:
    """The buffered audio is gone."""


@dataclass(frozen=True)
class InputTranscribed:
    """The transcript of a user's audio item; `audio_s` is its length in seconds."""

    item_id: str
    content_index: int
    transcript: str
    audio_s: float


@dataclass(frozen=True)
class InputTranscriptionFailed:
    """A user's audio item has no transcript, and why."""

    item_id: str
    content_index: int
    error: ErrorInfo


@dataclass(frozen=True)
class ItemAdded:
    """An item entered the conversation after `previous_item_id` (None: at the front)."""

    item: Item
    previous_item_id: str | None


@dataclass(frozen=True)
class ItemDone:
    """An item will not grow any more."""

    item: Item
    previous_item_id: str | None


@dataclass(frozen=True)
class ItemRetrieved:
    """The answer to RetrieveItem."""

    item: Item


@dataclass(frozen=True)
class ItemDeleted:
    """The item left the conversation."""

    item_id: str


@dataclass(frozen=True)
class ConversationReset:
    """The conversation is empty: these items have left it."""

    item_ids: list[str]


@dataclass(frozen=True)
class ItemTruncated:
    """The item's audio and transcript end at `audio_end_ms` now."""

    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True)
class ResponseCreated:
    """A response began."""

    response: Response


@dataclass(frozen=True)
class OutputItemAdded:
    """The response has a new output item."""

    response_id: str
    output_index: int
    item: Item


@dataclass(frozen=True)
class ContentPartAdded:
    """The item has a new, empty part."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    part: Part


@dataclass(frozen=True)
class TextDelta:
    """More of the part: text of a text part, transcript of an audio part."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    kind: PartKind
    delta: str


@dataclass(frozen=True)
class AudioDelta:
    """More audio of the part: PCM16 little-endian mono at 24 kHz."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    pcm: bytes


@dataclass(frozen=True)
class PartDone:
    """The part is complete. Wire formats with several `done` events make all of them."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    part: Part


@dataclass(frozen=True)
class OutputItemDone:
    """The output item is complete."""

    response_id: str
    output_index: int
    item: Item


@dataclass(frozen=True)
class ResponseDone:
    """The last word about a response, on every path."""

    response: Response


ClientOutput = (
    SessionOutput
    | SpeechStarted
    | SpeechStopped
    | InputCommitted
    | InputCleared
    | InputTranscribed
    | InputTranscriptionFailed
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ConversationReset
    | ItemTruncated
    | ResponseCreated
    | OutputItemAdded
    | ContentPartAdded
    | TextDelta
    | AudioDelta
    | PartDone
    | OutputItemDone
    | ResponseDone
)
