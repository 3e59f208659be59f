from __future__ import annotations

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from protocol.realtime import EventWriter
from protocol.realtime import server_events as wire
from protocol.realtime.audio import BYTES_PER_MS, split_pcm


def test_every_event_has_an_id_of_its_own() -> None:
    writer = EventWriter("a")
    frames = [writer.write(wire.InputCleared()) for _ in range(3)]
    frames += writer.write_audio("r", "i", 0, 0, bytes(2))
    frames.append(EventWriter("b").write(wire.InputCleared()))
    ids = [json.loads(frame)["event_id"] for frame in frames]
    assert len(set(ids)) == len(ids)


def test_events_are_compact_json() -> None:
    frame = EventWriter("a").write(wire.SpeechStarted(item_id="i", audio_start_ms=3))
    assert frame == (
        '{"type":"input_audio_buffer.speech_started","item_id":"i",'
        '"audio_start_ms":3,"event_id":"event_a_1"}'
    )


@given(
    st.binary(max_size=60_000).map(lambda data: data[: len(data) // 2 * 2]),
    st.text(max_size=8),
    st.integers(0, 3),
)
def test_audio_arrives_whole_in_small_frames(pcm: bytes, item_id: str, index: int) -> None:
    writer = EventWriter("p")
    frames = writer.write_audio("resp", item_id, index, 1, pcm)
    decoded = [json.loads(frame) for frame in frames]
    pieces = [base64.b64decode(event["delta"]) for event in decoded]
    assert b"".join(pieces) == pcm
    assert all(0 < len(piece) <= 200 * BYTES_PER_MS for piece in pieces)
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert all(
        (event["type"], event["response_id"], event["item_id"], event["output_index"])
        == ("response.output_audio.delta", "resp", item_id, index)
        and event["content_index"] == 1
        for event in decoded
    )


def test_long_audio_is_split_evenly_and_not_below_20_ms() -> None:
    pieces = split_pcm(bytes(201 * BYTES_PER_MS))
    assert [len(piece) // BYTES_PER_MS for piece in pieces] == [100, 100]
    assert sum(map(len, pieces)) == 201 * BYTES_PER_MS


def test_a_new_part_gets_its_own_ids() -> None:
    writer = EventWriter("p")
    (first,) = writer.write_audio("r1", "i1", 0, 0, bytes(4))
    (second,) = writer.write_audio("r2", "i2", 1, 0, bytes(4))
    (third,) = writer.write_audio("r1", "i1", 0, 0, bytes(4))
    assert [json.loads(frame)["response_id"] for frame in (first, second, third)] == [
        "r1",
        "r2",
        "r1",
    ]


def test_optional_members_are_absent_and_not_null() -> None:
    frame = EventWriter("p").write(
        wire.ItemAdded(
            item=wire.ItemOut("i", "user", "completed", [wire.ContentOut("input_text", text="x")]),
            previous_item_id=None,
        )
    )
    event = json.loads(frame)
    assert event["previous_item_id"] is None
    assert event["item"]["content"] == [{"type": "input_text", "text": "x"}]
