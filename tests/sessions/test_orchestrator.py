"""A turn's way over edges that carry more than text."""

from __future__ import annotations

import pytest

from protocol.connectors import ShmDescriptor
from protocol.edges import ConnectorKind
from protocol.messages import Acknowledge, Feed, Run
from protocol.payloads import PayloadType, audio_payload
from sessions.actions import StageProduced
from sessions.bindings import WAITING_COMMANDS
from sessions.duplex.events import ResponseDone, ResponseStatus
from sessions.pipeline import Delivery, Edge, Pipeline
from tests.sessions.harness import PCM_MS, Harness, voice_pipeline

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


def diamond() -> Pipeline:
    """think feeds both talk and decode; decode joins its text with talk's codes."""
    return Pipeline(
        name="diamond",
        stages=("listen", "think", "talk", "decode"),
        edges=(
            Edge("listen", "think", PayloadType.TEXT, Delivery.FULL),
            Edge("think", "talk", PayloadType.TEXT, Delivery.CHUNK),
            Edge("think", "decode", PayloadType.TEXT, Delivery.CHUNK),
            Edge("talk", "decode", PayloadType.CODEC_CODES, Delivery.CHUNK),
        ),
        outputs={"text": "think", "audio": "decode"},
        connectors={"talk->decode": ConnectorKind.SHM},
        voice="tone",
        voices={"tone": "tone"},
    )


def fan_out() -> Pipeline:
    """talk's codes go to decode and to watch, which nobody hears."""
    codes_to = (
        Edge("talk", target, PayloadType.CODEC_CODES, Delivery.CHUNK)
        for target in ("decode", "watch")
    )
    return Pipeline(
        name="fan",
        stages=("listen", "think", "talk", "decode", "watch", "join"),
        edges=(
            Edge("listen", "think", PayloadType.TEXT, Delivery.FULL),
            Edge("think", "talk", PayloadType.TEXT, Delivery.CHUNK),
            *codes_to,
            Edge("decode", "join", PayloadType.AUDIO, Delivery.CHUNK),
            Edge("watch", "join", PayloadType.AUDIO, Delivery.CHUNK),
        ),
        outputs={"text": "think", "audio": "join"},
        voice="tone",
        voices={"tone": "tone"},
    )


def test_a_stage_that_joins_edges_ends_its_input_when_all_of_them_have_ended() -> None:
    harness = Harness(diamond())
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.done("think", turn)
    assert not any(feed.last for feed in harness.sent(Feed, "decode"))
    codes(harness, turn, 1)
    harness.done("talk", turn)
    assert [feed.last for feed in harness.sent(Feed, "decode")][-1] is True
    assert sum(feed.last for feed in harness.sent(Feed, "decode")) == 1


def test_text_on_two_edges_is_one_transcript() -> None:
    harness = Harness(diamond())
    turn = harness.reply_turn()
    for clause in ("One moment. ", "Here it is. "):
        harness.text("think", turn, clause)
    harness.done("think", turn)
    for number in (0, 1):
        harness.produce(
            "decode", turn, audio_payload(PCM_MS * 100, 24_000, clause=number, clause_end=True)
        )
    harness.done("talk", turn)
    harness.done("decode", turn)
    response = harness.one(ResponseDone).response
    assert response.status is ResponseStatus.COMPLETED
    assert response.output[0].parts[0].text == "One moment. Here it is. "


def test_too_much_for_stages_without_a_worker_ends_the_turn_once() -> None:
    harness = Harness(fan_out())
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.lose("decode")
    harness.lose("watch")
    for number in range(WAITING_COMMANDS + 1):
        codes(harness, turn, number + 1)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "capacity_exceeded"
    harness.clear()
    harness.come_back("watch")
    assert not harness.sent(Run, "watch")
    assert not harness.sent(Feed, "watch")


def test_a_stage_lost_while_another_is_waited_for_ends_the_turn() -> None:
    harness = Harness(voice_pipeline(restore_ms=4_000))
    harness.lose("speak")
    turn = harness.reply_turn()
    harness.text("think", turn, "Speak is not there yet. ")
    harness.lose("think", back=True)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "engine_lost"
