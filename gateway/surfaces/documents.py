"""A surface with a stream described for machines, generated from the types that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

Struct = type[msgspec.Struct]

_DEFS = "#/$defs/"
_SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True)
class Documents:
    """What a surface takes and tells.

    `subprotocols` are those of its stream, at `address`, which names its parameter `session`.
    `bodies` are those of its requests, and `free` the types of members that are free in form.
    """

    title: str
    address: str
    bodies_at: str
    subprotocols: Sequence[str]
    client_frames: Sequence[Struct]
    server_frames: Sequence[Struct]
    bodies: Sequence[Struct]
    free: Sequence[type] = ()

    @cached_property
    def json_schema(self) -> dict[str, Any]:
        """A JSON Schema whose `$defs` are `ClientFrame`, `ServerFrame`, all frames and bodies."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": self.title,
            "description": f"The frames of WS {self.address.format(session='{id}')} as JSON, and"
            f" the bodies of {self.bodies_at}. In MessagePack, what has contentEncoding base64 here"
            " is bin.",
            "anyOf": [_ref("ClientFrame"), _ref("ServerFrame")],
            "$defs": self._definitions(self.bodies),
        }

    @cached_property
    def asyncapi(self) -> dict[str, Any]:
        """The stream as an AsyncAPI 3 document."""
        frames = {_tag(frame): frame for frame in (*self.client_frames, *self.server_frames)}
        document = {
            "asyncapi": "3.0.0",
            "info": {
                "title": self.title,
                "version": "1",
                "description": "The stream begins with `attach`.",
            },
            "defaultContentType": "application/json",
            "channels": {
                "stream": {
                    "address": self.address,
                    "parameters": {"session": {"description": "The id of the session."}},
                    "description": "JSON or MessagePack, by sub-protocol: "
                    + " or ".join(self.subprotocols),
                    "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in frames},
                    "bindings": {"ws": {}},
                }
            },
            "operations": {
                "hear": _operation("receive", "What a client says.", self.client_frames),
                "tell": _operation("send", "What a client is told.", self.server_frames),
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
                "schemas": self._definitions(()),
            },
        }
        moved: dict[str, Any] = _moved(document)
        return moved

    def _definitions(self, bodies: Sequence[Struct]) -> dict[str, Any]:
        kinds = (*self.client_frames, *self.server_frames, *bodies, *self.free)
        _, definitions = msgspec.json.schema_components(kinds)
        return {
            "ClientFrame": _one_of(self.client_frames),
            "ServerFrame": _one_of(self.server_frames),
            **definitions,
        }


def _operation(action: str, summary: str, frames: Sequence[Struct]) -> dict[str, Any]:
    tags = [_tag(frame) for frame in frames]
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": "#/channels/stream"},
        "messages": [{"$ref": f"#/channels/stream/messages/{tag}"} for tag in tags],
    }


def _one_of(frames: Sequence[Struct]) -> dict[str, Any]:
    mapping = {_tag(frame): _DEFS + frame.__name__ for frame in frames}
    return {
        "oneOf": [_ref(frame.__name__) for frame in frames],
        "discriminator": {"propertyName": "type", "mapping": mapping},
    }


def _tag(frame: Struct) -> str:
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
