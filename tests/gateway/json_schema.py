"""As much of JSON Schema as the documents of surfaces use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def references(value: Any) -> Iterator[str]:
    match value:
        case dict():
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for entry in value.values():
                yield from references(entry)
        case list():
            for entry in value:
                yield from references(entry)


def resolved(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def check(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> None:
    """As much of JSON Schema as these documents use."""
    if "$ref" in schema:
        return check(value, resolved(whole, schema["$ref"]), whole)
    if "anyOf" in schema:
        faults = []
        for option in schema["anyOf"]:
            try:
                return check(value, option, whole)
            except AssertionError as fault:
                faults.append(str(fault))
        raise AssertionError(faults)
    if "enum" in schema:
        assert value in schema["enum"], (value, schema)
    types: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    if "type" in schema:
        assert isinstance(value, types[schema["type"]]), (value, schema)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value), (value, schema)
        assert set(value) <= set(schema["properties"]), (value, schema)
        for name, entry in value.items():
            check(entry, schema["properties"][name], whole)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for entry in value:
            check(entry, schema["items"], whole)
    return None
