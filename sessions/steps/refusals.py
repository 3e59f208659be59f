"""Why a step does not run, in the words of both sides that see to it: session and worker."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import DeadlineMissed, InvalidRequest, SessionBusy, SessionStateLost


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


def state_lost(
    committed: int, why: str | None = None, restorable: int | None = None
) -> SessionStateLost:
    """Nothing works on the state that came after step `committed` until it begins anew, or is
    that after step `restorable`, where that is stored."""
    reason = "" if why is None else f" ({why})"
    again = "reset it" if restorable is None else f"restore that after step {restorable}, or reset"
    return SessionStateLost(f"the state after step {committed} is lost{reason}: {again}")


def nothing_to_restore() -> InvalidRequest:
    """Nothing was lost, or there is no snapshot to go on from."""
    return InvalidRequest(
        "there is no step to restore: the state is not lost, or no snapshot of it exists",
        code="nothing_to_restore",
    )


def no_checkpoint(step: int, kept: Iterable[int]) -> InvalidRequest:
    """There is no going back to the state after `step`; `kept` are those to which there is."""
    steps = ", ".join(map(str, kept)) or "none"
    return InvalidRequest(
        f"no checkpoint of step {step} is kept; those that are: {steps}",
        field="rewind.step",
        code="no_checkpoint",
    )


def source_gone(why: str) -> SessionStateLost:
    """There is no state that a fork could begin with."""
    return SessionStateLost(f"the session to fork is gone: {why}", code="fork_source_lost")


def deadline_missed() -> DeadlineMissed:
    """An observation has no answer in time."""
    return DeadlineMissed("no action could be given within the deadline")


def stopped(why: str = "the session is stopped") -> InvalidRequest:
    """Nothing runs until the emergency stop is released."""
    return InvalidRequest(f"{why}: nothing runs until it is released", code="emergency_stopped")


def superseded() -> SessionBusy:
    """Only the newest of those that wait is done."""
    return SessionBusy("a newer step came before this one had begun", code="superseded")
