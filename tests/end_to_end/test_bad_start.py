"""The product is started where something is missing or damaged: it says what, and how to help."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from protocol.exit_status import ExitStatus
from tests.deployment import VOICE_CONFIG, Deployment
from workers.model_registry import MODELS
from workers.models import cache_folder, find_part, package_folder

VOICE = MODELS["piper-joe"]
LIMIT_S = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Installation:
    """An environment of its own with this one's packages, whose model files may be damaged."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "environment"
        venv.EnvBuilder(symlinks=True).create(self.prefix)
        self.python = self.prefix / "bin" / "python"
        paths = {"base": str(self.prefix), "platbase": str(self.prefix)}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        (site / "borrowed.pth").write_text(
            # `addsitedir` also follows what is installed in there by reference.
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        )
        self.packages = self.prefix / package_folder().relative_to(sys.prefix)
        self.packages.mkdir(parents=True)
        for entry in package_folder().iterdir():
            (self.packages / entry.name).symlink_to(entry)
        # What has been put together already is used; what is verified is found out anew.
        self.cache = folder / "cache"
        self.cache.mkdir()
        for entry in cache_folder().iterdir():
            if entry.name != "verified":
                (self.cache / entry.name).symlink_to(entry)

    def own(self, module: str) -> Path:
        """Make a package this installation's own; its folder."""
        borrowed = self.packages / module
        source = borrowed.resolve()
        borrowed.unlink()
        shutil.copytree(source, borrowed)
        return borrowed

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ANTIPHON_CACHE": str(self.cache)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`antiphon WORDS`, which ends by itself, without a traceback."""
        return run(*words, python=self.python, environment=self.environment())


def run(
    *words: str, python: Path = Path(sys.executable), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [str(python), "-m", "antiphon", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert "Traceback" not in result.stderr + result.stdout
    return result


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def voice_file(installation: Installation) -> Path:
    """The voice's model in a copy of its package that may be damaged."""
    path = find_part(VOICE.files[0].parts[0])
    assert path is not None
    relative = path.relative_to(package_folder())
    installation.own(relative.parts[0])
    return installation.packages / relative


def damage(path: Path) -> None:
    """Change one byte in the middle; the length stays."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a person is told, without the log."""
    return [line for line in result.stderr.splitlines() if line.startswith("antiphon: ")]


def test_a_damaged_model_is_named_with_what_to_do(installation: Installation) -> None:
    path = voice_file(installation)
    damage(path)
    for words in (("serve", "-c", str(VOICE_CONFIG), "--port", "0"), ("models", "verify")):
        result = installation.run(*words)
        assert result.returncode == ExitStatus.MODEL
        (line,) = said(result)
        assert str(path) in line
        assert "SHA-256 is" in line
        assert "antiphon models fetch --again piper-joe" in line
    assert (
        "speak-0 cannot start"
        in said(installation.run("serve", "-c", str(VOICE_CONFIG), "--port", "0"))[0]
    )
    # The other models are not to blame, and a config is still a config.
    assert installation.run("models", "verify", "silero-vad", "whisper-base").returncode == 0
    assert installation.run("check", str(VOICE_CONFIG)).returncode == 0


def test_a_model_that_is_not_installed_is_named_with_what_to_do(
    installation: Installation,
) -> None:
    shutil.rmtree(voice_file(installation).parent)
    result = installation.run("serve", "-c", str(VOICE_CONFIG), "--port", "0")
    assert result.returncode == ExitStatus.MODEL
    (line,) = said(result)
    assert "speak-0 cannot start: model piper-joe: " in line
    assert "is not installed: run `antiphon models fetch`" in line
    listed = installation.run("models")
    assert listed.returncode == 0
    assert "missing" in next(line for line in listed.stdout.splitlines() if "piper-joe" in line)
    assert "Some are missing: run `antiphon models fetch`." in listed.stdout


def test_a_model_damaged_under_way_costs_its_stage_until_it_is_repaired(
    installation: Installation,
) -> None:
    path = voice_file(installation)
    whole = path.read_bytes()
    with Deployment(
        python=installation.python, environment={"ANTIPHON_CACHE": str(installation.cache)}
    ) as deployment:
        before = deployment.children()
        damage(path)
        deployment.kill("speak-0")
        deployment.until(lambda: any("fetch --again piper-joe" in line for line in deployment.log))
        answer = deployment.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["pipelines"]["voice"]["stages"] == {
            "listen": "ready",
            "think": "ready",
            "speak": "lost",
        }
        path.write_bytes(whole)
        deployment.until_ready()
        after = deployment.children()
        assert {name for name in before if before[name] != after[name]} == {"speak-0"}


def test_a_port_in_use_is_said(voice: Deployment) -> None:
    result = run("serve", "-c", str(VOICE_CONFIG), "--port", str(voice.port))
    assert result.returncode == ExitStatus.CONFIG
    (line,) = result.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{voice.port}: Address already in use" in line
    assert "--port or ANTIPHON_PORT" in line
    # Who has it goes on.
    assert voice.get("/readyz").status_code == 200


def test_a_call_without_an_audio_device_is_said(voice: Deployment, tmp_path: Path) -> None:
    # The library for it may be installed where this runs.
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run("talk", "--url", voice.base_url, environment=environment)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("antiphon talk: no audio device: PortAudio library not found")
    assert line.endswith("give a WAV file with --in instead")


def test_a_call_to_nobody_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sound = "tests/data/speech/questions/meow.wav"
    result = run("talk", "--url", f"http://127.0.0.1:{port}", "--in", sound)
    assert result.returncode == 3
    assert result.stderr.splitlines() == [
        f"antiphon talk: http://127.0.0.1:{port}: cannot connect (Connection refused)"
    ]
    missing = tmp_path / "none.wav"
    result = run("talk", "--url", f"http://127.0.0.1:{port}", "--in", str(missing))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [f"antiphon talk: {missing}: No such file or directory"]
