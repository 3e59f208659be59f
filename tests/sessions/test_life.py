"""Opening, ends, loss of workers, slow clients: the life around the conversation."""

from __future__ import annotations

import pytest

from protocol.errors import CapacityExceeded, ErrorKind
from protocol.messages import (
    Close,
    Configure,
    Open,
    RaiseFloor,
    ReceivedThrough,
    Run,
    Signal,
    TurnStatus,
    Update,
)
from sessions.actions import (
    AskDirectory,
    ClientBlocked,
    CloseRequested,
    OpenRequested,
    Released,
    Reported,
    Tick,
)
from sessions.client import Refused, Restored, Restoring, SessionEnded
from sessions.duplex.events import (
    AppendAudio,
    AudioDelta,
    ClearInput,
    CommitInput,
    CreateResponse,
    InputCleared,
    InputTranscribed,
    InputTranscriptionFailed,
    PatchSettings,
    ResponseDone,
    ResponseStatus,
    TextDelta,
)
from sessions.duplex.replies import MAX_OUT_OF_BAND
from sessions.lifecycle import (
    TRANSITIONS,
    CloseReason,
    IllegalTransition,
    Lifecycle,
    State,
    Trigger,
)
from sessions.pipeline import Limits
from tests.sessions.harness import PCM_MS, Harness, payload_of, voice_pipeline


def test_open_binds_every_stage_in_order() -> None:
    harness = Harness(opened=False)
    harness.feed(OpenRequested())
    assert [stage for stage, c in harness.commands if isinstance(c, Open)] == [
        "listen",
        "think",
        "speak",
    ]
    assert harness.session.state is State.ACTIVE
    assert harness.directory.get("sess_1") is not None


def test_an_open_whose_worker_is_lost_wants_a_worker_and_no_room() -> None:
    harness = Harness(opened=False)
    harness.answer_opens = False
    harness.feed(OpenRequested())
    harness.lose("listen")
    error = harness.session.error
    assert error is not None
    assert (error.code, error.kind) == ("engine_unavailable", ErrorKind.CAPACITY)
    assert harness.released is not None


@pytest.mark.parametrize("stage", ["listen", "think", "speak"])
def test_an_open_that_one_stage_refuses_gives_everything_back(stage: str) -> None:
    harness = Harness(opened=False)
    harness.refuse_open[stage] = CapacityExceeded("no room", code="no_room").info()
    harness.feed(OpenRequested())
    assert harness.released is not None
    assert harness.outputs == []
    assert harness.session.error is not None
    assert harness.session.error.code == "no_room"
    opened = [s for s, c in harness.commands if isinstance(c, Open) and s != stage]
    closed = [s for s, c in harness.commands if isinstance(c, Close)]
    assert sorted(opened) == sorted(closed)
    assert len(harness.directory) == 0


def opens_and_closes(harness: Harness) -> list[str]:
    said = {Open: "open", Close: "close"}
    return [
        f"{said[type(c)]} {stage}{' and wait' if isinstance(c, Open) and c.waits else ''}"
        for stage, c in harness.commands
        if type(c) in said
    ]


def test_an_open_waits_for_room_while_it_holds_nothing() -> None:
    harness = Harness(opened=False)
    harness.no_room["speak"] = 1
    harness.feed(OpenRequested())
    assert opens_and_closes(harness) == [
        "open listen and wait",
        "open think",
        "open speak",
        "close think",
        "close listen",
        "open speak and wait",
        "open listen",
        "open think",
    ]
    assert harness.unbound == ["think", "listen"]
    assert harness.session.state is State.ACTIVE


def test_an_open_whose_stages_lose_their_room_by_turns_is_refused_at_last() -> None:
    harness = Harness(opened=False)
    harness.no_room = dict.fromkeys(harness.pipeline.stages, 100)
    harness.feed(OpenRequested())
    assert sum("wait" in said for said in opens_and_closes(harness)) == 4
    assert harness.released is not None
    assert harness.session.error is not None
    assert harness.session.error.code == "capacity_exceeded"
    assert harness.session.refused_by == "listen"
    assert len(harness.directory) == 0


