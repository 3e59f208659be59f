from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import pytest

from gateway.surfaces.farewell import farewell
from gateway.surfaces.realtime import Translation
from protocol.errors import ErrorInfo, ErrorKind, InvalidRequest
from protocol.realtime import MalformedEvent
from sessions import client
from sessions.duplex import events as duplex
from sessions.duplex.events import (
    Item,
    ItemStatus,
    Part,
    PartKind,
    Response,
    ResponseStatus,
    Role,
    Usage,
)
from sessions.duplex.settings import DuplexSettings, Transcription, patched
from sessions.lifecycle import CloseReason
from tests.gateway.voice_turn import cancelled_turn, text_turn, voice_turn


def translation() -> Translation:
    counter = itertools.count(1)
    return Translation(
        "voice",
        event_prefix="t",
        new_id=lambda kind: f"{kind}_{next(counter)}",
        is_model=("voice", "gpt-realtime").__contains__,
    )


def read(**event: Any) -> duplex.ClientVerb:
    return translation().read(json.dumps(event))


def refused(**event: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(MalformedEvent) as caught:
        read(event_id="evt", **event)
    return caught.value.code, caught.value.field, caught.value.event_id


def written(outputs: list[duplex.ClientOutput]) -> list[dict[str, Any]]:
    shell = translation()
    return [json.loads(frame) for output in outputs for frame in shell.write(output)]


def one(output: duplex.ClientOutput) -> dict[str, Any]:
    (event,) = written([output])
    return event


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime", **session}}


# Client to session


def test_plain_events_become_verbs_with_the_client_s_id() -> None:
    assert read(type="input_audio_buffer.commit", event_id="a") == duplex.CommitInput("a")
    assert read(type="input_audio_buffer.clear") == duplex.ClearInput()
    assert read(type="conversation.item.delete", item_id="i") == duplex.DeleteItem("i")
    assert read(type="conversation.item.retrieve", item_id="i", event_id="b") == (
        duplex.RetrieveItem("i", "b")
    )
    assert read(
        type="conversation.item.truncate", item_id="i", content_index=0, audio_end_ms=120
    ) == duplex.TruncateItem("i", 0, 120)
    assert read(type="response.cancel", response_id="r") == duplex.CancelResponse("r")
    audio = base64.b64encode(b"\x01\x02").decode()
    assert read(type="input_audio_buffer.append", audio=audio) == duplex.AppendAudio(b"\x01\x02")


def test_an_unnamed_item_gets_an_id() -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    verb = read(type="conversation.item.create", item=item, previous_item_id="root")
    assert verb == duplex.CreateItem(
        Item("item_1", Role.USER, ItemStatus.COMPLETED, [Part(PartKind.INPUT_TEXT, "Hi")]), "root"
    )


def test_a_response_takes_what_the_client_says() -> None:
    verb = read(
        type="response.create",
        event_id="r",
        response={
            "conversation": "none",
            "input": [{"type": "item_reference", "id": "item_7"}],
            "instructions": "Be brief.",
            "output_modalities": ["text"],
            "audio": {"output": {"voice": "joe", "format": {"type": "audio/pcm", "rate": 24000}}},
            "max_output_tokens": 12,
            "metadata": {"k": "v"},
            "tools": [],
            "tool_choice": "auto",
        },
    )
    assert verb == duplex.CreateResponse(
        conversation=False,
        input=["item_7"],
        instructions="Be brief.",
        output_modalities=("text",),
        voice="joe",
        max_output_tokens=12,
        metadata={"k": "v"},
        ref="r",
    )
    assert read(type="response.create") == duplex.CreateResponse()


def test_a_patch_keeps_absent_and_null_apart() -> None:
    verb = read(
        **update(
            model="voice",
            instructions="",
            tools=None,
            tool_choice=None,
            truncation="auto",
            prompt=None,
            parallel_tool_calls=None,
            include=[],
            tracing={"workflow_name": "w"},
            audio={
                "input": {
                    "noise_reduction": None,
                    "turn_detection": {"silence_duration_ms": 700, "idle_timeout_ms": None},
                    "transcription": None,
                }
            },
        )
    )
    assert verb == duplex.PatchSettings(
        {
            "instructions": "",
            "tracing": {"workflow_name": "w"},
            "audio": {
                "input": {
                    "noise_reduction": None,
                    "turn_detection": {"silence_duration_ms": 700},
                    "transcription": None,
                }
            },
        }
    )


def test_every_patch_that_is_let_through_fits_the_settings() -> None:
    verb = read(
        **update(
            output_modalities=["text"],
            max_output_tokens="inf",
            tool_choice="none",
            tracing="auto",
            tools=[],
            audio={
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": "whisper-1", "language": "en", "prompt": None},
                    "turn_detection": {"type": "server_vad", "threshold": 0.4, "eagerness": None},
                },
                "output": {"format": {"type": "audio/pcm"}, "voice": "joe", "speed": 1.25},
            },
        )
    )
    assert isinstance(verb, duplex.PatchSettings)
    settings = patched(DuplexSettings(), verb.patch, voices={"joe": "joe"}, spoken=False)
    assert settings.audio.input.transcription == Transcription("whisper-1", "en")
    assert settings.audio.output.speed == 1.25


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"model": "other"}, "invalid_value", "model"),
        ({"tools": [{"type": "function", "name": "f"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "unsupported_value", "tool_choice"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning"),
        ({"parallel_tool_calls": True}, "unsupported_parameter", "parallel_tool_calls"),
        (
            {"include": ["item.input_audio_transcription.logprobs"]},
            "unsupported_parameter",
            "include",
        ),
        ({"truncation": "disabled"}, "unsupported_value", "truncation"),
        ({"truncation": {"type": "retention_ratio"}}, "unsupported_value", "truncation"),
        (
            {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
            "unsupported_value",
            "audio.input.format.type",
        ),
        (
            {"audio": {"output": {"format": {"type": "audio/pcma"}}}},
            "unsupported_value",
            "audio.output.format.type",
        ),
        (
            {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "invalid_value",
            "audio.input.format.rate",
        ),
        (
            {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}},
            "unsupported_parameter",
            "audio.input.noise_reduction",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}},
            "unsupported_value",
            "audio.input.turn_detection.type",
        ),
        (
            {"audio": {"input": {"turn_detection": {"idle_timeout_ms": 5000}}}},
            "unsupported_parameter",
            "audio.input.turn_detection.idle_timeout_ms",
        ),
        (
            {"audio": {"input": {"transcription": {"keywords": ["x"]}}}},
            "unsupported_parameter",
            "audio.input.transcription.keywords",
        ),
        (
            {"audio": {"output": {"voice": {"id": "voice_1"}}}},
            "unsupported_value",
            "audio.output.voice",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    session: dict[str, Any], code: str, param: str
) -> None:
    assert refused(**update(**session)) == (code, f"session.{param}", "evt")


@pytest.mark.parametrize(
    ("response", "param"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {}}, "reasoning"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"audio": {"output": {"voice": {"id": "v"}}}}, "audio.output.voice"),
        ({"audio": {"output": {"format": {"type": "audio/pcmu"}}}}, "audio.output.format.type"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(
    response: dict[str, Any], param: str
) -> None:
    code, field, event_id = refused(type="response.create", response=response)
    assert code.startswith("unsupported_")
    assert (field, event_id) == (f"response.{param}", "evt")


def test_the_webrtc_only_event_is_refused() -> None:
    assert refused(type="output_audio_buffer.clear") == ("unsupported_event", "type", "evt")


# Session to client


def test_the_session_object_tells_all_settings() -> None:
    event = one(client.SessionCreated("sess_1", "voice", DuplexSettings(), 1_900_000_000))
    assert event["type"] == "session.created"
    assert event["session"] == {
        "type": "realtime",
        "object": "realtime.session",
        "id": "sess_1",
        "model": "voice",
        "expires_at": 1_900_000_000,
        "truncation": "auto",
        "output_modalities": ["audio"],
        "instructions": "",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "noise_reduction": None,
                "transcription": None,
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.5,
                    "prefix_padding_ms": 300,
                    "silence_duration_ms": 500,
                    "create_response": True,
                    "interrupt_response": True,
                },
            },
            "output": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "voice": "",
                "speed": 1.0,
            },
        },
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "tracing": None,
    }


