"""A config that cannot be served is refused by line, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from antiphon.main import main

ROOT = Path(__file__).parents[2]
GOOD = (ROOT / "examples" / "voice.yaml").read_text()
COMMANDS = {"check": ["check"], "serve": ["serve", "--port", "0", "-c"]}


def refused(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on standard error, without the command's name and the file's."""
    assert main([*COMMANDS[command], str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return [line.removeprefix(f"antiphon: {path}:") for line in printed.err.splitlines()]


def line_of(text: str, words: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), start=1) if words in line)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("engine: ar", "engine: llama", "stages.think.engine: there is no engine llama"),
        ("vad: silero-vad", "vod: silero-vad", "stages.listen.vod: unknown option; did you mean"),
        ("vad: silero-vad", "vad: sliero-vad", "stages.listen.vad: there is no model called"),
        ("model: gemma-3-270m", "model: /no/such.gguf", "stages.think.model: model file /no/such"),
        ("voice: piper-joe", "voice: gone.onnx", "stages.speak.voice: model file gone.onnx does"),
        ("to: speak, payload: text", "to: speak, payload: audio", "pipelines.voice.edges[1]"),
        ("outputs: {text: think", "outputs: {text: thing", "pipelines.voice.outputs.text"),
        ("sessions: 8", "sessions: many", "pipelines.voice.limits.sessions: must be a valid"),
        ("port: 8080", "port: ${NO_SUCH_VARIABLE}", "gateway.port: environment variable NO_SUCH"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(
    command: str,
    old: str,
    new: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    path = tmp_path / "voice.yaml"
    path.write_text(text)
    lines = refused(command, path, capsys)
    wanted = f"{line_of(text, new)}: {said}"
    assert [line for line in lines if line.startswith(wanted)], lines


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"stages: [\n", "2: is not valid YAML: while parsing a flow node"),
        (b"stages: {a: 1, a: 2}\n", "1: stages.a: is given twice"),
        (b"- one\n", "1: must be a map of sections"),
        (b"\xff\xfe\x00", " is not UTF-8 text"),
        (b"stages: !!python/object:os.system {}\n", "1: is not valid YAML: unknown tag"),
        (b"", "1: stages: is missing"),
    ],
)
def test_what_is_no_config_is_said(
    command: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "voice.yaml"
    path.write_bytes(content)
    lines = refused(command, path, capsys)
    assert [line for line in lines if line.startswith(said)], lines


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_read_is_said(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(command, tmp_path / "none.yaml", capsys) == [
        " cannot be read: No such file or directory"
    ]
    assert refused(command, tmp_path, capsys) == [" cannot be read: Is a directory"]
    closed = tmp_path / "closed.yaml"
    closed.write_text(GOOD)
    closed.chmod(0)
    if not os.access(closed, os.R_OK):
        assert refused(command, closed, capsys) == [" cannot be read: Permission denied"]


def test_a_certificate_that_cannot_be_used_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert = tmp_path / "cert.pem"
    config = str(ROOT / "examples" / "voice.yaml")
    options = ["--port", "0", "--tls-cert", str(cert), "--tls-key", str(cert)]
    for content in (None, "no certificate\n"):
        if content is not None:
            cert.write_text(content)
        assert main(["serve", "-c", config, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"antiphon: cannot use the certificate {cert} with the key")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "gateway.keys is empty: anyone could use this server"),
        (["--host", "no.such.host.invalid"], "gateway.keys is empty"),
        (["--tls-cert", "cert.pem"], "a TLS certificate and its key belong together"),
    ],
)
def test_an_address_that_is_not_safe_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "examples" / "voice.yaml")
    assert main(["serve", "--port", "0", "-c", config, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
