"""Every output of a session as a frame, and the documents that describe them."""

from __future__ import annotations

import base64
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Union, get_args

import msgspec
import pytest

from gateway.surfaces.native.cursors import Cursors
from gateway.surfaces.native.documents import DOCUMENTS
from gateway.surfaces.native.outputs import FRAMES, OutputWriter
from gateway.surfaces.native.verbs import VERBS
from protocol.errors import ErrorInfo, ErrorKind, InvalidRequest
from protocol.native import WIRES
from protocol.native.frames import Input, Signals
from protocol.payloads import Payload, PayloadType
from protocol.wires import Wire
from sessions import client
from sessions.duplex import events as duplex
from sessions.duplex.settings import DuplexSettings
from sessions.oneshot import events as oneshot
from sessions.pipeline import Kind, Limits
from sessions.steps import events as steps
from tests.gateway.json_schema import check, resolved
from tests.gateway.voice_turn import cancelled_turn, text_turn, voice_turn

ERROR = ErrorInfo("item_not_found", ErrorKind.CLIENT, "None.", "item_id")
SETTINGS = DuplexSettings(instructions="Be brief.")
ITEM = duplex.Item(
    "i", duplex.Role.USER, duplex.ItemStatus.COMPLETED, [duplex.Part(duplex.PartKind.INPUT_AUDIO)]
)
FRAME = Payload(PayloadType.FRAMES, b"\x01\x02", "|u1", (2,), {"seed": 3})
SNAPSHOT = duplex.DuplexSnapshot([ITEM], [], None, 120)

OTHERS: list[Any] = [
    client.SessionCreated("s", "voice", SETTINGS, 1_900_000_000, Limits(idle_ms=1_500)),
    client.SettingsUpdated("s", "voice", SETTINGS, 1_900_000_000),
    client.Refused(ERROR, "mine"),
    client.Answered("c1", ERROR, {"committed_step": 3}),
    client.Parking("think", "requested"),
    client.Parked("think"),
    client.Restoring("think"),
    client.Restored("think"),
    client.SnapshotFailed("world", ERROR),
    client.SessionEnded("client"),
    client.Attached("s", "voice", SETTINGS, 1, Limits(), 7, SNAPSHOT, lost=(2, 4), secret="x"),
    client.LetGo("replaced"),
    duplex.InputCleared(),
    duplex.InputTranscriptionFailed("i", 0, ERROR),
    duplex.ItemRetrieved(ITEM),
    duplex.ItemDeleted("i"),
    duplex.ConversationReset(["i"]),
    steps.StepDone(3, 3, {"frames": [FRAME]}, {"world": {"done": 1.5}}),
    steps.StepFailed(3, 2, ErrorInfo("step_out_of_order", ErrorKind.CLIENT, "No.", "step"), "r"),
    steps.SafeAction(3, 2, steps.Reason.LATE, {"actions": [FRAME]}, in_flight=True, ref="r"),
    steps.EmergencyStopped(steps.StoppedBy.OPERATOR),
    steps.StopReleased(),
    steps.StateLost(2, None),
    steps.WasReset(0),
    steps.WasRestored(2),
    steps.CheckpointKept(2, [1, 2]),
    steps.WasRewound(1),
    steps.ActionsReleased(2),
    oneshot.Piece("text", FRAME),
    oneshot.RequestDone({"think": {"tokens": 3}}, {"think": {"done": 1.5}}),
    oneshot.RequestFailed(ERROR),
    duplex.ItemTruncated("i", 0, 120),
]
EXAMPLES = [*OTHERS, *voice_turn(), *text_turn(), *cancelled_turn()]

ServerFrame = Union[tuple(DOCUMENTS.server_frames)]  # type: ignore[valid-type]  # noqa: UP007


def writer(wire: Wire[Any]) -> OutputWriter:
    return OutputWriter(wire, Cursors("s"))


def frame_of(output: Any, wire: Wire[Any] = WIRES[0]) -> dict[str, Any]:
    written = writer(wire).write(9, output)
    decoded: dict[str, Any] = (
        msgspec.msgpack.decode(written)
        if isinstance(written, bytes)
        else msgspec.json.decode(written)
    )
    return decoded


