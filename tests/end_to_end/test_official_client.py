"""The official `openai` package talks to the voice product."""

from __future__ import annotations

import subprocess
import wave
from pathlib import Path

import numpy as np
import pytest
import soxr

from tests.deployment import Deployment
from tests.official_client.environment import ROOT, client_python

SCENARIOS = ROOT / "tests" / "official_client" / "scenarios.py"
SPEECH = ROOT / "tests" / "data" / "speech"
RATE_HZ = 24_000
LIMIT_S = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 150)]


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two questions as 24 kHz WAVs, each with a word that is in it and not in the other."""
    folder = tmp_path_factory.mktemp("speech")
    words = {"questions/capital_of_france.wav": "France", "questions/bees.wav": "bees"}
    return [f"{_resampled(SPEECH / name, folder)}={word}" for name, word in words.items()]


def _resampled(source: Path, folder: Path) -> Path:
    with wave.open(str(source), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        pcm = soxr.resample(samples, file.getframerate(), RATE_HZ).astype("<i2")
    target = folder / source.name
    with wave.open(str(target), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(pcm.tobytes())
    return target


PLAYED = [
    "spoken_turn",
    "text_turn",
    "cancel",
    "truncate",
    "delete",
    "retrieve",
    "two_sessions",
    "unknown_event",
    "malformed_json",
    "bad_base64",
    "wrong_rate",
    "oversize_frame",
]


def test_every_scenario_is_played() -> None:
    listed = subprocess.run(
        [client_python(), "-c", "import scenarios; print(*scenarios.SCENARIOS)"],
        cwd=SCENARIOS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == PLAYED


@pytest.mark.parametrize("scenario", PLAYED)
def test_the_official_client_is_answered_as_the_protocol_says(
    voice: Deployment, speeches: list[str], scenario: str
) -> None:
    result = subprocess.run(
        [client_python(), SCENARIOS, "--url", voice.base_url, "--speech", *speeches, scenario],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = "\n".join([result.stdout, result.stderr, *list(voice.log)[-30:]])
    assert result.returncode == 0, said
    assert result.stdout.startswith(f"ok {scenario} ")


def test_every_session_of_the_client_has_ended(voice: Deployment) -> None:
    voice.until(lambda: not voice.get("/v1/admin/sessions").json()["sessions"])
