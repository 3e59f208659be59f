"""What a worker has not worked off is bounded: the client's verbs wait meanwhile."""

from __future__ import annotations

from protocol.messages import Answer, ReceivedThrough, Signal, TurnStatus, Update
from sessions.actions import Reported, StageBound, StageCrowded, StageLost
from sessions.backlog import COMMANDS, INPUT_BYTES, STOPPING_TURNS, TURN_BYTES
from sessions.duplex.events import (
    AppendAudio,
    CancelResponse,
    ClearInput,
    CreateItem,
    CreateResponse,
    Item,
    ItemStatus,
    Part,
    PartKind,
    Role,
)
from tests.sessions.harness import Harness

CHUNK = bytes(64 * 1024)


def append_until_held(harness: Harness, pcm: bytes) -> int:
    """Append until the client is to wait; the number of appends."""
    for count in range(1, 10_000):
        harness.say(AppendAudio(pcm))
        if harness.held:
            return count
    raise AssertionError("the client never had to wait")


def test_a_client_waits_while_its_audio_is_under_way() -> None:
    harness = Harness()
    count = append_until_held(harness, CHUNK)
    assert count == INPUT_BYTES // len(CHUNK) + 1
    assert len(harness.sent(Update)) == count
    harness.feed(Reported("listen", ReceivedThrough("sess_1", 1)))
    assert not harness.held


def test_a_client_waits_while_many_small_pieces_are_under_way() -> None:
    harness = Harness()
    assert append_until_held(harness, b"\0\0") == COMMANDS + 1
    harness.feed(Reported("listen", ReceivedThrough("sess_1", COMMANDS + 1)))
    assert not harness.held
    assert append_until_held(harness, b"\0\0") == COMMANDS + 1


def test_a_client_waits_while_many_commands_are_not_answered() -> None:
    harness = Harness()
    while not harness.held:
        harness.say(ClearInput())
    signals = harness.sent(Signal, "listen")
    assert len(signals) == COMMANDS + 1
    harness.feed(Reported("listen", Answer("sess_1", signals[0].command)))
    assert not harness.held


def test_a_client_waits_while_cancelled_turns_have_not_stopped() -> None:
    harness = Harness()
    turns: list[int] = []
    while not harness.held:
        harness.say(CreateResponse())
        turns.append(harness.last_run("think").turn)
        harness.say(CancelResponse())
    assert len(turns) == STOPPING_TURNS + 1
    harness.done("think", turns[0], TurnStatus.CANCELLED)
    assert not harness.held


def test_turns_that_run_do_not_keep_a_client_waiting() -> None:
    harness = Harness()
    harness.say(CreateResponse())
    for _ in range(4):
        harness.say(CreateResponse(conversation=False))
    assert not harness.held


def test_a_client_waits_while_long_items_are_being_heard() -> None:
    harness = Harness()
    turns: list[int] = []
    while not harness.held:
        part = Part(PartKind.INPUT_AUDIO, audio=bytes(TURN_BYTES // 2))
        item = Item(f"item_{len(turns)}", Role.USER, ItemStatus.COMPLETED, [part])
        harness.say(CreateItem(item))
        turns.append(harness.last_run("listen").turn)
    assert len(turns) == 3
    harness.done("listen", turns[0])
    assert not harness.held


def test_nothing_is_under_way_to_a_worker_that_is_gone() -> None:
    harness = Harness()
    append_until_held(harness, CHUNK)
    harness.lose("listen")
    assert not harness.held
    harness.come_back("listen")
    assert append_until_held(harness, CHUNK) == INPUT_BYTES // len(CHUNK) + 1


def test_a_session_that_ends_keeps_nobody_waiting() -> None:
    harness = Harness(opened=True)
    append_until_held(harness, CHUNK)
    harness.later(harness.pipeline.limits.idle_ms)
    assert not harness.held


def test_a_client_waits_while_the_link_that_all_sessions_share_is_crowded() -> None:
    harness = Harness()
    harness.feed(StageCrowded("think", True))
    harness.feed(StageCrowded("speak", True))
    assert harness.held
    harness.feed(StageCrowded("think", False))
    assert harness.held
    harness.feed(StageCrowded("speak", False))
    assert not harness.held


def test_a_crowded_link_that_is_lost_keeps_nobody_waiting() -> None:
    harness = Harness()
    harness.feed(StageCrowded("speak", True))
    harness.available.discard("speak")
    harness.feed(StageLost("speak"))
    harness.feed(StageCrowded("speak", True))
    assert not harness.held
    harness.feed(StageBound("speak", "speak-2", crowded=True))
    assert harness.held
