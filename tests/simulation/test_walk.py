"""Every reachable state of a small instance: the invariants hold in each."""

from __future__ import annotations

import pytest

from sessions.lifecycle import TRANSITIONS
from tests.simulation.instance import Bounds
from tests.simulation.mutations.catch import catch
from tests.simulation.mutations.faults_in_machines import MUTATIONS
from tests.simulation.walk import walk

FOUND = (
    "another owner is let in with the same epoch",
    "a fence is valid whoever sends it",
    "a record is never removed",
    "a session is freed while its turns run",
    "a step that failed counts",
)
"""Mutations that no more is needed for than a small instance."""


def test_every_state_of_a_very_small_instance() -> None:
    seen = walk(Bounds(client=1, faults=1))
    assert seen.failure is None, seen.failure
    assert seen.complete
    assert seen.states > 500


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_state_of_a_small_instance() -> None:
    seen = walk()
    print(f"{seen.states} states, {seen.transitions} transitions, {seen.depth} deep")
    assert seen.failure is None, seen.failure
    assert seen.complete
    assert seen.taken == set(TRANSITIONS)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FOUND)
def test_a_walk_finds_a_mutation(name: str) -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == name)
    caught = catch(mutation, "tests.simulation.walk")
    print(f"{caught.seconds:6.1f} s  {caught.by}")
    assert caught.by is not None
