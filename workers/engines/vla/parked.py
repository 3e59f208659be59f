"""A session's state as a file: a digest, then its arrays by name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest, SessionStateLost
from protocol.openpi import pack, unpack
from workers.engines.vla.policy import State

_MOST_VALUES = 1_000_000
"""Of a state, which no event loop reads."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def create(path: Path) -> None:
    """Make the file, where none is yet, for nobody else to read."""
    path.touch(mode=0o600, exist_ok=False)


def write_state(path: Path, state: State) -> None:
    """Write to the file at `path`, which is there and empty."""
    body = pack(dict(state))
    with path.open("r+b") as file:
        file.write(hashlib.sha256(body).digest())
        file.write(body)


def read_state(path: Path, initial: State) -> dict[str, npt.NDArray[Any]]:
    """The state in the file at `path`, of the same form as `initial`.

    Raises SessionStateLost for any other file.
    """
    try:
        content = path.read_bytes()
        body = memoryview(content)[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
            raise SessionStateLost("the parked state is not whole")
        state = unpack(body, _MOST_VALUES)
    except OSError as error:
        reason = f"the parked state cannot be read: {error.strerror}"
        raise SessionStateLost(reason) from error
    except InvalidRequest as error:
        raise SessionStateLost(f"the parked state cannot be read: {error}") from error
    if not isinstance(state, dict) or _form(state) != _form(dict(initial)):
        raise SessionStateLost("the parked state is not this policy's")
    # A view would keep the whole file, and counts with it.
    return {name: values.copy() for name, values in state.items()}


def _form(state: dict[Any, Any]) -> dict[Any, Any]:
    return {
        name: (values.dtype.str, values.shape) if isinstance(values, np.ndarray) else None
        for name, values in state.items()
    }
