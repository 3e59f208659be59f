"""What a robot senses: a simulation, what is done to its images, and recordings of it.

A recording is a file of messages, each behind its length (4 bytes, big-endian), coded as the
OpenPI client codes them: first `{rate_hz, max_steps}`, then one a chunk: `{task,
seed, step, observation, actions}`.
"""

from __future__ import annotations

import importlib
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from openpi_client import msgpack_numpy

Action = npt.NDArray[Any]

RECORDED = "recorded"
KEPT = 64
"""Observations of a recording that are replayed: the first ones, over and over."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of a recording: an observation has at most 16 MiB."""

_LENGTH = struct.Struct(">I")


class Simulation(Protocol):
    """A world with one robot in it and one task to do, made as `CLASS(task, seed)`, used by one
    thread. A class that may also have `training_seeds`, a range."""

    tasks: ClassVar[Sequence[str]]
    """What can be asked of the robot."""
    rate_hz: float
    """Steps in a second of the world."""

    @property
    def max_steps(self) -> int:
        """Steps after which an episode has failed."""

    def reset(self, seed: int) -> None:
        """Begin an episode, in which all is as `seed` has it."""

    def observe(self) -> dict[str, Any]:
        """What the policy is asked with now: an OpenPI observation, of new arrays."""

    def hold(self, last: Action | None) -> Action:
        """What the robot does while it has no action, `last` being the one before, if any was."""

    def step(self, action: Action) -> None:
        """The world goes on for one step."""

    @property
    def succeeded(self) -> bool:
        """Whether the task is done."""


class World:
    """The worlds of a simulation, one for each task, or of a recording."""

    def __init__(self, make: Callable[[str, int], Simulation], about: Any) -> None:
        self.tasks = list(about.tasks)
        self.rate_hz = float(about.rate_hz)
        if not self.tasks or not 0 < self.rate_hz < math.inf:
            raise ValueError("it needs tasks, and a rate_hz above 0")
        self.training_seeds: range = getattr(about, "training_seeds", range(0))
        self._make = make
        self._made: dict[str, Simulation] = {}

    def at(self, task: str, seed: int) -> Simulation:
        """A world in which the episode of that seed begins."""
        made = self._made.get(task)
        if made is None:
            made = self._made[task] = self._make(task, seed)
        made.reset(seed)
        return made


def simulated(name: str) -> World:
    """The simulation `MODULE:CLASS`, also from the working directory. Raises ImportError, and
    ValueError for what is no simulation."""
    module, _, attribute = name.partition(":")
    sys.path.append("")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(str(error)) from None
    except Exception as error:  # Whatever a module does when it is loaded.
        raise ImportError(f"{module}: {type(error).__name__}: {error}") from error
    try:
        return World(kind, kind)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no simulation: {error}") from None


def replayed(path: str) -> World:
    """What was recorded in a file. Raises OSError, and ValueError for what is no recording."""
    with open(path, "rb") as file:
        messages = read(file)
        try:
            about = next(messages, None)
            if about is None or "rate_hz" not in about:
                raise ValueError(f"{path} is no recording")
            chunks = [chunk for chunk, _ in zip(messages, range(KEPT), strict=False)]
            if not chunks:
                raise ValueError(f"{path} has no observations")
            replay = Replay(about, chunks)
            return World(lambda task, seed: replay, replay)
        except (OSError, ValueError):
            raise
        except Exception as error:  # Whatever msgpack makes of other bytes.
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is no recording: {problem}") from None


class Replay:
    """A recording in the place of a simulation: it senses, and nothing it does has an effect."""

    tasks: ClassVar[Sequence[str]] = (RECORDED,)
    succeeded = False

    def __init__(self, about: dict[str, Any], chunks: Sequence[dict[str, Any]]) -> None:
        self.rate_hz: float = about["rate_hz"]
        self.max_steps: int = about["max_steps"]
        self._observations = [chunk["observation"] for chunk in chunks]
        self._still: Action = np.zeros_like(chunks[0]["actions"][0])
        self._next = 0

    def reset(self, seed: int) -> None:
        """Begin somewhere."""
        self._next = seed

    def observe(self) -> dict[str, Any]:
        """The next observation."""
        self._next += 1
        return dict(self._observations[self._next % len(self._observations)])

    def hold(self, last: Action | None) -> Action:
        """It makes no difference."""
        return self._still

    def step(self, action: Action) -> None:
        """Nothing happens."""


class Recording:
    """A recording that is written."""

    def __init__(self, path: str, rate_hz: float, max_steps: int) -> None:
        # For as long as the robot lives.
        self._file = open(path, "wb")  # noqa: SIM115
        self._write({"rate_hz": rate_hz, "max_steps": max_steps})

    def add(self, chunks: Sequence[dict[str, Any]]) -> None:
        """What was asked and answered in an episode."""
        for chunk in chunks:
            self._write(chunk)
        self._file.flush()

    def _write(self, message: dict[str, Any]) -> None:
        packed = msgpack_numpy.packb(message)
        self._file.write(_LENGTH.pack(len(packed)) + packed)


def read(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The messages of a recording."""
    while head := file.read(_LENGTH.size):
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes in a recording")
        yield msgpack_numpy.unpackb(file.read(length))


class Eyes:
    """The images of an episode: as they are (`seen`), without content (`blank`), or all the same
    as the first (`frozen`)."""

    def __init__(self, images: str) -> None:
        self._images = images
        self._first: dict[tuple[Any, ...], npt.NDArray[Any]] = {}

    def see(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The observation as it is sent."""
        return observation if self._images == "seen" else self._map(observation, ())

    def _map(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._map(part, (*path, key)) for key, part in value.items()}
        if not is_image(value):
            return value
        if self._images == "blank":
            return np.zeros_like(value)
        return self._first.setdefault(path, value)


def is_image(value: Any) -> bool:
    """Whether a value is one image, or several: an array of bytes with three axes or more."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim >= 3
