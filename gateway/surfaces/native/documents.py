"""The native surface described for machines, generated from the types that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec

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

BODIES = (OpenBody, QueuedBody, UpdateBody, SignalBody, SessionBody, SessionList, CommandResult)
CLIENT_FRAMES: tuple[type[msgspec.Struct], ...] = get_args(ClientFrame)
SERVER_FRAMES: tuple[type[msgspec.Struct], ...] = (*FRAMES.values(), Failed)

_DEFS = "#/$defs/"
_SCHEMAS = "#/components/schemas/"


@cache
def json_schema() -> dict[str, Any]:
    """A JSON Schema whose `$defs` hold `ClientFrame`, `ServerFrame`, every frame, every body."""
    free = (kind for kinds in FREE_FIELDS.values() for kind in kinds)
    kinds = (*CLIENT_FRAMES, *SERVER_FRAMES, *BODIES, *free)
    _, definitions = msgspec.json.schema_components(kinds)
    settings = definitions["SessionCreatedFrame"]["properties"]["settings"]
    definitions["SessionBody"]["properties"]["settings"] = settings
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Antiphon native sessions",
        "description": "The frames of WS /v1/sessions/{id}/stream as JSON, and the bodies of"
        " /v1/sessions. In MessagePack, what has contentEncoding base64 here is bin.",
        "anyOf": [_ref("ClientFrame"), _ref("ServerFrame")],
        "$defs": {
            "ClientFrame": _one_of(CLIENT_FRAMES),
            "ServerFrame": _one_of(SERVER_FRAMES),
            **definitions,
        },
    }


@cache
def asyncapi() -> dict[str, Any]:
    """The stream as an AsyncAPI 3 document."""
    frames = {_tag(frame): frame for frame in (*CLIENT_FRAMES, *SERVER_FRAMES)}
    document = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Antiphon native sessions",
            "version": "1",
            "description": "The stream of a session. It begins with `attach`.",
        },
        "defaultContentType": "application/json",
        "channels": {
            "stream": {
                "address": "/v1/sessions/{session}/stream",
                "parameters": {"session": {"description": "The id of the session."}},
                "description": "JSON or MessagePack, by sub-protocol: "
                + " or ".join(wire.subprotocol for wire in WIRES),
                "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in frames},
                "bindings": {"ws": {}},
            }
        },
        "operations": {
            "hear": _operation("receive", "What a client says.", CLIENT_FRAMES),
            "tell": _operation("send", "What a client is told.", SERVER_FRAMES),
        },
        "components": {
            "messages": {
                tag: {
                    "name": tag,
                    "summary": (frame.__doc__ or "").partition("\n")[0],
                    "payload": _ref(frame.__name__),
                }
                for tag, frame in frames.items()
            },
            "schemas": {
                name: schema
                for name, schema in json_schema()["$defs"].items()
                if name not in {body.__name__ for body in BODIES}
            },
        },
    }
    moved: dict[str, Any] = _moved(document)
    return moved


def _operation(action: str, summary: str, frames: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    tags = [_tag(frame) for frame in frames]
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": "#/channels/stream"},
        "messages": [{"$ref": f"#/channels/stream/messages/{tag}"} for tag in tags],
    }


def _one_of(frames: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    mapping = {_tag(frame): _DEFS + frame.__name__ for frame in frames}
    return {
        "oneOf": [_ref(frame.__name__) for frame in frames],
        "discriminator": {"propertyName": "type", "mapping": mapping},
    }


def _tag(frame: type[msgspec.Struct]) -> str:
    return str(frame.__struct_config__.tag)


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _DEFS + name}


def _moved(value: Any) -> Any:
    """`value` with what points to the definitions of a schema pointing to this document's."""
    match value:
        case dict():
            return {key: _moved(entry) for key, entry in value.items()}
        case list():
            return [_moved(entry) for entry in value]
        case str():
            return value.replace(_DEFS, _SCHEMAS)
    return value
