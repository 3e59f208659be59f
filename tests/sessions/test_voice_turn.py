"""A spoken turn and its reply, as the client sees them and as the stages are driven."""

from __future__ import annotations

import pytest

from protocol.messages import Acknowledge, Feed, RaiseFloor, Run, TurnStatus, Update
from protocol.payloads import read_conversation
from sessions.client import Refused
from sessions.duplex.events import (
    AppendAudio,
    AudioDelta,
    CancelResponse,
    ClearInput,
    CreateResponse,
    InputTranscribed,
    ItemAdded,
    ItemRetrieved,
    ItemStatus,
    OutputItemAdded,
    OutputItemDone,
    PatchSettings,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    RetrieveItem,
    SpeechStarted,
    TextDelta,
    TruncateItem,
)
from tests.sessions.harness import PCM_MS, Harness, payload_of, voice_pipeline

THREE = ["First of all, ", "here is the second clause. ", "And this is the third one."]


def long_reply(harness: Harness) -> int:
    """A reply of three clauses that think has finished; the voice has said nothing yet."""
    turn = harness.reply_turn()
    for clause in THREE:
        harness.text("think", turn, clause)
    harness.done("think", turn, input_tokens=9, cached_tokens=2, output_tokens=20)
    return turn


def test_a_spoken_turn_has_the_events_of_the_protocol_in_order() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"transcription": {"model": "whisper"}}}}))
    harness.clear()
    turn = harness.reply_turn("Hello there.")
    harness.text("think", turn, "Hi!")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    assert harness.names() == [
        "SpeechStarted",
        "SpeechStopped",
        "InputCommitted",
        "ItemAdded",
        "ItemDone",
        "InputTranscribed",
        "ResponseCreated",
        "OutputItemAdded",
        "ItemAdded",
        "ContentPartAdded",
        "TextDelta",
        "AudioDelta",
        "PartDone",
        "OutputItemDone",
        "ItemDone",
        "ResponseDone",
    ]
    assert harness.one(InputTranscribed).transcript == "Hello there."
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_what_has_begun_is_told_as_it_began() -> None:
    harness = Harness()
    turn = harness.reply_turn("Hello there.")
    harness.clear()
    harness.text("think", turn, "Hi!")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    added = harness.one(OutputItemAdded).item
    assert (added.status, added.parts) == (ItemStatus.IN_PROGRESS, [])
    assert harness.one(ItemAdded).item == added
    assert harness.one(OutputItemDone).item.parts[0].text == "Hi!"


def test_a_response_that_ends_is_still_told_as_it_began() -> None:
    harness = Harness()
    harness.reply_turn("Hello there.")
    created = harness.one(ResponseCreated).response
    harness.say(CancelResponse())
    assert (created.status, created.output) == (ResponseStatus.IN_PROGRESS, [])
    assert harness.one(ResponseDone).response.status is ResponseStatus.CANCELLED


def test_outputs_are_numbered_without_gaps() -> None:
    harness = Harness()
    long_reply(harness)
    assert harness.sequences == list(range(1, len(harness.sequences) + 1))


def test_the_reply_sees_the_whole_conversation() -> None:
    harness = Harness()
    turn = harness.reply_turn("One.")
    harness.text("think", turn, "Two.")
    harness.done("think", turn)
    harness.audio(turn, 0, 10)
    harness.done("speak", turn)
    harness.hear("Three.")
    payload = payload_of(harness.last_run("think").inputs[0])
    said = [(message.role, message.text) for message in read_conversation(payload)]
    assert said == [("user", "One."), ("assistant", "Two."), ("user", "Three.")]


def test_audio_goes_to_the_hearing_stage_numbered() -> None:
    harness = Harness()
    harness.say(AppendAudio(PCM_MS * 20))
    harness.say(AppendAudio(PCM_MS * 20))
    assert [update.sequence for update in harness.sent(Update, "listen")] == [1, 2]


def test_nothing_is_answered_when_nothing_was_understood() -> None:
    harness = Harness()
    harness.hear("")
    assert "ResponseCreated" not in harness.names()


def test_clauses_are_handed_over_within_their_credit() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    for number in range(6):
        harness.text("think", turn, f"This is quite a long sentence with number {number}. ")
    harness.done("think", turn)
    assert len(harness.clauses(turn)) == 2
    harness.audio(turn, 0, 500)
    assert len(harness.clauses(turn)) == 3