def test_transcription_holds_only_what_the_client_set() -> None:
    patch = {"audio": {"input": {"transcription": {"model": "whisper-1"}}}}
    settings = patched(DuplexSettings(), patch, voices={"": ""}, spoken=False)
    event = one(client.SettingsUpdated("sess_1", "voice", settings, 1))
    assert event["session"]["audio"]["input"]["transcription"] == {"model": "whisper-1"}


def test_additions_to_turn_detection_are_told_to_who_has_set_them() -> None:
    asked = {"type": "server_vad", "minimum_speech_ms": 200, "interrupt_on": "words"}
    session = {"type": "realtime", "audio": {"input": {"turn_detection": asked}}}
    verb = read(type="session.update", session=session)
    assert isinstance(verb, duplex.PatchSettings)
    settings = patched(DuplexSettings(), verb.patch, voices={"": ""}, spoken=False)
    event = one(client.SettingsUpdated("sess_1", "voice", settings, 1))
    assert event["session"]["audio"]["input"]["turn_detection"] == asked | {
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 500,
        "create_response": True,
        "interrupt_response": True,
    }


VOICE_TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
    "conversation.item.input_audio_transcription.completed",
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.delta",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


def test_a_voice_turn_has_the_skeleton_of_the_protocol() -> None:
    events = written(voice_turn())
    assert [event["type"] for event in events] == VOICE_TURN
    added = events[3]["item"]
    assert added["content"] == [{"type": "input_audio", "transcript": None}]
    assert events[5]["transcript"] == "How are you?"
    assert events[5]["usage"] == {"seconds": 1.25, "type": "duration"}
    assert events[9]["part"] == {"type": "audio", "transcript": ""}
    assert events[16]["transcript"] == "I am well. Thank you."
    assert events[18]["item"]["content"] == [
        {"type": "output_audio", "transcript": "I am well. Thank you."}
    ]
    done = events[-1]["response"]
    assert done["status"] == "completed"
    assert done["status_details"] is None
    assert done["usage"]["total_tokens"] == 47
    assert done["usage"]["input_token_details"]["cached_tokens"] == 30
    assert done["audio"]["output"]["voice"] == "joe"
    assert done["metadata"] == {"topic": "health"}


