"""Conversation items as a client writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.realtime.audio import decode_pcm
from protocol.realtime.errors import (
    MalformedEvent,
    from_validation,
    invalid_value,
    missing_parameter,
    unsupported_value,
)

ItemId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]

MAX_PARTS = 64
"""Content parts of one item: they are kept, and echoed, even when they are empty."""

_PARTS_OF_ROLE = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio"),
    "assistant": ("output_text", "output_audio"),
}

_ITEM_TYPES_NOT_SERVED = frozenset(
    {
        "function_call",
        "function_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
    }
)


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One content part; `audio` is base64 of PCM16, 24 kHz, mono."""

    type: str
    text: str | None = None
    transcript: str | None = None
    audio: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _WireMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)]
    id: ItemId | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class Content(msgspec.Struct, frozen=True):
    """A checked content part: `text` is the text or the transcript, `pcm` the audio."""

    type: str
    text: str | None = None
    pcm: bytes | None = None


class MessageItem(msgspec.Struct, frozen=True):
    """A checked message item; `id` is None when the server shall choose it."""

    id: str | None
    role: str
    status: str | None
    content: list[Content]


class ItemReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The id of an item that appeared earlier in the session."""

    type: Literal["item_reference"]
    id: ItemId


def read_item(raw: dict[str, Any], path: str) -> MessageItem:
    """The message that `raw` holds; `path` is where it stands in the event.

    Raises MalformedEvent for anything else, naming the parameter.
    """
    kind = raw.get("type")
    if isinstance(kind, str) and kind in _ITEM_TYPES_NOT_SERVED:
        raise unsupported_value(f"{path}.type", f"'{kind}' items need tools; send messages.")
    try:
        message = msgspec.convert(raw, _WireMessage)
    except msgspec.ValidationError as error:
        raise from_validation(error, path) from None
    content = [
        _read_part(part, message.role, f"{path}.content[{index}]")
        for index, part in enumerate(message.content)
    ]
    return MessageItem(message.id, message.role, message.status, content)


def read_input(raw: list[dict[str, Any]], path: str) -> list[MessageItem | ItemReference]:
    """The items and references of `response.input`. Raises MalformedEvent."""
    items: list[MessageItem | ItemReference] = []
    for index, entry in enumerate(raw):
        place = f"{path}[{index}]"
        if entry.get("type") == "item_reference":
            try:
                items.append(msgspec.convert(entry, ItemReference))
            except msgspec.ValidationError as error:
                raise from_validation(error, place) from None
        else:
            items.append(read_item(entry, place))
    return items


def _read_part(part: ContentPart, role: str, path: str) -> Content:
    allowed = _PARTS_OF_ROLE[role]
    if part.type not in allowed:
        if part.type == "input_image":
            raise MalformedEvent(
                "Images are not supported by this pipeline.",
                code="unsupported_content_type",
                field=f"{path}.type",
            )
        raise invalid_value(
            f"{path}.type",
            f"a {role} message holds {' or '.join(allowed)}, got '{part.type[:64]}'.",
        )
    for name in ("image_url", "detail"):
        if getattr(part, name) is not None:
            raise invalid_value(f"{path}.{name}", f"has no meaning in '{part.type}'.")
    if part.type.endswith("_text"):
        if part.text is None:
            raise missing_parameter(f"{path}.text")
        for name in ("audio", "transcript"):
            if getattr(part, name) is not None:
                raise invalid_value(f"{path}.{name}", f"has no meaning in '{part.type}'.")
        return Content(part.type, part.text)
    if part.text is not None:
        raise invalid_value(f"{path}.text", f"has no meaning in '{part.type}'.")
    if part.audio is None and part.type == "input_audio":
        raise missing_parameter(f"{path}.audio")
    pcm = None if part.audio is None else decode_pcm(part.audio, f"{path}.audio")
    return Content(part.type, part.transcript, pcm)
