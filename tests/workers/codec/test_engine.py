from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequest, ModelFileError
from protocol.payloads import (
    Message,
    Payload,
    audio_payload,
    conversation_payload,
    text_payload,
)
from workers.engine import EngineSession, Turn, TurnResult
from workers.engines.codec import CodecEngine, CodecOptions

CLAUSES = ["The train leaves soon,", "so please hurry up.", "Good luck!"]
LONG = "Every word of this long sentence is worth hearing once more. " * 4


def open_session(engine: CodecEngine, **more: Any) -> EngineSession:
    return engine.open("session", {"output_rate_hz": 24_000, **more}, lambda name, arguments: None)


async def stream(*payloads: Payload) -> AsyncIterator[Payload]:
    for payload in payloads:
        yield payload


def numbered(clauses: list[str]) -> list[Payload]:
    return [text_payload(clause, clause=index) for index, clause in enumerate(clauses)]


class Heard(list[Payload]):
    """What a turn emitted."""

    @property
    def pcm(self) -> bytes:
        return b"".join(payload.data for payload in self)

    @property
    def ends(self) -> list[int]:
        return [piece.attributes["clause"] for piece in self if piece.attributes["clause_end"]]


async def speak(
    session: EngineSession, payloads: list[Payload], **parameters: Any
) -> tuple[Heard, TurnResult]:
    heard = Heard()
    turn = Turn(1, "default", parameters, stream(*payloads), heard.append)
    return heard, await session.run(turn)


async def test_clauses_are_heard_in_pieces_that_say_where_each_ends(engine: CodecEngine) -> None:
    heard, result = await speak(open_session(engine), numbered(CLAUSES), voice="piper-joe")
    assert heard.ends == [0, 1, 2]
    clauses = [piece.attributes["clause"] for piece in heard]
    assert clauses == sorted(clauses)
    for piece in heard:
        assert piece.attributes["rate_hz"] == 24_000
        assert 20 <= len(piece.data) / 2 / 24 <= 200
    assert len(heard[0].data) / 2 / 24 == 40
    assert result.usage["audio_ms"] == len(heard.pcm) // 2 * 1000 // 24_000
    assert result.usage["synthesis_ms"] > 0
    assert np.abs(np.frombuffer(heard.pcm, "<i2")).max() > 3000


async def test_pieces_joined_are_the_clauses_spoken_whole(engine: CodecEngine) -> None:
    heard, _ = await speak(open_session(engine), numbered(["Hello there."]))
    speaker = engine.speaker
    (segment,) = speaker.segments("Hello there.")
    assert heard.pcm == speaker.speak(segment, 24_000, 1.0, 0.0)


async def test_a_clause_starts_while_later_ones_are_not_written_yet(engine: CodecEngine) -> None:
    first_heard, heard = asyncio.Event(), Heard()

    async def inputs() -> AsyncIterator[Payload]:
        yield text_payload(CLAUSES[0], clause=0)
        await first_heard.wait()
        yield text_payload(CLAUSES[1], clause=1)

    def emit(payload: Payload) -> None:
        heard.append(payload)
        if payload.attributes["clause_end"]:
            first_heard.set()

    await open_session(engine).run(Turn(1, "default", {}, inputs(), emit))
    assert heard.ends == [0, 1]


async def test_a_clause_without_words_is_one_empty_piece(engine: CodecEngine) -> None:
    heard, result = await speak(open_session(engine), numbered(["😀 ...", "Yes.", ""]))
    assert heard.ends == [0, 1, 2]
    assert [len(heard[0].data), len(heard[-1].data)] == [0, 0]
    assert result.usage["audio_ms"] > 100


async def test_clauses_without_numbers_are_counted(engine: CodecEngine) -> None:
    heard, _ = await speak(open_session(engine), [text_payload("Yes."), text_payload("No.")])
    assert heard.ends == [0, 1]


async def test_the_pause_between_clauses_follows_their_punctuation(engine: CodecEngine) -> None:
    session = open_session(engine)
    pauses = []
    for mark in (",", "."):
        heard, _ = await speak(session, numbered([f"Hello there{mark}", "Yes."]))
        second = b"".join(piece.data for piece in heard if piece.attributes["clause"] == 1)
        pauses.append(int(np.flatnonzero(np.frombuffer(second, "<i2"))[0]))
    assert 0 < pauses[0] < pauses[1]


async def test_speed_changes_the_duration(engine: CodecEngine) -> None:
    session = open_session(engine)
    slow, plain, fast = [
        (await speak(session, numbered(["This takes some time to say."]), speed=speed))[1]
        for speed in (0.5, 1, 1.5)
    ]
    assert slow.usage["audio_ms"] > 1.6 * plain.usage["audio_ms"]
    assert fast.usage["audio_ms"] < 0.8 * plain.usage["audio_ms"]


