"""How much processor time has been used, read as Linux tells it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from protocol.compute_use import AUTO_CORES as AUTO
from workers import processor_time


@pytest.fixture
def statistics(tmp_path: Path) -> Path:
    """A machine that was busy for 1,000 s: 600 user, 100 nice, 200 system, 60 and 40 for
    interrupts; guests are counted in user already."""
    ticks = os.sysconf("SC_CLK_TCK")
    counts = [600, 100, 200, 50_000, 7_000, 60, 40, 0, 300, 0]
    path = tmp_path / "stat"
    path.write_text(f"cpu  {' '.join(str(n * ticks) for n in counts)}\ncpu0 1 2 3\n")
    return path


def test_cores_that_are_given_are_the_workers_own(tmp_path: Path) -> None:
    taken = processor_time.sample(1.5, tmp_path, tmp_path / "absent")
    assert (taken.cores, taken.others_s) == (1.5, 0.0)
    assert processor_time.sample(None).cores is None


def test_of_a_machine_others_have_all_but_ones_own(tmp_path: Path, statistics: Path) -> None:
    before_s = time.process_time()
    taken = processor_time.sample(AUTO, tmp_path, statistics)
    assert taken.cores == len(os.sched_getaffinity(0))
    assert before_s <= taken.own_s <= time.process_time()
    assert taken.others_s == pytest.approx(1_000.0 - taken.own_s)


def test_a_container_has_its_quota(tmp_path: Path, statistics: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 900000000\nuser_usec 1\n")
    taken = processor_time.sample(AUTO, tmp_path, statistics)
    assert taken.cores == 0.5
    assert taken.others_s == pytest.approx(900.0 - taken.own_s)


@pytest.mark.parametrize("quota", ["max 100000\n", "100000000 100000\n", "rubbish\n", "1 0\n"])
def test_a_quota_that_bounds_nothing_is_none(tmp_path: Path, statistics: Path, quota: str) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    taken = processor_time.sample(AUTO, tmp_path, statistics)
    assert taken.cores == len(os.sched_getaffinity(0))


def test_a_system_that_does_not_say_leaves_all_to_the_worker(tmp_path: Path) -> None:
    assert processor_time.sample(AUTO, tmp_path, tmp_path / "absent").others_s == 0.0


def test_this_system_says_it() -> None:
    assert processor_time.sample(AUTO).others_s > 0.0
