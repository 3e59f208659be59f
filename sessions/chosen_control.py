"""What a client chooses of its robot's control loop, beside what its pipeline has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protocol.errors import InvalidRequest
from protocol.safe_action import read_safe_action
from sessions.pipeline import Kind, Pipeline

MOST = {"deadline_ms": 3_600_000.0, "rate_hz": 10_000.0}
"""Numbers that may be chosen: above 0, and at most this."""


def controlled(pipeline: Pipeline, asked: Mapping[str, Any]) -> Pipeline:
    """The pipeline as a client has it whose control loop is to be like this.

    A rate brings its own deadline, one period, where none is chosen with it. Raises
    InvalidRequest naming the first that cannot be honoured.
    """
    if not asked:
        return pipeline
    if pipeline.kind is not Kind.ROBOT:
        raise InvalidRequest(
            f"a session of kind {pipeline.kind} has no control loop", field="control"
        )
    chosen: dict[str, Any] = {}
    for name, value in asked.items():
        field = f"control.{name}"
        if name == "safe_action":
            try:
                chosen[name] = read_safe_action(value)
            except ValueError as error:
                raise InvalidRequest(str(error), field=field) from None
        elif name in MOST:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 < value <= MOST[name]:
                raise InvalidRequest(
                    f"must be a number above 0 and at most {MOST[name]:g}", field=field
                )
            chosen[name] = float(value)
        else:
            known = ", ".join([*MOST, "safe_action"])
            raise InvalidRequest(
                f"no {name!r} can be chosen; those that can are {known}",
                field=field,
                code="unknown_parameter",
            )
    if "rate_hz" in chosen:
        chosen.setdefault("deadline_ms", 1000.0 / chosen["rate_hz"])
    return replace(pipeline, control=replace(pipeline.control, **chosen))
