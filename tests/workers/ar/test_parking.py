"""Sessions of the real model leave their slot, and go on in any as if they had stayed."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import pytest
import pytest_asyncio

from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest, SessionStateLost
from protocol.payloads import Message
from tests.workers.ar.driving import Conversation, ask_and_interrupt, open_session
from workers.engines.ar import ArEngine, ArOptions
from workers.engines.ar.llamacpp import LlamaBackend, LlamaSession
from workers.engines.ar.parked import Parked, seal
from workers.models import locate

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SESSIONS = 2
BEFORE = ("The code word is tiger.", "Do you like snow?", "What is the colour of grass?")
AFTER = ("What is the code word?", "Tell me about the sea.", "Do you like cats?")
LONG = "Answer in eight long sentences."
FILLER = "I like to walk along the river in the early morning with my old dog. " * 6
WINDOW = 512
"""Tokens that most layers of the model look back; of what lies before llama.cpp keeps nothing
of theirs in files."""
STORY = Message("user", "Tell me a story about a dog.")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ArEngine]:
    engine = ArEngine.create(ArOptions(sessions=SESSIONS, context_tokens=1024, temperature=0.0))
    await engine.load()
    yield engine
    assert not list(backend_of(engine).server.socket_path.parent.glob("slots/*"))
    await engine.shutdown()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def no_slot_is_lost(engine: ArEngine) -> AsyncIterator[None]:
    yield
    assert len(backend_of(engine)._free) == SESSIONS


def backend_of(engine: ArEngine) -> LlamaBackend:
    backend = engine._backend
    assert isinstance(backend, LlamaBackend)
    return backend


def opened(engine: ArEngine) -> LlamaSession:
    session = open_session(engine)
    assert isinstance(session, LlamaSession)
    return session


async def restored(engine: ArEngine, path: Path) -> LlamaSession:
    session = await engine.restore("session", {}, lambda event, arguments: None, path)
    assert isinstance(session, LlamaSession)
    return session


async def say_in_a_new_session(engine: ArEngine, *texts: str) -> list[str]:
    talk = Conversation(open_session(engine))
    replies = [(await talk.say(text)).text for text in texts]
    talk.session.close()
    return replies


async def new_tokens(engine: ArEngine, text: str) -> int:
    return len(await backend_of(engine).server.tokenize(text, special=False))


@pytest.mark.parametrize("same_slot", [True, False])
async def test_a_parked_session_goes_on_word_for_word_with_its_prefix_resident(
    engine: ArEngine, tmp_path: Path, same_slot: bool
) -> None:
    expected = await say_in_a_new_session(engine, *BEFORE, *AFTER)

    session = opened(engine)
    talk = Conversation(session)
    replies = [(await talk.say(text)).text for text in BEFORE]
    path = tmp_path / "parked"
    began = perf_counter()
    await session.snapshot(path)
    saved = perf_counter()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    held, slot = len(session._slot.memory), session._slot
    session.close()

    other = opened(engine)
    assert other._slot is slot
    await Conversation(other).say("The code word is river, and I live in Japan.")
    if same_slot:
        other.close()
    restoring = perf_counter()
    talk.session = session = await restored(engine, path)
    print(
        f"\n{held} tokens: {path.stat().st_size} bytes, {path.stat().st_size / held:.0f} a token; "
        f"saved in {(saved - began) * 1e3:.0f} ms, "
        f"restored in {(perf_counter() - restoring) * 1e3:.0f} ms"
    )
    assert (session._slot is slot) == same_slot
    path.unlink()
    first = await talk.say(AFTER[0])
    print(f"the first turn after it: {first.usage}")
    assert first.prefill_tokens <= await new_tokens(engine, AFTER[0]) + 16
    replies += [first.text, *[(await talk.say(text)).text for text in AFTER[1:]]]
    assert replies == expected
    session.close()
    if not same_slot:
        other.close()


async def test_a_snapshot_follows_what_is_in_use_and_is_within_what_was_declared(
    engine: ArEngine, tmp_path: Path
) -> None:
    session = opened(engine)
    talk = Conversation(session)
    for number, text in enumerate([*BEFORE, FILLER * 5]):
        await talk.say(text)
        path = tmp_path / str(number)
        await session.snapshot(path)
        tokens = len(session._slot.memory)
        print(f"\n{tokens} tokens: {path.stat().st_size} bytes")
        (declared,) = engine.declare({}).values()
        in_use = declared * tokens / 1024
        if tokens < WINDOW:
            assert path.stat().st_size == pytest.approx(in_use, rel=0.05)
        else:
            assert path.stat().st_size < in_use
    # It was not closed, so it goes on.
    assert "tiger" in (await talk.say(AFTER[0])).text
    session.close()


async def long_talk(engine: ArEngine) -> tuple[Conversation, LlamaSession]:
    session = opened(engine)
    talk = Conversation(session)
    for text in (BEFORE[0], FILLER * 4):
        await talk.say(text)
    assert len(session._slot.memory) > WINDOW
    return talk, session


async def test_beyond_the_window_a_session_goes_on_with_its_prefix_resident(
    engine: ArEngine, tmp_path: Path
) -> None:
    # Not word for word: over so many tokens two sessions of which none was ever parked
    # differ in the last bits, and where two words are nearly as likely, in the word.
    talk, session = await long_talk(engine)
    await session.snapshot(tmp_path / "parked")
    session.close()
    await say_in_a_new_session(engine, FILLER * 4)
    talk.session = session = await restored(engine, tmp_path / "parked")
    first = await talk.say(AFTER[0])
    print(f"\nthe first turn after it: {first.usage}")
    assert first.prefill_tokens <= await new_tokens(engine, AFTER[0]) + 16
    assert "tiger" in first.text
    for text in AFTER[1:]:
        assert (await talk.say(text)).prefill_tokens <= await new_tokens(engine, text) + 16
    # It is so however often it is parked.
    await session.snapshot(tmp_path / "again")
    session.close()
    talk.session = session = await restored(engine, tmp_path / "again")
    assert (await talk.say("Who are you?")).usage["cached_tokens"] > WINDOW
    session.close()


async def test_beyond_the_window_a_prefix_that_is_cut_back_is_read_again(
    engine: ArEngine, tmp_path: Path
) -> None:
    talk, session = await long_talk(engine)
    await session.snapshot(tmp_path / "parked")
    session.close()
    talk.session = session = await restored(engine, tmp_path / "parked")
    last = talk.messages.pop()
    talk.messages.append(Message("assistant", last.text[:6]))
    reply = await talk.say(AFTER[0])
    assert reply.usage["cached_tokens"] == 0
    assert "tiger" in reply.text
    # Now it is whole.
    talk.messages[-1] = Message("assistant", "Well")
    assert (await talk.say(AFTER[1])).usage["cached_tokens"] > WINDOW
    session.close()


@pytest.mark.parametrize("ended", ["closed", "cancelled"])
async def test_half_a_prefix_is_not_left_to_the_next_session(
    engine: ArEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    _, session = await long_talk(engine)
    await session.snapshot(tmp_path / "parked")
    session.close()
    restoring = asyncio.ensure_future(restored(engine, tmp_path / "parked"))
    if ended == "closed":
        (await restoring).close()
    else:
        server, began = backend_of(engine).server, asyncio.Event()
        post = server._post

        async def seen(path: str, *arguments: Any, **options: Any) -> httpx.Response:
            began.set()
            return await post(path, *arguments, **options)

        monkeypatch.setattr(server, "_post", seen)
        await began.wait()
        restoring.cancel()
        await asyncio.wait([restoring])
        assert restoring.cancelled()
    slot = backend_of(engine)._free[-1]
    assert slot.continues_only
    replies = await say_in_a_new_session(engine, BEFORE[0], AFTER[0])
    assert slot.continues_only is None
    assert "tiger" in replies[-1]


async def test_messages_that_no_longer_fitted_stay_out(engine: ArEngine, tmp_path: Path) -> None:
    session = opened(engine)
    talk = Conversation(session)
    days = 0
    while "dropped_messages" not in (reply := await talk.say(f"{FILLER} Day {days}.")).usage:
        days += 1
    dropped = reply.usage["dropped_messages"]
    await session.snapshot(tmp_path / "parked")
    session.close()
    talk.session = session = await restored(engine, tmp_path / "parked")
    reply = await talk.say("Do you like cats?")
    assert reply.usage["dropped_messages"] == dropped
    assert reply.prefill_tokens <= await new_tokens(engine, "Do you like cats?") + 16
    session.close()


async def test_a_session_in_which_nothing_was_said_takes_nothing_of_the_one_before(
    engine: ArEngine, tmp_path: Path
) -> None:
    await say_in_a_new_session(engine, *BEFORE)
    session = opened(engine)
    path = tmp_path / "parked"
    # The engine has not come to reading the few-shot head into it yet.
    await session.snapshot(path)
    assert path.stat().st_size < 200
    session.close()
    session = await restored(engine, path)
    talk = Conversation(session)
    await talk.say(BEFORE[0])
    assert "tiger" in (await talk.say(AFTER[0])).text
    session.close()


async def test_a_session_whose_first_turn_was_refused_takes_nothing_of_the_one_before(
    engine: ArEngine, tmp_path: Path
) -> None:
    await say_in_a_new_session(engine, *BEFORE)
    session = opened(engine)
    # It has the slot before the engine comes to reading the few-shot head into it, and does
    # not get as far as the model.
    with pytest.raises(InvalidRequest):
        await Conversation(session).say("Do fish sleep at night? " * 400)
    known = sum(len(token.data) + 8 for token in session._slot.memory.tokens())
    path = tmp_path / "parked"
    await session.snapshot(path)
    assert 0 < path.stat().st_size < known + 200
    session.close()


@pytest.mark.parametrize("damage", ["byte", "end", "words", "gone", "foreign", "state"])
async def test_a_file_that_is_damaged_or_foreign_is_a_lost_state(
    engine: ArEngine, tmp_path: Path, damage: str
) -> None:
    session = opened(engine)
    await Conversation(session).say(BEFORE[0])
    path = tmp_path / "parked"
    await session.snapshot(path)
    session.close()
    match damage:
        case "byte":
            with path.open("r+b") as file:
                file.seek(1_000_000)
                file.write(b"damage")
        case "end":
            os.truncate(path, path.stat().st_size - 1000)
        case "words":
            path.write_text("words " * 1000)
        case "gone":
            path.unlink()
        case "foreign":
            os.truncate(path, 0)
            seal(path, Parked("another model", [], [], [], True))
        case "state":
            # Whole, but what lies in it is not llama.cpp's.
            path.write_bytes(b"words " * 1000)
            seal(path, Parked(engine.weights(), [], [], [], True))
    # More often than there are slots.
    for _ in range(SESSIONS + 1):
        with pytest.raises(SessionStateLost):
            await restored(engine, path)
    assert "tiger" in (await say_in_a_new_session(engine, BEFORE[0], AFTER[0]))[-1]


async def test_a_restore_finds_no_slot_where_all_are_taken(
    engine: ArEngine, tmp_path: Path
) -> None:
    sessions = [opened(engine) for _ in range(SESSIONS)]
    path = tmp_path / "parked"
    await sessions[0].snapshot(path)
    with pytest.raises(CapacityExceeded):
        await restored(engine, path)
    with pytest.raises(InvalidRequest):
        await engine.restore("session", {"voice": "x"}, lambda event, arguments: None, path)
    for session in sessions:
        session.close()


async def test_a_file_that_there_is_no_room_for_leaves_the_session_as_it_was(
    engine: ArEngine, tmp_path: Path
) -> None:
    session = opened(engine)
    talk = Conversation(session)
    await talk.say(BEFORE[0])
    path = tmp_path / "parked"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(EngineFailed):
            await session.snapshot(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        await session.snapshot(tmp_path / "no such folder" / "parked")
    path.write_text("somebody else's")
    with pytest.raises(FileExistsError):
        await session.snapshot(path)
    assert path.read_text() == "somebody else's"
    reply = await talk.say(AFTER[0])
    assert "tiger" in reply.text
    assert reply.prefill_tokens <= await new_tokens(engine, AFTER[0]) + 16
    session.close()


async def test_a_snapshot_may_be_cancelled_at_any_point(engine: ArEngine, tmp_path: Path) -> None:
    session = opened(engine)
    talk = Conversation(session)
    await talk.say(BEFORE[0])
    path = tmp_path / "parked"
    cancelled = 0
    for steps in range(60):
        task = asyncio.ensure_future(session.snapshot(path))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        assert path.exists() != task.cancelled()
        path.unlink(missing_ok=True)
    assert cancelled > 10
    reply = await talk.say(AFTER[0])
    assert "tiger" in reply.text
    assert reply.prefill_tokens <= await new_tokens(engine, AFTER[0]) + 16
    await session.snapshot(path)
    session.close()
    session = await restored(engine, path)
    session.close()


async def test_a_restore_may_be_cancelled_at_any_point(engine: ArEngine, tmp_path: Path) -> None:
    session = opened(engine)
    talk = Conversation(session)
    await talk.say(BEFORE[0])
    path = tmp_path / "parked"
    await session.snapshot(path)
    session.close()
    cancelled = 0
    for steps in range(60):
        task = asyncio.ensure_future(restored(engine, path))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        if not task.cancelled():
            task.result().close()
    assert cancelled > 10
    talk.session = session = await restored(engine, path)
    reply = await talk.say(AFTER[0])
    assert "tiger" in reply.text
    assert reply.prefill_tokens <= await new_tokens(engine, AFTER[0]) + 16
    session.close()


async def test_an_interrupted_reply_is_parked_with_what_was_made_of_it(
    engine: ArEngine, tmp_path: Path
) -> None:
    session = opened(engine)
    talk = Conversation(session)
    talk.messages.append(STORY)
    broken_off = await ask_and_interrupt(session, talk.messages, after_pieces=12, instructions=LONG)
    path = tmp_path / "parked"
    await session.snapshot(path)
    session.close()
    talk.messages.append(Message("assistant", " ".join(broken_off.text.split()[:6])))
    talk.session = session = await restored(engine, path)
    question = "What is your name?"
    reply = await talk.say(question, instructions=LONG, max_output_tokens=8)
    assert reply.prefill_tokens <= await new_tokens(engine, question) + 16
    session.close()


async def test_what_a_snapshot_fits_changes_with_what_decides_how_it_is_read(
    engine: ArEngine, tmp_path: Path
) -> None:
    path = tmp_path / "own.gguf"
    path.symlink_to(locate("gemma-3-270m"))
    options: list[dict[str, Any]] = [
        {"context_tokens": 1024, "sessions": 1},
        {"context_tokens": 512, "sessions": 1},
        {"context_tokens": 1024, "sessions": 1, "model": str(path), "prompt": "few-shot"},
    ]
    found = []
    for chosen in options:
        other = ArEngine.create(ArOptions(**chosen))
        assert other.weights() == ""
        await other.load()
        found.append(other.weights())
        await other.shutdown()
    same, smaller, own = found
    assert same == engine.weights()
    assert len({same, smaller, own}) == 3
