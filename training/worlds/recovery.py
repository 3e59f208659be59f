"""Whether frames show what the player did."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.worlds import arena


def recovered(
    frames: arena.Bytes, keys: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Of each frame but the first, (worlds, frames): whether the square has gone where the keys
    say, on both axes; and whether it was found at all."""
    places, found = arena.find_player(frames)
    before = places[:, :-1]
    expected = np.clip(before + arena.displacement(keys), arena.LOW, arena.HIGH) - before
    moved = places[:, 1:] - before
    right = (np.abs(moved - expected) < arena.STEP / 2).all(-1)
    return right & found[:, 1:] & found[:, :-1], found[:, 1:]
