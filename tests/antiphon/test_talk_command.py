"""`antiphon talk` against a synthetic server: what it prints, and how it ends."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.commands import talk
from antiphon.talk.realtime_client import endpoint
from antiphon.talk.wav import RATE_HZ, read_wav, write_wav
from tests.synthetic.realtime_server import HEARD, Script, serving


@pytest.fixture
def question(tmp_path: Path) -> Path:
    """Half a second of sound that the synthetic server takes for speech."""
    times = np.arange(RATE_HZ // 2) / RATE_HZ
    path = tmp_path / "question.wav"
    write_wav(path, (np.sin(2 * np.pi * 200 * times) * 9000).astype("<i2").tobytes())
    return path


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    talk.add_arguments(parser)
    return talk.run(parser.parse_args(words))


def talk_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = run("--json", *words)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    result: dict[str, Any] = json.loads(lines[0])
    return status, result


def test_a_heard_answer_is_written_and_measured(
    question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answer.wav"
    script = Script(reply_ms=(800,), server_rtf=0.07)
    with serving(script) as url:
        status, result = talk_json(
            capsys, "--url", url, "--in", str(question), "--out", str(out), "--instructions", "Hi"
        )
    assert (status, result["heard"], result["error"]) == (0, True, None)
    assert result["transcript"] == {"user": HEARD, "answer": "word 0. word 1. word 2. "}
    assert len(read_wav(out)) == 800 * 24
    assert result["server_rtf"] == 0.07
    assert result["barge_in_ms"] is None
    figures = ("speech_stopped_ms", "ttft_ms", "ttfp_ms", "first_audio_heard_ms", "e2el_ms")
    assert all(result[name] > 0 for name in figures)
    assert result["speech_stopped_ms"] <= result["ttft_ms"] <= result["e2el_ms"]
    assert script.received[0]["session"]["instructions"] == "Hi"


def test_a_person_reads_both_sides_and_the_figures(
    question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Script(reply_ms=(400,))) as url:
        assert run("--url", url, "--in", str(question)) == 0
    said = capsys.readouterr().out
    assert HEARD in said
    assert "word 0. word 1." in said
    for label in ("TTFT", "TTFP", "RTF", "underrun"):
        assert label in said


def test_barge_in_cuts_the_answer_and_hears_the_next(
    question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both.wav"
    script = Script(reply_ms=(20_000, 400))
    words = ["--then", str(question), "--barge-in-at-ms", "300", "--out", str(out)]
    with serving(script) as url:
        status, result = talk_json(capsys, "--url", url, "--in", str(question), *words)
    old, new = result["responses"]
    assert status == 0
    assert (old["status"], old["reason"], old["interrupted"]) == (
        "cancelled",
        "turn_detected",
        True,
    )
    assert new["status"] == "completed"
    assert 300 <= old["heard_ms"] < old["audio_ms"] < 20_000
    assert result["barge_in_ms"] >= 0
    (truncate,) = [e for e in script.received if e["type"] == "conversation.item.truncate"]
    assert truncate["audio_end_ms"] == old["heard_ms"]
    assert len(read_wav(out)) // 24 == pytest.approx(old["heard_ms"] + 400, abs=2)


@pytest.mark.parametrize(
    ("script", "status", "code", "words"),
    [
        (Script(fails=True), 1, "no_answer", "the answer failed: worker died"),
        (Script(amplitude=0.0), 1, "no_answer", "the answer is silent"),
        (Script(deaf=True), 1, "no_answer", "the server heard no speech"),
        (Script(breaks_off=True), 3, "close_1011", "1011: synthetic fault"),
        (Script(key="sesame"), 3, "http_401", "refused with 401: this key is not accepted"),
        (Script(key="a", close_1008_without_key=True), 3, "close_1008", "1008"),
    ],
)
def test_a_call_without_an_answer_says_why_in_one_line(
    question: Path,
    capsys: pytest.CaptureFixture[str],
    script: Script,
    status: int,
    code: str,
    words: str,
) -> None:
    with serving(script) as url:
        ended = run("--url", url, "--in", str(question), "--timeout-s", "1", "--json")
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (ended, result["heard"], result["error"]["code"]) == (status, False, code)
    assert words in output.err
    assert len(output.err.splitlines()) == 1


def test_the_key_is_sent(question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Script(key="sesame", reply_ms=(300,))) as url:
        status, _ = talk_json(capsys, "--url", url, "--in", str(question), "--key", "sesame")
    assert status == 0


def test_nobody_at_the_address(question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert run("--url", f"http://127.0.0.1:{port}", "--in", str(question)) == 3
    assert "cannot connect" in capsys.readouterr().err


def test_no_realtime_endpoint_at_the_address(
    question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Script()) as url:
        assert run("--url", f"{url}/elsewhere", "--in", str(question)) == 3
    assert "no Realtime endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--in", "missing.wav"], ["--in", __file__]])
def test_no_usable_sound(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, result = talk_json(capsys, "--url", "http://127.0.0.1:1", *words)
    assert (status, result["error"]["code"]) == (2, "unusable_sound")


def test_no_microphone_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with serving(Script()) as url:
        assert run("--url", url) == 2
    assert "no audio device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "ws://h:1/v1/realtime?model=voice"),
        ("h:1", "ws://h:1/v1/realtime?model=voice"),
        ("https://h/v1/", "wss://h/v1/realtime?model=voice"),
        ("ws://h/base/v1/realtime", "ws://h/base/v1/realtime?model=voice"),
    ],
)
def test_the_endpoint_is_found_from_any_usual_address(url: str, address: str) -> None:
    assert endpoint(url, "voice") == address
