"""A stage whose workers run in an environment of their own is checked by that environment."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from protocol.config import read_config
from protocol.errors import ConfigError
from tests.environments import bare_python, lent_python, site_packages
from workers.check import check_stages

CONFIG = """\
stages:
  act:
    engine: vla
    python: {python}
    policy: "{policy}"
pipelines:
  arm:
    kind: robot
    outputs: {{actions: act}}
"""
COUNTING = "tests.workers.vla.policies:Counting"
ONLY_THERE = """
print("an import that talks")
from workers.engines.vla.synthetic import SyntheticAny as There
"""


def check(folder: Path, python: Path | str, policy: str = COUNTING) -> None:
    path = folder / "arm.yaml"
    path.write_text(CONFIG.format(python=python, policy=policy))
    check_stages(read_config(path, {}))


def problem(folder: Path, python: Path | str, policy: str = COUNTING) -> str:
    """The only one."""
    with pytest.raises(ConfigError) as caught:
        check(folder, python, policy)
    (line,) = caught.value.message.splitlines()
    return line.removeprefix(f"{folder / 'arm.yaml'}:")


def test_an_interpreter_that_is_not_there_is_said(tmp_path: Path) -> None:
    python = tmp_path / "nowhere" / "python"
    assert problem(tmp_path, python) == (
        f"4: stages.act.python: {python} cannot be started: No such file or directory"
    )


def test_a_file_that_is_no_interpreter_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho wrong\n")
    assert problem(tmp_path, python).endswith(f"{python} cannot be started: Permission denied")
    python.chmod(0o755)
    assert problem(tmp_path, python).endswith("runs something else than workers of this version")


def test_an_environment_without_workers_is_said_with_its_remedy(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    said = problem(tmp_path, python)
    assert said.startswith(f"4: stages.act.python: {python} cannot run workers: ")
    assert "No module named" in said
    assert said.endswith(f"; install antiphon {version('antiphon')} in that environment")


def test_another_version_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What lies in the working directory would be found first, as no command has it.
    monkeypatch.chdir(tmp_path)
    python = lent_python(tmp_path / "lent")
    info = site_packages(python) / "antiphon-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: antiphon\nVersion: 0.0.1\n")
    said = problem(tmp_path, python)
    assert f"{python} has antiphon 0.0.1, and here is {version('antiphon')}; install" in said


def test_what_only_that_environment_has_is_found_there(tmp_path: Path) -> None:
    python = lent_python(tmp_path / "lent")
    policy = "only_there:There"
    assert "policy only_there:There cannot be loaded" in problem(tmp_path, python, policy)
    (site_packages(python) / "only_there.py").write_text(ONLY_THERE)
    check(tmp_path, python, policy)


def test_options_are_checked_there_and_pointed_at_here(tmp_path: Path) -> None:
    python = lent_python(tmp_path / "lent")
    path = tmp_path / "arm.yaml"
    text = CONFIG.format(python=python, policy=COUNTING)
    path.write_text(text.replace("    policy:", "    window: 3\n    policy:").replace("arm:", "a:"))
    with pytest.raises(ConfigError) as caught:
        check_stages(read_config(path, {}))
    assert caught.value.message == (
        f"{path}:5: stages.act.window: unknown option; did you mean window_ms?"
    )


def test_edges_to_it_are_held_against_what_it_takes(tmp_path: Path) -> None:
    python = lent_python(tmp_path / "lent")
    path = tmp_path / "arm.yaml"
    text = CONFIG.format(python=python, policy=COUNTING)
    path.write_text(text.replace("{actions: act}", "{frames: act}"))
    with pytest.raises(ConfigError, match="act makes actions, not frames"):
        check_stages(read_config(path, {}))


def test_a_link_to_an_interpreter_stays_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = bare_python(tmp_path / "bare")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "arm.yaml"
    path.write_text(CONFIG.format(python="bare/bin/python", policy=COUNTING))
    assert python.is_symlink()
    assert read_config(path, {}).config.stages["act"].python == python
