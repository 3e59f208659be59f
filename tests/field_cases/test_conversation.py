"""Field cases of the session core."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from protocol.errors import EngineFailed
from protocol.messages import (
    Close,
    Open,
    RaiseFloor,
    ReceivedThrough,
    TurnStatus,
)
from protocol.payloads import Message, read_conversation
from sessions.actions import (
    AttachRequested,
    ClientBlocked,
    ClientSaid,
    CloseRequested,
    Detached,
    OpenRequested,
    Reported,
)
from sessions.client import Attached, Refused, Role, SettingsUpdated
from sessions.duplex.events import (
    AppendAudio,
    AudioDelta,
    CancelResponse,
    ClearInput,
    ClientOutput,
    PatchSettings,
    ResponseDone,
    ResponseStatus,
    TextDelta,
    TruncateItem,
)
from sessions.lifecycle import CloseReason, State
from tests.sessions.harness import Harness, payload_of, voice_pipeline


def resumable(**limits: int) -> Harness:
    return Harness(voice_pipeline(**limits), secret="s0")


def come(harness: Harness, number: int, cursor: int) -> Attached:
    """A client comes back with the secret it was given last."""
    name = f"client-{number}"
    secrets = f"s{number - 1}", f"s{number}"
    harness.feed(AttachRequested(name, Role.CONTROLLER, cursor, *secrets))
    first = harness.told[name][0][1]
    assert isinstance(first, Attached)
    return first


# Every state has a bounded way out, also when nobody answers any more.


def opening() -> Harness:
    harness = Harness(voice_pipeline(), opened=False)
    harness.answer_opens = False
    harness.feed(OpenRequested())
    return harness


def active() -> Harness:
    return Harness()


def detached() -> Harness:
    harness = resumable()
    harness.feed(Detached("client"))
    return harness


def closing() -> Harness:
    harness = Harness()
    harness.answer_closes = False
    harness.feed(CloseRequested(CloseReason.CLIENT))
    return harness


@pytest.mark.parametrize("state", [opening, active, detached, closing])
def test_f08_every_state_is_left_in_time_though_nobody_answers(
    state: Callable[[], Harness],
) -> None:
    # A signal moved a session to a state that nothing ever ended: its place was lost.
    harness = state()
    assert harness.session.state is State[state.__name__.upper()]
    harness.answer_opens = harness.answer_closes = False
    limits = harness.pipeline.limits
    harness.later(limits.max_age_ms + limits.open_ms + limits.close_ms)
    assert harness.session.state is State.CLOSED
    assert harness.released is not None
    assert len(harness.directory) == 0
    assert harness.session.deadline() is None


def test_f09_a_session_whose_log_has_overflowed_is_resumed_again_and_again() -> None:
    # Once the replay buffer had overflowed, the session could never be resumed.
    harness = resumable(replay_bytes=2_000)
    name = "client"
    for number in range(1, 6):
        harness.feed(Detached(name))
        for _ in range(20):
            harness.feed(AttachRequested("looker", Role.OBSERVER))
            harness.feed(Detached("looker"))
        came = come(harness, number, cursor=1 if number > 1 else 0)
        name = f"client-{number}"
        assert (came.lost is not None) == (number > 1)
        for _ in range(20):
            harness.feed(ClientSaid(ClearInput(), name))
    assert harness.session.state is State.ACTIVE


def test_f10_an_interruption_leaves_the_state_and_its_replica() -> None:
    # Interrupting a reply threw the session's resident state away and moved it elsewhere.
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "A long story. ")
    workers = harness.session.workers()
    harness.clear()
    harness.speak(900, 1_500)
    assert harness.one(ResponseDone).response.status is ResponseStatus.CANCELLED
    assert harness.sent(RaiseFloor, "think")
    assert not harness.sent(Open) + harness.sent(Close)
    assert harness.session.workers() == workers


# Every response has its last word, exactly one, whatever ends it.


def completed(harness: Harness, turn: int) -> None:
    harness.done("think", turn)
    harness.audio(turn, 0, 100)
    harness.done("speak", turn)


def cancelled(harness: Harness, turn: int) -> None:
    harness.say(CancelResponse())


def interrupted(harness: Harness, turn: int) -> None:
    harness.notice("speech_started", audio_start_ms=900)


def engine_failed(harness: Harness, turn: int) -> None:
    harness.done("think", turn, TurnStatus.FAILED, EngineFailed("it failed").info())


def voice_failed(harness: Harness, turn: int) -> None:
    harness.done("think", turn)
    harness.done("speak", turn, TurnStatus.FAILED, EngineFailed("it failed").info())


def worker_lost(harness: Harness, turn: int) -> None:
    harness.lose("speak")


def closed(harness: Harness, turn: int) -> None:
    harness.feed(CloseRequested(CloseReason.CLIENT))


def drained(harness: Harness, turn: int) -> None:
    harness.feed(CloseRequested(CloseReason.DRAINED))


def grown_old(harness: Harness, turn: int) -> None:
    # Its stages go on with it all the while: a turn that rests fails before it is old.
    limits = harness.pipeline.limits
    while harness.now_ms + limits.turn_ms / 2 < limits.max_age_ms:
        harness.later(limits.turn_ms / 2)
        harness.text("think", turn, "More. ")
    assert not harness.all(ResponseDone)
    harness.later(limits.turn_ms * 3 / 4)


def rested(harness: Harness, turn: int) -> None:
    harness.later(harness.pipeline.limits.turn_ms)


def stalled(harness: Harness, turn: int) -> None:
    harness.feed(ClientBlocked(True, "client"))
    harness.later(harness.pipeline.limits.stall_ms)


def gone(harness: Harness, turn: int) -> None:
    harness.feed(Detached("client"))


ENDS: dict[Callable[[Harness, int], None], ResponseStatus] = {
    completed: ResponseStatus.COMPLETED,
    cancelled: ResponseStatus.CANCELLED,
    interrupted: ResponseStatus.CANCELLED,
    engine_failed: ResponseStatus.FAILED,
    voice_failed: ResponseStatus.FAILED,
    worker_lost: ResponseStatus.FAILED,
    closed: ResponseStatus.CANCELLED,
    drained: ResponseStatus.CANCELLED,
    grown_old: ResponseStatus.CANCELLED,
    rested: ResponseStatus.FAILED,
    stalled: ResponseStatus.INCOMPLETE,
    gone: ResponseStatus.CANCELLED,
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_f26_every_response_has_its_last_word(end: Callable[[Harness, int], None]) -> None:
    # A response never finished; its audio's end never came.
    harness = Harness()
    turn = harness.reply_turn()
    harness.text("think", turn, "Well then. ")
    end(harness, turn)
    assert harness.one(ResponseDone).response.status is ENDS[end]
    # What workers still say of it changes nothing.
    harness.clear()
    completed(harness, turn)
    harness.later(1_000)
    assert not harness.all(ResponseDone)


def test_f26_a_response_that_no_worker_will_take_ends_in_time() -> None:
    # A response that waits for a worker ends too.
    harness = Harness()
    harness.lose("think")
    harness.hear("Is anybody there?")
    assert not harness.all(ResponseDone)
    harness.later(harness.pipeline.limits.restore_ms)
    assert harness.one(ResponseDone).response.status is ResponseStatus.FAILED


def test_f27_nothing_of_an_old_answer_reaches_who_comes_back() -> None:
    # After a reconnect the old answer leaked into the new session.
    harness = resumable()
    old = harness.reply_turn()
    harness.text("think", old, "The old answer. ")
    harness.feed(Detached("client"))
    come(harness, 1, cursor=0)
    harness.feed(ClientSaid(CancelResponse(), "client-1"))
    seen = harness.session._attachments.sequence
    harness.clear()
    harness.feed(Detached("client-1"))
    harness.text("think", old, "More of the old answer. ")
    harness.audio(old, 0, 200)
    harness.done("speak", old)
    came = come(harness, 2, cursor=seen)
    assert came.lost is None
    told: list[ClientOutput] = [output for _, output in harness.told["client-2"]]
    assert [type(output) for output in told] == [Attached]
    assert not harness.all(TextDelta) + harness.all(AudioDelta)


def test_f28_a_patch_merges_deeply_and_is_refused_as_a_whole() -> None:
    # A partial turn_detection switched it off; an unknown key rejected the rest without a word.
    harness = Harness()
    detection = {"silence_duration_ms": 700}
    harness.say(PatchSettings({"audio": {"input": {"turn_detection": detection}}}))
    settings = harness.one(SettingsUpdated).settings
    kept = settings.audio.input.turn_detection
    assert (kept.type, kept.silence_duration_ms, kept.interrupt_response) == (
        "server_vad",
        700,
        True,
    )
    harness.clear()
    bad = {"silence_duration_ms": 800, "tone": "kind"}
    patch = {"instructions": "Sing.", "audio": {"input": {"turn_detection": bad}}}
    harness.say(PatchSettings(patch, ref="evt_1"))
    refused = harness.one(Refused)
    assert refused.error.field == "settings.audio.input.turn_detection.tone"
    assert refused.ref == "evt_1"
    assert harness.session.settings == settings
    harness.clear()
    harness.say(PatchSettings({"tools": [{"type": "function", "name": "look"}]}))
    assert harness.one(Refused).error.field == "settings.tools"


def test_f30_cancelling_keeps_what_was_said_and_what_was_heard() -> None:
    # Cancelling dropped the user's transcript and the heard part of the answer.
    harness = Harness()
    turn = harness.reply_turn("What is new?")
    for clause in ("First of all, ", "here is the second clause. ", "And a third one."):
        harness.text("think", turn, clause)
    harness.done("think", turn)
    harness.audio(turn, 0, 500)
    harness.say(CancelResponse())
    (item,) = harness.one(ResponseDone).response.output
    assert item.parts[0].text == "First of all, here is the second clause. "
    harness.say(TruncateItem(item.id, 0, 500))
    harness.hear("Go on.")
    heard = read_conversation(payload_of(harness.last_run("think").inputs[0]))
    assert heard == [
        Message("user", "What is new?"),
        Message("assistant", "First of all,"),
        Message("user", "Go on."),
    ]


@pytest.mark.parametrize("end", [completed, cancelled], ids=lambda end: end.__name__)
def test_f32_a_duration_is_that_of_the_samples_sent(end: Callable[[Harness, int], None]) -> None:
    # An item's reported duration differed from the bytes sent.
    harness = Harness(voice_pipeline(lead_ms=300))
    turn = harness.reply_turn()
    harness.text("think", turn, "One clause of it. ")
    for _ in range(7):
        harness.audio(turn, 0, 33, end=False)
    end(harness, turn)
    harness.later(10_000)
    sent = sum(len(output.pcm) for output in harness.all(AudioDelta)) // 48
    assert sent > 0
    (item,) = harness.one(ResponseDone).response.output
    assert item.parts[0].audio_ms == sent
    assert harness.measured[-1].audio_ms == sent


def test_f33_a_session_holds_none_of_the_audio_that_was_heard() -> None:
    # The user's audio was kept for the whole session, and appends got slower and slower.
    harness = Harness()

    def hear(first: int, last: int) -> None:
        for number in range(first, last + 1):
            harness.say(AppendAudio(bytes(960)))
            harness.feed(Reported("listen", ReceivedThrough("sess_1", number)))
            harness.commands.clear()

    hear(1, 100)
    tracemalloc.start()
    hear(101, 1_100)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 960_000 / 10
