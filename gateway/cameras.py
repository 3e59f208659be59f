"""What the robots' cameras see, for operators of a gateway that allows it.

Of each session the last observation is held in memory, until the next one or its end, and
nothing of it is ever written anywhere. A picture is made when somebody asks for it, by a thread.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.arrays import array_of
from protocol.errors import InvalidRequest
from protocol.openpi.parts import BELOW, KEY
from protocol.payloads import Payload

CAMERAS = 6
"""Of one observation; further ones are not shown."""
LONGEST_SIDE = 256
"""Larger pictures are shown by every second, third, ... pixel."""

_PIXELS = "|u1"


@dataclass(frozen=True)
class Picture:
    """One picture of an observation: its key, the size of the camera's, and a PNG in base64."""

    camera: str
    width: int
    height: int
    png: str


@dataclass(frozen=True)
class Seen:
    """What a robot's cameras saw, so long ago."""

    age_s: float
    pictures: list[Picture]


class Cameras:
    """The last observations of the sessions of a gateway."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, list[Payload]]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def observed(self, session: str, inputs: Sequence[Payload]) -> None:
        """A session got this observation."""
        images = [payload for payload in inputs if _is_image(payload)][:CAMERAS]
        if images:
            self._last[session] = time.monotonic(), images

    def forget(self, session: str) -> None:
        """A session has ended."""
        self._last.pop(session, None)

    async def seen(self, session: str) -> Seen:
        """What a session's cameras saw last; no pictures where there was no observation."""
        last = self._last.get(session)
        if last is None:
            return Seen(0.0, [])
        at_s, images = last
        pictures = await asyncio.to_thread(_pictures, images)
        return Seen(round(time.monotonic() - at_s, 3), pictures)


def _is_image(payload: Payload) -> bool:
    return payload.dtype == _PIXELS and _channels_last(payload.shape) is not None


def _channels_last(shape: tuple[int, ...]) -> bool | None:
    """Whether an image of this shape has its channels last, or first; None: it is no image."""
    if len(shape) != 3 or min(shape) < 1:
        return None
    if shape[2] in (1, 3):
        return True
    return False if shape[0] in (1, 3) else None


def _pictures(images: list[Payload]) -> list[Picture]:
    pictures = []
    for payload in images:
        try:
            pixels = array_of(payload)
        except InvalidRequest:
            continue  # Its session is told so by its policy.
        if not _channels_last(payload.shape):
            pixels = np.moveaxis(pixels, 0, 2)
        height, width = pixels.shape[:2]
        every = -(-max(height, width) // LONGEST_SIDE)
        png = base64.b64encode(encoded(pixels[::every, ::every])).decode()
        name = str(payload.attributes.get(KEY, "")).replace(BELOW, "/")
        pictures.append(Picture(name, width, height, png))
    return pictures


def encoded(pixels: npt.NDArray[Any]) -> bytes:
    """A PNG of pixels of shape (height, width, 1 or 3) and dtype uint8 (PNG, third edition)."""
    height, width, channels = pixels.shape
    kind = 0 if channels == 1 else 2  # Greyscale, or truecolour.
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # Each begins with filter type 0.
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(rows.tobytes(), 1)),
            (b"IEND", b""),
        )
    )