def test_a_worker_that_dies_while_it_is_given_back_holds_up_no_open() -> None:
    harness = Harness(opened=False)
    harness.no_room["speak"] = 1
    harness.answer_closes = False
    harness.feed(OpenRequested())
    assert opens_and_closes(harness)[-2:] == ["close think", "close listen"]
    harness.lose("think", back=True)
    assert harness.outputs == []
    harness.answer_closes = True
    harness.lose("listen", back=True)
    assert harness.session.state is State.ACTIVE


def test_a_client_that_leaves_while_stages_are_given_back_leaves_nothing() -> None:
    harness = Harness(opened=False)
    harness.no_room["speak"] = 1
    harness.answer_closes = False
    harness.feed(OpenRequested())
    harness.clear()
    harness.feed(CloseRequested(CloseReason.CLIENT))
    assert opens_and_closes(harness) == []
    assert harness.released is None
    harness.lose("think")
    harness.lose("listen")
    assert harness.released is not None
    assert len(harness.directory) == 0


@pytest.mark.parametrize("stage", ["listen", "think", "speak"])
def test_an_open_without_a_worker_is_refused(stage: str) -> None:
    harness = Harness(opened=False)
    harness.available.discard(stage)
    harness.feed(OpenRequested())
    assert harness.released is not None
    assert len(harness.directory) == 0


def test_an_open_that_is_never_answered_ends() -> None:
    harness = Harness(voice_pipeline(open_ms=500, close_ms=500), opened=False)
    harness.answer_opens = harness.answer_closes = False
    harness.feed(OpenRequested())
    harness.later(500)
    assert harness.released is None
    harness.later(500)
    assert harness.released is not None
    assert len(harness.directory) == 0


def test_close_frees_every_stage_and_is_idempotent() -> None:
    harness = Harness()
    harness.answer_closes = False
    harness.feed(CloseRequested(CloseReason.CLIENT))
    harness.feed(CloseRequested(CloseReason.ADMIN))
    assert harness.one(SessionEnded).reason == "client"
    assert sorted(s for s, c in harness.commands if isinstance(c, Close)) == [
        "listen",
        "speak",
        "think",
    ]
    assert harness.released is None
    harness.later(60_000)
    assert harness.released is not None
    assert harness.session.deadline() is None


def test_a_directory_that_does_not_answer_holds_up_no_end() -> None:
    harness = Harness()
    harness.answer_closes = False
    harness.feed(CloseRequested(CloseReason.CLIENT))
    due_ms = harness.session.deadline()
    assert due_ms is not None
    actions = harness.session.handle(Tick(), due_ms)
    assert [type(action) for action in actions] == [AskDirectory, Released]
    assert harness.session.deadline() is None


def test_an_end_is_the_last_output() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "Once upon a time, ")
    harness.clear()
    harness.feed(CloseRequested(CloseReason.CLIENT))
    assert harness.names()[-2:] == ["ResponseDone", "SessionEnded"]
    harness.clear()
    harness.text("think", turn, "there was")
    assert harness.names() == []


def test_a_silent_client_does_not_move_the_idle_clock() -> None:
    harness = Harness(voice_pipeline(idle_ms=10_000))
    for _ in range(9):
        harness.later(1_000)
        harness.say(AppendAudio(PCM_MS * 20))
    harness.later(1_000)
    assert harness.one(SessionEnded).reason == "idle"


def test_speech_moves_the_idle_clock() -> None:
    harness = Harness(voice_pipeline(idle_ms=10_000))
    harness.later(9_000)
    harness.notice("speech_started", audio_start_ms=0)
    harness.later(9_000)
    assert not harness.all(SessionEnded)


def test_a_long_reply_moves_the_idle_clock_while_it_is_sent() -> None:
    harness = Harness(voice_pipeline(idle_ms=3_000, lead_ms=500))
    turn = harness.reply_turn()
    harness.text("think", turn, "A very long story. ")
    harness.done("think", turn)
    for _ in range(40):
        harness.audio(turn, 0, 200, end=False)
    harness.audio(turn, 0, 200)
    harness.done("speak", turn)
    harness.later(8_000)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_the_maximum_age_ends_a_busy_session() -> None:
    harness = Harness(voice_pipeline(max_age_ms=5_000))
    turn = harness.reply_turn()
    harness.text("think", turn, "Well, this is it. ")
    harness.later(5_000)
    assert harness.one(SessionEnded).reason == "max_age"
    assert harness.all(ResponseDone)


