"""How a robot is controlled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon_client.actions import Vector, safe_action
from antiphon_client.arrays import BELOW


@dataclass(frozen=True)
class ControlOptions:
    """How a robot is controlled.

    `safe_action` is an action, a vector of finite numbers, or makes one of the last action that
    was taken (None: there was none). In each tick the loop waits for an action until `deadline_ms`
    after its beginning. An action whose observation is older than `max_age_ms` is not taken.

    The newest observation is sent once `execute` ticks have passed since the last one that was;
    with 1 that is as soon as the answer to that one is there, with the length of the chunks
    it is synchronous control. `prefix_key` names the member of an observation in which the policy
    is told the actions that will be taken before its answer can be there: those that it must not
    change. They are `prefix_steps` rows of float32, zeros behind what counts, and the member
    `{prefix_key}_length` is how many count.

    Raises ValueError, which names the option, for what makes no sense.
    """

    safe_action: npt.ArrayLike | Callable[[Vector | None], npt.ArrayLike]
    rate_hz: float
    deadline_ms: float
    max_age_ms: float
    execute: int = 1
    prefix_key: str | None = None
    prefix_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("rate_hz", "deadline_ms", "max_age_ms"):
            if not _is_number(getattr(self, name)):
                raise ValueError(f"{name} is a number")
        if not 0 < self.rate_hz < math.inf:
            raise ValueError("rate_hz is above 0")
        if not 0 < self.deadline_ms <= self.period_ms:
            raise ValueError(f"deadline_ms is above 0, and at most a period ({self.period_ms:g})")
        if not self.deadline_ms <= self.max_age_ms < math.inf:
            raise ValueError("max_age_ms is at least deadline_ms, and finite")
        if not _counts(self.execute):
            raise ValueError("execute is a whole number of 1 or more")
        if (self.prefix_key is None) != (self.prefix_steps is None):
            raise ValueError("prefix_key and prefix_steps go together")
        if self.prefix_key is not None and not _is_key(self.prefix_key):
            raise ValueError("prefix_key is a text, of no NUL")
        if self.prefix_steps is not None and not _counts(self.prefix_steps):
            raise ValueError("prefix_steps is a whole number of 1 or more")
        if not callable(self.safe_action):
            # Whatever becomes of the caller's array, the robot does what was said here.
            object.__setattr__(self, "safe_action", safe_action(self.safe_action))
        self.safely(None)

    def safely(self, last: Vector | None) -> Vector:
        """The safe action after the action `last` (None: there was none). Raises ValueError where
        a function makes none."""
        safe = self.safe_action
        return safe_action(safe(last)) if callable(safe) else np.asarray(safe)

    @property
    def period_ms(self) -> float:
        """The time from one tick to the next."""
        return 1000.0 / self.rate_hz


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _counts(value: object) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1  # type: ignore[operator]


def _is_key(value: object) -> bool:
    return isinstance(value, str) and value != "" and BELOW not in value
