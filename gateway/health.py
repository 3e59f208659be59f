"""What the gateway says of its own health.

`/healthz`: the process answers. `/readyz`: the gateway can do its work; full is still
ready, wedged is not. With `?pipeline=P` only P counts, with `&capacity=1` P must also
have room for one more session, or a session that would make room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.hosting import PipelineHealth, SessionHost
from protocol.errors import NotFound


@dataclass(frozen=True)
class Readiness:
    """The answer to a readiness question and its reasons."""

    ready: bool
    body: dict[str, Any]


def readiness(host: SessionHost, pipeline: str | None = None, capacity: bool = False) -> Readiness:
    """Whether the gateway is ready, or one `pipeline` of it (then strictly).

    Raises NotFound for an unknown pipeline.
    """
    states = host.health()
    if pipeline is not None:
        states = [state for state in states if state.name == pipeline]
        if not states:
            raise NotFound(f"There is no pipeline '{pipeline[:64]}'.", field="pipeline")
    reasons = []
    if host.draining:
        reasons.append("draining")
    if not host.holds_lease:
        reasons.append("no lease")
    for state in states:
        if state.required or pipeline is not None:
            reasons += [
                f"{state.name}: stage {stage} is {health.value}"
                for stage, health in state.stages.items()
                if health.value != "ready"
            ]
            if capacity and state.full:
                reasons.append(f"{state.name}: full")
    body = {
        "status": "not_ready" if reasons else "ready",
        "reasons": reasons,
        "capacity": "full" if any(state.full for state in states) else "free",
        "pipelines": {state.name: described(state) for state in states},
    }
    return Readiness(not reasons, body)


def described(state: PipelineHealth) -> dict[str, Any]:
    """One pipeline, as `/readyz` and operators are told of it."""
    return {
        "ready": state.ready,
        "required": state.required,
        "capacity": "full" if state.full else "free",
        "sessions": state.sessions,
        "session_limit": state.session_limit,
        "stopped": state.stopped,
        "stages": {stage: health.value for stage, health in state.stages.items()},
    }
