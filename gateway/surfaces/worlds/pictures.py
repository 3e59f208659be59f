"""Pictures of frames: encoded off the loop, once for all who want the same.

The threads are few. Their queue is bounded by who asks: a connection waits for one picture at a
time, and what it leaves out is never encoded.
"""

from __future__ import annotations

import asyncio
import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from gateway.cameras import encoded as as_png
from gateway.metrics import GatewayMetrics
from protocol.arrays import array_of
from protocol.errors import AntiphonError, EngineFailed, InvalidRequest
from protocol.payloads import Payload, PayloadType
from sessions.steps.events import StepDone

try:
    from PIL import Image
except ModuleNotFoundError:
    Image = None  # type: ignore[assignment]

THREADS = 2

FORMATS = ("png", "raw") if Image is None else ("jpeg", "webp", "png", "raw")
"""The formats that this gateway has: those with loss need Pillow."""

_Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Look:
    """How a client wants its pictures."""

    format: str
    quality: int

    def check(self) -> Look:
        """Itself. Raises InvalidRequest for a format that this gateway has not."""
        if self.format not in FORMATS:
            raise InvalidRequest(
                f"there is no {self.format} here, but {', '.join(FORMATS)}",
                field="format",
                code="unsupported",
            )
        return self


@dataclass(frozen=True)
class Picture:
    """A frame in one format; it took `encoded_ms`."""

    data: bytes
    width: int
    height: int
    encoded_ms: float


class Shot:
    """One frame of a step, as long as somebody wants to see it."""

    def __init__(self, payload: Payload, done: StepDone, done_ms: float, studio: Studio) -> None:
        self.payload = payload
        self.done = done
        self.done_ms = done_ms
        """When the step was done (monotonic)."""
        self._studio = studio
        self._pictures: dict[Look, asyncio.Future[Picture]] = {}

    def attribute(self, name: str, default: Any = 0) -> Any:
        """What the engine says of the frame."""
        return self.payload.attributes.get(name, default)

    async def picture(self, look: Look) -> Picture:
        """The frame, encoded. Raises EngineFailed for what is no picture."""
        picture = self._pictures.get(look)
        if picture is None:
            picture = self._pictures[look] = self._studio.encode(self.payload, look)
        # Others may wait for the same one.
        return await asyncio.shield(picture)


class Studio:
    """Where pictures are made, for all worlds of a gateway."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, "pictures")
        self._shots: WeakValueDictionary[int, Shot] = WeakValueDictionary()

    def shots(self, done: StepDone, done_ms: float) -> list[Shot]:
        """The frames of a step: for whoever is told of it, the same ones."""
        return [
            self._shot(payload, done, done_ms)
            for pieces in done.outputs.values()
            for payload in pieces
            if payload.type is PayloadType.FRAMES
        ]

    def _shot(self, payload: Payload, done: StepDone, done_ms: float) -> Shot:
        shot = self._shots.get(id(payload))
        if shot is None or shot.payload is not payload:
            shot = self._shots[id(payload)] = Shot(payload, done, done_ms, self)
        return shot

    def encode(self, payload: Payload, look: Look) -> asyncio.Future[Picture]:
        """Have a frame encoded by a thread."""
        loop = asyncio.get_running_loop()
        picture = loop.run_in_executor(self._threads, _encoded, payload, look)
        picture.add_done_callback(lambda done: self._count(done, look))
        return picture

    def _count(self, done: asyncio.Future[Picture], look: Look) -> None:
        if not done.cancelled() and done.exception() is None:
            self._metrics.picture_encoded(look.format, done.result().encoded_ms / 1000)


def _encoded(payload: Payload, look: Look) -> Picture:
    begun_s = time.perf_counter()
    pixels = _pixels(payload)
    height, width = pixels.shape[:2]
    data = _data(pixels, look)
    return Picture(data, width, height, round((time.perf_counter() - begun_s) * 1000, 3))


def _pixels(payload: Payload) -> _Pixels:
    try:
        pixels = array_of(payload)
    except AntiphonError as error:
        raise EngineFailed(
            f"the engine's frame is none: {error.message}", code="no_picture"
        ) from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise EngineFailed(
            f"a frame is (height, width, 3) bytes, not {pixels.dtype} of {pixels.shape}",
            code="no_picture",
        )
    return pixels


def _data(pixels: _Pixels, look: Look) -> bytes:
    match look.format:
        case "raw":
            return pixels.tobytes()
        case "png":
            return as_png(pixels)
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    file = io.BytesIO()
    if look.format == "webp":
        picture.save(file, "WEBP", quality=look.quality, method=1)
    else:
        # Small pictures are made of hard edges: colours at half the size would blur them.
        picture.save(file, "JPEG", quality=look.quality, subsampling=0)
    return file.getvalue()
