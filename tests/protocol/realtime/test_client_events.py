from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.realtime import (
    EVENT_TYPES,
    MAX_EVENT_BYTES,
    ClientEvent,
    InputAudioAppend,
    InputAudioCommit,
    ItemCreate,
    ItemReference,
    ItemTruncate,
    MalformedEvent,
    MessageItem,
    ResponseCreate,
    SessionUpdate,
    parse,
)
from protocol.realtime.client_events import MAX_VALUES
from protocol.realtime.items import MAX_PARTS


def event(**fields: Any) -> str:
    return json.dumps(fields)


def refused(frame: str | bytes) -> MalformedEvent:
    with pytest.raises(MalformedEvent) as caught:
        parse(frame)
    return caught.value


@given(st.binary(max_size=4000).filter(lambda data: len(data) % 2 == 0))
def test_appended_audio_arrives_byte_for_byte(pcm: bytes) -> None:
    frame = event(type="input_audio_buffer.append", audio=base64.b64encode(pcm).decode())
    assert parse(frame) == InputAudioAppend(pcm, None)
    assert parse(frame.encode()) == InputAudioAppend(pcm, None)


def test_escaped_slashes_are_base64_too() -> None:
    frame = r'{"type":"input_audio_buffer.append","audio":"\/\/8="}'
    assert parse(frame) == InputAudioAppend(b"\xff\xff", None)


@pytest.mark.parametrize("audio", ["%%%%", "YWI", "YW I=", "YWI=\n", "é", "YQ=="])
def test_bad_base64_and_half_samples_name_the_audio(audio: str) -> None:
    error = refused(event(type="input_audio_buffer.append", audio=audio, event_id="e1"))
    assert (error.code, error.field, error.event_id) == ("invalid_value", "audio", "e1")


@pytest.mark.parametrize("frame", ["", "{", "nonsense", '{"type":', b"\xff\xfe", '{"a":"\ud800"}'])
def test_malformed_json_is_said_to_be_that(frame: str | bytes) -> None:
    assert refused(frame).code == "invalid_json"


def test_deep_nesting_is_refused_and_not_fatal() -> None:
    error = refused('{"type":"session.update","session":' + "[" * 50_000 + "}")
    assert error.code in ("invalid_json", "invalid_type")


@pytest.mark.parametrize("frame", ["[]", "3", '"session.update"', "null", "true"])
def test_a_frame_must_hold_an_object(frame: str) -> None:
    assert refused(frame).code == "invalid_type"


def test_a_frame_must_say_its_type() -> None:
    error = refused(event(event_id="e2"))
    assert (error.code, error.field, error.event_id) == ("missing_required_parameter", "type", "e2")
    assert refused(event(type=3)).code == "invalid_type"


def test_an_unknown_event_is_refused_with_the_list_of_events() -> None:
    error = refused(event(type="conversation.item.explode", event_id="e3"))
    assert (error.code, error.field, error.event_id) == ("invalid_value", "type", "e3")
    assert all(name in error.message for name in EVENT_TYPES)


def test_an_unknown_event_s_name_is_not_echoed_at_length() -> None:
    assert len(refused(event(type="x" * 10_000)).message) < 1000


def test_an_unknown_field_is_refused_by_its_path() -> None:
    error = refused(event(type="input_audio_buffer.commit", flavour=1, event_id="e4"))
    assert (error.code, error.field, error.event_id) == ("unknown_parameter", "flavour", "e4")


