"""The limits that a client chooses for its session, within those of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protocol.errors import InvalidRequest
from sessions.pipeline import Limits

CHOICES = {
    "idle_s": "idle_ms",
    "max_age_s": "max_age_ms",
    "grace_s": "grace_ms",
    "stall_s": "stall_ms",
}
"""What may be chosen, in seconds: above 0, and at most what the pipeline allows."""


def chosen(limits: Limits, asked: Mapping[str, Any]) -> Limits:
    """The limits of a session whose client asks for these.

    Raises InvalidRequest naming the first that cannot be honoured.
    """
    taken = {}
    for name, value in asked.items():
        field = f"limits.{name}"
        if name not in CHOICES:
            known = ", ".join(CHOICES)
            raise InvalidRequest(
                f"no limit {name!r} can be chosen; those that can are {known}",
                field=field,
                code="unknown_parameter",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest("a limit is a number of seconds", field=field)
        most_ms = getattr(limits, CHOICES[name])
        if not 0.001 <= value <= most_ms / 1000:
            raise InvalidRequest(
                f"must be above 0 and at most the {most_ms / 1000:g} s of the pipeline",
                field=field,
            )
        taken[CHOICES[name]] = int(value * 1000)
    return replace(limits, **taken)