def test_a_voice_turn_s_audio_arrives_whole() -> None:
    deltas = [
        base64.b64decode(event["delta"])
        for event in written(voice_turn())
        if event["type"] == "response.output_audio.delta"
    ]
    assert b"".join(deltas) == b"".join(
        output.pcm for output in voice_turn() if isinstance(output, duplex.AudioDelta)
    )
    assert max(map(len, deltas)) <= 9600


def test_a_text_turn_uses_the_text_events() -> None:
    assert [event["type"] for event in written(text_turn())] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]


def test_a_cancelled_turn_still_has_all_done_events() -> None:
    events = written(cancelled_turn())
    assert [event["type"] for event in events][-6:] == [
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    done = events[-1]["response"]
    assert done["status"] == "cancelled"
    assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert done["usage"] is None
    assert done["output"][0]["status"] == "incomplete"


def response(status: ResponseStatus, **fields: Any) -> dict[str, Any]:
    made = Response("resp_1", status, None, ("audio",), "joe", None, None, **fields)
    event: dict[str, Any] = one(duplex.ResponseDone(made))["response"]
    return event


def test_a_failed_response_says_why() -> None:
    error = ErrorInfo("engine_lost", ErrorKind.LOST, "The worker died.")
    details = response(ResponseStatus.FAILED, error=error)["status_details"]
    assert details == {
        "type": "failed",
        "error": {"type": "server_error", "code": "engine_lost", "message": "The worker died."},
    }


def test_a_reason_that_clients_do_not_know_is_told_as_a_code() -> None:
    details = response(ResponseStatus.INCOMPLETE, reason="stalled")["status_details"]
    assert details["error"]["code"] == "stalled"
    assert "reason" not in details
    details = response(ResponseStatus.INCOMPLETE, reason="max_output_tokens")["status_details"]
    assert details == {"type": "incomplete", "reason": "max_output_tokens"}


def test_an_out_of_band_response_has_no_conversation() -> None:
    made = response(ResponseStatus.COMPLETED, usage=Usage(1, 0, 2))
    assert made["conversation_id"] is None
    assert made["max_output_tokens"] == "inf"


def test_a_refusal_names_the_parameter_as_the_client_wrote_it() -> None:
    def error(field: str | None) -> dict[str, Any]:
        info = ErrorInfo("invalid_value", ErrorKind.CLIENT, "No.", field)
        event: dict[str, Any] = one(client.Refused(info, "evt_1"))["error"]
        return event

    assert error("settings.audio.input.turn_detection.threshold") == {
        "type": "invalid_request_error",
        "code": "invalid_value",
        "message": "No.",
        "param": "session.audio.input.turn_detection.threshold",
        "event_id": "evt_1",
    }
    assert error("audio_end_ms")["param"] == "audio_end_ms"
    assert error("response.output_modalities")["param"] == "response.output_modalities"
    assert error(None)["param"] is None


LONG = "x" * 2_000_000


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.cancel", LONG: 1},
        update(audio={"output": {LONG: 1}}),
        update(output_modalities=[LONG]),
        {
            "type": "conversation.item.create",
            "item": {"type": "message", "role": LONG, "content": []},
        },
        {"type": "response.create", "response": {"conversation": LONG}},
    ],
)
def test_an_error_quotes_little_of_what_the_client_wrote(event: dict[str, Any]) -> None:
    # A frame of megabytes would end the session as one that does not read.
    shell = translation()
    with pytest.raises(MalformedEvent) as caught:
        shell.read(json.dumps(event))
    assert len(shell.refusal(caught.value)) < 4096


