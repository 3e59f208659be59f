"""Frames of the native surface: read as they are meant, or refused by the path of the field."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.free_form import MAX_VALUES, Unreadable
from protocol.native import (
    MAX_FRAME_BYTES,
    MAX_FREE_BYTES,
    WIRES,
    Attach,
    AudioInput,
    Cancel,
    ChosenLimits,
    NewItem,
    NewPart,
    OpenBody,
    Respond,
    SettingsInput,
    Signal,
    Update,
    read_body,
)
from protocol.wires import Wire

JSON, MSGPACK = WIRES


def refused(wire: Wire[Any], frame: str | bytes) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        wire.read(frame)
    return caught.value


def encoded(wire: Wire[Any], frame: Any) -> str | bytes:
    return msgspec.msgpack.encode(frame) if wire is MSGPACK else msgspec.json.encode(frame)


def test_audio_is_base64_in_json_and_bytes_in_msgpack() -> None:
    expected = Update(AudioInput(b"\x01\x02"), ref="r")
    audio = {"type": "audio", "pcm": b"\x01\x02"}
    for wire in WIRES:
        assert wire.read(encoded(wire, {"type": "update", "input": audio, "ref": "r"})) == expected
    assert JSON.read('{"type": "update", "input": {"type": "audio", "pcm": "AQI="}, "ref": "r"}')


@pytest.mark.parametrize("wire", WIRES)
def test_frames_are_read_as_they_are_meant(wire: Wire[Any]) -> None:
    item = {"role": "user", "parts": [{"kind": "input_text", "text": "Hello."}]}
    frames: list[tuple[dict[str, Any], Any]] = [
        ({"type": "attach", "role": "observer"}, Attach("observer")),
        ({"type": "signal", "signal": {"type": "cancel"}, "id": "c"}, Signal(Cancel(), "c")),
        (
            {"type": "signal", "signal": {"type": "respond", "input": [item, "item_1"]}},
            Signal(Respond(input=[NewItem("user", [NewPart("input_text", "Hello.")]), "item_1"])),
        ),
    ]
    for written, meant in frames:
        assert wire.read(encoded(wire, written)) == meant


PATHS: list[tuple[Any, str | None, str]] = [
    ([], None, "invalid_type"),
    ({}, "type", "missing_required_parameter"),
    ({"type": "talk"}, "type", "invalid_value"),
    ({"type": "attach"}, "role", "missing_required_parameter"),
    ({"type": "attach", "role": "king"}, "role", "invalid_value"),
    ({"type": "attach", "role": "observer", "key": 1}, "key", "unknown_parameter"),
    ({"type": "update", "input": {}}, "input.type", "missing_required_parameter"),
    ({"type": "update", "input": {"type": "commit"}}, "input.type", "invalid_value"),
    ({"type": "update", "input": {"type": "audio", "pcm": 1}}, "input.pcm", "invalid_type"),
    (
        {"type": "update", "input": {"type": "item", "item": {"role": "user", "parts": [{}]}}},
        "input.item.parts[0].kind",
        "missing_required_parameter",
    ),
    (
        {"type": "signal", "signal": {"type": "respond", "metadata": {"k" * 65: "v"}}},
        "signal.metadata",
        "invalid_value",
    ),
    (
        {"type": "signal", "signal": {"type": "truncate", "item_id": "i", "audio_end_ms": -1}},
        "signal.audio_end_ms",
        "invalid_value",
    ),
    ({"type": "signal", "signal": {"type": "clear"}, "id": "a b"}, "id", "invalid_value"),
    (
        {"type": "signal", "signal": {"type": "clear"}, "id": "a", "ref": "b"},
        "ref",
        "invalid_value",
    ),
    (
        {"type": "update", "input": {"type": "settings", "settings": {"a": [{"b": 2**65}]}}},
        "input.settings.a[0].b",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("frame", "path", "code"), PATHS)
def test_a_refusal_names_the_path(frame: Any, path: str | None, code: str) -> None:
    error = refused(JSON, encoded(JSON, frame))
    assert (error.field, error.code) == (path, code)
    if "2**65" not in repr(frame) and path != "input.settings.a[0].b":
        error = refused(MSGPACK, encoded(MSGPACK, frame))
        assert (error.field, error.code) == (path, code)


@pytest.mark.parametrize("wire", WIRES)
def test_a_refusal_has_the_names_that_the_client_gave(wire: Wire[Any]) -> None:
    error = refused(wire, encoded(wire, {"type": "update", "id": "c1", "input": 3}))
    assert (error.id, error.ref) == ("c1", None)
    error = refused(wire, encoded(wire, {"type": "update", "ref": "r", "more": 3}))
    assert (error.id, error.ref) == (None, "r")


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        b"bytes",
        {1: 2},
        {"a": {b"k": 1}},
        msgspec.msgpack.Ext(5, b"x"),
        datetime.datetime.now(datetime.UTC),
    ],
)
def test_msgpack_says_nothing_in_settings_that_json_cannot(value: Any) -> None:
    settings = {"type": "settings", "settings": {"tracing": value}}
    error = refused(MSGPACK, encoded(MSGPACK, {"type": "update", "input": settings}))
    assert error.field is not None
    assert error.field.startswith("input.settings.tracing")


def test_settings_and_parameters_hold_values_to_a_bound() -> None:
    kinds: tuple[Any, ...] = ([1] * MAX_VALUES, {f"k{n}": [] for n in range(MAX_VALUES)})
    for wire in WIRES:
        for many in kinds:
            said = {"type": "settings", "settings": {"many": many}}
            error = refused(wire, encoded(wire, {"type": "update", "input": said}))
            assert (error.field, "more than" in error.message) == ("input.settings", True)
        said = {"type": "reset", "parameters": {"many": [1] * (MAX_VALUES - 2)}}
        assert wire.read(encoded(wire, {"type": "signal", "signal": said}))


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_free_in_form_is_refused_unread_when_it_is_long(wire: Wire[Any]) -> None:
    long = {"x": "x" * MAX_FREE_BYTES}
    for frame, place in (
        ({"type": "update", "input": {"type": "settings", "settings": long}}, "input.settings"),
        ({"type": "signal", "signal": {"type": "reset", "parameters": long}}, "signal.parameters"),
        ({"type": "signal", "signal": {"type": "respond", "metadata": long}}, "signal.metadata"),
    ):
        error = refused(wire, encoded(wire, frame | {"id": "é" if wire is JSON else "i"}))
        assert (error.code, error.field) == ("event_too_large", place)
        assert error.id == ("é" if wire is JSON else "i")
    audio = {"type": "audio", "pcm": bytes(2 * MAX_FREE_BYTES)}
    assert wire.read(encoded(wire, {"type": "update", "input": audio}))


def test_the_path_of_a_value_deep_inside_is_told() -> None:
    for wire, value in ((JSON, 2**70), (MSGPACK, b"bytes")):
        settings = {"a": 1, "b": [[], {"c": ["x", {"d": value}]}]}
        frame = {"type": "update", "input": {"type": "settings", "settings": settings}}
        raw = json.dumps(frame) if wire is JSON else msgspec.msgpack.encode(frame)
        assert refused(wire, raw).field == "input.settings.b[1].c[1].d"


def test_settings_are_nested_to_a_bound() -> None:
    nested: Any = {}
    for _ in range(200):
        nested = {"a": nested}
    frame = {"type": "update", "input": {"type": "settings", "settings": nested}}
    for wire in WIRES:
        assert "nested deeper" in refused(wire, encoded(wire, frame)).message
    for deep in (b"[" * 100_000, b'{"type":' * 100_000):
        assert refused(JSON, deep).code in ("invalid_json", "invalid_type")
    assert refused(MSGPACK, b"\x91" * 100_000).code in ("invalid_msgpack", "invalid_type")


def test_what_is_not_the_encoding_is_said() -> None:
    assert refused(JSON, "{").code == "invalid_json"
    assert refused(JSON, b"\xff\xff").code == "invalid_json"
    assert refused(MSGPACK, "text").code == "invalid_msgpack"
    assert refused(MSGPACK, b"\xc1").code == "invalid_msgpack"
    for wire in WIRES:
        assert refused(wire, b" " * (MAX_FRAME_BYTES + 1)).code == "event_too_large"


def test_bodies_are_read_or_refused_by_the_path() -> None:
    body = read_body(b'{"model": "voice", "limits": {"grace_s": 3}}', OpenBody)
    assert body == OpenBody("voice", None, ChosenLimits(grace_s=3))
    for raw, path in (
        (b'{"limits": {"grace_s": 0}}', "limits.grace_s"),
        (b'{"limits": {"sessions": 1}}', "limits.sessions"),
        (b'{"settings": []}', "settings"),
        (b'{"settings": {"a": 99999999999999999999}}', "settings.a"),
    ):
        with pytest.raises(Unreadable) as caught:
            read_body(raw, OpenBody)
        assert caught.value.field == path
    with pytest.raises(Unreadable, match="not valid JSON"):
        read_body(b"{", OpenBody)
    assert read_body(b"", OpenBody) == read_body(b" \n", OpenBody) == OpenBody()


WORDS = st.sampled_from(
    ["type", "input", "signal", "id", "ref", "settings", "item", "parts", "update", "audio", "pcm"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | WORDS
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_read_or_refused(value: Any) -> None:
    for wire in WIRES:
        try:
            frame = wire.read(encoded(wire, value))
        except Unreadable:
            continue
        assert not isinstance(frame, Update) or isinstance(frame.input, AudioInput | SettingsInput)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for wire in WIRES:
        try:
            wire.read(raw)
        except Unreadable:
            continue