@pytest.mark.parametrize(
    ("frame", "code", "field"),
    [
        (event(type="conversation.item.delete"), "missing_required_parameter", "item_id"),
        (event(type="conversation.item.delete", item_id=4), "invalid_type", "item_id"),
        (event(type="conversation.item.delete", item_id=""), "invalid_value", "item_id"),
        (
            event(
                type="conversation.item.truncate", item_id="a", content_index=0, audio_end_ms=1.5
            ),
            "invalid_type",
            "audio_end_ms",
        ),
        (
            event(type="conversation.item.truncate", item_id="a", content_index=0, audio_end_ms=-1),
            "invalid_value",
            "audio_end_ms",
        ),
        (event(type="response.create", response={"tone": 1}), "unknown_parameter", "response.tone"),
        (
            event(type="response.create", response={"metadata": {"k": 1}}),
            "invalid_type",
            "response.metadata[...]",
        ),
        (
            event(type="response.create", response={"output_modalities": ["audio", "text"]}),
            "invalid_value",
            "response.output_modalities",
        ),
        (
            event(type="response.create", response={"max_output_tokens": 0}),
            "invalid_value",
            "response.max_output_tokens",
        ),
        (
            event(type="response.create", response={"conversation": "maybe"}),
            "invalid_value",
            "response.conversation",
        ),
        (event(type="session.update"), "missing_required_parameter", "session"),
        (event(type="session.update", session={}), "missing_required_parameter", "session.type"),
        (
            event(type="session.update", session={"type": "transcription"}),
            "invalid_value",
            "session.type",
        ),
        (
            event(type="session.update", session={"type": "realtime", "voice": "x"}),
            "unknown_parameter",
            "session.voice",
        ),
        (
            event(
                type="session.update",
                session={"type": "realtime", "audio": {"input": {"format": {"rate": "x"}}}},
            ),
            "invalid_type",
            "session.audio.input.format.rate",
        ),
        (
            event(
                type="session.update",
                session={"type": "realtime", "audio": {"input": {"turn_detection": {"q": 1}}}},
            ),
            "unknown_parameter",
            "session.audio.input.turn_detection.q",
        ),
    ],
)
def test_wrong_fields_are_named_by_their_path(frame: str, code: str, field: str) -> None:
    error = refused(frame)
    assert (error.code, error.field) == (code, field)


def test_an_item_of_very_many_parts_is_refused() -> None:
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": ""}] * (MAX_PARTS + 1),
    }
    error = refused(event(type="conversation.item.create", item=item))
    assert (error.code, error.field) == ("invalid_value", "item.content")
    error = refused(event(type="response.create", response={"input": [item]}))
    assert (error.code, error.field) == ("invalid_value", "response.input[0].content")


def test_too_many_or_too_long_metadata_is_refused() -> None:
    many = {str(index): "x" for index in range(17)}
    error = refused(event(type="response.create", response={"metadata": many}))
    assert (error.code, error.field) == ("invalid_value", "response.metadata")
    error = refused(event(type="response.create", response={"metadata": {"k": "x" * 513}}))
    assert (error.code, error.field) == ("string_above_max_length", "response.metadata.k")


def test_an_event_longer_than_the_limit_is_refused_unread() -> None:
    assert refused("x" * (MAX_EVENT_BYTES + 1)).code == "event_too_large"


def test_events_without_payload_are_read() -> None:
    assert parse('{"type":"input_audio_buffer.commit"}') == InputAudioCommit()
    assert parse('{"type":"response.create","event_id":"r"}') == ResponseCreate(event_id="r")
    assert parse('{"type":"response.create","response":null}') == ResponseCreate(event_id=None)


def test_truncate_is_read() -> None:
    frame = event(
        type="conversation.item.truncate", item_id="item_1", content_index=0, audio_end_ms=1500
    )
    assert parse(frame) == ItemTruncate(item_id="item_1", content_index=0, audio_end_ms=1500)


def test_session_update_keeps_what_was_absent_apart_from_null() -> None:
    read = parse(
        event(
            type="session.update",
            session={"type": "realtime", "audio": {"input": {"turn_detection": None}}},
        )
    )
    assert isinstance(read, SessionUpdate)
    assert read.session.audio.input.turn_detection is None  # type: ignore[union-attr]
    assert read.session.instructions is not None


