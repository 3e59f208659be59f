"""The native surface described for machines."""

from __future__ import annotations

from functools import cached_property
from typing import Any, get_args

from gateway.surfaces.documents import Documents
from gateway.surfaces.native.outputs import FRAMES, FREE_FIELDS
from protocol.native import (
    WIRES,
    ClientFrame,
    CommandResult,
    Failed,
    OpenBody,
    QueuedBody,
    SessionBody,
    SessionList,
    SignalBody,
    UpdateBody,
)


class _NativeDocuments(Documents):
    @cached_property
    def json_schema(self) -> dict[str, Any]:
        # `settings` of a body is free in form: what can be in it is known of the frame.
        schema = super().json_schema
        definitions = schema["$defs"]
        settings = definitions["SessionCreatedFrame"]["properties"]["settings"]
        definitions["SessionBody"]["properties"]["settings"] = settings
        return schema


DOCUMENTS = _NativeDocuments(
    title="Antiphon native sessions",
    address="/v1/sessions/{session}/stream",
    bodies_at="/v1/sessions",
    subprotocols=tuple(wire.subprotocol for wire in WIRES),
    client_frames=get_args(ClientFrame),
    server_frames=(*FRAMES.values(), Failed),
    bodies=(OpenBody, QueuedBody, UpdateBody, SignalBody, SessionBody, SessionList, CommandResult),
    free=tuple(kind for kinds in FREE_FIELDS.values() for kind in kinds),
)
