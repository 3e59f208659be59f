"""The messages of a world's stream: what a player says, and what all who look on are told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.native.fields import Id, Index, Ref, Secret
from protocol.worlds.bodies import Capabilities, Format, Quality

MAX_WINDOW = 1024
"""Frames that a player may let the world run ahead of what it has seen."""

Sequence = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
Axis = Annotated[float, msgspec.Meta(ge=-1, le=1)]


class _Frame(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class _Told(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    pass


# Frames of a client


class Attach(_Frame, frozen=True, tag="attach"):
    """The first frame: who this is to be, and how it wants its pictures.

    A player presents the `secret` it was last given, or takes over without one, which a holder
    of the tenant's key may. With a `window` the world never runs more frames ahead of the last
    one `seen` than that.
    """

    role: Literal["controller", "observer"]
    secret: Secret | None = None
    takeover: bool = False
    format: Format = "jpeg"
    quality: Quality = 80
    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)] | None = None


class Hold(_Frame, frozen=True, tag="hold"):
    """What is held down from now on, all of it: the next step is begun with it. `sequence` is
    the player's own number, and comes back with the first frame in which it took effect."""

    sequence: Sequence
    keys: Annotated[list[Id], msgspec.Meta(max_length=256)] = []
    axes: Annotated[dict[Id, Axis], msgspec.Meta(max_length=256)] = {}


class Play(_Frame, frozen=True, tag="play"):
    """Frame after frame at the world's rate."""

    ref: Ref | None = None


class Pause(_Frame, frozen=True, tag="pause"):
    """The world stands still behind the frame that is being made."""

    ref: Ref | None = None


class Step(_Frame, frozen=True, tag="step"):
    """So many single frames, one after the other, while the world stands still otherwise."""

    frames: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    ref: Ref | None = None


class Reset(_Frame, frozen=True, tag="reset"):
    """Begin anew; `settings` replace those that the world was opened with."""

    settings: dict[str, Any] = {}
    ref: Ref | None = None


class Checkpoint(_Frame, frozen=True, tag="checkpoint"):
    """Keep the state as it is behind the frame that is being made."""

    ref: Ref | None = None


class Rewind(_Frame, frozen=True, tag="rewind"):
    """Go back to the state that was kept after `step`, as if what came later never was."""

    step: Index
    ref: Ref | None = None


class Restore(_Frame, frozen=True, tag="restore"):
    """Go on from the `restorable_step` of the last `state_lost`."""

    ref: Ref | None = None


class Scene(_Frame, frozen=True, tag="scene"):
    """Another scene from the next step on."""

    scene: Id
    ref: Ref | None = None


class Seen(_Frame, frozen=True, tag="seen"):
    """The picture of this `frame` has come, and all before it."""

    frame: Index


class Ping(_Frame, frozen=True, tag="ping"):
    """Answered at once; `at` is the client's own."""

    at: float = 0.0


class Close(_Frame, frozen=True, tag="close"):
    """The world ends. Hanging up without it leaves it waiting for `grace_s`."""


ClientFrame = (
    Attach
    | Hold
    | Play
    | Pause
    | Step
    | Reset
    | Checkpoint
    | Rewind
    | Restore
    | Scene
    | Seen
    | Ping
    | Close
)


# Frames of the gateway


class Attached(_Told, frozen=True, tag="attached"):
    """This connection sees the world from here on. `secret` is for who comes back, `kept` are the
    steps to which the world can go back."""

    session: str
    model: str
    role: str
    world: Capabilities
    committed_step: int
    lost: bool
    expires_at_s: int
    grace_s: float
    secret: str | None = None
    restorable_step: int | None = None
    kept: list[int] = []


