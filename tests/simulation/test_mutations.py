"""Every small fault in a machine is seen by the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.mutations.catch import catch_all, mutated
from tests.simulation.mutations.faults_in_machines import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_names_text_that_is_there_once(mutation: Mutation, tmp_path: Path) -> None:
    mutated(mutation, tmp_path)
    assert mutation.new in (tmp_path / mutation.file).read_text()


EVERY = 3
"""`make simulate-mutations` tries all of them; here it is one in so many."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutations_are_caught() -> None:
    caught = catch_all([mutation.name for mutation in MUTATIONS[::EVERY]])
    for result in caught:
        print(f"{result.seconds:6.1f} s  {result.mutation.name}: {result.by}")
    assert [result.mutation.name for result in caught if result.by is None] == []