def test_every_output_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(FRAMES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_output_is_the_frame_that_its_type_says(example: Any) -> None:
    expected = re.sub(r"(?<!^)(?=[A-Z])", "_", type(example).__name__).lower()
    for wire in WIRES:
        written = writer(wire).write(9, example)
        assert isinstance(written, bytes) is (wire is WIRES[1])
        module = msgspec.msgpack if wire is WIRES[1] else msgspec.json
        read = module.decode(written, type=ServerFrame)
        frame = frame_of(example, wire)
        assert type(read) is FRAMES[type(example)]
        assert frame["type"] == {"answered": "answer"}.get(expected, expected)
        assert (frame["sequence"], frame["cursor"]) == (9, Cursors("s").write(9))


def test_audio_is_bytes_in_msgpack_whatever_memory_it_lies_in() -> None:
    pcm = b"\x01\x02" * 480
    for held in (pcm, memoryview(pcm)):
        delta = duplex.AudioDelta("r", "i", 0, 0, held)  # type: ignore[arg-type]
        assert frame_of(delta, WIRES[1])["pcm"] == pcm
        assert base64.b64decode(frame_of(delta)["pcm"]) == pcm


def test_limits_are_told_in_seconds_and_fields_as_they_were_written() -> None:
    assert frame_of(OTHERS[0])["limits"]["idle_s"] == 1.5
    answer = frame_of(client.Answered("c1", ERROR, {"committed_step": 3}))
    assert (answer["id"], answer["result"]) == ("c1", {"committed_step": 3})
    assert answer["error"]["field"] == "signal.item_id"
    for field, written in (
        ("settings.audio.output.voice", "input.settings.audio.output.voice"),
        ("response.audio.output.voice", "signal.voice"),
        ("response.input[0].content", "signal.input[0].content"),
        ("item.content", "input.item.parts"),
        ("settings.surprise", "input.settings.surprise"),
        ("reset.parameters", "signal.parameters"),
        ("parameters.think", "input.parameters.think"),
        ("step", "input.step"),
        ("inputs", "input.inputs"),
        ("items", "items"),
    ):
        error = msgspec.structs.replace(ERROR, field=field)
        assert frame_of(client.Refused(error, None))["error"]["field"] == written


def test_the_cursor_of_the_welcome_is_where_the_client_goes_on() -> None:
    cursors = Cursors("s")
    attached = client.Attached("s", "voice", SETTINGS, 1, Limits(), 7, SNAPSHOT)
    gapped = client.Attached("s", "voice", SETTINGS, 1, Limits(), 7, SNAPSHOT, lost=(3, 5))
    for welcome, came_with, goes_on in ((attached, None, 7), (attached, 2, 2), (gapped, 2, 5)):
        frames = writer(WIRES[0])
        frame = msgspec.json.decode(frames.attached(welcome, came_with))
        assert (frame["sequence"], cursors.read(frame["cursor"])) == (7, goes_on)
        # What is said to this client alone moves nothing.
        alone = msgspec.json.decode(frames.alone(client.Refused(ERROR, None)))
        assert cursors.read(alone["cursor"]) == goes_on


def test_a_cursor_is_read_by_its_own_session() -> None:
    cursors = Cursors("sess_1")
    assert cursors.read(cursors.write(12)) == 12
    for cursor in (Cursors("sess_2").write(12), "", "12", cursors.write(1) + "x", "x.1"):
        with pytest.raises(InvalidRequest):
            cursors.read(cursor)


def test_every_input_and_signal_is_taken_by_some_kind() -> None:
    taken = {said for kind in Kind for said in VERBS[kind]}
    assert taken == {*get_args(Input), *get_args(Signals)}


# The documents


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_real_frames_are_what_the_schema_says(example: Any) -> None:
    schema = DOCUMENTS.json_schema
    definition = resolved(
        schema,
        schema["$defs"]["ServerFrame"]["discriminator"]["mapping"][frame_of(example)["type"]],
    )
    check(frame_of(example), definition, schema)


def test_the_page_about_it_names_everything() -> None:
    page = (Path(__file__).parents[2] / "docs" / "native.md").read_text()
    named = [
        *DOCUMENTS.client_frames,
        *DOCUMENTS.server_frames,
        *get_args(Input),
        *get_args(Signals),
    ]
    tags = {str(struct.__struct_config__.tag) for struct in named}
    assert {tag for tag in tags if f"`{tag}`" not in page} == set()


def test_the_check_of_the_schema_can_fail() -> None:
    schema = DOCUMENTS.json_schema
    frame = frame_of(client.Restoring("think"))
    definition = schema["$defs"]["RestoringFrame"]
    check(frame, definition, schema)
    for broken in (frame | {"stage": 3}, frame | {"more": 1}, {"type": "restoring"}):
        with pytest.raises(AssertionError):
            check(broken, definition, schema)
    assert all(is_dataclass(output) for output in FRAMES)
