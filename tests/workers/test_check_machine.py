"""What `antiphon check` and `serve` say of a config that this machine cannot be for, by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config import read_config
from protocol.errors import ConfigError
from workers.check import check_machine

CONFIG = """\
stages:
  a: {{engine: "loadtest.synthetic_step:SyntheticStep"{stage}}}
pipelines:
  game: {{kind: world, outputs: {{frames: a}}}}
parking: {parking}
"""


def said(folder: Path, parking: str = "{}", stage: str = "") -> str:
    """What is wrong with it; empty: nothing."""
    path = folder / "c.yaml"
    path.write_text(CONFIG.format(parking=parking, stage=stage))
    try:
        check_machine(read_config(path))
    except ConfigError as error:
        return error.message.removeprefix(f"{path}:")
    return ""


@pytest.mark.parametrize(
    ("parking", "why"),
    [
        ('{disk: "a\\0b"}', "must be a path"),
        ('{disk: ""}', "must be a path"),
        ("{disk: 5}", "must be a path"),
        ("{disk: /proc/x}", "cannot be made in /proc"),
        ("{disk: /etc/passwd}", "is no directory"),
        ("{disk: /etc/passwd/x}", "cannot be used"),
        ("{disk: /}", "others than its owner can use"),
        ("{memory: 99TiB}", "more than this machine has"),
        ("{memory: 1.5.2GB}", "must be a number of bytes"),
        ("{disk_bytes: 1GiB}", "no `disk` is named"),
        ("5", "must be a map of options"),
    ],
)
def test_a_place_for_parked_state_is_refused_by_its_line(
    parking: str, why: str, tmp_path: Path
) -> None:
    message = said(tmp_path, parking)
    assert message.startswith("5: parking")
    assert why in message
    assert "Config" not in message


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (", budget: {cpu: 99TiB}", "more than this machine has"),
        (", budget: {cpu: 1.5.2GB}", "must be a number of bytes"),
        (", tenant_share: 1.0e-300", "must be greater than or equal to 0.001"),
        (', python: ""', "must be a path"),
        (", cores: 999", "999 cores are more than this machine has"),
    ],
)
def test_a_stage_is_refused_by_its_line(stage: str, why: str, tmp_path: Path) -> None:
    message = said(tmp_path, stage=stage)
    assert message.startswith("2: stages.a.")
    assert why in message


def test_a_directory_that_can_be_made_is_not_made_by_a_check(tmp_path: Path) -> None:
    assert said(tmp_path, f"{{disk: {tmp_path}/a/b}}") == ""
    assert not (tmp_path / "a").exists()
