"""`antiphon talk` calls the running product."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.talk.wav import read_wav
from tests.deployment import Deployment
from tests.end_to_end.conversation import SPEECH, loudness
from tests.word_errors import word_errors

pytestmark = pytest.mark.slow

QUESTION = SPEECH / "questions" / "bees.wav"
LIMIT_S = 90


def talk(voice: Deployment, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "antiphon", "talk", "--url", voice.base_url, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def talk_json(voice: Deployment, *words: str | Path) -> tuple[int, dict[str, Any]]:
    done = talk(voice, "--json", *words)
    (line,) = done.stdout.splitlines()
    assert "Traceback" not in done.stderr
    result: dict[str, Any] = json.loads(line)
    return done.returncode, result


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("questions/bees.wav", "What do bees make?"),
        ("joe_hotel.wav", "We booked room 27 at the Hotel Victoria for 4 nights."),
        (
            "kokoro_garden_pink.wav",
            "James planted 12 apple trees behind the house last year.",
        ),
    ],
    ids=["22_kHz", "48_kHz_stereo", "noisy"],
)
def test_a_recording_of_any_kind_is_answered(
    voice: Deployment, tmp_path: Path, file: str, said: str
) -> None:
    out = tmp_path / "answer.wav"
    status, result = talk_json(voice, "--in", SPEECH / file, "--out", out)
    assert (status, result["heard"], result["error"]) == (0, True, None), result
    wrong, words = word_errors(said, result["transcript"]["user"])
    assert wrong <= words * 0.15
    assert result["transcript"]["answer"].strip()
    heard = read_wav(out)
    assert len(heard) // 24 == pytest.approx(result["responses"][-1]["heard_ms"], abs=40)
    assert loudness(heard.tobytes()) > 0.01
    for figure in ("ttft_ms", "ttfp_ms", "first_audio_heard_ms", "e2el_ms", "rtf"):
        assert result[figure] > 0, figure
    assert result["underrun_ms"] >= 0
    assert result["ttft_ms"] <= result["e2el_ms"]


def test_a_person_reads_the_answer_and_its_figures(voice: Deployment) -> None:
    done = talk(voice, "--in", QUESTION)
    assert done.returncode == 0, done.stderr
    assert "What do bees make?" in done.stdout
    for label in ("TTFT", "TTFP", "RTF", "underrun"):
        assert label in done.stdout


def test_a_second_sound_interrupts_the_answer(voice: Deployment, tmp_path: Path) -> None:
    out = tmp_path / "both.wav"
    status, result = talk_json(
        voice,
        *("--in", SPEECH / "joe_hotel.wav", "--out", out, "--then", QUESTION),
        *("--instructions", "Answer in four sentences.", "--barge-in-at-ms", "600"),
    )
    assert status == 0, result
    old, new = result["responses"]
    assert (old["status"], old["reason"], old["interrupted"]) == (
        "cancelled",
        "turn_detected",
        True,
    )
    assert new["status"] == "completed"
    assert result["barge_in_ms"] >= 0
    assert 0 < old["heard_ms"] < old["audio_ms"]
    assert "bees" in result["turns"][-1]["transcript"].lower()


def test_without_words_there_is_no_answer(voice: Deployment, tmp_path: Path) -> None:
    noise = np.random.default_rng(1).normal(0, 120, (96_000, 2)).astype("<i2")
    sound = tmp_path / "hiss.wav"
    with wave.open(str(sound), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes(noise.tobytes())
    status, result = talk_json(voice, "--in", sound, "--timeout-s", "2")
    assert (status, result["heard"], result["error"]["code"]) == (1, False, "no_answer")


def test_a_pipeline_that_is_not_there_is_said_so(voice: Deployment) -> None:
    done = talk(voice, "--in", QUESTION, "--model", "nothing")
    assert done.returncode == 3
    assert "nothing" in done.stderr
    assert len(done.stderr.splitlines()) == 1
