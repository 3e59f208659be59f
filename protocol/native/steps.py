"""What a client may say to a step loop (world, robot) and to a session of one turn."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from protocol.native.fields import Id, Index
from protocol.native.payloads import Inputs


class _Said(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class StepInput(_Said, frozen=True, tag="step"):
    """Move the state from `step` - 1 to `step`; steps count from 1.

    Without a number it is the one after the last that is committed. It waits while another is
    in flight, and only the newest waits.

    A step that is in flight, or was committed and is remembered, is not carried out again:
    `step_done` has its one answer.
    """

    inputs: Inputs
    step: Index = 0
    parameters: dict[str, Any] = {}


class RequestInput(_Said, frozen=True, tag="request"):
    """Run the one turn of the session. `parameters` are by stage; without `ports` every output
    is made."""

    inputs: Inputs
    parameters: dict[str, Any] = {}
    ports: Annotated[list[Id], msgspec.Meta(max_length=64)] | None = None


class Interrupt(_Said, frozen=True, tag="interrupt"):
    """Cancel the step in flight. Its answer says whether it was committed before."""


class EmergencyStop(_Said, frozen=True, tag="stop"):
    """Emergency stop: whatever runs, nothing fresh is given until a release or a reset."""


class ReleaseStop(_Said, frozen=True, tag="release"):
    """Let a stop go that a client asked for. Refused while an operator's holds."""


class Restore(_Said, frozen=True, tag="restore"):
    """Go on from the `restorable_step` of the last `state_lost`."""


class Checkpoint(_Said, frozen=True, tag="checkpoint"):
    """Keep the state as it is after the step in flight, so that a rewind finds it."""


class Rewind(_Said, frozen=True, tag="rewind"):
    """Go back to the state that was kept after `step`, as if what came later never was."""

    step: Index


class ReleaseActions(_Said, frozen=True, tag="release_actions"):
    """Let go of the actions that are held until others come."""


class Reset(_Said, frozen=True, tag="reset"):
    """Begin anew: a step loop at step 0 with what `parameters` say, a conversation empty."""

    parameters: dict[str, Any] = {}
