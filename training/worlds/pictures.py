"""Pictures of rollouts, as PNG files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from training.worlds.arena import Bytes

GAP = 4


def strip(true: Bytes, made: Bytes, *, columns: int = 10, every: int = 4) -> Bytes:
    """Rows of frames, true above generated, of rollouts (worlds, frames, height, width, 3): each
    `every`th of the first."""
    rows = []
    for one, other in zip(true, made, strict=True):
        for frames in (one, other):
            chosen = frames[: columns * every : every]
            rows.append(np.concatenate(list(chosen), axis=1))
        rows.append(np.full((GAP, *rows[-1].shape[1:]), 255, np.uint8))
    return np.concatenate(rows[:-1], axis=0).repeat(2, 0).repeat(2, 1)


def write_png(path: Path, picture: Bytes) -> None:
    """Write a picture of (height, width, 3)."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + row.tobytes() for row in picture)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