def test_a_clause_beyond_the_lead_keeps_its_credit_until_it_is_sent() -> None:
    harness = Harness(voice_pipeline(lead_ms=1_000))
    turn = long_reply(harness)
    harness.audio(turn, 0, 800, end=False)
    harness.audio(turn, 0, 800, end=False)
    harness.audio(turn, 0, 800)
    assert len(harness.all(AudioDelta)) == 2
    assert len(harness.clauses(turn)) == 2
    harness.later(600)
    assert len(harness.all(AudioDelta)) == 3
    assert len(harness.clauses(turn)) == 3


def test_the_transcript_runs_at_most_one_clause_ahead_of_the_speech() -> None:
    harness = Harness()
    turn = long_reply(harness)
    assert "".join(delta.delta for delta in harness.all(TextDelta)) == THREE[0]
    harness.audio(turn, 0, 100)
    assert "".join(delta.delta for delta in harness.all(TextDelta)) == "".join(THREE[:2])
    harness.audio(turn, 1, 100)
    assert "".join(delta.delta for delta in harness.all(TextDelta)) == "".join(THREE)


def test_the_turn_is_done_when_text_and_audio_have_both_drained() -> None:
    harness = Harness(voice_pipeline(lead_ms=1_000))
    turn = long_reply(harness)
    for clause in range(3):
        harness.audio(turn, clause, 600)
    harness.done("speak", turn)
    assert not harness.all(ResponseDone)
    harness.later(2_000)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED
    assert len(harness.all(AudioDelta)) == 3


def test_speech_interrupts_the_reply_everywhere() -> None:
    harness = Harness()
    turn = long_reply(harness)
    harness.audio(turn, 0, 500)
    harness.notice("speech_started", audio_start_ms=900)
    done = harness.one(ResponseDone).response
    assert (done.status, done.reason) == (ResponseStatus.CANCELLED, "turn_detected")
    assert {stage for stage, command in harness.commands if isinstance(command, RaiseFloor)} == {
        "think",
        "speak",
    }
    harness.clear()
    harness.audio(turn, 1, 500)
    harness.text("think", turn, "late")
    harness.later(10_000)
    assert harness.names() == []


def test_an_interruption_leaves_the_hearing_of_the_user_alone() -> None:
    harness = Harness()
    long_reply(harness)
    harness.notice("speech_started", audio_start_ms=900)
    assert not harness.sent(RaiseFloor, "listen")


def test_the_closing_events_of_an_interrupted_reply_are_sent() -> None:
    harness = Harness()
    turn = long_reply(harness)
    harness.audio(turn, 0, 500)
    harness.clear()
    harness.notice("speech_started", audio_start_ms=900)
    assert harness.names() == [
        "SpeechStarted",
        "PartDone",
        "OutputItemDone",
        "ItemDone",
        "ResponseDone",
    ]
    item = harness.one(ResponseDone).response.output[0]
    assert item.status is ItemStatus.INCOMPLETE


def test_without_interrupt_response_the_reply_goes_on() -> None:
    harness = Harness()
    detection = {"interrupt_response": False}
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": detection}}}))
    turn = long_reply(harness)
    harness.notice("speech_started", audio_start_ms=900)
    assert not harness.all(ResponseDone)
    harness.notice("speech_stopped", audio_start_ms=900, audio_end_ms=1_500)
    hearing = harness.last_run("listen").turn
    harness.text("listen", hearing, "And then?")
    harness.done("listen", hearing)
    assert harness.last_run("think").turn == turn
    for clause in range(3):
        harness.audio(turn, clause, 100)
    harness.done("speak", turn)
    assert harness.last_run("think").turn > turn


def test_truncate_cuts_the_transcript_to_what_was_played() -> None:
    harness = Harness()
    turn = long_reply(harness)
    harness.audio(turn, 0, 500)
    harness.audio(turn, 1, 1_000)
    harness.notice("speech_started", audio_start_ms=900)
    item = harness.one(ResponseDone).response.output[0]
    harness.say(TruncateItem(item.id, 0, 1_000))
    harness.say(RetrieveItem(item.id))
    (part,) = harness.one(ItemRetrieved).item.parts
    assert (part.text, part.audio_ms) == ("First of all, here is", 1_000)
    # What was told before stays as it was told.
    assert item.parts[0].text == "".join(THREE)
    harness.notice("speech_stopped", audio_start_ms=900, audio_end_ms=1_500)
    hearing = harness.last_run("listen").turn
    harness.text("listen", hearing, "Stop.")
    harness.done("listen", hearing)
    heard = read_conversation(payload_of(harness.last_run("think").inputs[0]))
    assert heard[1].text == "First of all, here is"


