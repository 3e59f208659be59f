"""What the two ends of an arena share belongs to one version, which they tell each other."""

from __future__ import annotations

import msgspec

from protocol.arena import content, handshake
from protocol.arena.producer import Flow, Place, ProducerEnd
from protocol.arena.records import RECORD
from protocol.arena.slots import Slot
from protocol.payloads import Payload, PayloadType
from tests.protocol.arena.test_producer import new_end


def payload_slot(end: ProducerEnd) -> Slot[Place]:
    """The first slot of an arena."""
    end.attach("c")
    flow: Flow = end.open("s", 1, {"edge": "c"}, 4096)
    return end.fill(flow, 200)


def test_a_layout_that_changes_is_another_version() -> None:
    description = content.describe(
        Payload(PayloadType.AUDIO, b"data", "<i2", (2,), {"rate_hz": 24000}),
        content.describe_flow({"c": "edge"}, "s", 1),
    )
    head = content.head(payload_slot(new_end()), description, b"note", 4)
    messages: list[msgspec.Struct] = [
        handshake.Prepare(2, 64),
        handshake.Hello(2, "c"),
        handshake.Welcome("p", 7, 4096, 64, 8),
        handshake.OwnMemory(1, 2, 3),
        handshake.Refusal("why"),
    ]
    assert handshake.VERSION == 2
    assert RECORD.format == "<IIQQQ"
    assert head == (
        b"\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x25\0\0\0\x04\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0"
        b"\x95\x93\x81\xa1c\xa4edge\xa1s\x01\xa5audio\xa3<i2\x91\x02\x81\xa7rate_hz\xcd\x5d\xc0"
        b"note"
    ).ljust(128, b"\0")
    assert [msgspec.to_builtins(message) for message in messages] == [
        {"type": "prepare", "version": 2, "outbox_bytes": 64},
        {"type": "hello", "version": 2, "name": "c"},
        {
            "type": "welcome",
            "name": "p",
            "arena": 7,
            "arena_bytes": 4096,
            "outbox_bytes": 64,
            "slots": 8,
        },
        {"type": "own_memory", "slot": 1, "generation": 2, "size_bytes": 3},
        {"type": "refusal", "reason": "why"},
    ]
