"""A stage's state is put away and brought back, and nobody who has work for it loses any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol.edges import ConnectorKind
from protocol.errors import CapacityExceeded, SessionBusy, SessionStateLost
from protocol.messages import (
    Answer,
    Close,
    Configure,
    Open,
    Park,
    RoomWanted,
    Run,
    Signal,
    SnapshotOrder,
    Update,
)
from sessions.actions import (
    CloseRequested,
    OpenRequested,
    ParkRequested,
    Reported,
    RestoreRequested,
    StageLost,
)
from sessions.client import Origin, Parked, Parking, Refused, Restored, Restoring
from sessions.duplex.events import (
    AppendAudio,
    ClearInput,
    CommitInput,
    PatchSettings,
    ResponseDone,
    ResponseStatus,
)
from sessions.lifecycle import CloseReason
from tests.sessions.harness import PCM_MS, Harness, voice_pipeline

THINK = "think"


def parking(*stages: str, **fields: Any) -> Harness:
    """A session whose `stages` (by default: think) can be parked."""
    return Harness(parks=stages or (THINK,), **fields)


def parked(*stages: str, **fields: Any) -> Harness:
    """A session whose state on `stages` is in the store."""
    harness = parking(*stages, **fields)
    harness.feed(ParkRequested())
    harness.clear()
    return harness


def last_open(harness: Harness, stage: str = THINK) -> Open:
    opened: Open = harness.sent(Open, stage)[-1]
    return opened


def test_what_can_be_parked_is_when_it_is_asked_for() -> None:
    harness = parking()
    harness.feed(ParkRequested())
    assert harness.outputs == [Parking(THINK, "requested"), Parked(THINK)]
    (park,) = harness.sent(Park, THINK)
    assert park.expires_at_s == 1_900_000_000
    assert harness.parked == {THINK}
    assert harness.unbound == [THINK]
    assert harness.session.parked == (THINK,)
    assert not harness.sent(Park, "listen")


def test_the_next_turn_brings_it_back() -> None:
    harness = parked()
    turn = harness.reply_turn()
    assert last_open(harness).restore
    assert [o for o in harness.outputs if isinstance(o, Restoring | Restored)] == [
        Restoring(THINK),
        Restored(THINK, Origin.SNAPSHOT),
    ]
    assert harness.last_run(THINK).turn == turn
    assert (harness.parked, harness.session.parked) == (set(), ())


def test_it_comes_back_when_that_is_asked_for() -> None:
    harness = parked()
    harness.feed(RestoreRequested())
    assert harness.outputs == [Restoring(THINK), Restored(THINK, Origin.SNAPSHOT)]


def test_the_owner_gives_room_when_a_worker_wants_it() -> None:
    harness = parking()
    harness.feed(Reported(THINK, RoomWanted("sess_1")))
    assert harness.outputs == [Parking(THINK, "room_wanted"), Parked(THINK)]


def test_a_stage_with_work_gives_room_as_soon_as_it_has_none() -> None:
    harness = parking()
    turn = harness.reply_turn()
    harness.feed(Reported(THINK, RoomWanted("sess_1")))
    assert not harness.sent(Park, THINK)
    harness.text(THINK, turn, "Well then. ")
    harness.done(THINK, turn)
    assert len(harness.sent(Park, THINK)) == 1


def test_a_wish_for_room_is_not_remembered_for_ever() -> None:
    harness = parking()
    turn = harness.reply_turn()
    harness.feed(Reported(THINK, RoomWanted("sess_1")))
    harness.later(5_000)
    harness.text(THINK, turn, "Well then. ")
    harness.done(THINK, turn)
    assert not harness.sent(Park, THINK)


def test_what_is_never_to_be_parked_is_not_by_the_operator_either() -> None:
    harness = Harness(replace(voice_pipeline(), parks=False), parks=(THINK,))
    harness.feed(ParkRequested())
    assert not harness.sent(Park, THINK)


def test_a_stage_with_work_gives_no_room() -> None:
    harness = parking()
    harness.reply_turn()
    harness.feed(Reported(THINK, RoomWanted("sess_1")))
    harness.feed(ParkRequested())
    assert not harness.sent(Park, THINK)


def test_what_cannot_be_put_away_goes_on() -> None:
    harness = parking()
    full = harness.refuse_park = CapacityExceeded("the store is full").info()
    harness.feed(ParkRequested())
    assert harness.outputs == [Parking(THINK, "requested"), Restored(THINK, Origin.KEPT, full)]
    assert (harness.unbound, harness.session.parked) == ([], ())
    harness.reply_turn()
    assert not harness.sent(Open, THINK)


def test_a_turn_that_comes_while_it_is_put_away_waits_and_brings_it_back() -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    harness.hear("What is new?")
    assert not harness.sent(Run, THINK)
    (park,) = harness.sent(Park, THINK)
    harness.parked.add(THINK)
    harness.feed(Reported(THINK, Answer("sess_1", park.command, None)))
    assert last_open(harness).restore
    assert len(harness.sent(Run, THINK)) == 1


def test_a_snapshot_that_was_never_finished_is_told_as_such() -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    assert harness.session.putting_away == (THINK,)
    harness.feed(StageLost(THINK))
    assert not harness.session.stored
    (error,) = harness.not_restored
    assert error.code == "session_state_lost"
    assert "was lost before the snapshot was finished: nothing is parked" in error.message


def test_why_the_state_is_kept_is_told_by_stage() -> None:
    harness = parking()
    kept = harness.session.kept
    assert kept["listen"].code == "unsupported"
    assert kept[THINK].code == "session_busy"
    harness.feed(ParkRequested())
    assert harness.session.stored == (THINK,)
    assert THINK not in harness.session.kept


def test_a_worker_that_has_nothing_to_put_away_has_lost_the_session() -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    (park,) = harness.sent(Park, THINK)
    lost = SessionStateLost("this worker has no such session").info()
    harness.feed(Reported(THINK, Answer("sess_1", park.command, lost)))
    assert harness.outputs[-2:] == [Restoring(THINK), Restored(THINK, Origin.REBUILT)]
    assert not last_open(harness).restore


def test_a_stage_that_is_wanted_while_it_is_put_away_comes_back() -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    harness.feed(RestoreRequested())
    (park,) = harness.sent(Park, THINK)
    harness.parked.add(THINK)
    harness.feed(Reported(THINK, Answer("sess_1", park.command, None)))
    assert harness.outputs[-1] == Restored(THINK, Origin.SNAPSHOT)


def test_a_turn_that_waits_for_its_reader_has_that_brought_back_from_its_way_into_the_store() -> (
    None
):
    pipeline = replace(voice_pipeline(), connectors={"think->speak": ConnectorKind.SHM})
    harness = Harness(pipeline, parks=["speak"])
    harness.answer_parks = False
    harness.feed(ParkRequested())
    harness.hear("What is new?")
    assert not harness.sent(Run, THINK)
    (park,) = harness.sent(Park, "speak")
    harness.parked.add("speak")
    harness.feed(Reported("speak", Answer("sess_1", park.command, None)))
    assert len(harness.sent(Run, THINK)) == 1


def test_a_stage_that_reads_what_another_makes_is_not_put_away() -> None:
    pipeline = replace(voice_pipeline(), connectors={"think->speak": ConnectorKind.SHM})
    harness = Harness(pipeline, parks=["speak"])
    turn = harness.reply_turn()
    harness.feed(Reported("speak", RoomWanted("sess_1")))
    assert not harness.sent(Park, "speak")
    harness.text(THINK, turn, "Here I am. ")
    harness.done(THINK, turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    harness.feed(Reported("speak", RoomWanted("sess_1")))
    assert harness.sent(Park, "speak")


def test_a_turn_that_comes_while_it_cannot_be_put_away_runs() -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    harness.hear("What is new?")
    (park,) = harness.sent(Park, THINK)
    busy = SessionBusy("not now").info()
    harness.feed(Reported(THINK, Answer("sess_1", park.command, busy)))
    assert not harness.sent(Open, THINK)
    assert len(harness.sent(Run, THINK)) == 1


def test_settings_that_come_while_it_cannot_be_put_away_reach_the_worker() -> None:
    harness = parking("listen")
    harness.answer_parks = False
    harness.feed(ParkRequested())
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
    assert not harness.sent(Configure, "listen")
    (park,) = harness.sent(Park, "listen")
    busy = SessionBusy("not now").info()
    harness.feed(Reported("listen", Answer("sess_1", park.command, busy)))
    (configure,) = harness.sent(Configure, "listen")
    assert configure.settings["turn_detection"] is None


def test_settings_that_come_while_it_is_away_come_with_it() -> None:
    harness = parked("listen")
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
    harness.say(AppendAudio(PCM_MS * 20))
    assert last_open(harness, "listen").settings["turn_detection"] is None
    assert not harness.sent(Configure, "listen")


def test_a_turn_waits_for_the_input_that_was_held_before_it() -> None:
    harness = parked("listen")
    harness.answer_opens = False
    for _ in range(3):
        harness.say(AppendAudio(PCM_MS * 100))
    harness.say(CommitInput())
    opened = last_open(harness, "listen")
    harness.feed(Reported("listen", Answer("sess_1", opened.command)))
    assert harness.last_run("listen").after_input == 3


def test_a_turn_brings_back_the_stage_that_reads_it_too() -> None:
    harness = parked("think", "speak")
    turn = harness.reply_turn()
    harness.text(THINK, turn, "Here I am. ")
    harness.done(THINK, turn)
    assert last_open(harness, "speak").restore
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_input_brings_it_back_and_none_of_it_is_lost() -> None:
    harness = parked("listen")
    harness.answer_opens = False
    for _ in range(3):
        harness.say(AppendAudio(PCM_MS * 20))
    harness.say(ClearInput())
    opened = last_open(harness, "listen")
    assert opened.restore
    after = harness.commands[harness.commands.index(("listen", opened)) + 1 :]
    kinds = [type(command) for stage, command in after if stage == "listen"]
    assert kinds == [Update, Update, Update, Signal]
    assert [u.sequence for u in harness.sent(Update, "listen")] == [1, 2, 3]
    assert harness.sent(Signal, "listen")[0].after_input == 3


def test_more_input_than_is_held_is_told_as_lost() -> None:
    harness = parked("listen")
    harness.available.discard("listen")
    for _ in range(100):
        harness.say(AppendAudio(PCM_MS * 10))
    harness.come_back("listen")
    assert len(harness.sent(Update, "listen")) == 64
    assert harness.one(Refused).error.message.startswith("360 ms")


def restored_from(harness: Harness) -> tuple[Origin, str | None]:
    """Where the state is from that a stage goes on from, and why it is not what was stored."""
    told = harness.one(Restored)
    return told.origin, None if told.error is None else told.error.code


def test_what_does_not_come_back_is_rebuilt() -> None:
    harness = parked()
    harness.parked.clear()
    turn = harness.reply_turn()
    restored, anew = harness.sent(Open, THINK)[-2:]
    assert (restored.restore, anew.restore) == (SnapshotOrder(1, 1), None)
    assert restored_from(harness) == (Origin.REBUILT, "session_state_lost")
    assert harness.last_run(THINK).turn == turn


def test_where_there_is_no_room_now_the_turn_fails_and_the_state_stays() -> None:
    harness = parked()
    harness.refuse_open[THINK] = CapacityExceeded("no room").info()
    harness.hear("What is new?")
    done = harness.one(ResponseDone).response
    assert (done.status, done.error.code) == (ResponseStatus.FAILED, "capacity_exceeded")
    assert harness.session.parked == (THINK,)
    assert harness.parked == {THINK}
    harness.refuse_open.clear()
    harness.clear()
    turn = harness.reply_turn("And now?")
    assert last_open(harness).restore
    assert harness.last_run(THINK).turn == turn


@pytest.mark.parametrize("stored", [True, False])
def test_a_worker_that_dies_while_it_restores_is_followed_by_another(stored: bool) -> None:
    harness = parked()
    harness.answer_opens = False
    harness.hear("What is new?")
    harness.clear()
    harness.answer_opens = True
    if not stored:
        harness.parked.clear()
    harness.feed(StageLost(THINK))
    lost = (Origin.REBUILT, "session_state_lost")
    assert restored_from(harness) == ((Origin.SNAPSHOT, None) if stored else lost)
    assert len(harness.sent(Run, THINK)) == 1
    assert harness.parked == set()


@pytest.mark.parametrize("stored", [True, False])
def test_a_worker_that_dies_while_it_parks_may_have_done_so(stored: bool) -> None:
    harness = parking()
    harness.answer_parks = False
    harness.feed(ParkRequested())
    if stored:
        harness.parked.add(THINK)
    harness.clear()
    harness.feed(StageLost(THINK))
    assert harness.outputs[0] == Restoring(THINK)
    assert not [o for o in harness.outputs if isinstance(o, Parked)]
    lost = (Origin.REBUILT, "session_state_lost")
    assert restored_from(harness) == ((Origin.SNAPSHOT, None) if stored else lost)
    harness.hear("What is new?")
    assert len(harness.sent(Run, THINK)) == 1


def test_input_that_goes_down_with_the_worker_that_restores_is_told_and_the_state_with_it() -> None:
    harness = parked("listen")
    harness.answer_opens = False
    harness.say(AppendAudio(PCM_MS * 40))
    harness.answer_opens = True
    harness.feed(StageLost("listen"))
    assert harness.one(Refused).error.message.startswith("40 ms")
    assert not last_open(harness, "listen").restore
    assert harness.parked == set()


@pytest.mark.parametrize("when", ["parked", "parking", "restoring", "waiting"])
def test_a_session_that_ends_leaves_nothing_in_the_store(when: str) -> None:
    harness = parking() if when == "parking" else parked()
    if when == "waiting":
        harness.available.discard(THINK)
    harness.answer_parks = harness.answer_opens = False
    if when == "parking":
        harness.feed(ParkRequested())
    elif when != "parked":
        harness.feed(RestoreRequested())
    harness.feed(CloseRequested(CloseReason.CLIENT))
    if when in ("parking", "restoring"):
        assert harness.sent(Close, THINK)
    else:
        assert harness.parked == set()
    assert harness.released is not None


@pytest.mark.parametrize("priority", [0, 3])
@pytest.mark.parametrize("parks", [True, False])
def test_workers_are_told_who_makes_room_first(priority: int, parks: bool) -> None:
    harness = Harness(replace(voice_pipeline(), priority=priority, parks=parks), opened=False)
    harness.feed(OpenRequested())
    opens = [command for _, command in harness.commands if isinstance(command, Open)]
    assert [command.priority for command in opens] == [priority if parks else None] * 3


def test_nothing_is_parked_of_a_session_that_ends() -> None:
    harness = parking()
    harness.answer_closes = False
    harness.feed(CloseRequested(CloseReason.CLIENT))
    harness.feed(ParkRequested())
    harness.feed(Reported(THINK, RoomWanted("sess_1")))
    assert not harness.sent(Park, THINK)


def test_a_second_wish_for_room_changes_nothing() -> None:
    harness = parking()
    harness.answer_parks = False
    for _ in range(2):
        harness.feed(Reported(THINK, RoomWanted("sess_1")))
        harness.feed(ParkRequested())
    assert len(harness.sent(Park, THINK)) == 1


def test_a_late_answer_to_a_restore_that_was_given_up_is_nobodys() -> None:
    harness = parked()
    harness.answer_opens = False
    harness.feed(RestoreRequested())
    stale = last_open(harness).command
    harness.feed(StageLost(THINK))
    lost = SessionStateLost("gone").info()
    harness.feed(Reported(THINK, Answer("sess_1", stale, lost)))
    assert harness.session.state.value == "active"