def test_truncate_beyond_the_audio_sent_is_refused_and_changes_nothing() -> None:
    harness = Harness()
    turn = long_reply(harness)
    for clause in range(3):
        harness.audio(turn, clause, 100)
    harness.done("speak", turn)
    item = harness.one(ResponseDone).response.output[0]
    harness.say(TruncateItem(item.id, 0, 301, ref="evt"))
    refused = harness.one(Refused)
    assert (refused.error.field, refused.ref) == ("audio_end_ms", "evt")
    assert item.parts[0].text == "".join(THREE)


def test_truncating_a_reply_in_progress_ends_it() -> None:
    harness = Harness()
    turn = long_reply(harness)
    harness.audio(turn, 0, 500)
    item = harness.all(ItemAdded)[-1].item
    harness.say(TruncateItem(item.id, 0, 250))
    assert harness.one(ResponseDone).response.reason == "client_cancelled"
    (kept,) = harness.one(OutputItemDone).item.parts
    assert kept.text == "First"


def test_text_only_replies_never_reach_the_voice() -> None:
    harness = Harness()
    harness.hear("x")
    harness.say(CancelResponse())
    harness.clear()
    harness.say(CreateResponse(output_modalities=("text",)))
    turn = harness.last_run("think").turn
    for clause in THREE:
        harness.text("think", turn, clause)
    harness.done("think", turn)
    assert "".join(delta.delta for delta in harness.all(TextDelta)) == "".join(THREE)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED
    assert not harness.sent(Run, "speak")
    assert not harness.sent(Feed, "speak")


def test_an_out_of_band_response_runs_beside_the_reply_and_survives_interruption() -> None:
    harness = Harness()
    reply = long_reply(harness)
    harness.say(
        CreateResponse(conversation=False, output_modalities=("text",), metadata={"a": "b"})
    )
    aside = harness.last_run("think").turn
    assert aside != reply
    harness.notice("speech_started", audio_start_ms=900)
    harness.text("think", aside, "Aside.")
    harness.done("think", aside)
    by_id = [done.response for done in harness.all(ResponseDone)]
    assert [response.status for response in by_id] == [
        ResponseStatus.CANCELLED,
        ResponseStatus.COMPLETED,
    ]
    assert by_id[1].conversation is None
    assert by_id[1].metadata == {"a": "b"}


def test_max_output_tokens_makes_the_response_incomplete() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "I was going to")
    harness.done("think", turn, output_tokens=4, finish_reason="length")
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    response = harness.one(ResponseDone).response
    assert (response.status, response.reason) == (
        ResponseStatus.INCOMPLETE,
        "max_output_tokens",
    )


def test_latencies_count_from_the_end_of_the_users_turn() -> None:
    harness = Harness()
    hearing = harness.speak()
    harness.later(200)
    harness.text("listen", hearing, "Hello.")
    harness.done("listen", hearing)
    turn = harness.last_run("think").turn
    harness.later(100)
    harness.text("think", turn, "Hi. ")
    harness.done("think", turn)
    harness.later(50)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn, synthesis_ms=20.0)
    assert (harness.measured[0].ttft_ms, harness.measured[0].ttfp_ms) == (300, 350)
    assert harness.measured[0].rtf == 0.2


def test_a_user_who_speaks_on_is_answered_once_with_all_that_was_said() -> None:
    harness = Harness()
    first = harness.speak(0, 500)
    harness.notice("speech_started", audio_start_ms=600)
    harness.text("listen", first, "Well,")
    harness.done("listen", first)
    assert not harness.sent(Run, "think")
    harness.notice("speech_stopped", audio_start_ms=600, audio_end_ms=1_000)
    second = harness.last_run("listen").turn
    harness.text("listen", second, "what now?")
    harness.done("listen", second)
    (run,) = harness.sent(Run, "think")
    assert [m.text for m in read_conversation(payload_of(run.inputs[0]))] == ["Well,", "what now?"]


