"""A turn's way over edges that carry more than text."""

from __future__ import annotations

import pytest

from protocol.connectors import ShmDescriptor
from protocol.edges import ConnectorKind
from protocol.errors import CapacityExceeded
from protocol.messages import Acknowledge, Feed, RaiseFloor, Run
from protocol.payloads import PayloadType, audio_payload
from sessions.actions import StageProduced
from sessions.bindings import WAITING_COMMANDS
from sessions.client import SessionEnded
from sessions.duplex.events import (
    AppendAudio,
    CancelResponse,
    CreateItem,
    CreateResponse,
    Item,
    ItemStatus,
    Part,
    PartKind,
    ResponseDone,
    ResponseStatus,
    Role,
)
from sessions.pipeline import Delivery, Edge, Limits, Pipeline
from tests.sessions.harness import PCM_MS, Harness, voice_pipeline

CODES = ShmDescriptor(arena=1, slot=2, generation=3, offset=0, key=4, size_bytes=3_200)


def chain(delivery: Delivery, connector: ConnectorKind, **limits: int) -> Pipeline:
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
        limits=Limits(**limits),
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


def failure_of(harness: Harness) -> tuple[str, str]:
    """The code and message with which the only response failed."""
    response = harness.one(ResponseDone).response
    assert response.status is ResponseStatus.FAILED
    assert response.error is not None
    return response.error.code, response.error.message


def sound(harness: Harness, turn: int) -> None:
    """Talk and decode do all their work on a reply of one clause."""
    codes(harness, turn, 1)
    harness.done("talk", turn)
    harness.produce("decode", turn, audio_payload(PCM_MS * 100, 24_000, clause=0, clause_end=True))
    harness.done("decode", turn)


def test_the_loss_of_a_reader_that_has_read_nothing_yet_ends_the_turn() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.lose("decode")
    assert failure_of(harness) == ("engine_lost", "the worker of stage decode was lost")
    for stage in ("think", "talk"):
        assert [command.floor for command in harness.sent(RaiseFloor, stage)] == [turn + 1]


def test_a_stage_that_is_not_there_yet_ends_no_turn_when_it_reads_no_arena() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.INLINE))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.done("think", turn)
    harness.lose("decode")
    assert not harness.all(ResponseDone)
    codes(harness, turn, 1)
    harness.come_back("decode")
    assert harness.last_run("decode").inputs == [CODES]


def test_a_turn_waits_for_who_reads_it_and_begins_in_order() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.text("think", turn, "Two is a longer one. ")
    assert not [stage for stage, _ in harness.commands if stage == "talk"]
    harness.come_back("decode")
    to_talk = [type(command) for stage, command in harness.commands if stage == "talk"]
    assert to_talk == [Run, Feed]
    assert harness.last_run("talk").readers == {"talk->decode": "decode"}
    harness.later(harness.pipeline.limits.restore_ms)
    assert not harness.all(ResponseDone)


def test_a_response_that_waited_for_a_reader_completes() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.done("think", turn)
    harness.come_back("decode")
    sound(harness, turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_every_turn_that_waits_for_a_reader_begins_with_it() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turns = [harness.reply_turn()]
    harness.say(CreateResponse(conversation=False))
    turns.append(harness.last_run("think").turn)
    for turn in turns:
        harness.text("think", turn, "One. ")
        harness.text("think", turn, "Two is a longer one. ")
    harness.come_back("decode")
    assert [run.turn for run in harness.sent(Run, "talk")] == turns
    assert [feed.turn for feed in harness.sent(Feed, "talk")] == turns


def test_a_turn_waits_for_a_reader_no_longer_than_for_its_own_worker() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM, restore_ms=4_000))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.later(3_999)
    assert not harness.all(ResponseDone)
    harness.later(1)
    assert failure_of(harness) == ("engine_lost", "no worker came for stage decode")
    harness.come_back("decode")
    assert not harness.sent(Run, "talk")


def test_a_turn_cancelled_while_it_waits_for_a_reader_never_begins() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.text("think", turn, "Two is a longer one. ")
    harness.say(CancelResponse())
    assert harness.one(ResponseDone).response.status is ResponseStatus.CANCELLED
    harness.come_back("decode")
    assert not harness.sent(Run, "talk")
    assert not harness.sent(Feed, "talk")
    harness.later(harness.pipeline.limits.restore_ms)
    assert len(harness.all(ResponseDone)) == 1
    assert not harness.held


