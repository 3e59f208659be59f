"""The simulation alone reaches nearly all of the machines."""

from __future__ import annotations

import pytest

from tests.simulation.coverage import below, lines, measured
from tests.simulation.many import EVENTS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_machines_are_reached() -> None:
    files = measured(EVENTS)
    print("\n".join(lines(files)))
    assert below(files) == []
