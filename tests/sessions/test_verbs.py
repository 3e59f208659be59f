"""Verbs of the client: carried out, or refused by name with everything as it was."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import InvalidRequest, SessionStateLost
from protocol.messages import (
    Answer,
    Configure,
    Open,
    RaiseFloor,
    ReceivedThrough,
    Run,
    Signal,
    TurnStatus,
)
from protocol.payloads import PayloadType, read_conversation
from sessions.actions import Reported
from sessions.backlog import COMMANDS
from sessions.client import Refused, Restored, Restoring, SessionEnded, SettingsUpdated
from sessions.duplex.events import (
    FRONT,
    AppendAudio,
    CancelResponse,
    ClearInput,
    ClientVerb,
    CommitInput,
    ConversationReset,
    CreateItem,
    CreateResponse,
    DeleteItem,
    InputCleared,
    InputCommitted,
    InputTranscribed,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    ItemStatus,
    Part,
    PartKind,
    PatchSettings,
    Reset,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    RetrieveItem,
    Role,
    TruncateItem,
)
from sessions.lifecycle import State
from tests.sessions.harness import PCM_MS, Harness, payload_of

NO_VAD = PatchSettings({"audio": {"input": {"turn_detection": None}}})


def user(item_id: str, text: str = "Hello.") -> Item:
    part = Part(PartKind.INPUT_TEXT, text)
    return Item(item_id, Role.USER, ItemStatus.COMPLETED, [part])


def detection(patch: dict[str, Any]) -> dict[str, Any]:
    return {"audio": {"input": {"turn_detection": patch}}}


def manual() -> Harness:
    harness = Harness()
    harness.say(NO_VAD)
    harness.clear()
    return harness


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"audio": {"input": {"format": {"rate": 16_000}}}}, "audio.input.format.rate"),
        ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "audio.input.format.type"),
        (
            {"audio": {"input": {"turn_detection": {"threshold": 2}}}},
            "audio.input.turn_detection.threshold",
        ),
        (
            {"audio": {"input": {"turn_detection": {"eagerness": "low"}}}},
            "audio.input.turn_detection.eagerness",
        ),
        ({"audio": {"output": {"voice": "nobody"}}}, "audio.output.voice"),
        ({"audio": {"output": {"speed": 3.0}}}, "audio.output.speed"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"output_modalities": ["audio", "text"]}, "output_modalities"),
        (
            {"audio": {"input": {"transcription": {"language": "English"}}}},
            "audio.input.transcription.language",
        ),
        ({"instructions": 7}, "instructions"),
        ({"instructions": "x" * 20_000}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"tracing": {"metadata": {"k": "x" * 5_000}}}, "tracing"),
        ({"tracing": {"metadata": {"k": 2**64}}}, "tracing"),
        (
            {"audio": {"input": {"transcription": {"model": "x" * 200}}}},
            "audio.input.transcription.model",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_its_path(patch: dict[str, Any], field: str) -> None:
    harness = Harness()
    before = harness.session.freeze()
    harness.say(PatchSettings(patch, ref="evt_1"))
    refused = harness.one(Refused)
    assert (refused.error.field, refused.ref) == (f"settings.{field}", "evt_1")
    assert not harness.all(SettingsUpdated)
    # Only the output number and nothing of the settings has moved.
    assert harness.session.freeze()[2:] == before[2:]


def test_settings_merge_deeply_and_reach_the_stage() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": {"threshold": 0.7}}}}))
    detection = harness.one(SettingsUpdated).settings.audio.input.turn_detection
    assert (detection.threshold, detection.silence_duration_ms) == (0.7, 500)
    (configure,) = harness.sent(Configure, "listen")
    assert configure.settings["turn_detection"]["threshold"] == 0.7


def test_turn_detection_switched_off_and_on_again_has_its_defaults() -> None:
    harness = manual()
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}))
    detection = harness.one(SettingsUpdated).settings.audio.input.turn_detection
    assert (detection.type, detection.create_response) == ("server_vad", True)


def test_the_voice_is_frozen_once_audio_was_heard() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "Yes. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.say(PatchSettings({"audio": {"output": {"voice": "alloy"}}}))
    assert harness.one(Refused).error.code == "cannot_update_voice"


def test_a_commit_by_hand_makes_an_item_and_no_response() -> None:
    harness = manual()
    harness.say(AppendAudio(PCM_MS * 400))
    harness.say(CommitInput())
    run = harness.last_run("listen")
    assert run.parameters == {"start_ms": 0, "end_ms": 400}
    assert harness.sent(Signal, "listen")[0].name == "cut"
    harness.text("listen", run.turn, "Hi.")
    harness.done("listen", run.turn)
    assert not harness.all(ResponseCreated)


def test_a_response_asked_for_right_after_a_commit_waits_for_the_words() -> None:
    harness = manual()
    harness.say(AppendAudio(PCM_MS * 400))
    harness.say(CommitInput())
    harness.say(CreateResponse())
    assert harness.all(ResponseCreated)
    assert not harness.sent(Run, "think")
    hearing = harness.last_run("listen").turn
    harness.text("listen", hearing, "Hi.")
    harness.done("listen", hearing)
    conversation = read_conversation(payload_of(harness.last_run("think").inputs[0]))
    assert conversation[0].text == "Hi."


def test_a_response_to_words_that_cannot_be_had_fails() -> None:
    harness = manual()
    harness.say(AppendAudio(PCM_MS * 400))
    harness.say(CommitInput())
    harness.say(CreateResponse())
    harness.done("listen", harness.last_run("listen").turn, TurnStatus.FAILED)
    assert harness.one(ResponseDone).response.status is ResponseStatus.FAILED


def test_an_empty_commit_is_refused() -> None:
    harness = manual()
    harness.say(AppendAudio(PCM_MS * 99))
    harness.say(CommitInput())
    assert harness.one(Refused).error.code == "input_audio_buffer_commit_empty"
    harness.say(AppendAudio(PCM_MS))
    harness.say(CommitInput())
    assert harness.all(InputCommitted)


def test_a_cleared_buffer_is_empty() -> None:
    harness = manual()
    harness.say(AppendAudio(PCM_MS * 400))
    harness.say(ClearInput())
    assert harness.all(InputCleared)
    harness.say(CommitInput())
    assert harness.one(Refused).error.code == "input_audio_buffer_commit_empty"


def test_items_are_inserted_where_they_were_asked_for() -> None:
    harness = Harness()
    harness.say(CreateItem(user("a")))
    harness.say(CreateItem(user("c")))
    harness.say(CreateItem(user("b"), after="a"))
    harness.say(CreateItem(user("first"), after=FRONT))
    previous = [(added.item.id, added.previous_item_id) for added in harness.all(ItemAdded)]
    assert previous == [("a", None), ("c", "a"), ("b", "a"), ("first", None)]
    harness.say(CreateResponse())
    conversation = payload_of(harness.last_run("think").inputs[0])
    assert len(read_conversation(conversation)) == 4


def test_an_item_with_audio_is_transcribed() -> None:
    harness = Harness()
    part = Part(PartKind.INPUT_AUDIO, None, audio=PCM_MS * 300)
    harness.say(CreateItem(Item("spoken", Role.USER, ItemStatus.COMPLETED, [part])))
    run = harness.last_run("listen")
    assert payload_of(run.inputs[0]).type is PayloadType.AUDIO
    harness.text("listen", run.turn, "Good morning.")
    harness.done("listen", run.turn)
    harness.say(RetrieveItem("spoken"))
    assert harness.one(ItemRetrieved).item.parts[0].text == "Good morning."
    assert harness.one(ItemRetrieved).item.parts[0].audio_ms == 300


def test_a_deleted_item_is_gone_from_the_conversation() -> None:
    harness = Harness()
    harness.say(CreateItem(user("a", "One.")))
    harness.say(CreateItem(user("b", "Two.")))
    harness.say(DeleteItem("a"))
    assert harness.one(ItemDeleted).item_id == "a"
    harness.say(CreateResponse())
    conversation = read_conversation(payload_of(harness.last_run("think").inputs[0]))
    assert [message.text for message in conversation] == ["Two."]


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        (CreateItem(user("a")), "item_create_duplicate_item_id"),
        (CreateItem(user("b"), after="nobody"), "invalid_value"),
        (DeleteItem("nobody"), "item_not_found"),
        (RetrieveItem("nobody"), "item_retrieve_invalid_item_id"),
        (TruncateItem("nobody", 0, 0), "item_not_found"),
        (TruncateItem("a", 0, 0), "invalid_value"),
        (CancelResponse(), "response_cancel_not_active"),
        (CancelResponse("resp_nobody"), "response_cancel_not_active"),
        (CreateResponse(input=["nobody"]), "item_not_found"),
        (CreateResponse(voice="nobody"), "invalid_value"),
        (CreateResponse(output_modalities=("text", "audio")), "invalid_value"),
    ],
)
def test_a_verb_that_cannot_be_carried_out_changes_nothing(verb: ClientVerb, code: str) -> None:
    harness = Harness()
    harness.say(CreateItem(user("a")))
    harness.clear()
    before = harness.session.freeze()
    harness.say(verb)
    assert harness.names() == ["Refused"]
    assert harness.one(Refused).error.code == code
    assert harness.session.freeze()[2:] == before[2:]


def test_a_second_response_in_the_conversation_is_refused() -> None:
    harness = Harness()
    harness.reply_turn()
    harness.say(CreateResponse())
    assert harness.one(Refused).error.code == "conversation_already_has_active_response"


def test_cancel_ends_the_running_response_once() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "I will tell you, ")
    harness.say(CancelResponse())
    response = harness.one(ResponseDone).response
    assert (response.status, response.reason) == (
        ResponseStatus.CANCELLED,
        "client_cancelled",
    )
    harness.say(CancelResponse(response.id))
    assert harness.one(Refused).error.code == "response_cancel_not_active"


def test_response_options_override_the_session() -> None:
    harness = Harness()
    given: list[Item | str] = [user("x", "Given.")]
    harness.say(
        CreateResponse(input=given, instructions="Shout.", max_output_tokens=5, voice="alloy")
    )
    run = harness.last_run("think")
    assert run.parameters == {"instructions": "Shout.", "max_output_tokens": 5}
    assert [m.text for m in read_conversation(payload_of(run.inputs[0]))] == ["Given."]
    harness.text("think", run.turn, "OK.")
    harness.done("think", run.turn)
    assert harness.last_run("speak").parameters["voice"] == "joe"


def test_a_verb_sees_all_earlier_ones_applied() -> None:
    harness = Harness()
    harness.say(PatchSettings({"instructions": "Sing."}))
    harness.say(CreateResponse())
    assert harness.last_run("think").parameters["instructions"] == "Sing."


def test_a_full_conversation_refuses_text_and_names_the_bound() -> None:
    harness = Harness()
    harness.say(CreateItem(user("a", "x" * 60_000)))
    harness.say(CreateItem(user("b", "x" * 10_000)))
    assert harness.one(Refused).error.code == "conversation_full"


def test_a_setting_that_the_stage_refuses_is_taken_back_and_told() -> None:
    harness = Harness()
    spoken = {"transcription": {"language": "xx"}}
    harness.say(PatchSettings({"audio": {"input": spoken}}))
    (configure,) = harness.sent(Configure, "listen")
    error = InvalidRequest("no such language", field="language").info()
    harness.feed(Reported("listen", Answer("sess_1", configure.command, error)))
    assert harness.one(Refused).error.field == "settings.audio.input.transcription.language"
    assert harness.all(SettingsUpdated)[-1].settings.audio.input.transcription is None
    assert harness.sent(Configure, "listen")[-1].settings["language"] is None


def refuse_settings(harness: Harness) -> None:
    """The hearing stage refuses what it was asked last."""
    error = InvalidRequest("no such language", field="language").info()
    configure = harness.sent(Configure, "listen")[-1]
    harness.feed(Reported("listen", Answer("sess_1", configure.command, error)))


def test_a_stage_that_refuses_the_default_as_well_ends_the_session() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"transcription": {"language": "xx"}}}}))
    refuse_settings(harness)
    assert harness.session.state is State.ACTIVE
    refuse_settings(harness)
    assert len(harness.sent(Configure, "listen")) == 2
    ended = harness.one(SessionEnded)
    assert ended.reason == "engine_lost"
    assert ended.error.message == "no such language"


def test_a_worker_that_has_no_session_to_set_is_lost_like_any_other() -> None:
    harness = Harness()
    harness.say(CreateResponse())
    reply = harness.last_run("think").turn
    harness.say(NO_VAD)
    harness.say(PatchSettings({"audio": {"input": {"transcription": {"language": "de"}}}}))
    harness.say(AppendAudio(PCM_MS * 200))
    error = SessionStateLost("this worker has no such session").info()
    for configure in harness.sent(Configure, "listen"):
        harness.feed(Reported("listen", Answer("sess_1", configure.command, error)))
    assert harness.session.state is State.ACTIVE
    assert (harness.one(Restoring).stage, harness.one(Restored).stage) == ("listen", "listen")
    # What it was sent and had not applied is told of; its settings are with the new worker.
    assert harness.one(Refused).error.code == "session_state_lost"
    opened = harness.sent(Open)[-1]
    assert (opened.settings["turn_detection"], opened.settings["language"]) == (None, "de")
    assert (opened.settings["clock_ms"], len(harness.sent(Open))) == (200, 1)
    harness.text("think", reply, "Still here. ")
    harness.done("think", reply)
    harness.audio(reply, 0, 100)
    harness.done("speak", reply)
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED


def test_a_worker_that_has_no_session_to_signal_is_lost_like_any_other() -> None:
    harness = Harness()
    harness.say(ClearInput())
    (signal,) = harness.sent(Signal, "listen")
    error = SessionStateLost("this worker has no such session").info()
    harness.feed(Reported("listen", Answer("sess_1", signal.command, error)))
    assert harness.session.state is State.ACTIVE
    assert len(harness.sent(Open, "listen")) == 1
    assert harness.all(Restored)


def test_what_a_lost_binding_still_says_of_input_is_not_taken_for_the_new_one() -> None:
    harness = Harness()
    harness.answer_opens = False
    harness.lose("listen", back=True)
    for _ in range(COMMANDS + 1):
        harness.say(AppendAudio(PCM_MS))
    assert harness.held
    harness.feed(Reported("listen", ReceivedThrough("sess_1", COMMANDS + 1)))
    assert harness.held


def test_settings_refused_twice_on_their_way_fall_back_once() -> None:
    harness = Harness()
    for language in ("xx", "yy"):
        patch = {"audio": {"input": {"transcription": {"language": language}}}}
        harness.say(PatchSettings(patch))
    error = InvalidRequest("no such language", field="language").info()
    for configure in harness.sent(Configure, "listen"):
        harness.feed(Reported("listen", Answer("sess_1", configure.command, error)))
    assert len(harness.sent(Configure, "listen")) == 3
    assert len(harness.all(Refused)) == 2
    last = harness.sent(Configure, "listen")[-1]
    assert last.settings["language"] is None
    harness.feed(Reported("listen", Answer("sess_1", last.command)))
    assert harness.session.state is State.ACTIVE


def test_what_came_of_a_transcript_that_failed_is_no_part_of_the_conversation() -> None:
    harness = Harness()
    turn = harness.speak()
    harness.text("listen", turn, "Half of wh")
    harness.done("listen", turn, TurnStatus.FAILED)
    harness.say(CreateResponse())
    (given,) = harness.last_run("think").inputs
    assert read_conversation(payload_of(given)) == []


def test_audio_in_an_item_is_heard_once_and_not_kept() -> None:
    harness = Harness()
    harness.say(PatchSettings({"audio": {"input": {"transcription": {}}}}))
    parts = [Part(PartKind.INPUT_TEXT, "Hear:"), Part(PartKind.INPUT_AUDIO, audio=PCM_MS * 500)]
    harness.say(CreateItem(Item("mine", Role.USER, ItemStatus.COMPLETED, parts)))
    turn = harness.last_run("listen").turn
    harness.text("listen", turn, " Hello there.")
    harness.done("listen", turn)
    said = harness.one(InputTranscribed)
    assert (said.item_id, said.content_index, said.transcript) == ("mine", 1, "Hello there.")
    harness.say(RetrieveItem("mine"))
    kept = harness.one(ItemRetrieved).item.parts
    assert [part.text for part in kept] == ["Hear:", "Hello there."]
    assert [part.audio for part in kept] == [None, None]
    assert kept[1].audio_ms == 500


@pytest.mark.parametrize(
    ("role", "kind"),
    [(Role.USER, PartKind.INPUT_AUDIO), (Role.ASSISTANT, PartKind.OUTPUT_AUDIO)],
)
def test_audio_with_its_words_is_not_heard_again(role: Role, kind: PartKind) -> None:
    harness = Harness()
    parts = [Part(kind, "Hello.", audio=PCM_MS * 500)]
    harness.say(CreateItem(Item("mine", role, ItemStatus.COMPLETED, parts)))
    assert not harness.sent(Run)
    harness.say(RetrieveItem("mine"))
    (part,) = harness.one(ItemRetrieved).item.parts
    assert (part.text, part.audio_ms, part.audio) == ("Hello.", 500, None)


def test_an_item_has_one_unheard_part_at_most() -> None:
    harness = Harness()
    parts = [Part(PartKind.INPUT_AUDIO, audio=PCM_MS * 500) for _ in range(2)]
    harness.say(CreateItem(Item("mine", Role.USER, ItemStatus.COMPLETED, parts), ref="evt"))
    assert harness.one(Refused).error.field == "item.content"
    assert not harness.sent(Run)


@pytest.mark.parametrize(
    ("verb", "field"),
    [
        (CreateResponse(instructions="x" * 16_385), "response.instructions"),
        (CreateResponse(input=[user("one", "x" * 65_537)]), "response.input"),
        (CreateResponse(input=[user(f"i{n}") for n in range(513)]), "response.input"),
        (CreateResponse(input=["nobody"] * 513), "response.input"),
        (CreateResponse(input=[user("one"), "nobody"]), "response.input[1]"),
        (
            CreateResponse(
                input=[
                    Item(
                        "spoken",
                        Role.USER,
                        ItemStatus.COMPLETED,
                        [Part(PartKind.INPUT_AUDIO, audio=PCM_MS)],
                    )
                ]
            ),
            "response.input",
        ),
    ],
)
def test_what_a_response_works_from_is_bounded(verb: CreateResponse, field: str) -> None:
    harness = Harness()
    harness.say(verb)
    assert harness.one(Refused).error.field == field
    assert not harness.sent(Run)


def test_lost_input_is_told() -> None:
    harness = Harness()
    harness.notice("input_lost", first=3, last=5)
    assert harness.one(Refused).error.code == "input_audio_lost"


def test_a_reset_cancels_what_runs_and_forgets_what_was_said() -> None:
    harness = Harness()
    reply = harness.reply_turn("Remember the bees.")
    harness.text("think", reply, "I shall. ")
    harness.audio(reply, 0, 100)
    hearing = harness.speak(1_000, 1_500)
    harness.say(PatchSettings({"instructions": "Be kind."}))
    floors = {(c.lane, c.floor) for c in harness.sent(RaiseFloor)}
    harness.clear()
    harness.say(Reset())
    assert harness.session.state is State.ACTIVE
    said = harness.one(ConversationReset)
    assert len(said.item_ids) == 3
    raised = {(c.lane, c.floor) for c in harness.sent(RaiseFloor)} - floors
    assert ("input", hearing + 1) in raised
    # What still comes of the turns before goes nowhere.
    harness.clear()
    harness.text("listen", hearing, "What bees?")
    harness.done("listen", hearing)
    harness.audio(reply, 1, 100)
    assert harness.outputs == []
    harness.say(CreateItem(user("new", "Hello.")))
    harness.say(CreateResponse())
    run = harness.last_run("think")
    (conversation,) = run.inputs
    messages = read_conversation(payload_of(conversation))
    assert [message.text for message in messages] == ["Hello."]
    assert run.parameters["instructions"] == "Be kind."


def test_a_reset_in_mid_reply_ends_the_reply_first() -> None:
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "Well. ")
    harness.clear()
    harness.say(Reset())
    names = harness.names()
    assert names.index("ResponseDone") < names.index("ConversationReset")
    assert harness.one(ResponseDone).response.status is ResponseStatus.CANCELLED