class Frame(_Told, frozen=True, tag="frame"):
    """A picture, and where it belongs. Its `picture_bytes` are the next message, which is
    binary; in MessagePack they are in `data`.

    `frame` counts from 1 since the last reset, `step` is the one that made it, with
    `denoising_steps` each; `action_sequence` is that of the hold that took effect. Times in ms:
    the engine took `made_ms`, the step `step_ms` in all as the gateway saw it, encoding
    `encoded_ms`; `age_ms` passed since the step was done, and `control_ms` since the hold that
    took effect here for the first time had come. `dropped` pictures were left out for this
    connection, so far.
    """

    frame: int
    step: int
    action_sequence: int
    denoising_steps: int
    format: str
    width: int
    height: int
    picture_bytes: int
    made_ms: float
    encoded_ms: float
    age_ms: float
    dropped: int
    scene: str | None = None
    engine_ms: float | None = None
    step_ms: float | None = None
    control_ms: float | None = None
    data: bytes | None = None


class Playing(_Told, frozen=True, tag="playing"):
    """The world goes on by itself."""

    ref: str | None = None


class Paused(_Told, frozen=True, tag="paused"):
    """The world stands still: as the player said, or for this error."""

    ref: str | None = None
    error: ErrorInfo | None = None


class Stepped(_Told, frozen=True, tag="stepped"):
    """Of the single frames that the `step` of this `ref` asked for so many were made, and no more
    are: fewer than those where the world stands still before. With an `error` it does so for
    that. Pictures may come behind it."""

    frames: int
    ref: str
    error: ErrorInfo | None = None


class SceneChanged(_Told, frozen=True, tag="scene_changed"):
    """The frames from this step on are of another scene."""

    scene: str
    step: int
    ref: str | None = None


class WasReset(_Told, frozen=True, tag="was_reset"):
    """The world has begun anew."""

    committed_step: int
    ref: str | None = None


class CheckpointKept(_Told, frozen=True, tag="checkpoint_kept"):
    """The state after `committed_step` is kept. `kept` are all steps after which one is."""

    committed_step: int
    kept: list[int]
    ref: str | None = None


class WasRewound(_Told, frozen=True, tag="was_rewound"):
    """The state is the one that was kept after `committed_step`: what came later never was."""

    committed_step: int
    ref: str | None = None


class WasRestored(_Told, frozen=True, tag="was_restored"):
    """The state is the one after `committed_step`: what came later never was. `kept` are the steps
    to which the world can go back."""

    committed_step: int
    ref: str | None = None
    kept: list[int] = []


class StepFailed(_Told, frozen=True, tag="step_failed"):
    """A step has no pictures. The state is the one after `committed_step`."""

    step: int
    committed_step: int
    error: ErrorInfo


class StateLost(_Told, frozen=True, tag="state_lost"):
    """The state after `committed_step` is gone: reset, or restore where there is a step to."""

    committed_step: int
    restorable_step: int | None = None
    reason: str | None = None


class Waits(_Told, frozen=True, tag="waits"):
    """The state is put away, or comes back: `parking`, `parked`, `restoring`, `restored`."""

    what: str


class Refused(_Told, frozen=True, tag="refused"):
    """A frame was not carried out, and changed nothing."""

    error: ErrorInfo
    ref: str | None = None


class Pong(_Told, frozen=True, tag="pong"):
    """The answer to a ping, with its `at`."""

    at: float


class LetGo(_Told, frozen=True, tag="let_go"):
    """The world goes on without this connection: `replaced`, `stalled` or `failed`."""

    reason: str


class SessionEnded(_Told, frozen=True, tag="session_ended"):
    """The world is closed; nothing follows."""

    reason: str
    error: ErrorInfo | None = None


class Failed(_Told, frozen=True, tag="error"):
    """The connection is refused, or ends, for this; a close code follows."""

    error: ErrorInfo


ServerFrame = (
    Attached
    | Frame
    | Playing
    | Paused
    | Stepped
    | SceneChanged
    | WasReset
    | CheckpointKept
    | WasRewound
    | WasRestored
    | StepFailed
    | StateLost
    | Waits
    | Refused
    | Pong
    | LetGo
    | SessionEnded
    | Failed
)
