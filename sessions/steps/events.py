"""What goes into and comes out of a step loop (world, robot), free of any wire format.

`ref` is whatever the client wants echoed in the refusal of a verb; it has no other meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from protocol.errors import ErrorInfo
from protocol.payloads import Payload
from sessions.client import SessionOutput

NEXT = 0
"""The number of a step that is to follow whatever has been done by then."""

# Verbs


class Step(msgspec.Struct, frozen=True):
    """Move the state from `step` - 1 to `step` with `inputs`, which may be several payloads.

    Steps count from 1. A step that is in flight, or was committed and is remembered, is
    not carried out again: whoever asked gets the one answer.

    `NEXT` is the one after the last that is committed, whichever that will be. It waits while
    another is in flight; only the newest waits. `since_ms` is when what it senses came
    (monotonic), which a deadline counts from; None: with the verb.
    """

    step: int
    inputs: list[Payload]
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    ref: str | None = None
    since_ms: float | None = None


@dataclass(frozen=True)
class Interrupt:
    """Cancel the step in flight. Its answer says whether it was committed before."""

    ref: str | None = None


@dataclass(frozen=True)
class Reset:
    """Begin anew at step 0, with what `parameters` say. A step in flight is cancelled.

    `since_ms` is when it came (monotonic), where it is to have an answer in time as a step has;
    None: it is told what came of it, whenever that is. `said_ms` is the earliest that it may have
    been said, where it has waited since: it does not release a client's stop that came later.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    ref: str | None = None
    since_ms: float | None = None
    said_ms: float | None = None


@dataclass(frozen=True)
class Restore:
    """Go on from the last step of which a snapshot exists, where the state after it is lost."""

    ref: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Keep the state as it is between two steps. It waits for the step in flight."""

    ref: str | None = None


@dataclass(frozen=True)
class Rewind:
    """Go back to the state that was kept after `step`, as if what came later never was.

    It waits for the step in flight. Refused where that state is not kept.
    """

    step: int
    ref: str | None = None


@dataclass(frozen=True)
class ReleaseActions:
    """Let go of the actions that the engine holds. It waits for the step in flight."""

    ref: str | None = None


class StoppedBy(StrEnum):
    """What holds a loop still. Each is released by itself, and the loop goes on when none is
    left."""

    CLIENT = "client"
    """Released by its next reset as well, and with `OPERATOR`."""
    OPERATOR = "operator"
    """Who stopped this session alone."""
    PIPELINE = "pipeline"
    """An operator who stopped all robots of its pipeline."""
    ROBOTS = "robots"
    """An operator who stopped all robots."""

    @property
    def told(self) -> StoppedBy:
        """Who that is, as a client is told: `CLIENT` or `OPERATOR`."""
        return self if self is StoppedBy.CLIENT else StoppedBy.OPERATOR


@dataclass(frozen=True)
class EmergencyStop:
    """No step runs, and none is answered with fresh output, until it is let go on."""

    by: StoppedBy = StoppedBy.CLIENT
    ref: str | None = None


@dataclass(frozen=True)
class ReleaseStop:
    """Let go of one hold: the loop goes on if there is no other. A client may where no operator
    holds it. `said_ms` is as of a reset: refused where the stop came later."""

    by: StoppedBy = StoppedBy.CLIENT
    ref: str | None = None
    said_ms: float | None = None


StepVerb = (
    Step
    | Interrupt
    | Reset
    | Restore
    | Checkpoint
    | Rewind
    | ReleaseActions
    | EmergencyStop
    | ReleaseStop
)


@dataclass(frozen=True)
class StepSnapshot:
    """What a client that comes back has to know of the loop.

    `in_flight` is the step that is under way. With `lost` every step is refused until a
    reset, or until the state after `restorable_step` is restored, where there is one. `kept` are
    the steps to which it can go back.
    """

    committed_step: int
    lost: bool
    in_flight: int | None
    restorable_step: int | None = None
    stopped: bool = False
    kept: tuple[int, ...] = ()


# Outputs


@dataclass(frozen=True)
class StepDone:
    """The step is committed: its output by port, and its hop times by stage (ms).

    The state is the one after `committed_step`, which is a later one where an answer is given
    again. `ref` is that of the verb for which the step was done: whoever asked for the same step
    otherwise has the answer all the same.
    """

    step: int
    committed_step: int
    outputs: dict[str, list[Payload]]
    timeline: dict[str, dict[str, float]]
    ref: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StepFailed:
    """The step has no output. The state is the one after `committed_step`.

    Where that is `step` itself or a later one, it was committed and its output is lost: go on with
    the next. `step` is 0 where it had no number yet. If it is `in_flight` it goes on, and another
    one tells what became of it.
    """

    step: int
    committed_step: int
    error: ErrorInfo
    ref: str | None
    in_flight: bool = False


class Reason(StrEnum):
    """Why an answer is not fresh."""

    LATE = "late"
    SUPERSEDED = "superseded"
    """A newer observation came before this one had begun."""
    STOPPED = "stopped"
    WORKER_LOST = "worker_lost"
    STATE_LOST = "state_lost"
    """Nothing fresh comes before a reset or a restore."""
    FAILED = "failed"
    """The policy raised."""


@dataclass(frozen=True)
class SafeAction:
    """The answer to a step without anything fresh: `outputs` are the safe action.

    `step` is 0 where it had no number yet. If it is `in_flight` it goes on, and a `StepFailed`
    tells what became of it: its own output is not given any more. So it is with a reset that
    is to have an answer in time, which has the number 0 and its own `ref`; it ends with a
    `WasReset` or a `Refused`.
    """

    step: int
    committed_step: int
    reason: Reason
    outputs: dict[str, list[Payload]]
    in_flight: bool = False
    ref: str | None = None


@dataclass(frozen=True)
class EmergencyStopped:
    """The loop stands still until it is let go on."""

    by: StoppedBy
    """`CLIENT` or `OPERATOR`."""


@dataclass(frozen=True)
class StopReleased:
    """Steps run again."""


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
    """The state is the one after `committed_step`: what came later never was. `kept` are the steps
    to which it can go back, and `ref` is that of the verb."""

    committed_step: int
    ref: str | None = field(default=None, compare=False)
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CheckpointKept:
    """The state after `committed_step` is kept. `kept` are all steps after which one is."""

    committed_step: int
    kept: list[int]


@dataclass(frozen=True)
class WasRewound:
    """The state is the one that was kept after `committed_step`: what came later never was."""

    committed_step: int


@dataclass(frozen=True)
class ActionsReleased:
    """No action is held from the step after `committed_step` on, until others come."""

    committed_step: int


StepOutput = (
    SessionOutput
    | StepDone
    | StepFailed
    | SafeAction
    | EmergencyStopped
    | StopReleased
    | StateLost
    | WasReset
    | WasRestored
    | CheckpointKept
    | WasRewound
    | ActionsReleased
)
