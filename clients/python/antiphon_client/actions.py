"""Actions: whose they are, and that they are numbers a robot can be given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon_client.arrays import from_payloads
from antiphon_client.errors import ProtocolError
from antiphon_client.told import understood

Vector = npt.NDArray[Any]


class Source(StrEnum):
    """Who decided on an action."""

    POLICY = "policy"
    GATEWAY = "gateway"
    """The safe action that the gateway gives in place of the policy."""
    WATCHDOG = "watchdog"
    """The safe action that is configured here: nothing better has come."""


@dataclass(frozen=True)
class Action:
    """What the robot does in tick number `tick`. `values` are a copy, and read-only.

    `age_ms` is the time since the observation that a policy's action was made from. `reason` is
    why it is a safe one.
    """

    values: Vector
    source: Source
    tick: int
    age_ms: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _read_only_copy(self.values))

    @property
    def fresh(self) -> bool:
        """Whether it is the policy's."""
        return self.source is Source.POLICY


def safe_action(given: npt.ArrayLike) -> Vector:
    """A copy of an action that somebody configured. Raises ValueError where it is none."""
    try:
        values = _read_only_copy(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"safe_action is not an array: {error}") from error
    if values.dtype.kind not in "iuf" or values.ndim != 1 or not values.size:
        raise ValueError("safe_action is a vector of numbers, or a function that makes one")
    if not np.isfinite(values).all():
        raise ValueError("safe_action is finite")
    return values


def chunk_of(fields: Mapping[str, Any], dimensions: int) -> Vector:
    """The actions of an answer, each a row of so many numbers. Raises ProtocolError for what the
    robot cannot do."""
    with understood("an answer without actions"):
        chunk = from_payloads(fields["outputs"]["actions"])["actions"]
    if not isinstance(chunk, np.ndarray) or chunk.dtype.kind not in "iuf" or not chunk.size:
        raise ProtocolError("actions that are no array of numbers")
    if chunk.ndim != 2 or not np.isfinite(chunk).all():
        raise ProtocolError(f"actions that are no rows of finite numbers: {chunk.shape}")
    if chunk.shape[1] != dimensions:
        raise ProtocolError(
            f"actions of {chunk.shape[1]} numbers, for a robot whose safe action has {dimensions}"
        )
    return chunk


def _read_only_copy(values: npt.ArrayLike) -> Vector:
    copy = np.array(values)
    copy.flags.writeable = False
    return copy
