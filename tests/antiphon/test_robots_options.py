"""Options of `antiphon eval robots` and `antiphon bench robots`: what is wrong is told at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.commands import eval as command
from antiphon.main import main
from loadtest import robot_faults, robots

EVALUATION = ("eval", "robots", "--pipeline", "arm", "--python", sys.executable)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be played or measured fails the test."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr(command, "Evaluation", started)
    monkeypatch.setattr(robots, "measure", started)
    monkeypatch.setattr(robot_faults, "measure", started)


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a command says that ends with status 2."""
    try:
        status = main(words)
    except SystemExit as exit:
        status = int(exit.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, ""), said.err
    lines = [line for line in said.err.splitlines() if "error: " in line or line[:9] == "antiphon:"]
    assert len(lines) == 1, said.err
    return lines[0]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("robots", "0", "whole number from 1 to 256"),
        ("robots", "nan", "whole number from 1 to 256"),
        ("robots", "1,-1", "whole number from 1 to 256"),
        ("robots", "2,2", "names something twice"),
        ("episodes", "0", "whole number from 1"),
        ("episodes", "1.5", "whole number from 1"),
        ("seed", "-1", "whole number from 0"),
        ("slow-motion", "0", "above 0 to 1"),
        ("slow-motion", "nan", "above 0 to 1"),
        ("slow-motion", "2", "above 0 to 1"),
        ("latency", "nan", "from 0 to 60000"),
        ("latency", "inf", "from 0 to 60000"),
        ("jitter", "-1", "from 0 to 60000"),
        ("jitter", "much", "from 0 to 60000"),
        ("loss", "1.5", "from 0 to 1"),
        ("loss", "nan", "from 0 to 1"),
        ("loss-ms", "nan", "from 0 to 60000"),
        ("timeout-s", "0", "above 0 to 86400"),
        ("timeout-s", "inf", "above 0 to 86400"),
        ("ask-ahead", "-1", "whole number from 0 to 10000"),
        ("control", "quick", "one of synchronous, chunked"),
        ("control", "chunked:0", "whole number from 1 to 10000"),
        ("control", "chunked:many", "whole number from 1 to 10000"),
        ("images", "seen,dark", "one of seen, blank, frozen"),
        ("while-waiting", "dance", "invalid choice"),
        ("tasks", "reach,", "a name is missing"),
        ("tasks", "reach,reach", "names something twice"),
        ("simulation", "nothing", "MODULE:CLASS"),
        ("simulation", "a b:C", "MODULE:CLASS"),
        ("url", "http://", "http://HOST:PORT"),
        ("url", "ftp://here", "http://HOST:PORT"),
        ("url", "http://here:there", "no address"),
        ("key", "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel", "visible ASCII"),
        ("python", "nowhere", "is missing"),
        ("python", ".", "is no program"),
    ],
)
def test_a_wrong_option_of_an_evaluation_is_named(
    option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*EVALUATION]
    if option != "simulation":
        words += ["--simulation", "module:Class"]
    line = told([*words, f"--{option}={value}"], capsys)
    assert f"--{option}" in line
    assert reason in line


@pytest.mark.parametrize(
    ("option", "place", "reason"),
    [
        ("out", ".", "is a folder"),
        ("out", "file/report.json", "cannot be a folder"),
        ("plots", "file", "cannot be a folder"),
        ("plots", "file/plots", "cannot be a folder"),
        ("record", "file", "cannot be a folder"),
        ("recorded", "nothing", "is missing"),
        ("recorded", ".", "is no file"),
    ],
)
def test_a_place_of_no_use_is_told_before_anything_is_played(
    option: str, place: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = [*EVALUATION, f"--{option}", str(tmp_path / place)]
    if option != "recorded":
        words += ["--simulation", "module:Class"]
    line = told(words, capsys)
    assert f"--{option}: {tmp_path}" in line
    assert reason in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_where_nothing_may_be_written_no_report_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    words = [*EVALUATION, "--simulation", "module:Class"]
    line = told([*words, "--out", str(tmp_path / "report.json")], capsys)
    assert line == f"antiphon: --out: nothing can be written in {tmp_path}"


@pytest.mark.parametrize(
    ("words", "option", "reason"),
    [
        (["--steps=0"], "steps", "whole number from 1"),
        (["--steps=nan"], "steps", "whole number from 1"),
        (["--rounds=0"], "rounds", "whole number from 1"),
        (["--rounds=-1"], "rounds", "whole number from 1"),
        (["--faults", "--robots=0"], "robots", "whole number from 1 to 32"),
        (["--faults", "--robots=nan"], "robots", "whole number from 1 to 32"),
        (["--faults", "--robots=-1"], "robots", "whole number from 1 to 32"),
        (["--faults", "--robots=33"], "robots", "whole number from 1 to 32"),
        (["--faults", "--margin-ms=nan"], "margin-ms", "from 0 to 60000"),
        (["--faults", "--margin-ms=-1"], "margin-ms", "from 0 to 60000"),
        (["--faults", "--margin-ms=inf"], "margin-ms", "from 0 to 60000"),
        (["--faults", "--fault=fire"], "fault", "invalid choice"),
        (["--faults", "--rounds=2"], "rounds", "does not go with --faults"),
        (["--faults", "--check"], "check", "does not go with --faults"),
        (["--margin-ms=0"], "margin-ms", "goes with --faults"),
        (["--robots=2"], "robots", "goes with --faults"),
        (["--fault=partition"], "fault", "goes with --faults"),
    ],
)
def test_a_wrong_option_of_the_benchmark_is_named(
    words: list[str], option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = told(["bench", "robots", *words], capsys)
    assert f"argument --{option}: " in line
    assert reason in line


@pytest.mark.parametrize("words", [[], ["--faults"]])
def test_a_benchmark_without_the_robots_environment_says_how_to_make_it(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.official_client.environment.ROOT", tmp_path)
    assert "run `make setup-test`" in told(["bench", "robots", *words], capsys)