def item_event(item: dict[str, Any]) -> str:
    return event(type="conversation.item.create", item=item, event_id="i")


def test_a_message_item_is_read_with_its_audio() -> None:
    read = parse(
        item_event(
            {
                "type": "message",
                "role": "user",
                "id": "mine",
                "content": [
                    {"type": "input_text", "text": "Hello"},
                    {"type": "input_audio", "audio": "AAAA", "transcript": "hm"},
                ],
            }
        ).replace("AAAA", "AAABAA==")
    )
    assert isinstance(read, ItemCreate)
    assert read.item.id == "mine"
    assert [part.type for part in read.item.content] == ["input_text", "input_audio"]
    assert read.item.content[1].pcm == b"\x00\x00\x01\x00"
    assert read.item.content[1].text == "hm"


@pytest.mark.parametrize(
    ("item", "code", "field"),
    [
        ({"type": "function_call_output", "output": "x"}, "unsupported_value", "item.type"),
        ({"type": "mcp_call"}, "unsupported_value", "item.type"),
        ({"type": "rumour"}, "invalid_value", "item.type"),
        ({"type": "message", "content": []}, "missing_required_parameter", "item.role"),
        (
            {"type": "message", "role": "user", "content": [{"type": "output_text", "text": "x"}]},
            "invalid_value",
            "item.content[0].type",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text"}]},
            "missing_required_parameter",
            "item.content[0].text",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_audio"}]},
            "missing_required_parameter",
            "item.content[0].audio",
        ),
        (
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "x"},
                    {"type": "input_audio", "audio": "AA=="},
                ],
            },
            "invalid_value",
            "item.content[1].audio",
        ),
        (
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
            },
            "unsupported_content_type",
            "item.content[0].type",
        ),
    ],
)
def test_wrong_items_are_named_by_their_path(item: dict[str, Any], code: str, field: str) -> None:
    error = refused(item_event(item))
    assert (error.code, error.field, error.event_id) == (code, field, "i")


def test_response_input_holds_items_and_references() -> None:
    read = parse(
        event(
            type="response.create",
            response={
                "conversation": "none",
                "input": [
                    {"type": "item_reference", "id": "item_9"},
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "x"}],
                    },
                ],
            },
        )
    )
    assert isinstance(read, ResponseCreate)
    assert read.conversation == "none"
    assert read.input is not None
    assert isinstance(read.input[0], ItemReference)
    assert isinstance(read.input[1], MessageItem)
    error = refused(event(type="response.create", response={"input": [{"type": "item_reference"}]}))
    assert error.field == "response.input[0].id"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    (
        "event_id session audio item item_id response response_id type content_index"
        " audio_end_ms previous_item_id"
    ).split()
)


@given(st.sampled_from(EVENT_TYPES), st.dictionaries(NAMES, JSON, max_size=5))
def test_any_object_is_either_an_event_or_refused(kind: str, fields: dict[str, Any]) -> None:
    with contextlib.suppress(MalformedEvent):
        assert isinstance(parse(json.dumps({"type": kind, **fields})), ClientEvent)


@pytest.mark.parametrize(
    "tracing",
    ["[" + "[]," * MAX_VALUES + "1]", '{"a":' + '{"a":' * MAX_VALUES, '{"k":1,' * MAX_VALUES],
)
@pytest.mark.parametrize("binary", [False, True])
def test_an_event_of_more_values_than_the_limit_is_refused_unread(
    tracing: str, binary: bool
) -> None:
    frame = '{"type":"session.update","session":{"type":"realtime","tracing":' + tracing + "}}"
    error = refused(frame.encode() if binary else frame)
    assert error.code == "event_too_large"
    assert "values" in str(error)


def test_a_long_append_has_few_values() -> None:
    audio = base64.b64encode(bytes(2 * MAX_VALUES)).decode()
    parsed = parse(event(type="input_audio_buffer.append", audio=audio))
    assert isinstance(parsed, InputAudioAppend)
