"""A fixed budget of the simulation: no invariant fails, and each is put to the test."""

from __future__ import annotations

import pytest

from tests.simulation.many import EVENTS, FIRST_SEED, seeds_from, tally
from tests.simulation.report import Tally
from tests.simulation.schedule import run
from tests.simulation.sweep import WAYS, sweep, sweep_forks

SHORT_EVENTS = 120_000
MEDIAN_EVENTS = 200


def the_failure(result: Tally) -> str:
    """What a failure of a run is told with."""
    return "\n\n".join(
        f"{outcome.failure}\nreplay: python -m tests.simulation --seed {outcome.seed}"
        for outcome in result.failures
    )


def test_the_invariants_hold() -> None:
    result = tally(seeds_from(0), events=SHORT_EVENTS)
    assert not result.failures, the_failure(result)
    assert result.median >= MEDIAN_EVENTS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_invariants_hold_and_are_put_to_the_test() -> None:
    result = tally(seeds_from(FIRST_SEED), events=EVENTS)
    print("\n".join(result.lines()))
    assert not result.failures, the_failure(result)
    assert result.events >= EVENTS
    assert result.median >= MEDIAN_EVENTS
    assert result.missing == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stages", ["plain", "chain"])
def test_giving_up_at_every_step_leaves_nothing(stages: str, way: str) -> None:
    result = Tally()
    for outcome in sweep(stages, way):
        result.add(outcome)
    assert not result.failures, the_failure(result)
    assert len(result.sizes) > 50


@pytest.mark.parametrize("gone", ["fork", "source"])
@pytest.mark.parametrize("stages", ["world", "encoded"])
def test_a_fork_that_comes_to_nothing_at_any_step_leaves_nothing(stages: str, gone: str) -> None:
    result = Tally()
    for outcome in sweep_forks(stages, gone):
        result.add(outcome)
    assert not result.failures, the_failure(result)
    assert len(result.sizes) > 30
    assert result.counts["I5 steps: steps done by forks"]


def test_a_seed_decides_everything() -> None:
    first, second = run(11), run(11)
    assert (first.events, first.counts) == (second.events, second.counts)
    assert first.counts != run(12).counts
