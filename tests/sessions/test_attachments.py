"""Clients that come, go, come back, take over and look on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ErrorInfo, InvalidRequest
from sessions.actions import (
    AskDirectory,
    AttachRequested,
    ClientBlocked,
    ClientHas,
    ClientMisspoke,
    ClientSaid,
    CloseRequested,
    Detached,
    DirectoryAnswered,
)
from sessions.attachments import MAX_ARRIVING, MAX_OBSERVERS
from sessions.client import (
    Answered,
    Attached,
    LetGo,
    Refused,
    Role,
    SessionCreated,
    SessionEnded,
    SettingsUpdated,
)
from sessions.commands import REMEMBERED
from sessions.directory import Outcome, Reply, Write
from sessions.duplex.events import (
    AppendAudio,
    AudioDelta,
    CancelResponse,
    ClearInput,
    ClientVerb,
    CommitInput,
    CreateItem,
    CreateResponse,
    DuplexSnapshot,
    InputCleared,
    InputCommitted,
    Item,
    ItemDone,
    ItemStatus,
    Part,
    PartKind,
    PatchSettings,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    TextDelta,
    TruncateItem,
)
from sessions.duplex.events import Role as Speaker
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Limits
from sessions.resume_secret import digest
from sessions.session import FIRST_CLIENT_MS
from tests.sessions.harness import PCM_MS, Harness, voice_pipeline


def resumable(**limits: int) -> Harness:
    return Harness(voice_pipeline(**limits), secret="s1")


def state(harness: Harness) -> State:
    return harness.session.state


def come(
    harness: Harness,
    name: str,
    *,
    secret: str | None = "s1",
    new: str = "s2",
    cursor: int | None = None,
    role: Role = Role.CONTROLLER,
) -> list[Any]:
    """A client attaches; what it alone is told."""
    harness.feed(AttachRequested(name, role, cursor, secret, new))
    return harness.told.get(name, [])


def attached(told: list[tuple[int, Any]]) -> Attached:
    _, first = told[0]
    assert isinstance(first, Attached), first
    return first


def refusal(told: list[tuple[int, Any]]) -> str:
    _, only = told[-1]
    assert isinstance(only, ErrorInfo), only
    return only.code


def say(harness: Harness, name: str, command: str | None = None) -> None:
    harness.feed(ClientSaid(ClearInput("ref"), name, command))


# Coming back


def test_a_reply_goes_on_while_its_client_is_away_and_is_told_when_it_is_back() -> None:
    harness = resumable(lead_ms=60_000)
    turn = harness.reply_turn()
    harness.text("think", turn, "One. Two.")
    harness.audio(turn, 0, 100)
    seen = harness.sequences[-1]
    harness.feed(Detached("client"))
    assert state(harness) is State.DETACHED
    harness.clear()
    harness.done("think", turn)
    harness.audio(turn, 1, 200)
    harness.done("speak", turn)
    away = list(zip(harness.sequences[-len(harness.outputs) :], harness.outputs, strict=True))
    assert harness.one(ResponseDone).response.status is ResponseStatus.COMPLETED

    told = come(harness, "again", cursor=seen)
    welcome = attached(told)
    assert state(harness) is State.ACTIVE
    assert welcome.lost is None
    assert welcome.secret == "s2"
    assert welcome.sequence == away[-1][0]
    assert [(sequence, type(output)) for sequence, output in told[1:]] == [
        (sequence, type(output)) for sequence, output in away
    ]
    pcm = [output.pcm for _, output in told if isinstance(output, AudioDelta)]
    assert sum(map(len, pcm)) == 200 * 48


def test_what_is_told_again_is_what_was_told_then() -> None:
    harness = resumable()
    turn = harness.reply_turn()
    harness.text("think", turn, "Hello there. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)
    done = harness.all(ItemDone)[-1]
    harness.say(TruncateItem(done.item.id, 0, 0))
    assert done.item.parts[0].text == "Hello there. "
    harness.feed(Detached("client"))
    told = [output for _, output in come(harness, "again", cursor=0)]
    again = [output for output in told if isinstance(output, ItemDone)][-1]
    assert again.item.parts[0].text == "Hello there. "


def test_a_session_that_cannot_be_resumed_ends_with_its_connection() -> None:
    harness = Harness()
    harness.feed(Detached("client"))
    assert harness.released is not None
    assert harness.released.reason is CloseReason.CLIENT


def test_nobody_comes_to_a_session_that_cannot_be_resumed() -> None:
    harness = Harness()
    assert refusal(come(harness, "other")) == "invalid_value"
    assert refusal(come(harness, "other", role=Role.OBSERVER)) == "invalid_value"


def test_a_client_that_does_not_come_back_is_waited_for_no_longer_than_its_grace() -> None:
    harness = resumable(grace_ms=5_000)
    harness.feed(Detached("client"))
    harness.later(4_999)
    assert state(harness) is State.DETACHED
    harness.later(1)
    assert harness.released is not None
    assert harness.released.reason is CloseReason.DETACHED


def test_an_idle_session_ends_while_its_client_is_away_too() -> None:
    harness = resumable(idle_ms=3_000, grace_ms=60_000)
    harness.later(1_000)
    harness.feed(Detached("client"))
    harness.later(2_000)
    assert harness.released is not None
    assert harness.released.reason is CloseReason.IDLE


def test_settings_are_intact_after_a_return() -> None:
    harness = resumable()
    harness.say(PatchSettings({"instructions": "Be kind.", "output_modalities": ["text"]}))
    harness.feed(Detached("client"))
    welcome = attached(come(harness, "again"))
    assert welcome.settings.instructions == "Be kind."
    assert welcome.settings.output_modalities == ("text",)


def test_the_snapshot_has_the_conversation_and_the_reply_in_progress() -> None:
    harness = resumable()
    turn = harness.reply_turn("What is new?")
    harness.text("think", turn, "Nothing. ")
    harness.audio(turn, 0, 100)
    harness.feed(Detached("client"))
    snapshot = attached(come(harness, "again")).snapshot
    assert isinstance(snapshot, DuplexSnapshot)
    assert snapshot.items[0].parts[0].text == "What is new?"
    (progress,) = snapshot.responses
    assert (progress.text, progress.audio_ms) == ("Nothing. ", 100)
    assert progress.item_id == snapshot.items[1].id


def test_past_what_was_kept_the_gap_is_stated_and_the_session_goes_on() -> None:
    harness = resumable(replay_bytes=2_000)
    for _ in range(20):
        harness.say(ClearInput())
    last = harness.sequences[-1]
    harness.feed(Detached("client"))
    told = come(harness, "again", cursor=1)
    lost = attached(told).lost
    assert lost is not None
    assert lost[0] == 2
    assert [sequence for sequence, _ in told[1:]] == list(range(lost[1] + 1, last + 1))
    say(harness, "again")
    assert isinstance(harness.outputs[-1], InputCleared)


def test_outputs_that_the_client_has_are_not_kept() -> None:
    harness = resumable()
    harness.say(ClearInput())
    harness.feed(ClientHas("client", harness.sequences[-1]))
    assert harness.session.kept_bytes == 0
    harness.feed(Detached("client"))
    assert attached(come(harness, "again", cursor=0)).lost == (1, harness.sequences[-1])


def test_a_cursor_from_the_future_is_refused() -> None:
    harness = resumable()
    assert refusal(come(harness, "again", cursor=99)) == "invalid_value"


def test_a_reply_that_nobody_takes_ends_incomplete_at_the_bound() -> None:
    harness = resumable(replay_bytes=10_000, lead_ms=60_000)
    turn = harness.reply_turn()
    harness.text("think", turn, "A long story.")
    harness.done("think", turn)
    harness.audio(turn, 0, 50, end=False)
    harness.feed(Detached("client"))
    harness.audio(turn, 0, 100, end=False)
    assert not harness.all(ResponseDone)
    harness.audio(turn, 0, 200, end=False)
    response = harness.one(ResponseDone).response
    assert (response.status, response.reason) == (ResponseStatus.INCOMPLETE, "stalled")
    assert state(harness) is State.DETACHED
    assert isinstance(come(harness, "again", cursor=0)[-1][1], ResponseDone)


def test_what_was_put_out_while_nobody_was_there_is_told_whole_however_much_it_is() -> None:
    harness = resumable(replay_bytes=2_000, lead_ms=60_000)
    turn = harness.reply_turn()
    seen = harness.sequences[-1]
    harness.feed(Detached("client"))
    harness.text("think", turn, "A long story.")
    harness.done("think", turn)
    harness.audio(turn, 0, 200, end=False)
    assert harness.session.kept_bytes > 2_000
    told = come(harness, "again", cursor=seen)
    assert attached(told).lost is None
    assert [sequence for sequence, _ in told[1:]] == harness.sequences[seen:]
    assert harness.session.kept_bytes <= 2_000


def test_a_client_that_reads_nothing_is_let_go_and_may_come_back() -> None:
    harness = resumable(stall_ms=5_000, grace_ms=60_000)
    harness.reply_turn()
    harness.feed(ClientBlocked(True, "client"))
    harness.later(5_000)
    assert harness.told["client"] == [(harness.session._attachments.sequence, LetGo("stalled"))]
    assert state(harness) is State.DETACHED
    attached(come(harness, "again", cursor=0))
    assert state(harness) is State.ACTIVE


def test_a_client_is_let_go_by_the_patience_that_was_chosen_for_it() -> None:
    harness = Harness(
        voice_pipeline(stall_ms=60_000, grace_ms=60_000),
        secret="s1",
        limits=Limits(stall_ms=1_000, grace_ms=60_000),
    )
    harness.feed(ClientBlocked(True, "client"))
    harness.later(1_500)
    assert [output for _, output in harness.told["client"]] == [LetGo("stalled")]


def test_who_was_blocked_holds_up_nobody_who_comes_after() -> None:
    harness = resumable(stall_ms=5_000)
    turn = harness.reply_turn()
    harness.feed(ClientBlocked(True, "client"))
    come(harness, "again")
    harness.feed(ClientBlocked(True, "client"))
    harness.text("think", turn, "Hello there. ")
    harness.audio(turn, 0, 10)
    assert harness.all(TextDelta)
    harness.later(6_000)
    assert state(harness) is State.ACTIVE


# Secrets


def test_a_secret_is_good_until_its_successor_was_used() -> None:
    harness = resumable()
    harness.feed(Detached("client"))
    attached(come(harness, "lost-answer", secret="s1", new="s2"))
    # The answer that carried s2 was lost on the way: the client comes with s1 again.
    attached(come(harness, "again", secret="s1", new="s3"))
    assert refusal(come(harness, "thief", secret="s2", new="s4")) == "secret_reused"
    say(harness, "again")
    assert refusal(come(harness, "late", secret="s1", new="s5")) == "secret_reused"
    attached(come(harness, "next", secret="s3", new="s6"))


def test_a_secret_that_was_never_given_is_refused() -> None:
    harness = resumable()
    assert refusal(come(harness, "guess", secret="s9")) == "resume_refused"
    assert state(harness) is State.ACTIVE


def test_of_two_that_come_the_first_is_replaced() -> None:
    harness = resumable()
    come(harness, "first", secret="s1", new="s2")
    come(harness, "second", secret="s1", new="s3")
    assert harness.told["client"][-1][1] == LetGo("replaced")
    assert harness.told["first"][-1][1] == LetGo("replaced")
    say(harness, "first", "c1")
    assert not harness.all(Answered)
    say(harness, "second", "c2")
    assert harness.one(Answered).command == "c2"


def test_the_new_digest_is_in_the_directory_before_the_new_secret_is_sent() -> None:
    harness = resumable()
    record = harness.directory.get("sess_1")
    actions = harness.session.handle(
        AttachRequested("again", Role.CONTROLLER, None, "s1", "s2"), harness.now_ms
    )
    (asked,) = actions
    assert isinstance(asked, AskDirectory)
    assert isinstance(asked.request, Write)
    assert record is not None
    assert asked.request.record.revision == record.revision + 1
    harness.feed(DirectoryAnswered(harness.directory.call(asked.request)))
    assert attached(harness.told["again"]).secret == "s2"


def test_a_directory_that_knows_another_owner_fences_the_session() -> None:
    harness = resumable()
    harness.session.handle(
        AttachRequested("again", Role.CONTROLLER, None, "s1", "s2"), harness.now_ms
    )
    harness.feed(DirectoryAnswered(Reply(Outcome.CONFLICT)))
    assert refusal(harness.told["again"]) == "fenced"
    assert harness.released is not None
    assert harness.released.reason is CloseReason.FENCED


def test_who_leaves_before_it_got_control_leaves_the_session_as_it_was() -> None:
    harness = resumable()
    (asked,) = harness.session.handle(
        AttachRequested("again", Role.CONTROLLER, None, "s1", "s2"), harness.now_ms
    )
    assert isinstance(asked, AskDirectory)
    harness.feed(Detached("again"))
    harness.feed(DirectoryAnswered(harness.directory.call(asked.request)))
    assert "again" not in harness.told
    say(harness, "client")
    assert harness.all(InputCleared)
    harness.feed(Detached("client"))
    # It has spoken after the new secret was made, which nobody has: its own is still good.
    attached(come(harness, "back", secret="s1", new="s3"))


def test_who_leaves_before_it_got_control_retires_nobodys_secret() -> None:
    harness = resumable()
    harness.feed(Detached("client"))
    attached(come(harness, "first", secret="s1", new="s2"))
    harness.answer_directory = False
    # Two come with one secret: this one is gone again before the directory has answered.
    come(harness, "second", secret="s1", new="s3")
    harness.feed(Detached("second"))
    harness.answer()
    record = harness.directory.get("sess_1")
    assert record is not None
    assert record.secret_digest == digest("s2")
    harness.feed(Detached("first"))
    come(harness, "first again", secret="s2", new="s4")
    harness.answer()
    assert attached(harness.told["first again"]).secret == "s4"


def test_of_those_who_come_at_once_the_directory_is_told_one_after_the_other() -> None:
    harness = resumable()
    harness.answer_directory = False
    for number in range(MAX_ARRIVING):
        come(harness, f"a{number}", secret="s1", new=f"n{number}")
        assert len(harness.asked) == 1
    harness.feed(Detached("a0"))
    harness.feed(Detached("a2"))
    harness.answer()
    got = [name for name in harness.told if name in ("a0", "a1", "a2", "a3")]
    assert got == ["a1", "a3"]
    record = harness.directory.get("sess_1")
    assert record is not None
    # Two were let in, and for one who had left nothing else had to be undone.
    assert (record.secret_digest, record.revision) == (digest("n3"), 4)


names = st.integers(0, 5)
plans = st.lists(
    st.one_of(
        st.tuples(st.just("come"), names, st.none() | names),
        st.tuples(st.sampled_from(["leave", "speak"]), names, st.none()),
        st.tuples(st.just("answer"), st.none(), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=500, deadline=None)
@given(plans)
def test_the_secret_that_was_given_last_opens_the_session(
    plan: list[tuple[str, int | None, int | None]],
) -> None:
    harness = resumable()
    harness.answer_directory = False
    given_out = ["s1"]
    for number, (what, who, which) in enumerate([*plan, ("answer", None, None)]):
        name = f"client {who}"
        match what:
            case "come":
                # With the latest that was given, or an earlier one, or none.
                secret = None if which is None else given_out[max(0, len(given_out) - 1 - which)]
                harness.feed(Detached(name))
                come(harness, name, secret=secret, new=f"new {number}")
            case "leave":
                harness.feed(Detached(name))
            case "speak":
                say(harness, name)
            case "answer":
                harness.answer()
        for told in harness.told.values():
            given_out += [
                output.secret
                for _, output in told
                if isinstance(output, Attached) and output.secret is not None
            ]
        harness.told.clear()
    last = given_out[-1]
    record = harness.directory.get("sess_1")
    assert record is not None
    assert record.secret_digest == digest(last)
    come(harness, "last", secret=last, new="newest")
    harness.answer()
    assert attached(harness.told["last"]).secret == "newest"


def test_who_waits_while_the_session_ends_is_refused() -> None:
    harness = resumable()
    for number in range(MAX_ARRIVING):
        harness.session.handle(
            AttachRequested(f"a{number}", Role.CONTROLLER, None, "s1", f"n{number}"),
            harness.now_ms,
        )
    harness.feed(AttachRequested("late", Role.CONTROLLER, None, "s1", "n"))
    assert refusal(harness.told["late"]) == "capacity_exceeded"
    harness.feed(CloseRequested(CloseReason.CLIENT))
    for number in range(MAX_ARRIVING):
        assert refusal(harness.told[f"a{number}"]) == "session_state_lost"
    harness.feed(AttachRequested("after", Role.CONTROLLER, None, "s1", "n"))
    assert refusal(harness.told["after"]) == "session_state_lost"


def test_who_takes_over_without_a_secret_ends_all_earlier_ones() -> None:
    harness = resumable()
    attached(come(harness, "operator", secret=None, new="s2"))
    assert refusal(come(harness, "back", secret="s1")) == "secret_reused"


def test_the_first_client_of_a_session_that_was_opened_without_one_has_time_to_come() -> None:
    harness = Harness(controller=None, secret="s1")
    assert not harness.session.evictable
    harness.later(FIRST_CLIENT_MS - 1)
    assert not harness.session.evictable
    assert harness.session.deadline() == harness.now_ms + 1
    harness.later(1)
    assert harness.session.evictable
    come(harness, "first", cursor=0)
    harness.feed(Detached("first"))
    assert harness.session.evictable


# Commands


def test_an_id_is_answered_once_whatever_is_said_under_it() -> None:
    harness = resumable()
    error = InvalidRequest("unreadable", field="input.pcm").info()
    other = InvalidRequest("unreadable", field="input").info()
    harness.feed(ClientMisspoke("client", "c1", error))
    harness.feed(ClientMisspoke("client", "c1", other))
    say(harness, "client", "c1")
    assert harness.outputs == [Answered("c1", error)] * 3
    harness.clear()
    say(harness, "client", "c2")
    harness.feed(ClientMisspoke("client", "c2", error))
    assert harness.outputs == [InputCleared(), Answered("c2"), Answered("c2")]


def test_what_one_without_control_says_under_an_id_answers_nobodys_command() -> None:
    harness = resumable()
    come(harness, "watcher", role=Role.OBSERVER)
    error = InvalidRequest("unreadable").info()
    for name in ("watcher", "nobody"):
        harness.feed(ClientMisspoke(name, "c1", error))
    assert harness.outputs == []
    say(harness, "client", "c1")
    assert harness.one(Answered).error is None


def test_an_answer_names_what_was_made() -> None:
    harness = resumable()
    item = Item("mine", Speaker.USER, ItemStatus.COMPLETED, [Part(PartKind.INPUT_TEXT, "Hello.")])
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": None}}}))
    harness.say(AppendAudio(PCM_MS * 200))
    harness.clear()
    verbs: list[ClientVerb] = [CreateItem(item), CommitInput(), CreateResponse()]
    for number, verb in enumerate(verbs):
        harness.feed(ClientSaid(verb, "client", f"c{number}"))
    assert [answer.result for answer in harness.all(Answered)] == [
        {"item_id": "mine"},
        {"item_id": harness.one(InputCommitted).item_id},
        {"response_id": harness.one(ResponseCreated).response.id},
    ]


# Observers


def test_an_observer_sees_what_is_put_out_and_changes_nothing() -> None:
    harness = resumable()
    told = come(harness, "watcher", secret=None, role=Role.OBSERVER, cursor=0)
    assert attached(told).secret is None
    assert attached(told).role is Role.OBSERVER
    assert isinstance(told[1][1], SessionCreated)
    harness.feed(ClientSaid(PatchSettings({"instructions": "No."}, "r"), "watcher"))
    error = harness.told["watcher"][-1][1]
    assert isinstance(error, Refused)
    assert (error.error.code, error.ref) == ("not_controller", "r")
    assert not harness.all(SettingsUpdated)
    harness.feed(ClientBlocked(True, "watcher"))
    harness.feed(ClientHas("watcher", 1))
    assert harness.session.kept_bytes > 0
    harness.feed(Detached("watcher"))
    assert state(harness) is State.ACTIVE


def test_a_session_has_so_many_observers_and_no_more() -> None:
    harness = resumable()
    for number in range(MAX_OBSERVERS):
        attached(come(harness, f"w{number}", role=Role.OBSERVER))
    assert refusal(come(harness, "one-more", role=Role.OBSERVER)) == "capacity_exceeded"
    harness.feed(Detached("w0"))
    attached(come(harness, "one-more", role=Role.OBSERVER)[1:])


def test_only_who_has_control_ends_the_session() -> None:
    harness = resumable()
    come(harness, "watcher", role=Role.OBSERVER)
    come(harness, "second")
    for name in ("client", "watcher"):
        harness.feed(CloseRequested(CloseReason.CLIENT, name))
        assert state(harness) is State.ACTIVE
    harness.feed(CloseRequested(CloseReason.CLIENT, "second"))
    assert harness.released is not None


# Sessions that wait for their first client


def test_a_session_that_is_opened_without_a_client_waits_for_one() -> None:
    harness = Harness(controller=None, secret="s1")
    assert state(harness) is State.DETACHED
    told = come(harness, "first", cursor=0)
    assert isinstance(told[1][1], SessionCreated)
    assert state(harness) is State.ACTIVE


def test_a_session_may_be_evicted_only_when_nobody_is_there_and_nothing_runs() -> None:
    harness = resumable()
    assert not harness.session.evictable
    turn = harness.reply_turn()
    harness.feed(Detached("client"))
    assert not harness.session.evictable
    harness.text("think", turn, "Done. ")
    harness.done("think", turn)
    harness.audio(turn, 0, 10)
    harness.done("speak", turn)
    assert harness.session.evictable


# Commands


def test_a_repeated_command_gets_the_first_answer_and_is_not_carried_out_again() -> None:
    harness = resumable()
    for _ in range(3):
        say(harness, "client", "c1")
    assert harness.names() == ["InputCleared", "Answered", "Answered", "Answered"]
    assert len(set(map(repr, harness.all(Answered)))) == 1


def test_a_refused_command_is_answered_so_every_time() -> None:
    harness = resumable()
    for _ in range(2):
        harness.feed(ClientSaid(CancelResponse(), "client", "c1"))
    codes = [answer.error.code for answer in harness.all(Answered)]
    assert codes == ["response_cancel_not_active"] * 2
    assert not harness.all(Refused)


def test_a_command_is_not_repeated_by_another_connection_either() -> None:
    harness = resumable()
    harness.feed(ClientSaid(CreateResponse(), "client", "c1"))
    harness.feed(Detached("client"))
    come(harness, "again")
    harness.feed(ClientSaid(CreateResponse(), "again", "c1"))
    assert [answer.error for answer in harness.all(Answered)] == [None, None]
    assert harness.names().count("ResponseCreated") == 1


def test_so_many_answers_are_remembered_and_no_more() -> None:
    harness = resumable()
    say(harness, "client", "first")
    for number in range(REMEMBERED):
        say(harness, "client", f"c{number}")
    harness.clear()
    say(harness, "client", "first")
    say(harness, "client", f"c{REMEMBERED - 1}")
    assert harness.names() == ["InputCleared", "Answered", "Answered"]


@pytest.mark.parametrize("reason", [CloseReason.CLIENT, CloseReason.EVICTED])
def test_a_session_that_ends_keeps_nothing(reason: CloseReason) -> None:
    harness = resumable()
    come(harness, "watcher", role=Role.OBSERVER)
    harness.feed(CloseRequested(reason))
    assert harness.one(SessionEnded).reason == reason.value
    assert harness.session.kept_bytes == 0
    assert len(harness.directory) == 0
