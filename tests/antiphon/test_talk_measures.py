"""The figures follow their definitions, on events with times that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from antiphon.talk.dialogue import Dialogue
from antiphon.talk.measures import InputTrack, measure
from antiphon.talk.player import Player
from antiphon.talk.realtime_client import Received, encode_audio
from antiphon.talk.speech import find_speech
from antiphon.talk.wav import RATE_HZ, Pcm

SECOND = RATE_HZ


def loud(seconds: float) -> Pcm:
    times = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    return (np.sin(2 * np.pi * 300 * times) * 8000).astype(np.int16)


def silence(seconds: float) -> Pcm:
    return np.zeros(int(seconds * RATE_HZ), np.int16)


def say(dialogue: Dialogue, at: float, kind: str, sent: int = 0, **fields: Any) -> Any:
    return dialogue.handle(Received(at, {"type": kind, **fields}), sent)


def track_of(*sounds: Pcm, started_at: float = 0.0) -> InputTrack:
    """Sounds one after the other, sent in real time, 20 ms a chunk."""
    track = InputTrack()
    for sound in sounds:
        track.place(track.sent, sound)
        for _ in range(len(sound) // 480):
            track.add(480, started_at + (track.sent + 480) / RATE_HZ)
    return track


def turn(dialogue: Dialogue, stopped_at: float) -> None:
    say(dialogue, 0.4, "input_audio_buffer.speech_started", item_id="u", audio_start_ms=0)
    say(
        dialogue,
        stopped_at,
        "input_audio_buffer.speech_stopped",
        sent=int(stopped_at * RATE_HZ),
        item_id="u",
        audio_end_ms=1500,
    )
    say(dialogue, stopped_at, "input_audio_buffer.committed", item_id="u", previous_item_id=None)
    say(dialogue, stopped_at, "response.created", response={"id": "r", "status": "in_progress"})


def audio(dialogue: Dialogue, at: float, pcm: Pcm, item: str = "a") -> None:
    say(
        dialogue,
        at,
        "response.output_audio.delta",
        response_id="r",
        item_id=item,
        output_index=0,
        content_index=0,
        delta=encode_audio(pcm.tobytes()),
    )


def text(dialogue: Dialogue, at: float, words: str) -> None:
    say(dialogue, at, "response.output_audio_transcript.delta", response_id="r", delta=words)


def done(dialogue: Dialogue, at: float, status: str = "completed", **fields: Any) -> None:
    say(dialogue, at, "response.done", response={"id": "r", "status": status}, **fields)


def test_latencies_count_from_the_last_sample_of_speech_sent() -> None:
    track = track_of(np.concatenate([silence(0.2), loud(0.8), silence(1.0)]))
    dialogue = Dialogue()
    turn(dialogue, stopped_at=1.5)
    text(dialogue, 1.75, "Hello")
    audio(dialogue, 2.0, silence(0.1))
    audio(dialogue, 2.05, loud(0.9))
    done(dialogue, 2.5, server_rtf=0.05)
    figures = measure(dialogue.replies[0], track)
    # Speech ends at 1.0 s; windows end at most 10 ms later, chunks at most 20 ms later.
    assert figures.ttft_ms == pytest.approx(750, abs=30)
    assert figures.ttfp_ms == pytest.approx(1000, abs=30)
    assert figures.first_audio_heard_ms == pytest.approx(1100, abs=40)
    assert figures.speech_stopped_ms == pytest.approx(500, abs=30)
    assert figures.e2el_ms == pytest.approx(1500, abs=30)
    assert figures.rtf == pytest.approx((2.05 - 1.75) / 1.0, abs=0.001)
    assert figures.server_rtf == 0.05
    assert figures.underrun_ms == 0.0
    assert figures.barge_in_ms is None


def test_an_empty_delta_is_neither_text_nor_audio() -> None:
    dialogue = Dialogue()
    turn(dialogue, stopped_at=1.5)
    text(dialogue, 1.6, "")
    audio(dialogue, 1.6, silence(0.0))
    reply = dialogue.replies[0]
    assert (reply.first_text_at, reply.first_audio_at) == (None, None)


def test_barge_in_counts_to_the_last_packet_of_the_old_reply() -> None:
    first = np.concatenate([loud(1.0), silence(1.0)])
    second = np.concatenate([silence(0.5), loud(1.0)])
    track = track_of(first, second)
    dialogue = Dialogue()
    turn(dialogue, stopped_at=1.5)
    audio(dialogue, 1.6, loud(3.0))
    truncations = say(
        dialogue, 2.6, "input_audio_buffer.speech_started", item_id="v", audio_start_ms=2200
    )
    audio(dialogue, 2.7, loud(0.1))
    done(dialogue, 2.8, "cancelled")
    assert truncations == [
        {
            "type": "conversation.item.truncate",
            "item_id": "a",
            "content_index": 0,
            "audio_end_ms": pytest.approx(1000, abs=1),
        }
    ]
    reply = dialogue.replies[0]
    # The second sound begins at 2.0 s and its speech at 2.5 s.
    assert measure(reply, track).barge_in_ms == pytest.approx(200, abs=30)
    assert len(reply.heard(9.0)) == pytest.approx(2 * SECOND, abs=100)


def test_a_reply_that_was_heard_to_its_end_is_not_truncated() -> None:
    dialogue = Dialogue()
    turn(dialogue, stopped_at=1.5)
    audio(dialogue, 1.6, loud(1.0))
    done(dialogue, 1.7)
    late = say(dialogue, 3.0, "input_audio_buffer.speech_started", item_id="v", audio_start_ms=0)
    assert late == []
    assert not dialogue.replies[0].interrupted


def test_speech_that_interrupts_cuts_what_is_still_to_be_played() -> None:
    dialogue = Dialogue()
    turn(dialogue, stopped_at=1.5)
    audio(dialogue, 1.6, loud(1.0), item="a")
    audio(dialogue, 1.6, loud(1.0), item="b")
    done(dialogue, 1.7)
    (cut,) = say(dialogue, 2.9, "input_audio_buffer.speech_started", item_id="v", audio_start_ms=0)
    assert (cut["item_id"], cut["audio_end_ms"]) == ("b", pytest.approx(300, abs=1))


def test_underrun_is_the_longest_deficit_counted_from_the_first_packet() -> None:
    player = Player()
    player.add(SECOND // 10, 10.0)
    player.add(SECOND // 10, 10.25)
    player.add(SECOND // 10, 10.32)
    player.add(SECOND, 10.33)
    assert player.underrun_s == pytest.approx(0.15)


def test_a_late_packet_makes_the_player_wait() -> None:
    player = Player()
    player.add(SECOND // 10, 10.0)
    player.add(SECOND // 10, 10.25)
    assert player.played(10.2) == SECOND // 10
    assert player.played(10.30) == pytest.approx(SECOND * 0.15, abs=1)
    assert player.due(SECOND // 10) == pytest.approx(10.25)
    assert player.stop(10.30) == player.played(99.0)


def test_speech_ends_before_quieter_noise() -> None:
    noise = np.random.default_rng(7).normal(0, 80, 3 * SECOND)
    sound = noise.astype(np.int16)
    sound[SECOND // 2 : SECOND] += loud(0.5)
    speech = find_speech(sound)
    assert speech.first() == pytest.approx(SECOND // 2, abs=480)
    assert speech.last() == pytest.approx(SECOND, abs=480)
    assert find_speech(silence(1.0)).last() is None
