"""The wire of the OpenAI Realtime API (GA dialect): frames to events, events to frames.

No I/O and no session logic: what an event means is the surface's matter.
"""

from protocol.realtime.client_events import (
    EVENT_TYPES,
    MAX_EVENT_BYTES,
    ClientEvent,
    InputAudioAppend,
    InputAudioClear,
    InputAudioCommit,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    OutputAudioClear,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    parse,
)
from protocol.realtime.errors import (
    MalformedEvent,
    invalid_value,
    unsupported_parameter,
    unsupported_value,
)
from protocol.realtime.items import Content, ItemReference, MessageItem
from protocol.realtime.server_events import EventWriter, ServerEvent
from protocol.realtime.session import FormatPatch, SessionPatch

__all__ = [
    "EVENT_TYPES",
    "MAX_EVENT_BYTES",
    "ClientEvent",
    "Content",
    "EventWriter",
    "FormatPatch",
    "InputAudioAppend",
    "InputAudioClear",
    "InputAudioCommit",
    "ItemCreate",
    "ItemDelete",
    "ItemReference",
    "ItemRetrieve",
    "ItemTruncate",
    "MalformedEvent",
    "MessageItem",
    "OutputAudioClear",
    "ResponseCancel",
    "ResponseCreate",
    "ServerEvent",
    "SessionPatch",
    "SessionUpdate",
    "invalid_value",
    "parse",
    "unsupported_parameter",
    "unsupported_value",
]
