"""A turn's way over edges that carry more than text."""

from __future__ import annotations

import pytest

from protocol.connectors import ShmDescriptor
from protocol.edges import ConnectorKind
from protocol.messages import Acknowledge, Feed, Run
from protocol.payloads import PayloadType
from sessions.actions import StageProduced
from sessions.duplex.events import ResponseDone, ResponseStatus
from sessions.pipeline import Delivery, Edge, Pipeline
from tests.sessions.harness import Harness

CODES = ShmDescriptor(arena=1, slot=2, generation=3, offset=0, key=4, size_bytes=3_200)


def chain(delivery: Delivery, connector: ConnectorKind) -> Pipeline:
    """listen -> think -> talk -> decode, with codec codes on the last edge."""
    return Pipeline(
        name="chain",
        stages=("listen", "think", "talk", "decode"),
        edges=(
            Edge("listen", "think", PayloadType.TEXT, Delivery.FULL),
            Edge("think", "talk", PayloadType.TEXT, Delivery.CHUNK),
            Edge("talk", "decode", PayloadType.CODEC_CODES, delivery),
        ),
        outputs={"text": "think", "audio": "decode"},
        connectors={"talk->decode": connector},
        voice="tone",
        voices={"tone": "tone"},
    )


def codes(harness: Harness, turn: int, sequence: int) -> None:
    harness.feed(StageProduced("talk", turn, sequence, None, CODES))


def test_the_producer_is_told_who_reads_its_output() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    run = harness.last_run("talk")
    assert (run.readers, run.to_client) == ({"talk->decode": "decode"}, False)
    assert harness.last_run("think").readers == {}


def test_pieces_are_passed_on_as_they_come_and_need_not_be_kept() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    codes(harness, turn, 1)
    codes(harness, turn, 2)
    assert harness.last_run("decode").inputs == [CODES]
    assert [feed.payload for feed in harness.sent(Feed, "decode")] == [CODES]
    assert [a.through for a in harness.sent(Acknowledge, "talk")] == [1, 2]


def test_a_whole_payload_is_handed_over_when_its_producer_has_ended() -> None:
    harness = Harness(chain(Delivery.FULL, ConnectorKind.INLINE))
    turn = harness.reply_turn()
    for number in range(6):
        harness.text("think", turn, f"This is sentence number {number} of a long reply. ")
    harness.done("think", turn)
    # What waits for the end cannot be paced by what comes out behind it.
    assert len([f for f in harness.sent(Feed, "talk") if f.payload is not None]) == 5
    codes(harness, turn, 1)
    codes(harness, turn, 2)
    assert not harness.sent(Run, "decode")
    harness.done("talk", turn)
    run = harness.last_run("decode")
    assert (run.inputs, run.last) == ([CODES, CODES], True)


@pytest.mark.parametrize("stage", ["talk", "decode"])
def test_the_loss_of_any_stage_ends_the_turn_with_its_reason(stage: str) -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    codes(harness, turn, 1)
    harness.lose(stage)
    response = harness.one(ResponseDone).response
    assert response.status is ResponseStatus.FAILED
    assert response.error is not None
    assert response.error.code == "engine_lost"