@pytest.mark.parametrize("stage", ["think", "speak"])
def test_a_lost_worker_fails_the_reply_with_the_reason(stage: str) -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "One moment please. ")
    harness.audio(turn, 0, 500, end=False)
    harness.lose(stage)
    response = harness.one(ResponseDone).response
    assert response.status is ResponseStatus.FAILED
    assert response.error is not None
    assert response.error.code == "engine_lost"
    assert not harness.all(SessionEnded)


@pytest.mark.parametrize("stage", ["think", "speak"])
def test_the_next_turn_waits_for_the_new_worker_and_knows_the_conversation(stage: str) -> None:
    harness = Harness()
    turn = harness.reply_turn("First question?")
    harness.text("think", turn, "One moment please. ")
    harness.lose(stage)
    harness.clear()
    harness.hear("Second question?")
    assert not [c for s, c in harness.commands if isinstance(c, Run) and s == stage]
    harness.come_back(stage)
    turn = harness.last_run("think").turn
    harness.text("think", turn, "Yes. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED
    assert b"First question?" in payload_of(harness.last_run("think").inputs[0]).data


def test_a_turn_does_not_wait_for_ever_for_a_worker() -> None:
    harness = Harness(voice_pipeline(restore_ms=4_000))
    harness.lose("think")
    harness.hear("Anybody?")
    harness.later(4_000)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "engine_lost"


def test_a_transcript_that_waited_for_a_worker_which_had_its_audio_is_lost_with_it() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"transcription": {}}}}))
    harness.answer_opens = False
    harness.lose("listen", back=True)
    harness.say(AppendAudio(PCM_MS * 700))
    harness.say(CommitInput())
    harness.clear()
    harness.answer_opens = True
    harness.lose("listen", back=True)
    assert harness.one(InputTranscriptionFailed).error.code == "session_state_lost"
    assert harness.sent(Run, "listen") == []
    harness.clear()
    harness.hear("hello")
    assert harness.one(InputTranscribed).transcript == "hello"


def test_an_utterance_lost_with_its_worker_is_told() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"transcription": {}}}}))
    harness.say(AppendAudio(PCM_MS * 700))
    harness.notice("speech_started", audio_start_ms=200)
    harness.lose("listen", back=True)
    assert harness.one(InputTranscriptionFailed).error.code == "session_state_lost"
    assert harness.one(ResponseDone).response.error.code == "session_state_lost"
    reopened = harness.sent(Open, "listen")[-1]
    assert reopened.settings["clock_ms"] == 700


def test_a_transcript_lost_with_its_worker_fails_the_answer() -> None:
    harness = Harness()
    harness.speak()
    harness.lose("listen", back=True)
    assert harness.one(ResponseDone).response.error.code == "engine_lost"


def test_buffered_audio_lost_with_its_worker_is_told() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
    harness.say(AppendAudio(PCM_MS * 700))
    harness.lose("listen", back=True)
    assert harness.one(Refused).error.code == "session_state_lost"
    assert harness.all(InputCleared)


def test_audio_that_nobody_could_hear_is_told_once_somebody_can() -> None:
    harness = Harness()
    harness.lose("listen")
    harness.say(AppendAudio(PCM_MS * 300))
    harness.say(AppendAudio(PCM_MS * 200))
    assert harness.names() == ["Restoring"]
    harness.come_back("listen")
    error = harness.one(Refused).error
    assert error.code == "input_audio_lost"
    assert error.message.startswith("500 ms")
    harness.lose("listen", back=True)
    assert len(harness.all(Refused)) == 1


