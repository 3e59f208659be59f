"""The engine with its real models: turns, ranges, bounds, and what cancellation leaves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from protocol.errors import CapacityExceeded, InvalidRequest, SessionStateLost
from protocol.payloads import PayloadType, audio_payload, text_payload
from tests.word_errors import word_errors
from tests.workers.speech_in.listener import (
    RATE_HZ,
    VAD,
    Listener,
    loud_from_to_ms,
    read_wav,
    silence,
)
from workers.engines.speech_in import SpeechInEngine
from workers.engines.speech_in.ring import Samples

pytestmark = pytest.mark.slow

FLIGHT = "Flight 382 to Chicago was delayed by 40 minutes."
LIBRARY = "The library opens at 9 and closes at 6 in the evening."
MANUAL = {"turn_detection": None, "language": "en"}


def assert_heard(sentence: str, text: str) -> None:
    errors, _ = word_errors(sentence, text)
    assert errors == 0, text


def flight() -> Samples:
    return read_wav("joe_flight.wav")


async def test_a_spoken_turn_is_noticed_and_understood(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    speech = flight()
    await listener.feed(np.concatenate([silence(1000), speech, silence(1500)]))
    assert [event.name for event in listener.events] == ["speech_started", "speech_stopped"]
    started, stopped = listener.events
    begin_ms, end_ms = (1000 + ms for ms in loud_from_to_ms(speech))

    assert abs(started.arguments["audio_start_ms"] - (begin_ms - 300)) <= 120
    assert begin_ms < started.fed_ms <= begin_ms + 300
    assert stopped.arguments["audio_start_ms"] == started.arguments["audio_start_ms"]
    assert abs(stopped.arguments["audio_end_ms"] - end_ms) <= 200
    assert stopped.arguments["audio_end_ms"] < stopped.fed_ms <= end_ms + 500 + 200

    text, result = await listener.run_last_turn()
    assert_heard(FLIGHT, text)
    arguments = stopped.arguments
    assert result.usage["audio_ms"] == arguments["audio_end_ms"] - arguments["audio_start_ms"]


async def test_silence_and_noise_start_no_turn(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    noise = np.random.default_rng(1).normal(0, 300, RATE_HZ * 5).astype(np.int16)
    await listener.feed(np.concatenate([silence(5000), noise]))
    assert listener.events == []


async def test_speech_shorter_than_the_minimum_starts_no_turn() -> None:
    engine = SpeechInEngine.create(SpeechInEngine.Options(minimum_speech_ms=5000))
    await engine.load()
    listener = Listener(engine)
    await listener.feed(np.concatenate([flight(), silence(1000)]))
    assert listener.events == []
    await engine.shutdown()


async def test_a_session_chooses_its_minimum_of_speech(engine: SpeechInEngine) -> None:
    audio = np.concatenate([flight(), silence(1000)])
    strict = Listener(engine, {"turn_detection": {**VAD, "minimum_speech_ms": 5_000}})
    await strict.feed(audio)
    assert strict.events == []
    usual = Listener(engine, {"turn_detection": {**VAD, "minimum_speech_ms": None}})
    await usual.feed(audio)
    assert usual.named("speech_started")


async def test_one_big_append_is_heard_like_a_stream(engine: SpeechInEngine) -> None:
    audio = np.concatenate([silence(500), flight(), silence(1500)])
    streamed, at_once = Listener(engine), Listener(engine)
    await streamed.feed(audio)
    at_once.session.update(audio_payload(audio.tobytes(), RATE_HZ))
    await at_once.until("speech_stopped")
    assert [(e.name, e.arguments) for e in at_once.events] == [
        (e.name, e.arguments) for e in streamed.events
    ]


async def test_the_end_that_was_foreseen_is_not_transcribed_twice(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    await listener.feed(np.concatenate([silence(300), flight(), silence(1500)]))
    text, result = await listener.run_last_turn()
    assert_heard(FLIGHT, text)
    assert result.usage["speculations_reused"] == 1
    assert result.usage["speculations_wasted"] == 0
    again, result = await listener.run_last_turn()
    assert again == text
    assert result.usage["speculations_reused"] == 0


async def test_a_pause_inside_a_turn_wastes_one_speculation(engine: SpeechInEngine) -> None:
    listener = Listener(engine, {"turn_detection": VAD | {"silence_duration_ms": 2000}})
    speech = flight()
    _, end_ms = loud_from_to_ms(speech)
    spoken = speech[: RATE_HZ * end_ms // 1000]
    await listener.feed(np.concatenate([spoken, silence(1200)]))
    # Audio comes faster here than in life: let the speculation give the thread back.
    assert await engine.queue.run(lambda _: "free") == "free"
    await listener.feed(np.concatenate([read_wav("kokoro_library.wav"), silence(2500)]))
    assert [event.name for event in listener.events] == ["speech_started", "speech_stopped"]
    text, result = await listener.run_last_turn()
    assert_heard(f"{FLIGHT} {LIBRARY}", text)
    assert result.usage["speculations_reused"] == 1
    assert result.usage["speculations_wasted"] == 1


async def test_the_language_is_a_setting(engine: SpeechInEngine) -> None:
    listener = Listener(engine, MANUAL)
    await listener.feed(flight())
    english, _, _ = await listener.run({"start_ms": 0, "end_ms": 4000})
    listener.session.configure(MANUAL | {"language": "ru"})
    russian, _, _ = await listener.run({"start_ms": 0, "end_ms": 4000})
    assert english.isascii()
    assert not russian.isascii()
    with pytest.raises(InvalidRequest) as refused:
        listener.session.configure(MANUAL | {"language": "xx"})
    assert refused.value.field == "language"


async def test_a_manual_range_is_transcribed_up_to_the_newest_sample(
    engine: SpeechInEngine,
) -> None:
    listener = Listener(engine, MANUAL)
    speech = flight()
    _, end_ms = loud_from_to_ms(speech)
    await listener.feed(speech[: RATE_HZ * end_ms // 1000])
    assert listener.events == []
    assert listener.session.signal("cut", {"end_ms": end_ms}) == {"clock_ms": end_ms}
    text, result, outputs = await listener.run({"start_ms": 0, "end_ms": end_ms})
    assert_heard(FLIGHT, text)
    assert result.usage["audio_ms"] == end_ms
    assert [payload.type for payload in outputs] == [PayloadType.TEXT]
    assert outputs[0].attributes == {"audio_ms": end_ms}


async def test_silence_and_hiss_have_an_empty_transcript(engine: SpeechInEngine) -> None:
    listener = Listener(engine, MANUAL)
    noise = np.random.default_rng(1).normal(0, 300, RATE_HZ * 3).astype(np.int16)
    await listener.feed(np.concatenate([silence(3000), noise]))
    for start_ms, end_ms in [(0, 3000), (3000, 6000), (0, 6000), (100, 101), (7, 7)]:
        text, _, outputs = await listener.run({"start_ms": start_ms, "end_ms": end_ms})
        assert text == ""
        assert len(outputs) == 1


async def test_audio_can_come_with_the_turn_at_a_rate_of_its_own(engine: SpeechInEngine) -> None:
    listener = Listener(engine, MANUAL)
    payload = audio_payload(flight().tobytes(), RATE_HZ)
    text, result, _ = await listener.run({}, payload)
    assert_heard(FLIGHT, text)
    assert result.usage["audio_ms"] == len(flight()) * 1000 // RATE_HZ
    with pytest.raises(InvalidRequest):
        await listener.run({}, audio_payload(b"\0\0", 12))
    with pytest.raises(InvalidRequest):
        await listener.run({}, text_payload("not audio"))
    with pytest.raises(InvalidRequest):
        await listener.run({})


async def test_long_audio_is_understood_piece_by_piece(engine: SpeechInEngine) -> None:
    files = [
        ("joe_flight.wav", FLIGHT),
        ("kokoro_library.wav", LIBRARY),
        ("joe_population.wav", "About 8 million people live in New York City."),
        ("joe_hotel.wav", "We booked room 27 at the Hotel Victoria for 4 nights."),
    ] * 2
    audio = np.concatenate([read_wav(file) for file, _ in files])
    assert len(audio) > 28 * RATE_HZ
    listener = Listener(engine, MANUAL)
    text, _, _ = await listener.run({}, audio_payload(audio.tobytes(), RATE_HZ))
    errors, words = word_errors(" ".join(sentence for _, sentence in files), text)
    assert errors / words < 0.05, text


async def test_clear_forgets_audio_and_speech(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    half = flight()[: 2 * RATE_HZ]
    await listener.feed(half)
    assert [event.name for event in listener.events] == ["speech_started"]
    assert listener.session.signal("clear", {}) == {"clock_ms": 2000}
    await listener.feed(silence(2000))
    assert len(listener.events) == 1
    with pytest.raises(SessionStateLost):
        await listener.run({"start_ms": 0, "end_ms": 2000})

    await listener.feed(np.concatenate([flight(), silence(1000)]))
    started, stopped = listener.events[1:]
    assert started.arguments["audio_start_ms"] >= 4000 - 64
    text, _ = await listener.run_last_turn()
    assert stopped.name == "speech_stopped"
    assert_heard(FLIGHT, text)


async def test_no_turn_begins_before_the_last_cut(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    speech = flight()
    cut_ms = 1500
    await listener.feed(speech[: RATE_HZ * cut_ms // 1000])
    listener.session.signal("cut", {"end_ms": cut_ms})
    await listener.feed(np.concatenate([speech[RATE_HZ * cut_ms // 1000 :], silence(1000)]))
    assert [event.name for event in listener.events] == [
        "speech_started",
        "speech_started",
        "speech_stopped",
    ]
    assert cut_ms <= listener.events[1].arguments["audio_start_ms"] <= cut_ms + 100


async def test_turn_detection_can_be_switched_while_audio_flows(engine: SpeechInEngine) -> None:
    listener = Listener(engine, MANUAL)
    speech = np.concatenate([flight(), silence(1000)])
    await listener.feed(speech)
    assert listener.events == []
    listener.session.configure(MANUAL | {"turn_detection": VAD})
    await listener.feed(speech)
    assert [event.name for event in listener.events] == ["speech_started", "speech_stopped"]
    text, _ = await listener.run_last_turn()
    assert_heard(FLIGHT, text)
    listener.session.configure(MANUAL)
    await listener.feed(speech)
    assert len(listener.events) == 2


async def test_a_session_opened_again_goes_on_with_its_clock(engine: SpeechInEngine) -> None:
    listener = Listener(engine, {"turn_detection": VAD, "clock_ms": 60_000})
    await listener.feed(np.concatenate([flight(), silence(1000)]))
    started, _ = listener.events
    assert 60_000 <= started.arguments["audio_start_ms"] < 60_300
    text, _ = await listener.run_last_turn()
    assert_heard(FLIGHT, text)
    with pytest.raises(SessionStateLost):
        await listener.run({"start_ms": 58_000, "end_ms": 60_000})
    assert listener.session.signal("clear", {})["clock_ms"] == 60_000 + listener.fed_ms


async def test_sessions_do_not_mix(engine: SpeechInEngine) -> None:
    one, other = Listener(engine), Listener(engine)
    first = np.concatenate([flight(), silence(2500)])
    second = np.concatenate([silence(200), read_wav("kokoro_library.wav"), silence(1500)])
    async with asyncio.TaskGroup() as group:
        group.create_task(one.feed(first))
        group.create_task(other.feed(second))
    async with asyncio.TaskGroup() as group:
        heard = group.create_task(one.run_last_turn())
        other_heard = group.create_task(other.run_last_turn())
    assert_heard(FLIGHT, heard.result()[0])
    assert_heard(LIBRARY, other_heard.result()[0])
    assert len(one.events) == len(other.events) == 2


async def test_cancelling_a_transcription_leaves_the_engine_usable(
    engine: SpeechInEngine,
) -> None:
    listener = Listener(engine, MANUAL)
    long = np.concatenate([flight()] * 8)
    queue = engine.queue
    running = asyncio.create_task(listener.run({}, audio_payload(long.tobytes(), RATE_HZ)))
    await asyncio.sleep(0)
    assert not queue.idle
    waiting = asyncio.create_task(listener.run({}, audio_payload(long.tobytes(), RATE_HZ)))
    await asyncio.sleep(0)
    assert queue.waiting == 1
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert queue.waiting == 0
    text, _, _ = await listener.run({}, audio_payload(flight().tobytes(), RATE_HZ))
    assert_heard(FLIGHT, text)


async def test_too_many_transcriptions_are_refused_and_the_others_finish() -> None:
    engine = SpeechInEngine.create(SpeechInEngine.Options(waiting=1))
    await engine.load()
    listener = Listener(engine, MANUAL)
    await listener.feed(flight())
    whole = {"start_ms": 0, "end_ms": 4500}
    tasks = [asyncio.create_task(listener.run(whole)) for _ in range(4)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert [type(error) for error in refused] == [CapacityExceeded] * 2
    for result in results:
        if not isinstance(result, BaseException):
            assert_heard(FLIGHT, result[0])
    await engine.shutdown()


async def test_closing_ends_listening_and_speculation(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    audio = np.concatenate([flight(), silence(1000)])
    listener.session.update(audio_payload(audio.tobytes(), RATE_HZ))
    listener.session.close()
    before = len(listener.events)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(listener.events) == before
    assert engine.queue.waiting == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"input_rate_hz": 10}, "input_rate_hz"),
        ({"turn_detection": {"threshold": 2.0}}, "turn_detection.threshold"),
        ({"turn_detection": {"silence_duration_ms": 1}}, "turn_detection.silence_duration_ms"),
        ({"language": "xx"}, "language"),
        ({"clock_ms": -1}, "clock_ms"),
    ],
)
async def test_settings_out_of_range_are_refused_by_name(
    engine: SpeechInEngine, settings: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Listener(engine, settings)
    assert refused.value.field == field
    listener = Listener(engine)
    with pytest.raises(InvalidRequest):
        listener.session.configure(settings)


async def test_what_is_no_range_or_no_audio_is_refused(engine: SpeechInEngine) -> None:
    listener = Listener(engine)
    await listener.feed(silence(1000))
    for parameters in (
        {"start_ms": 0},
        {"end_ms": 500},
        {"start_ms": 600, "end_ms": 500},
        {"start_ms": 0, "end_ms": 1100},
        {"start_ms": -5, "end_ms": 500},
        {"start_ms": 0.5, "end_ms": 500},
    ):
        with pytest.raises(InvalidRequest):
            await listener.run(parameters)
    with pytest.raises(InvalidRequest):
        listener.session.update(audio_payload(b"\0\0\0", RATE_HZ))
    with pytest.raises(InvalidRequest):
        listener.session.update(audio_payload(b"\0\0", 16_000))
    with pytest.raises(InvalidRequest):
        listener.session.update(text_payload("hello"))
    with pytest.raises(InvalidRequest):
        listener.session.signal("sing", {})
    with pytest.raises(InvalidRequest):
        listener.session.signal("cut", {})
    with pytest.raises(InvalidRequest):
        listener.session.configure({"input_rate_hz": 16_000})


async def test_input_that_nobody_committed_is_dropped_with_notice() -> None:
    engine = SpeechInEngine.create(SpeechInEngine.Options(ring_s=5))
    await engine.load()
    listener = Listener(engine, MANUAL)
    await listener.feed(silence(4900))
    assert listener.events == []
    await listener.feed(np.concatenate([silence(2500), flight()]))
    end_ms = listener.fed_ms
    listener.session.signal("cut", {"end_ms": end_ms})
    dropped_ms = sum(event.arguments["ms"] for event in listener.named("input_dropped"))
    assert 0 <= end_ms - 5000 - dropped_ms <= 60
    text, result, outputs = await listener.run({"start_ms": 0, "end_ms": end_ms})
    assert_heard(FLIGHT, text)
    assert 0 <= result.usage["lost_ms"] - dropped_ms <= 60
    assert outputs[0].attributes["lost_ms"] == result.usage["lost_ms"]
    with pytest.raises(SessionStateLost):
        await listener.run({"start_ms": 0, "end_ms": 1000})
    await engine.shutdown()


async def test_silence_between_turns_leaves_the_ring_without_a_word() -> None:
    engine = SpeechInEngine.create(SpeechInEngine.Options(ring_s=6))
    await engine.load()
    listener = Listener(engine)
    await listener.feed(silence(20_000))
    await listener.feed(np.concatenate([flight(), silence(1000)]))
    assert [event.name for event in listener.events] == ["speech_started", "speech_stopped"]
    text, _ = await listener.run_last_turn()
    assert_heard(FLIGHT, text)
    await listener.feed(silence(20_000))
    assert listener.named("input_dropped") == []
    await engine.shutdown()


async def test_a_turn_that_outgrows_the_ring_loses_its_beginning_with_notice() -> None:
    engine = SpeechInEngine.create(SpeechInEngine.Options(ring_s=3))
    await engine.load()
    listener = Listener(engine)
    await listener.feed(np.concatenate([flight(), silence(1000)]))
    assert listener.named("input_dropped")
    text, result = await listener.run_last_turn()
    assert result.usage["lost_ms"] > 0
    assert text
    await engine.shutdown()