def test_speech_is_announced_with_the_id_of_the_item_to_come() -> None:
    harness = Harness()
    harness.hear("Hello.")
    assert harness.one(SpeechStarted).item_id == harness.all(ItemAdded)[0].item.id


def acknowledged(harness: Harness, stage: str, turn: int) -> list[int]:
    return [a.through for a in harness.sent(Acknowledge, stage) if a.turn == turn]


def test_output_is_acknowledged_when_it_has_been_sent_not_before() -> None:
    harness = Harness(voice_pipeline(lead_ms=500))
    turn = long_reply(harness)
    assert acknowledged(harness, "think", turn) == [1]
    harness.audio(turn, 0, 400, end=False)
    harness.audio(turn, 0, 400, end=False)
    harness.audio(turn, 0, 400)
    assert acknowledged(harness, "speak", turn) == [1, 2]
    harness.later(400)
    assert acknowledged(harness, "speak", turn) == [1, 2, 3]


def test_a_reply_that_failed_leaves_nothing_to_be_kept() -> None:
    harness = Harness()
    turn = long_reply(harness)
    harness.lose("speak")
    assert acknowledged(harness, "think", turn)[-1] == 3


def test_a_transcript_is_acknowledged_when_it_is_in_its_item() -> None:
    harness = Harness()
    turn = harness.speak()
    harness.text("listen", turn, "Hello.")
    assert acknowledged(harness, "listen", turn) == [1]


# Interruption once there are words


def careful() -> Harness:
    """A session whose reply ends by words, not by every noise."""
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": {"interrupt_on": "words"}}}}))
    return harness


def speaking_reply(harness: Harness) -> int:
    """A reply of which one clause was sent, and another is still to come."""
    turn = harness.reply_turn()
    harness.text("think", turn, "One thing. Another thing. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.clear()
    return turn


def test_a_noise_does_not_end_a_reply_that_waits_for_words() -> None:
    harness = careful()
    turn = speaking_reply(harness)
    hearing = harness.speak(1_000, 1_300)
    harness.audio(turn, 1, 100)
    harness.done("speak", turn)
    assert not harness.all(AudioDelta)
    assert not harness.all(ResponseDone)
    deadline = harness.session.deadline()
    assert deadline is not None
    assert deadline > harness.now_ms
    harness.done("listen", hearing)
    assert sum(len(delta.pcm) for delta in harness.all(AudioDelta)) == 100 * 48
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED
    assert not harness.all(ResponseCreated)


def test_words_end_a_reply_that_waits_for_them_and_are_answered() -> None:
    harness = careful()
    turn = speaking_reply(harness)
    hearing = harness.speak(1_000, 1_800)
    harness.audio(turn, 1, 100)
    harness.text("listen", hearing, "Stop.")
    harness.done("listen", hearing)
    assert not harness.all(AudioDelta)
    response = harness.one(ResponseDone).response
    assert (response.status, response.reason) == (ResponseStatus.CANCELLED, "turn_detected")
    assert harness.one(ResponseCreated)


@pytest.mark.parametrize("end", ["listen lost", "cleared", "switched off", "transcript failed"])
def test_a_reply_goes_on_when_nobody_will_say_what_was_said(end: str) -> None:
    harness = careful()
    turn = speaking_reply(harness)
    harness.notice("speech_started", audio_start_ms=1_000)
    harness.audio(turn, 1, 100)
    assert not harness.all(AudioDelta)
    match end:
        case "listen lost":
            harness.lose("listen", back=True)
        case "cleared":
            harness.say(ClearInput())
        case "switched off":
            harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
        case "transcript failed":
            harness.notice("speech_stopped", audio_start_ms=1_000, audio_end_ms=1_300)
            harness.done("listen", harness.last_run("listen").turn, TurnStatus.FAILED)
    assert harness.all(AudioDelta)


def test_a_reply_that_waits_for_words_can_be_cancelled_and_the_next_is_free() -> None:
    harness = careful()
    speaking_reply(harness)
    harness.notice("speech_started", audio_start_ms=1_000)
    harness.say(CancelResponse())
    harness.clear()
    harness.say(CreateResponse())
    turn = harness.last_run("think").turn
    harness.text("think", turn, "Next. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 50)
    assert harness.all(AudioDelta)
