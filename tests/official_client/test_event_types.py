"""Every event that the Realtime surface emits fits the official client's types."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

from gateway.surfaces.realtime import Translation
from protocol.errors import ErrorInfo, ErrorKind
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
)
from sessions.duplex.settings import DuplexSettings, patched
from sessions.pipeline import Limits
from tests.gateway.voice_turn import cancelled_turn, text_turn, voice_turn
from tests.official_client.environment import client_python

VALIDATOR = Path(__file__).parent / "validate_events.py"


def session_outputs() -> list[duplex.ClientOutput]:
    changed = patched(
        DuplexSettings(),
        {
            "output_modalities": ["text"],
            "max_output_tokens": 200,
            "tool_choice": "none",
            "tracing": {"workflow_name": "test"},
            "audio": {
                "input": {
                    "turn_detection": None,
                    "transcription": {"model": "whisper-1", "language": "en"},
                },
                "output": {"voice": "joe", "speed": 1.25},
            },
        },
        voices={"joe": "joe"},
        spoken=False,
    )
    return [
        client.SessionCreated("sess_1", "voice", DuplexSettings(), 1_900_000_000),
        client.SettingsUpdated("sess_1", "voice", changed, 1_900_000_000),
    ]


def other_outputs() -> list[duplex.ClientOutput]:
    error = ErrorInfo("engine_lost", ErrorKind.LOST, "The worker died.")
    parts = [
        Part(PartKind.INPUT_TEXT, "Hello"),
        Part(PartKind.INPUT_AUDIO, None, 20, bytes(960)),
    ]
    user = Item("item_1", Role.USER, ItemStatus.COMPLETED, parts)
    system = Item("item_2", Role.SYSTEM, ItemStatus.COMPLETED, [Part(PartKind.INPUT_TEXT, "Be.")])

    def ended(status: ResponseStatus, reason: str | None, error: ErrorInfo | None) -> Response:
        return Response(
            "resp_2", status, None, ("audio",), "joe", None, None, reason=reason, error=error
        )

    return [
        duplex.InputCleared(),
        duplex.ItemAdded(user, None),
        duplex.ItemAdded(system, "item_1"),
        duplex.ItemDone(user, None),
        duplex.ItemRetrieved(user),
        duplex.ItemDeleted("item_1"),
        duplex.ConversationReset(["item_1", "item_2"]),
        duplex.ItemTruncated("item_a", 0, 1500),
        duplex.InputTranscriptionFailed("item_1", 0, error),
        duplex.ResponseDone(ended(ResponseStatus.FAILED, None, error)),
        duplex.ResponseDone(ended(ResponseStatus.INCOMPLETE, "max_output_tokens", None)),
        duplex.ResponseDone(ended(ResponseStatus.INCOMPLETE, "stalled", None)),
        duplex.ResponseDone(ended(ResponseStatus.CANCELLED, "client_cancelled", None)),
        client.Refused(ErrorInfo("invalid_value", ErrorKind.CLIENT, "No.", "item_id"), "evt"),
        client.Refused(error, None),
        client.Answered("command", error),
        client.Parking("think", "requested"),
        client.Parked("think"),
        client.Restoring("think"),
        client.Restored("think"),
        client.SnapshotFailed(
            "think", ErrorInfo("capacity_exceeded", ErrorKind.CAPACITY, "The store is full.")
        ),
        client.Attached("sess_1", "voice", DuplexSettings(), 1, Limits(), 9, None, secret="s"),
        client.LetGo("replaced"),
        client.SessionEnded("max_age"),
    ]


def frames() -> list[str]:
    counter = itertools.count()
    shell = Translation(
        "voice",
        event_prefix="t",
        new_id=lambda kind: f"{kind}_{next(counter)}",
        is_model=("voice", "gpt-realtime").__contains__,
    )
    outputs = [*session_outputs(), *voice_turn(), *text_turn(), *cancelled_turn()]
    outputs += other_outputs()
    return [frame for output in outputs for frame in shell.write(output)]


def validate(lines: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [client_python(), VALIDATOR],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_emitted_event_fits_the_types() -> None:
    result = validate(frames())
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "", "")


def test_every_output_of_a_session_is_among_them() -> None:
    outputs = [*session_outputs(), *voice_turn(), *text_turn(), *cancelled_turn()]
    outputs += other_outputs()
    assert {type(output) for output in outputs} == set(duplex.ClientOutput.__args__)


def test_the_check_finds_what_does_not_fit() -> None:
    frame = next(frame for frame in frames() if '"session.created"' in frame)
    event = json.loads(frame)
    event["session"]["audio"]["input"]["format"]["rate"] = 16_000
    result = validate([json.dumps(event)])
    assert result.returncode == 1
    assert "session.created" in result.stdout
