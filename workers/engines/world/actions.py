"""What a player holds down: state, of which the latest counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.arrays import array_of
from protocol.errors import InvalidRequest
from protocol.payloads import Payload, PayloadType
from workers.engines.world.architecture import Architecture


@dataclass(frozen=True)
class Held:
    """Keys and axes as they are held, since the input with this number (0: none yet)."""

    values: tuple[float, ...]
    sequence: int = 0

    def released(self) -> Held:
        """Nothing is held any more."""
        return Held((0.0,) * len(self.values), self.sequence)


def held_of(payload: Payload, architecture: Architecture, before: Held) -> Held:
    """What a piece of stream input says is held from now on: one row, whose attribute
    `sequence` is the client's own number; without one it counts on.

    Raises InvalidRequest for anything else.
    """
    held = given_by(payload, architecture, before.sequence + 1)
    if len(held) != 1:
        raise InvalidRequest("held actions are one row", field="actions")
    return held[0]


def given_by(payload: Payload, architecture: Architecture, sequence: int = 0) -> list[Held]:
    """What each row of a payload has held, under the number that its attribute `sequence` says,
    or this one. Raises InvalidRequest."""
    said = payload.attributes.get("sequence", sequence)
    if not isinstance(said, int) or said < 0:
        raise InvalidRequest("a sequence is a number of 0 or more", field="sequence")
    return [Held(tuple(row), said) for row in rows_of(payload, architecture).tolist()]


def rows_of(payload: Payload, architecture: Architecture) -> npt.NDArray[np.float32]:
    """Rows of actions, (rows, action_size): keys of 0 or 1, then axes of -1 to 1.

    Raises InvalidRequest for anything else.
    """
    if payload.type is not PayloadType.ACTIONS:
        raise InvalidRequest(f"a world takes actions, not {payload.type}", field="inputs")
    size = architecture.action_size
    values = array_of(payload)
    if values.dtype.kind not in "fiub" or values.ndim not in (1, 2) or values.shape[-1] != size:
        raise InvalidRequest(
            f"actions are rows of {size} numbers, not {values.dtype} of {values.shape}",
            field="actions",
        )
    rows = np.array(values, np.float32, ndmin=2)
    keys, axes = rows[:, : len(architecture.keys)], rows[:, len(architecture.keys) :]
    if not (np.isin(keys, (0, 1)).all() and (np.abs(axes) <= 1).all()):
        raise InvalidRequest("a key is 0 or 1, and an axis from -1 to 1", field="actions")
    return rows
