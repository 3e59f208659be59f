"""CI refuses tests that were skipped without leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_skips.py"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_runs" time="0.1"/>
{case}
</testsuite></testsuites>"""
SKIPPED = '<testcase classname="tests.a" name="test_b[x]"><skipped message="no device"/></testcase>'


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    path = tmp_path / "allowed.txt"
    path.write_text("# comment\n\ntests.a::test_b  needs a device\n")
    return path


def test_no_skip_passes(tmp_path: Path) -> None:
    (tmp_path / "fast.xml").write_text(REPORT.format(case=""))
    assert check(str(tmp_path)).returncode == 0


def test_a_skip_without_leave_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "fast.xml").write_text(REPORT.format(case=SKIPPED))
    result = check(str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == "skipped without leave: tests.a::test_b[x]: no device\n"


def test_a_listed_skip_passes(tmp_path: Path, allowed: Path) -> None:
    (tmp_path / "fast.xml").write_text(REPORT.format(case=SKIPPED))
    assert check(str(tmp_path), str(allowed)).returncode == 0


def test_leave_needs_a_reason(tmp_path: Path, allowed: Path) -> None:
    (tmp_path / "fast.xml").write_text(REPORT.format(case=SKIPPED))
    allowed.write_text("tests.a::test_b\n")
    result = check(str(tmp_path), str(allowed))
    assert result.returncode == 1
    assert "without a reason" in result.stderr


def test_no_report_fails(tmp_path: Path) -> None:
    assert check(str(tmp_path)).returncode == 1
