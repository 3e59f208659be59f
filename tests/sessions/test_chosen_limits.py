"""Limits that a client chooses are honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import InvalidRequest
from sessions.chosen_limits import chosen
from sessions.pipeline import Limits

LIMITS = Limits(idle_ms=10_000, max_age_ms=60_000, grace_ms=5_000, stall_ms=2_000)


def test_what_is_not_asked_for_is_the_pipelines() -> None:
    assert chosen(LIMITS, {}) == LIMITS


def test_a_limit_within_the_pipelines_is_taken() -> None:
    taken = chosen(LIMITS, {"idle_s": 2.5, "max_age_s": 60, "grace_s": 0.5, "stall_s": 1})
    assert (taken.idle_ms, taken.max_age_ms, taken.grace_ms, taken.stall_ms) == (
        2_500,
        60_000,
        500,
        1_000,
    )


@pytest.mark.parametrize(
    ("asked", "field", "code"),
    [
        ({"idle_s": 10.1}, "limits.idle_s", "invalid_value"),
        ({"idle_s": 0}, "limits.idle_s", "invalid_value"),
        ({"grace_s": -1}, "limits.grace_s", "invalid_value"),
        ({"grace_s": float("nan")}, "limits.grace_s", "invalid_value"),
        ({"stall_s": True}, "limits.stall_s", "invalid_value"),
        ({"max_age_s": "60"}, "limits.max_age_s", "invalid_value"),
        ({"sessions": 1}, "limits.sessions", "unknown_parameter"),
    ],
)
def test_a_limit_that_cannot_be_honoured_is_refused_by_name(
    asked: dict[str, Any], field: str, code: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chosen(LIMITS, {"max_age_s": 30, **asked})
    assert (refused.value.field, refused.value.code) == (field, code)
