"""Why a step does not run, in the words of both sides that see to it: session and worker."""

from __future__ import annotations

from protocol.errors import InvalidRequest, SessionStateLost


def misplaced(step: int, committed: int) -> InvalidRequest:
    """`step` is not the one that follows step `committed`, the last that is committed."""
    if 1 <= step <= committed:
        return InvalidRequest(
            f"step {step} is committed and its answer is not kept; "
            f"the last committed step is {committed}",
            field="step",
            code="step_committed",
        )
    return InvalidRequest(
        f"step {step} does not follow the last committed step, {committed}",
        field="step",
        code="step_out_of_order",
    )


def state_lost(committed: int) -> SessionStateLost:
    """Nothing works on the state that came after step `committed` until it begins anew."""
    return SessionStateLost(f"the state after step {committed} is lost: reset it")