def test_audio_that_a_silent_worker_had_not_applied_is_told() -> None:
    # A worker that hangs is given up only after seconds, in which the user may have spoken.
    harness = Harness()
    for _ in range(3):
        harness.say(AppendAudio(PCM_MS * 300))
    harness.feed(Reported("listen", ReceivedThrough("sess_1", 1)))
    harness.lose("listen", back=True)
    error = harness.one(Refused).error
    assert error.code == "input_audio_lost"
    assert error.message.startswith("600 ms")


def test_what_comes_while_a_worker_opens_the_session_reaches_it_in_order() -> None:
    harness = Harness()
    harness.lose("listen")
    harness.answer_opens = False
    harness.come_back("listen")
    harness.clear()
    harness.say(AppendAudio(PCM_MS * 300))
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
    harness.say(ClearInput())
    (update,) = harness.sent(Update, "listen")
    assert update.sequence == 1
    assert harness.sent(Configure, "listen")[0].settings["turn_detection"] is None
    assert harness.sent(Signal, "listen")[0].name == "clear"
    # The second worker dies before it answered: the third gets the clock and the settings.
    harness.lose("listen")
    harness.come_back("listen")
    opened = harness.sent(Open, "listen")[-1]
    assert (opened.settings["clock_ms"], opened.settings["turn_detection"]) == (300, None)


def test_losing_an_idle_worker_is_told_and_does_no_harm() -> None:
    harness = Harness()
    for stage in ("listen", "think", "speak"):
        harness.lose(stage, back=True)
        assert harness.outputs == [Restoring(stage), Restored(stage)]
        harness.clear()


