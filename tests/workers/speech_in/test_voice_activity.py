"""Turns from speech probabilities, without any model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.speech_in.voice_activity import (
    FRAME_SAMPLES,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
    VoiceActivity,
    VoiceEvent,
)

FRAME_MS = 32
DETECTION = TurnDetection(
    threshold=0.5, prefix_padding_ms=320, silence_duration_ms=320, minimum_speech_ms=96
)

detections = st.builds(
    TurnDetection,
    threshold=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    prefix_padding_ms=st.integers(0, 1000),
    silence_duration_ms=st.integers(64, 1000),
    minimum_speech_ms=st.integers(0, 300),
)
# Runs of the same level, because single frames rarely make a turn.
probabilities = st.lists(
    st.tuples(st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.8, 1.0]), st.integers(1, 30)), max_size=30
).map(lambda runs: [level for level, count in runs for _ in range(count)])


def samples(ms: int) -> int:
    """16 kHz samples in `ms`."""
    return ms * 16


def play(activity: VoiceActivity, levels: list[float]) -> list[VoiceEvent]:
    return [event for level in levels for event in activity.step(level)]


def test_speech_starts_with_the_padding_before_it() -> None:
    activity = VoiceActivity(DETECTION, 0)
    assert play(activity, [0.0] * 20 + [0.9] * 2) == []
    assert play(activity, [0.9]) == [SpeechStarted(20 * FRAME_SAMPLES - samples(320))]


def test_padding_ends_at_the_beginning_of_the_audio() -> None:
    activity = VoiceActivity(DETECTION, 1000)
    assert play(activity, [0.0] + [0.9] * 3) == [SpeechStarted(1000)]


def test_a_click_is_no_speech() -> None:
    activity = VoiceActivity(DETECTION, 0)
    assert play(activity, ([0.9] * 2 + [0.0]) * 50) == []


def test_a_doubtful_frame_neither_counts_nor_interrupts_the_beginning() -> None:
    activity = VoiceActivity(DETECTION, 0)
    assert play(activity, [0.9, 0.4, 0.9, 0.4]) == []
    assert play(activity, [0.9]) == [SpeechStarted(0)]


def test_speech_stops_after_the_silence_and_keeps_a_short_tail() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    events = play(activity, [0.0] * 9)
    end = 10 * FRAME_SAMPLES + samples(96)
    assert events == [SpeechPaused(0, end)]
    assert play(activity, [0.0]) == [SpeechStopped(0, end)]


def test_the_pause_is_told_at_half_of_the_silence() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    assert play(activity, [0.0] * 4) == []
    assert len(play(activity, [0.0])) == 1


def test_speech_that_goes_on_takes_the_pause_back() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10 + [0.0] * 6)
    assert play(activity, [0.9]) == [SpeechResumed()]
    assert play(activity, [0.0] * 9)[-1] == SpeechPaused(0, 17 * FRAME_SAMPLES + samples(96))


def test_a_short_dip_tells_nothing() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    assert play(activity, ([0.0] * 3 + [0.9]) * 20) == []


def test_between_the_thresholds_speech_goes_on() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    assert play(activity, [0.4] * 200) == []


def test_a_cut_ends_the_turn_without_a_word_and_bounds_the_next() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    cut = activity.position
    activity.cut(cut)
    assert play(activity, [0.0] * 40) == []
    activity.cut(activity.position)
    assert play(activity, [0.9] * 3) == [SpeechStarted(50 * FRAME_SAMPLES)]


def test_speech_across_a_cut_starts_again_after_it() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    activity.cut(activity.position)
    assert play(activity, [0.9] * 3) == [SpeechStarted(10 * FRAME_SAMPLES)]


def test_a_cut_ahead_of_the_frames_holds_for_them_too() -> None:
    activity = VoiceActivity(DETECTION, 0)
    activity.cut(20 * FRAME_SAMPLES)
    assert play(activity, [0.9] * 20) == []
    assert play(activity, [0.9] * 3) == [SpeechStarted(20 * FRAME_SAMPLES)]


def test_a_restart_forgets_the_speech() -> None:
    activity = VoiceActivity(DETECTION, 0)
    play(activity, [0.9] * 10)
    activity.restart(99_999)
    assert play(activity, [0.0] * 40) == []
    assert activity.position == 99_999 + 40 * FRAME_SAMPLES


@given(detections, probabilities, st.integers(0, 10_000))
def test_turns_are_whole_ordered_and_apart(
    detection: TurnDetection, levels: list[float], position: int
) -> None:
    activity = VoiceActivity(detection, position)
    open_start: int | None = None
    last_end = position
    for level in levels:
        for event in activity.step(level):
            match event:
                case SpeechStarted(start):
                    assert open_start is None
                    assert last_end <= start < activity.position
                    open_start = start
                case SpeechPaused(start, end):
                    assert start == open_start
                    assert start < end <= activity.position
                case SpeechResumed():
                    assert open_start is not None
                case SpeechStopped(start, end):
                    assert start == open_start
                    assert start < end <= activity.position
                    open_start, last_end = None, end
    assert last_end <= activity.wanted_from <= activity.position


@given(detections, probabilities)
def test_every_turn_has_its_minimum_of_speech_and_its_silence(
    detection: TurnDetection, levels: list[float]
) -> None:
    activity = VoiceActivity(detection, 0)
    for index, level in enumerate(levels):
        for event in activity.step(level):
            heard = levels[: index + 1]
            if isinstance(event, SpeechStarted):
                spoken = sum(value >= detection.threshold for value in heard)
                assert spoken * FRAME_MS >= detection.minimum_speech_ms
                assert heard[-1] >= detection.threshold
            elif isinstance(event, SpeechStopped):
                silent = -(-detection.silence_duration_ms // FRAME_MS)
                assert all(value < detection.threshold for value in heard[-silent:])


@given(detections, probabilities)
def test_a_pause_that_becomes_the_end_foretells_it_exactly(
    detection: TurnDetection, levels: list[float]
) -> None:
    activity = VoiceActivity(detection, 0)
    foretold: SpeechPaused | None = None
    for event in play(activity, levels):
        match event:
            case SpeechPaused():
                foretold = event
            case SpeechResumed():
                foretold = None
            case SpeechStopped(start, end):
                assert foretold == SpeechPaused(start, end)


@given(
    detections,
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 20)), max_size=20),
    st.data(),
)
def test_no_turn_reaches_back_over_a_cut(
    detection: TurnDetection, runs: list[tuple[float, int]], data: st.DataObject
) -> None:
    activity = VoiceActivity(detection, 0)
    floor = 0
    for level, count in runs:
        for event in play(activity, [level] * count):
            if isinstance(event, SpeechStarted | SpeechStopped):
                assert event.start >= floor
        if data.draw(st.booleans()):
            cut = data.draw(st.integers(0, activity.position + 5 * FRAME_SAMPLES))
            activity.cut(cut)
            floor = max(floor, cut)
