from __future__ import annotations

from typing import Any

from gateway.hosting import SessionSummary
from gateway.timeline import ENDED, NOTED, OTHERS, TURNS, Timeline, Timelines
from protocol.errors import EngineLost
from sessions.actions import ToClient, TurnMeasured
from sessions.client import (
    Answered,
    Attached,
    LetGo,
    Origin,
    Parked,
    Parking,
    Restored,
    Restoring,
    Role,
    SessionCreated,
    SessionEnded,
)
from sessions.duplex.events import AudioDelta
from sessions.pipeline import Limits


def turn(number: int, **members: Any) -> TurnMeasured:
    known = {"lane": "default", "status": "completed", "reason": None, "error": None}
    times = {"ttft_ms": None, "ttfp_ms": None, "rtf": None}
    return TurnMeasured(
        turn=number, audio_ms=0, prefill_tokens=None, timelines={}, **(known | times | members)
    )


def summary(session: str) -> SessionSummary:
    return SessionSummary(session, "voice", "duplex", "local", "closed", 1, 0, 1.0, 1.0)


def test_what_became_of_a_session_is_told_with_its_age() -> None:
    timeline = Timeline(begun_ms=1000.0)
    timeline.note(1000.0, "opening")
    lost = EngineLost("It died.").info()
    for number, output in enumerate(
        (
            SessionCreated("s", "voice", None, 0),
            Parking("think", "room_wanted"),
            Parked("think"),
            Restoring("think"),
            Restored("think", Origin.SNAPSHOT),
            SessionEnded("engine_lost", lost),
        )
    ):
        assert type(output) in NOTED
        timeline.told(1010.0 + number, ToClient(number, output))
    timeline.turn_ended(1020.04, turn(3, ttft_ms=81.44, status="failed", error="engine_failed"))
    assert timeline.described() == {
        "dropped": 0,
        "entries": [
            {"at_ms": 0.0, "event": "opening"},
            {"at_ms": 10.0, "event": "opened"},
            {"at_ms": 11.0, "event": "parking", "stage": "think", "reason": "room_wanted"},
            {"at_ms": 12.0, "event": "parked", "stage": "think"},
            {"at_ms": 13.0, "event": "restoring", "stage": "think"},
            {"at_ms": 14.0, "event": "restored", "stage": "think", "origin": "snapshot"},
            {"at_ms": 15.0, "event": "closing", "reason": "engine_lost", "error": "engine_lost"},
            {
                **{"at_ms": 20.0, "event": "turn_ended", "turn": 3},
                **{"status": "failed", "error": "engine_failed", "ttft_ms": 81.4},
            },
        ],
    }


def test_what_is_told_again_to_one_client_is_noted_once() -> None:
    timeline = Timeline(0.0)
    timeline.told(1.0, ToClient(1, Parked("think")))
    timeline.told(2.0, ToClient(1, Parked("think"), to="att_1"))
    limits = Limits()
    attached = Attached("s", "voice", None, 0, limits, 1, None, Role.OBSERVER, secret="hidden")
    timeline.told(3.0, ToClient(1, attached, to="att_2"))
    timeline.told(4.0, ToClient(1, LetGo("replaced"), to="att_1"))
    entries = timeline.described()["entries"]
    assert [(entry["event"], entry["at_ms"]) for entry in entries] == [
        ("parked", 1.0),
        ("attached", 3.0),
        ("let_go", 4.0),
    ]
    assert entries[1] == {"at_ms": 3.0, "event": "attached", "role": "observer"}


def test_a_loop_of_turns_drops_turns_alone_and_says_how_many() -> None:
    timeline = Timeline(0.0)
    timeline.note(0.0, "opening")
    for number in range(1, 1001):
        timeline.turn_ended(float(number), turn(number))
    timeline.note(2000.0, "detached")
    described = timeline.described()
    entries = described["entries"]
    assert (len(entries), described["dropped"]) == (TURNS + 2, 1000 - TURNS)
    assert timeline.noted == 1002
    assert [entries[0]["event"], entries[-1]["event"]] == ["opening", "detached"]
    assert [entry["turn"] for entry in entries[1:-1]] == list(range(1001 - TURNS, 1001))


def test_the_oldest_go_first() -> None:
    timeline = Timeline(0.0)
    for number in range(OTHERS + 5):
        timeline.note(float(number), "detached")
    described = timeline.described()
    assert described["dropped"] == 5
    assert [entry["at_ms"] for entry in described["entries"]] == list(range(5, OTHERS + 5))


def test_nothing_that_comes_with_every_frame_or_answer_is_noted() -> None:
    assert not {AudioDelta, Answered} & NOTED


def test_the_last_that_ended_are_remembered_and_refused_opens_are_not() -> None:
    timelines = Timelines()
    for number in range(ENDED + 1):
        timelines.begin(f"sess_{number}", 0.0)
        timelines.end(summary(f"sess_{number}"), keep=True)
    assert timelines.ended("sess_0") is None
    history = timelines.ended("sess_1")
    assert history is not None
    assert history.timeline["entries"] == [{"at_ms": 0.0, "event": "opening"}]
    timelines.begin("refused", 0.0)
    timelines.end(summary("refused"), keep=False)
    assert timelines.ended("refused") is None
    assert timelines.of("refused") is None
    assert timelines.of("sess_1") is None
