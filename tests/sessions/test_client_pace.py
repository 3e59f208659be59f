"""A client that takes nothing is stalled at the very time that is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sessions.client_pace import ClientPace


@given(st.floats(0, 1e9), st.integers(1, 10**7))
def test_a_client_is_stalled_when_its_time_has_come(now_ms: float, stall_ms: int) -> None:
    pace = ClientPace(stall_ms)
    assert pace.stalled_at_ms is None
    pace.set(True, now_ms)
    at_ms = pace.stalled_at_ms
    assert at_ms is not None
    assert pace.stalled(at_ms)
    assert not pace.stalled(now_ms) or at_ms == now_ms


def test_the_time_runs_from_when_it_took_nothing_first() -> None:
    pace = ClientPace(100)
    pace.set(True, 10)
    pace.set(True, 60)
    assert pace.stalled_at_ms == 110
    pace.set(False, 70)
    assert not pace.blocked
    assert not pace.stalled(1_000)
