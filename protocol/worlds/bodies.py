"""The bodies of requests to worlds and of their answers; JSON, or MessagePack where it is said."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.native.fields import Id, Index
from protocol.native.frames import ChosenLimits, ForkedFrom, SessionLimits

MAX_FRAMES = 1024
MAX_BATCH = 256
"""Worlds that are stepped by one request."""

Format = Literal["jpeg", "webp", "png", "raw"]
"""Of a picture; `raw` is rows of red, green and blue."""

Quality = Annotated[int, msgspec.Meta(ge=1, le=100)]
"""Of JPEG and WebP."""

Row = Annotated[list[Annotated[float, msgspec.Meta(ge=-1, le=1)]], msgspec.Meta(max_length=512)]
"""An action: the keys (0 or 1), then the axes (-1 to 1), in the order of the capabilities."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class OpenWorldBody(_Body, frozen=True):
    """`POST /v1/worlds`. `model` names a pipeline; absent: the first one of kind world. With
    `fork` the world begins as another of the tenant's is then."""

    model: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    settings: dict[str, Any] | None = None
    limits: ChosenLimits = ChosenLimits()
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    fork: ForkedFrom | None = None


class Capabilities(msgspec.Struct, frozen=True):
    """What a world is, before its first frame: a picture's size, the rate at which it is played,
    the most frames of a step, what can be held down, and how pictures can be had."""

    width: int
    height: int
    rate_hz: float
    chunk: int
    denoising_steps: int
    keys: list[str]
    axes: list[str]
    scenes: list[str]
    formats: list[str]


class WorldBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One world. `stream` is the path of its WebSocket; `secret` is in the answer to the open
    alone."""

    id: str
    model: str
    state: str
    stream: str
    world: Capabilities
    facts: dict[str, Any]
    settings: Any
    limits: SessionLimits
    age_s: float
    idle_s: float
    expires_at_s: int
    bytes: dict[str, dict[str, int]] = {}
    secret: str | None = None


class StepBody(_Body, frozen=True):
    """`POST /v1/worlds/{id}/step`: `frames` more, with a row of `actions` for each, or one for
    all; without any nothing is held.

    `step` is its number, which makes that a repetition is not done twice; absent: the next.
    """

    step: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    actions: Annotated[list[Row], msgspec.Meta(max_length=MAX_FRAMES)] = []
    frames: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAMES)] = 1
    scene: Id | None = None
    deadline_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] | None = None
    format: Format | None = None
    quality: Quality = 80


class BatchEntry(StepBody, frozen=True, kw_only=True):
    """A step of one world of several."""

    id: Id


class BatchBody(_Body, frozen=True):
    """`POST /v1/worlds/step`: each of another world. They do not wait for each other."""

    worlds: Annotated[list[BatchEntry], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class ResetBody(_Body, frozen=True):
    """`POST /v1/worlds/{id}/reset`: `settings` replace those that it was opened with."""

    settings: dict[str, Any] = {}


class EmptyBody(_Body, frozen=True):
    """`POST /v1/worlds/{id}/checkpoint`, `.../restore`, `.../close` and `DELETE /v1/worlds/{id}`:
    there is nothing to say."""


class RewindBody(_Body, frozen=True):
    """`POST /v1/worlds/{id}/rewind`: back to the state that was kept after `step`."""

    step: Index


class StepFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """A picture of a step, as the stream has it; `data` is base64 in JSON."""

    frame: int
    action_sequence: int
    denoising_steps: int
    made_ms: float
    format: str
    width: int
    height: int
    data: bytes
    scene: str | None = None


class StepAnswer(msgspec.Struct, frozen=True):
    """A step is committed: its pictures."""

    step: int
    committed_step: int
    frames: list[StepFrame]


class ChangeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A world has begun anew, gone back, or been kept: then `kept` has all steps that are."""

    committed_step: int
    kept: list[int] | None = None


class BatchAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the step of one world: `status` is as of a request of its own."""

    id: str
    status: Index
    answer: StepAnswer | None = None
    error: ErrorInfo | None = None
    committed_step: int | None = None


class BatchAnswers(msgspec.Struct, frozen=True):
    """What became of the steps, in the order in which they were asked for."""

    worlds: list[BatchAnswer]