async def test_another_output_rate_keeps_the_duration(engine: CodecEngine) -> None:
    _, usual = await speak(open_session(engine), numbered(["Hello there."]))
    heard, other = await speak(
        open_session(engine, output_rate_hz=16_000), numbered(["Hello there."])
    )
    assert heard[0].attributes["rate_hz"] == 16_000
    assert abs(usual.usage["audio_ms"] - other.usage["audio_ms"]) <= 1


async def test_two_sessions_at_once_sound_as_each_alone_and_take_turns(engine: CodecEngine) -> None:
    texts = {"first": numbered([LONG]), "second": numbered(["Something else entirely. " * 4])}
    alone = {name: (await speak(open_session(engine), text))[0].pcm for name, text in texts.items()}
    order: list[str] = []
    together = {name: Heard() for name in texts}

    async def run(name: str) -> None:
        def emit(payload: Payload) -> None:
            together[name].append(payload)
            order.append(name)

        await open_session(engine).run(Turn(1, "default", {}, stream(*texts[name]), emit))

    async with asyncio.TaskGroup() as group:
        for name in texts:
            group.create_task(run(name))
    assert {name: heard.pcm for name, heard in together.items()} == alone
    assert order.index("second") < len(order) - 1 - order[::-1].index("first")
    assert order.index("first") < len(order) - 1 - order[::-1].index("second")


async def test_a_cancelled_turn_emits_nothing_more(engine: CodecEngine) -> None:
    session, heard, started = open_session(engine), Heard(), asyncio.Event()

    def emit(payload: Payload) -> None:
        heard.append(payload)
        started.set()

    running = asyncio.create_task(
        session.run(Turn(1, "default", {}, stream(*numbered([LONG])), emit))
    )
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    said = len(heard)
    # The thread takes work in order: when this is through, so is the cancelled turn's call.
    again, _ = await speak(session, numbered(["Yes."]))
    assert again.ends == [0]
    assert len(heard) == said
    assert not heard.ends


async def test_a_turn_cancelled_while_it_waits_is_never_begun(engine: CodecEngine) -> None:
    release, busy, heard = threading.Event(), threading.Event(), Heard()

    def block() -> None:
        busy.set()
        release.wait()

    blocked = asyncio.create_task(engine.in_thread(block))
    await asyncio.to_thread(busy.wait)
    asked = asyncio.Event()

    async def inputs() -> AsyncIterator[Payload]:
        asked.set()
        yield text_payload("Hello.", clause=0)

    waiting = asyncio.create_task(
        open_session(engine).run(Turn(1, "default", {}, inputs(), heard.append))
    )
    await asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await blocked
    await engine.in_thread(lambda: None)
    assert heard == []


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"voice": ""}, "voice"),
        ({"voice": 7}, "voice"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 1.6}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"speed": True}, "speed"),
    ],
)
async def test_parameters_that_cannot_be_spoken_are_refused(
    engine: CodecEngine, parameters: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await speak(open_session(engine), numbered(["Yes."]), **parameters)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "payload",
    [
        audio_payload(b"\0\0", 24_000),
        conversation_payload([Message("user", "hi")]),
        text_payload("a" * 20_000),
        text_payload("hi", clause="first"),
        Payload(text_payload("").type, b"\xff"),
    ],
)
async def test_inputs_that_are_no_clause_are_refused(engine: CodecEngine, payload: Payload) -> None:
    with pytest.raises(InvalidRequest):
        await speak(open_session(engine), [payload])


@pytest.mark.parametrize(
    ("session_settings", "field"),
    [
        ({"output_rate_hz": 1}, "output_rate_hz"),
        ({"output_rate_hz": True}, "output_rate_hz"),
        ({"pitch": 2}, "pitch"),
    ],
)
def test_session_settings_are_checked(
    engine: CodecEngine, session_settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine.open("session", session_settings, lambda name, arguments: None)
    assert refusal.value.field == field


def test_a_voice_that_is_not_there_says_so() -> None:
    with pytest.raises(pydantic.ValidationError, match="nowhere"):
        CodecOptions(voice="/nowhere/voice.onnx")


async def test_a_voice_that_has_gone_since_says_so(tmp_path: Path) -> None:
    voice = tmp_path / "voice.onnx"
    voice.touch()
    engine = CodecEngine.create(CodecOptions(voice=str(voice)))
    voice.unlink()
    with pytest.raises(ModelFileError, match="voice"):
        await engine.load()
    await engine.shutdown()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=40))
def test_any_text_gives_bounded_audio(engine: CodecEngine, text: str) -> None:
    heard, result = asyncio.run(
        speak(open_session(engine), [text_payload(text.encode("utf-8", "replace").decode())])
    )
    assert heard.ends == [0]
    assert result.usage["audio_ms"] <= 60_000
