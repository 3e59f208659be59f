"""What a Realtime client may send, and how a frame becomes one of it.

A frame holds one JSON object whose `type` names the event. Fields that the
protocol does not know are refused, as the public service refuses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from protocol.realtime.audio import decode_pcm
from protocol.realtime.errors import (
    MalformedEvent,
    from_validation,
    invalid_value,
    missing_parameter,
)
from protocol.realtime.items import ItemId, ItemReference, MessageItem, read_input, read_item
from protocol.realtime.session import FormatPatch, SessionPatch, read_session

MAX_EVENT_BYTES = 15 * 1024 * 1024
"""A longer event is refused unread; the connection stays open."""

MAX_VALUES = 65_536
"""An event with more members and entries, counted by the marks between them (in texts as
well), is refused unread: to make objects of millions would hold all sessions up."""

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

EventId = Annotated[str, msgspec.Meta(max_length=512)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Event(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    event_id: EventId | None = None


class _WireSessionUpdate(_Event, frozen=True, tag="session.update"):
    session: dict[str, Any]


class _WireAppend(_Event, frozen=True, tag="input_audio_buffer.append"):
    audio: str


class InputAudioCommit(_Event, frozen=True, tag="input_audio_buffer.commit"):
    """The buffered audio is one user message."""


class InputAudioClear(_Event, frozen=True, tag="input_audio_buffer.clear"):
    """Forget the buffered audio."""


class OutputAudioClear(_Event, frozen=True, tag="output_audio_buffer.clear"):
    """Cut off the playing response (WebRTC only: elsewhere the client plays)."""


class _WireItemCreate(_Event, frozen=True, tag="conversation.item.create"):
    item: dict[str, Any]
    previous_item_id: ItemId | None = None


class ItemRetrieve(_Event, frozen=True, tag="conversation.item.retrieve"):
    """Ask for an item."""

    item_id: ItemId


class ItemDelete(_Event, frozen=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: ItemId


class ItemTruncate(_Event, frozen=True, tag="conversation.item.truncate"):
    """Only the first `audio_end_ms` of an assistant's audio were heard."""

    item_id: ItemId
    content_index: Index
    audio_end_ms: Index


class ResponseCancel(_Event, frozen=True, tag="response.cancel"):
    """Stop a response; None: the one of the default conversation."""

    response_id: ItemId | None = None


class _ResponseOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: FormatPatch | None = None
    voice: str | dict[str, Any] | None = None


class _ResponseAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: _ResponseOutput | None = None


class _WireResponseParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conversation: Literal["auto", "none"] | None = None
    input: list[dict[str, Any]] | None = None
    instructions: str | None = None
    output_modalities: list[Literal["text", "audio"]] | None = None
    audio: _ResponseAudio | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] | Literal["inf"] | None = None
    metadata: dict[str, str] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class _WireResponseCreate(_Event, frozen=True, tag="response.create"):
    response: _WireResponseParameters | None = None


class SessionUpdate(msgspec.Struct, frozen=True):
    """Change the session's settings."""

    session: SessionPatch
    event_id: str | None


class InputAudioAppend(msgspec.Struct, frozen=True, gc=False):
    """More of the user's audio: PCM16 little-endian, 24 kHz, mono."""

    pcm: bytes
    event_id: str | None


class ItemCreate(msgspec.Struct, frozen=True):
    """Put a message into the conversation ("root": at its front, None: at its end)."""

    item: MessageItem
    previous_item_id: str | None
    event_id: str | None


class ResponseCreate(msgspec.Struct, frozen=True, kw_only=True):
    """Make a response; None means as the session's settings say.

    The last five are carried as they came, for the server to serve or refuse.
    """

    event_id: str | None
    conversation: Literal["auto", "none"] = "auto"
    input: list[MessageItem | ItemReference] | None = None
    instructions: str | None = None
    output_modalities: tuple[Literal["text", "audio"], ...] | None = None
    format: FormatPatch | None = None
    voice: str | dict[str, Any] | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    metadata: dict[str, str] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


ClientEvent = (
    SessionUpdate
    | InputAudioAppend
    | InputAudioCommit
    | InputAudioClear
    | OutputAudioClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)

_WireEvent = (
    _WireSessionUpdate
    | _WireAppend
    | InputAudioCommit
    | InputAudioClear
    | OutputAudioClear
    | _WireItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | _WireResponseCreate
    | ResponseCancel
)

_decoder: msgspec.json.Decoder[_WireEvent] = msgspec.json.Decoder(_WireEvent)

