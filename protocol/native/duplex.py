"""What a client may say to a duplex session: the inputs of `update`, the signals of `signal`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.native.fields import Id, Index, Text

MAX_PARTS = 64
"""Content parts of one item."""
MAX_INPUT_ITEMS = 512
"""Items that one response may be given to see."""

MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]


class _Said(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class NewPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A content part that a client hands in.

    `text` is the text, or the transcript of an audio part. `audio` is PCM16 little-endian,
    24 kHz, mono; an `input_audio` part without a transcript is transcribed.
    """

    kind: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: Text | None = None
    audio: bytes | None = None


class NewItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that a client hands in; without `id` the gateway names it.

    A system message holds `input_text`, a user's `input_text` and `input_audio`, an
    assistant's `output_text` and `output_audio`.
    """

    role: Literal["system", "user", "assistant"]
    parts: Annotated[list[NewPart], msgspec.Meta(max_length=MAX_PARTS)]
    id: Id | None = None
    status: Literal["completed", "incomplete", "in_progress"] = "completed"


# Inputs


class AudioInput(_Said, frozen=True, tag="audio", gc=False):
    """More of the user's speech: PCM16 little-endian, 24 kHz, mono."""

    pcm: bytes


class SettingsInput(_Said, frozen=True, tag="settings"):
    """Deep-merge `settings` into the session's; all or nothing. null switches a feature off."""

    settings: dict[str, Any]


class ItemInput(_Said, frozen=True, tag="item"):
    """Put a message into the conversation behind item `after` (null: at the end, "root": at
    the front)."""

    item: NewItem
    after: Id | None = None


DuplexInput = AudioInput | SettingsInput | ItemInput


# Signals


class Commit(_Said, frozen=True, tag="commit"):
    """The buffered audio is one user message."""


class Clear(_Said, frozen=True, tag="clear"):
    """Throw the buffered audio away."""


class Respond(_Said, frozen=True, tag="respond"):
    """Start a response; what is absent is as the session's settings say.

    With `conversation` false it runs out of band, and leaves the conversation alone.
    `input` replaces the conversation as what the response sees: items, or ids of items.
    """

    conversation: bool = True
    input: Annotated[list[NewItem | Id], msgspec.Meta(max_length=MAX_INPUT_ITEMS)] | None = None
    instructions: Text | None = None
    output_modalities: tuple[Literal["text", "audio"]] | None = None
    voice: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] | Literal["inf"] | None = None
    metadata: Metadata | None = None


class Cancel(_Said, frozen=True, tag="cancel"):
    """Stop a response; without `response_id` the one of the conversation."""

    response_id: Id | None = None


class Truncate(_Said, frozen=True, tag="truncate"):
    """The user heard only the first `audio_end_ms` of an assistant's audio."""

    item_id: Id
    audio_end_ms: Index
    content_index: Index = 0


class Delete(_Said, frozen=True, tag="delete"):
    """Take an item out of the conversation."""

    item_id: Id


class Retrieve(_Said, frozen=True, tag="retrieve"):
    """Ask for an item as it stands: `item_retrieved` has it."""

    item_id: Id


DuplexSignal = Commit | Clear | Respond | Cancel | Truncate | Delete | Retrieve
