"""What goes into and comes out of a step loop (world, robot), free of any wire format.

`ref` is whatever the client wants echoed in the refusal of a verb; it has no other meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ErrorInfo
from protocol.payloads import Payload
from sessions.client import SessionOutput

# Verbs


@dataclass(frozen=True)
class Step:
    """Move the state from `step` - 1 to `step` with `inputs`, which may be several payloads.

    Steps count from 1. A step that is in flight, or was committed and is remembered, is
    not carried out again: whoever asked gets the one answer.
    """

    step: int
    inputs: list[Payload]
    parameters: dict[str, Any] = field(default_factory=dict)
    ref: str | None = None


@dataclass(frozen=True)
class Interrupt:
    """Cancel the step in flight. Its answer says whether it was committed before."""

    ref: str | None = None


@dataclass(frozen=True)
class Reset:
    """Begin anew at step 0, with what `parameters` say. A step in flight is cancelled."""

    parameters: dict[str, Any] = field(default_factory=dict)
    ref: str | None = None


@dataclass(frozen=True)
class Restore:
    """Go on from the last step of which a snapshot exists, where the state after it is lost."""

    ref: str | None = None


StepVerb = Step | Interrupt | Reset | Restore


@dataclass(frozen=True)
class StepSnapshot:
    """What a client that comes back has to know of the loop.

    `in_flight` is the step that is under way. With `lost` every step is refused until a
    reset, or until the state after `restorable_step` is restored, where there is one.
    """

    committed_step: int
    lost: bool
    in_flight: int | None
    restorable_step: int | None = None


# Outputs


@dataclass(frozen=True)
class StepDone:
    """The step is committed: its output by port, and its hop times by stage (ms)."""

    step: int
    committed_step: int
    outputs: dict[str, list[Payload]]
    timeline: dict[str, dict[str, float]]


@dataclass(frozen=True)
class StepFailed:
    """The step has no output. The state is the one after `committed_step`.

    Where that is `step` itself, it was committed and its output is lost: go on with the
    next.
    """

    step: int
    committed_step: int
    error: ErrorInfo
    ref: str | None


@dataclass(frozen=True)
class StateLost:
    """The state after `committed_step` is gone: every step is refused until a reset.

    `restorable_step` is the last step of which a snapshot exists, None without one: a
    `Restore` goes on from there. `reason` is why what was in the store did not come back.
    """

    committed_step: int
    restorable_step: int | None
    reason: str | None = None


@dataclass(frozen=True)
class WasReset:
    """The state is as at the open, with what the reset said."""

    committed_step: int


@dataclass(frozen=True)
class WasRestored:
    """The state is the one after `committed_step`: what came later never was."""

    committed_step: int


StepOutput = SessionOutput | StepDone | StepFailed | StateLost | WasReset | WasRestored