def test_a_refusal_by_the_session_quotes_little_too() -> None:
    info = InvalidRequest(f"no voice {LONG}", field=LONG).info()
    assert len(json.dumps(one(client.Refused(info, "evt_1")))) < 4096


def test_the_model_may_be_repeated_by_any_of_its_names() -> None:
    for name in ("voice", "gpt-realtime"):
        verb = read(**update(model=name, instructions="Hi."))
        assert verb == duplex.PatchSettings({"instructions": "Hi."})
    assert refused(**update(model="other")) == ("invalid_value", "session.model", "evt")


def test_a_parameter_of_an_event_is_not_taken_for_a_setting() -> None:
    shell = translation()
    frame = json.dumps({"type": "input_audio_buffer.append", "audio": "%", "event_id": "mine"})
    with pytest.raises(MalformedEvent) as caught:
        shell.read(frame)
    error = json.loads(shell.refusal(caught.value))["error"]
    assert (error["param"], error["event_id"]) == ("audio", "mine")


def test_a_retrieved_item_has_its_transcript_and_no_audio() -> None:
    item = Item("i", Role.USER, ItemStatus.COMPLETED, [Part(PartKind.INPUT_AUDIO, "x", 400)])
    (frame,) = translation().write(duplex.ItemRetrieved(item))
    assert json.loads(frame)["item"]["content"] == [{"type": "input_audio", "transcript": "x"}]


@pytest.mark.parametrize(
    ("reason", "code", "error"),
    [
        ("client", 1000, None),
        ("idle", 1000, "session_expired"),
        ("max_age", 1000, "session_expired"),
        ("completed", 1000, None),
        ("detached", 1000, "session_expired"),
        ("drained", 1001, None),
        ("evicted", 1000, "session_expired"),
        ("fenced", 1012, "fenced"),
        ("engine_lost", 1012, "engine_lost"),
        ("stalled", 1008, "session_stalled"),
        ("error", 1011, "internal_error"),
        ("something new", 1011, "internal_error"),
    ],
)
def test_the_end_of_a_session_has_a_close_code(reason: str, code: int, error: str | None) -> None:
    ending = farewell(reason, None)
    assert ending.code == code
    assert (ending.error.code if ending.error else None) == error


def test_the_end_of_a_session_is_told_before_the_close() -> None:
    events = written([client.SessionEnded("max_age")])
    assert [event["error"]["code"] for event in events] == ["session_expired"]
    assert written([client.SessionEnded("client")]) == []


def test_every_end_of_a_session_has_its_close_code() -> None:
    faults = {reason for reason in CloseReason if farewell(reason.value, None).code == 1011}
    assert faults == {CloseReason.ERROR}
