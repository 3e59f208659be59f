"""What is left out when a chunk would not be ready in time.

First steps: each frame that is still to come gets as many as there is time for, at least
`least`. Where that is not enough the chunk is cut short, but never below its first frame.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""The weight of the newest call in the time that a call is expected to take."""


class CallTime:
    """How long a call of the denoiser is expected to take, in ms."""

    def __init__(self) -> None:
        self.expected_ms = 0.0

    def took(self, call_ms: float) -> None:
        """A call has taken that long."""
        if not self.expected_ms:
            self.expected_ms = call_ms
        self.expected_ms += SMOOTHING * (call_ms - self.expected_ms)


def steps_of_next(
    remaining_ms: float, frames: int, call_ms: float, steps: int, least: int, *, first: bool
) -> int:
    """The denoising steps of the next frame, of `frames` that are still to be made in
    `remaining_ms`; 0: the chunk ends here. `first`: nothing of it was made yet."""
    if remaining_ms >= frames * steps * call_ms:
        return steps
    affordable = max(0, int(remaining_ms / call_ms))
    if affordable >= frames * least:
        return min(steps, affordable // frames)
    return least if first or affordable >= least else 0
