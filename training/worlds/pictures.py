"""Pictures of rollouts, still and moving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from training.worlds.arena import Bytes

GAP = 4
LARGER = 2
"""Times that a pixel is repeated each way."""


def strip(true: Bytes, made: Bytes, *, columns: int = 10, every: int = 4) -> Bytes:
    """Rows of frames, true above generated, of rollouts (worlds, frames, height, width, 3): each
    `every`th of the first."""
    rows = []
    for one, other in zip(true, made, strict=True):
        for frames in (one, other):
            chosen = frames[: columns * every : every]
            rows.append(np.concatenate(list(chosen), axis=1))
        rows.append(np.full((GAP, *rows[-1].shape[1:]), 255, np.uint8))
    return _larger(np.concatenate(rows[:-1], axis=0))


def write_picture(path: Path, picture: Bytes) -> None:
    """Write a picture of (height, width, 3); the ending of its name says in which format."""
    Image.fromarray(picture).save(path, optimize=True)


def write_video(path: Path, true: Bytes, made: Bytes, *, rate_hz: float) -> None:
    """Write rollouts (worlds, frames, height, width, 3) beside each other, true above generated,
    as an animated WebP."""
    above, below = (np.concatenate(list(each), axis=2) for each in (true, made))
    gap = np.full_like(above[:, :GAP], 255)
    pictures = np.concatenate([above, gap, below], axis=1)
    first, *others = (Image.fromarray(_larger(picture)) for picture in pictures)
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=round(1000 / rate_hz),
        loop=0,
        quality=60,
    )


def _larger(picture: Bytes) -> Bytes:
    return picture.repeat(LARGER, 0).repeat(LARGER, 1)