@pytest.mark.parametrize("back", [("talk", "decode"), ("decode", "talk")])
@pytest.mark.parametrize("lost", [("talk", "decode"), ("decode", "talk")])
@pytest.mark.parametrize("begun", [False, True])
def test_a_turn_begins_when_its_worker_and_its_reader_are_both_there(
    lost: tuple[str, str], back: tuple[str, str], begun: bool
) -> None:
    """`begun`: the second is lost while the turn waits for the first."""
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose(lost[0])
    if not begun:
        harness.lose(lost[1])
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.done("think", turn)
    if begun:
        harness.lose(lost[1])
    harness.come_back(back[0])
    assert not harness.sent(Run, "talk")
    harness.come_back(back[1])
    assert len(harness.sent(Run, "talk")) == 1
    assert [feed.last for feed in harness.sent(Feed, "talk")] == [True]
    sound(harness, turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_a_turn_that_waits_goes_on_waiting_when_its_reader_is_lost_again() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.answer_opens = False
    harness.come_back("decode")
    harness.lose("decode")
    assert not harness.all(ResponseDone)
    harness.answer_opens = True
    harness.come_back("decode")
    assert harness.last_run("talk").turn == turn


def test_a_reader_that_refuses_the_session_is_the_reason_of_the_turns_end() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.refuse_open["decode"] = CapacityExceeded("no room").info()
    harness.come_back("decode")
    assert failure_of(harness) == ("capacity_exceeded", "no room")
    assert harness.one(SessionEnded).reason == "engine_lost"
    assert not harness.sent(Run, "talk")


def test_a_session_that_closes_while_a_turn_waits_for_a_reader_leaves_nothing() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM, max_age_ms=5_000))
    harness.lose("decode")
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.later(5_000)
    assert harness.all(ResponseDone)
    assert harness.released is not None
    assert not harness.sent(Run, "talk")


def test_a_stage_that_has_done_its_part_need_not_come_back() -> None:
    harness = Harness(chain(Delivery.CHUNK, ConnectorKind.SHM, restore_ms=4_000))
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.done("think", turn)
    harness.lose("think")
    codes(harness, turn, 1)
    harness.later(4_000)
    harness.done("talk", turn)
    harness.produce("decode", turn, audio_payload(PCM_MS * 100, 24_000, clause=0, clause_end=True))
    harness.done("decode", turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_a_stage_in_the_middle_waits_for_its_reader_with_what_it_is_to_read() -> None:
    pipeline = Pipeline(
        name="long chain",
        stages=("listen", "think", "talk", "decode", "polish"),
        edges=(
            Edge("listen", "think", PayloadType.TEXT, Delivery.FULL),
            Edge("think", "talk", PayloadType.TEXT, Delivery.CHUNK),
            Edge("talk", "decode", PayloadType.CODEC_CODES, Delivery.CHUNK),
            Edge("decode", "polish", PayloadType.AUDIO, Delivery.CHUNK),
        ),
        outputs={"text": "think", "audio": "polish"},
        connectors={"talk->decode": ConnectorKind.SHM, "decode->polish": ConnectorKind.SHM},
        voice="tone",
        voices={"tone": "tone"},
    )
    harness = Harness(pipeline)
    turn = harness.reply_turn()
    harness.text("think", turn, "One. ")
    harness.lose("polish")
    codes(harness, turn, 1)
    codes(harness, turn, 2)
    assert not harness.all(ResponseDone)
    assert not harness.sent(Run, "decode")
    harness.come_back("polish")
    assert harness.last_run("decode").inputs == [CODES]
    assert [feed.payload for feed in harness.sent(Feed, "decode")] == [CODES]
    # What it reads in place lies with the worker before it.
    harness.lose("talk")
    assert failure_of(harness)[0] == "engine_lost"


def test_a_turn_that_waited_over_two_losses_waits_for_no_input_of_the_worker_before() -> None:
    harness = Harness(voice_pipeline())
    harness.lose("listen")
    harness.answer_opens = False
    harness.come_back("listen")
    for _ in range(3):
        harness.say(AppendAudio(PCM_MS * 300))
    part = Part(PartKind.INPUT_AUDIO, audio=PCM_MS * 500)
    harness.say(CreateItem(Item("item_a", Role.USER, ItemStatus.COMPLETED, [part])))
    harness.lose("listen")
    harness.answer_opens = True
    harness.come_back("listen")
    assert harness.last_run("listen").after_input == 0