EVENT_TYPES = tuple(str(event.__struct_config__.tag) for event in get_args(_WireEvent))


def parse(frame: str | bytes) -> ClientEvent:
    """The event that a text or binary frame holds.

    Raises MalformedEvent with the protocol's code, the `param` path and, where it
    could be read, the client's `event_id`.
    """
    if len(frame) > MAX_EVENT_BYTES:
        raise MalformedEvent(
            f"The event is longer than {MAX_EVENT_BYTES} bytes.", code="event_too_large"
        )
    if len(frame) > MAX_VALUES and _marks(frame) > MAX_VALUES:
        raise MalformedEvent(
            f"The event has more than {MAX_VALUES} values.", code="event_too_large"
        )
    try:
        event = _decoder.decode(frame)
    except msgspec.ValidationError as error:
        raise _explain(frame, error) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise MalformedEvent("The event is not valid JSON.", code="invalid_json") from None
    try:
        return _checked(event)
    except MalformedEvent as error:
        error.event_id = event.event_id
        raise


def _marks(frame: str | bytes) -> int:
    """At most so many values are in the JSON text `frame`, for what it costs to count them."""
    if isinstance(frame, str):
        return frame.count(",") + frame.count("[") + frame.count("{")
    return frame.count(b",") + frame.count(b"[") + frame.count(b"{")


def _checked(event: _WireEvent) -> ClientEvent:
    match event:
        case _WireAppend():
            return InputAudioAppend(decode_pcm(event.audio, "audio"), event.event_id)
        case _WireSessionUpdate():
            return SessionUpdate(read_session(event.session), event.event_id)
        case _WireItemCreate():
            return ItemCreate(read_item(event.item, "item"), event.previous_item_id, event.event_id)
        case _WireResponseCreate():
            return _response_create(event.response, event.event_id)
        case _:
            return event


def _response_create(wire: _WireResponseParameters | None, event_id: str | None) -> ResponseCreate:
    if wire is None:
        return ResponseCreate(event_id=event_id)
    _check_metadata(wire.metadata)
    if wire.output_modalities is not None and len(wire.output_modalities) != 1:
        raise invalid_value("response.output_modalities", "one of ['audio'] and ['text'].")
    output = wire.audio.output if wire.audio is not None else None
    return ResponseCreate(
        event_id=event_id,
        conversation=wire.conversation or "auto",
        input=None if wire.input is None else read_input(wire.input, "response.input"),
        instructions=wire.instructions,
        output_modalities=(
            None if wire.output_modalities is None else tuple(wire.output_modalities)
        ),
        format=output.format if output is not None else None,
        voice=output.voice if output is not None else None,
        max_output_tokens=wire.max_output_tokens,
        metadata=wire.metadata,
        tools=wire.tools,
        tool_choice=wire.tool_choice,
        prompt=wire.prompt,
        reasoning=wire.reasoning,
        parallel_tool_calls=wire.parallel_tool_calls,
    )


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    path = "response.metadata"
    if len(metadata) > MAX_METADATA_PAIRS:
        raise invalid_value(path, f"at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}.")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise invalid_value(path, f"a key has more than {MAX_METADATA_KEY} characters.")
        if len(value) > MAX_METADATA_VALUE:
            raise MalformedEvent(
                f"Invalid '{path}.{key}': more than {MAX_METADATA_VALUE} characters.",
                code="string_above_max_length",
                field=f"{path}.{key}",
            )


def _explain(frame: str | bytes, error: msgspec.ValidationError) -> MalformedEvent:
    """Read the frame once more, loosely, to say what is wrong and echo its id."""
    try:
        raw = msgspec.json.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return MalformedEvent("The event is not valid JSON.", code="invalid_json")
    if not isinstance(raw, dict):
        return MalformedEvent("The event is not a JSON object.", code="invalid_type")
    explained = _explain_type(raw.get("type")) or from_validation(error)
    event_id = raw.get("event_id")
    if isinstance(event_id, str):
        explained.event_id = event_id[:512]
    return explained


def _explain_type(kind: Any) -> MalformedEvent | None:
    if kind is None:
        return missing_parameter("type")
    if not isinstance(kind, str):
        return MalformedEvent(
            "Invalid 'type': expected a string.", code="invalid_type", field="type"
        )
    if kind not in EVENT_TYPES:
        return invalid_value(
            "type", f"'{kind[:64]}' is not an event. Supported are: {', '.join(EVENT_TYPES)}."
        )
    return None
