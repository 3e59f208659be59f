"""The form of a world model: what its weights, its frames and its cache look like."""

from __future__ import annotations

import msgspec

VECTOR = 32
"""Numbers that functions like `exp` are computed of at once, at most. What is left over at the end
of a tensor is computed in another way, so a session's numbers are whole vectors: else they would
depend on how many sessions are beside it."""


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the shapes of a denoiser, and what its inputs mean.

    A frame sees itself, the `window` frames before it, and the first `sinks` frames of its
    rollout, which never leave. Frames are cut into patches of `patch` pixels, and those into
    one token for each 2 by 2.
    """

    height: int = 64
    width: int = 64
    patch: int = 4
    channels: int = 64
    """Of the convolutions around the transformer."""
    dim: int = 128
    heads: int = 4
    layers: int = 3
    window: int = 5
    sinks: int = 1
    ring: int = 1
    """How many earlier frames go in as pixels, newest first."""
    keys: tuple[str, ...] = ("up", "down", "left", "right")
    axes: tuple[str, ...] = ()
    scenes: tuple[str, ...] = ("meadow", "dusk", "ice")

    def __post_init__(self) -> None:
        least = {"channels": self.channels, "heads": self.heads, "layers": self.layers}
        least |= {"window": self.window, "sinks": self.sinks, "ring": self.ring}
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.ring > self.window:
            raise ValueError("ring is at most window")
        if self.patch < 1 or self.height % (2 * self.patch) or self.width % (2 * self.patch):
            raise ValueError("height and width must be multiples of twice the patch")
        if self.dim % self.heads or self.dim % VECTOR or self.channels % 8:
            raise ValueError(f"dim must be a multiple of heads and {VECTOR}, and channels of 8")
        rows, columns = self.grid
        if self.channels * rows * columns % VECTOR:
            raise ValueError(f"channels times patches of a frame must be a multiple of {VECTOR}")
        if not self.scenes:
            raise ValueError("there must be a scene")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a frame: rows and columns."""
        return self.height // self.patch, self.width // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of a frame."""
        rows, columns = self.grid
        return rows * columns // 4

    @property
    def head_dim(self) -> int:
        """Numbers of one attention head."""
        return self.dim // self.heads

    @property
    def action_size(self) -> int:
        """Numbers of an action: the keys (0 or 1), then the axes (-1 to 1)."""
        return len(self.keys) + len(self.axes)

    @property
    def frame_numbers(self) -> int:
        """Numbers of a frame."""
        return 3 * self.height * self.width

    @property
    def cached_numbers(self) -> int:
        """Numbers that a frame leaves in the cache: a key and a value a token and layer."""
        return 2 * self.layers * self.tokens * self.dim