def test_a_reply_is_not_touched_by_the_loss_of_the_hearing_worker() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "Still here. ")
    harness.done("think", turn)
    harness.lose("listen")
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_a_failing_engine_fails_its_turn_only() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.done("think", turn, TurnStatus.FAILED)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "engine_failed"
    harness.clear()
    turn = harness.reply_turn()
    # A worker that is being stopped.
    harness.done("think", turn, TurnStatus.CANCELLED)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "engine_lost"
    harness.clear()
    turn = harness.reply_turn()
    harness.text("think", turn, "Fine. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 10)
    harness.done("speak", turn)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_a_blocked_client_paces_the_producer_and_then_gets_everything() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.feed(ClientBlocked(True, "client"))
    harness.clear()
    for _ in range(5):
        harness.text("think", turn, "This is one more sentence of many words. ")
    harness.audio(turn, 0, 100)
    assert harness.names() == []
    assert len(harness.clauses(turn)) == 2
    harness.feed(ClientBlocked(False, "client"))
    assert harness.all(TextDelta)
    assert harness.all(AudioDelta)


def test_a_client_that_never_reads_is_given_up() -> None:
    harness = Harness(voice_pipeline(stall_ms=5_000))
    harness.reply_turn()
    harness.feed(ClientBlocked(True, "client"))
    harness.later(5_000)
    assert harness.one(SessionEnded).reason == "stalled"
    response = harness.one(ResponseDone).response
    assert (response.status, response.reason) == (ResponseStatus.INCOMPLETE, "stalled")
    assert harness.released is not None


def test_a_client_that_never_reads_is_given_up_at_any_time_of_the_clock() -> None:
    harness = Harness(voice_pipeline(stall_ms=8_000))
    harness.reply_turn()
    # The sum of the two times rounds down: their difference is less than 8,000.
    harness.now_ms = 10_938.59586774235
    harness.feed(ClientBlocked(True, "client"))
    harness.later(8_000)
    assert harness.one(SessionEnded).reason == "stalled"


def test_too_much_waiting_work_is_refused_not_piled_up() -> None:
    harness = Harness()
    harness.lose("think")
    for _ in range(10):
        harness.say(CreateResponse(conversation=False, output_modalities=("text",)))
    errors = [refused.error for refused in harness.all(Refused)]
    assert {(e.code, e.kind) for e in errors} == {("rate_limit_exceeded", ErrorKind.CAPACITY)}
    assert len(errors) == 10 - MAX_OUT_OF_BAND
    # The default lane has a place of its own.
    harness.say(CreateResponse(output_modalities=("text",)))
    assert len(harness.all(Refused)) == len(errors)


def test_every_transition_of_the_table_and_no_other_is_taken() -> None:
    for state in State:
        for trigger in Trigger:
            lifecycle = Lifecycle(Limits(), 0.0)
            lifecycle.state = state
            if (state, trigger) in TRANSITIONS:
                lifecycle.move(trigger, 1.0)
                assert lifecycle.state is TRANSITIONS[state, trigger][0]
            else:
                with pytest.raises(IllegalTransition):
                    lifecycle.move(trigger, 1.0)


def test_every_state_but_closed_has_a_deadline() -> None:
    for state in State:
        lifecycle = Lifecycle(Limits(), 0.0)
        lifecycle.state = state
        lifecycle.reason = CloseReason.CLIENT
        assert (lifecycle.deadline() is None) == (state is State.CLOSED)


def test_the_clocks_of_a_session_that_is_open_say_what_ends_it() -> None:
    limits = Limits(idle_ms=100, max_age_ms=500, grace_ms=50)
    lifecycle = Lifecycle(limits, 1000.0)
    assert lifecycle.ends == []
    lifecycle.move(Trigger.OPENED, 1010.0)
    assert lifecycle.ends == [(1110.0, CloseReason.IDLE), (1500.0, CloseReason.MAX_AGE)]
    lifecycle.progress(1420.0)
    assert lifecycle.deadline() == (1500.0, CloseReason.MAX_AGE)
    lifecycle.move(Trigger.DETACHED, 1430.0)
    assert lifecycle.ends[-1] == (1480.0, CloseReason.DETACHED) == lifecycle.deadline()
    lifecycle.reason = CloseReason.CLIENT
    lifecycle.move(Trigger.CLOSE, 1440.0)
    assert lifecycle.ends == []


def test_a_tick_that_comes_too_early_changes_nothing() -> None:
    harness = Harness(voice_pipeline(idle_ms=10_000))
    harness.now_ms += 5_000
    before = harness.session.freeze()
    harness.feed(Tick())
    assert harness.session.freeze() == before
    assert harness.names() == []


# Turns that get nothing done


def test_a_transcription_that_hangs_fails_and_holds_no_reply_up() -> None:
    harness = Harness(voice_pipeline(turn_ms=60_000))
    turn = harness.speak()
    harness.say(CreateResponse())
    harness.later(59_000)
    assert not harness.all(ResponseDone)
    harness.later(1_000)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert response.error.code == "turn_timeout"
    assert harness.sent(RaiseFloor, "listen")[-1].floor == turn + 1
    harness.say(CreateResponse())
    assert harness.last_run("think").turn > turn


def test_a_reply_that_gets_something_done_now_and_then_goes_on() -> None:
    harness = Harness(voice_pipeline(turn_ms=60_000))
    turn = harness.reply_turn()
    for _ in range(5):
        harness.later(50_000)
        harness.text("think", turn, "and so on and on ")
    assert not harness.all(ResponseDone)
    harness.later(60_000)
    response = harness.one(ResponseDone).response
    assert response.error is not None
    assert (response.status, response.error.code) == (ResponseStatus.FAILED, "turn_timeout")


def test_a_turn_may_stand_still_while_its_client_takes_nothing() -> None:
    harness = Harness(voice_pipeline(turn_ms=10_000, stall_ms=60_000))
    harness.reply_turn()
    harness.feed(ClientBlocked(True, "client"))
    harness.later(50_000)
    harness.feed(ClientBlocked(False, "client"))
    harness.later(9_000)
    assert not harness.all(ResponseDone)
    harness.later(1_000)
    assert harness.all(ResponseDone)


def test_a_reply_that_waits_for_words_is_freed_when_they_cannot_be_had() -> None:
    harness = Harness(voice_pipeline(turn_ms=10_000))
    words = {"turn_detection": {"interrupt_on": "words"}}
    harness.say(PatchSettings({"audio": {"input": words}}))
    turn = harness.reply_turn()
    harness.text("think", turn, "One thing. Another thing. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.speak(1_000, 1_300)
    harness.audio(turn, 1, 100)
    harness.later(9_000)
    harness.clear()
    harness.later(1_000)
    assert harness.all(AudioDelta)
