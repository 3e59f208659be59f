"""What may be said of a world: by its stage's options, at an open, with a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
import pydantic

from protocol.errors import InvalidRequest
from workers.engines.world.architecture import Architecture

Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class WorldOptions(pydantic.BaseModel):
    """The options of a stage with this engine."""

    model_config = pydantic.ConfigDict(extra="forbid")

    weights: Path | None = None
    """A world's safetensors file."""
    random: int | None = pydantic.Field(default=None, ge=0, lt=2**31)
    """Instead of a file: the seed of a tiny world whose weights mean nothing."""
    device: str = pydantic.Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int = pydantic.Field(default=1, ge=1, le=256)
    """Of the processor, for one call."""
    blocks: int = pydantic.Field(default=128, ge=1, le=1_000_000)
    """Of the cache, for all sessions together."""
    block_frames: int = pydantic.Field(default=1, ge=1, le=64)
    """Frames of a block."""
    reserve_blocks: int | None = pydantic.Field(default=None, ge=0)
    """Blocks that a session reserves when it is opened; all that it can come to hold, if it is
    not named."""
    checkpoints: int = pydantic.Field(default=2, ge=0, le=64)
    """How many a session keeps."""
    batch: int = pydantic.Field(default=16, ge=1, le=1024)
    """How many sessions share a call at most."""
    window_ms: float = pydantic.Field(default=5.0, ge=0, le=1000)
    """How long a session that is ready waits for others."""
    steps: int = pydantic.Field(default=2, ge=1, le=64)
    """Denoising steps of a frame."""
    least_steps: int = pydantic.Field(default=1, ge=1, le=64)
    """The fewest, where there is no time for more."""
    chunk: int = pydantic.Field(default=8, ge=1, le=64)
    """The most frames of a step."""

    @pydantic.model_validator(mode="after")
    def _one_world(self) -> WorldOptions:
        if (self.weights is None) == (self.random is None):
            raise ValueError("either weights or random")
        if self.least_steps > self.steps:
            raise ValueError("least_steps is at most steps")
        return self


class WorldSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With what a rollout begins: at an open, and at a reset."""

    seed: Seed = 0
    """Decides the noise, and where there is no `frame`, which of the model's own it is."""
    scene: str | None = None
    """None: that of the model's frame, or else its first."""
    frame: bytes | None = None
    """The frame to begin with: height * width * 3 bytes, red, green and blue of each pixel."""

    def check(self, architecture: Architecture) -> WorldSettings:
        """Itself. Raises InvalidRequest for what this world does not have."""
        a = architecture
        if self.scene is not None and self.scene not in a.scenes:
            raise InvalidRequest(f"there is no scene {self.scene}", field="settings.scene")
        if self.frame is not None and len(self.frame) != a.frame_numbers:
            raise InvalidRequest(f"a frame is {a.frame_numbers} bytes", field="settings.frame")
        return self


class StepParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step may say beside its actions."""

    frames: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many are to be made."""
    deadline_ms: float | None = None
    """Within what time they are wanted."""
    steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Denoising steps of each, at most the stage's."""
    scene: str | None = None
    """Another scene, from this step on."""

    def check(self, options: WorldOptions, architecture: Architecture) -> StepParameters:
        """Itself. Raises InvalidRequest for what this stage does not do."""
        if self.scene is not None and self.scene not in architecture.scenes:
            raise InvalidRequest(f"there is no scene {self.scene}", field="parameters.scene")
        if self.frames > options.chunk:
            raise InvalidRequest(
                f"a step has up to {options.chunk} frames", field="parameters.frames"
            )
        if self.steps is not None and self.steps > options.steps:
            raise InvalidRequest(
                f"a frame has up to {options.steps} steps", field="parameters.steps"
            )
        if self.deadline_ms is not None and not 0 <= self.deadline_ms < math.inf:
            raise InvalidRequest("a deadline is 0 ms or more", field="parameters.deadline_ms")
        return self


class Rewind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint a world goes back to: the step after which it was kept."""

    step: int
