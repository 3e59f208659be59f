"""What the engines of a session say of their models, as clients of every language can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from protocol.openpi import unpack

METADATA = "metadata"
"""What a policy says of itself, which its engine has packed as OpenPI has it."""


def told(about: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each stage says, without those that say nothing."""
    return {stage: _of_stage(said) for stage, said in about.items() if said}


def _of_stage(said: Mapping[str, Any]) -> dict[str, Any]:
    packed = said.get(METADATA)
    if not isinstance(packed, bytes):
        return dict(said)
    return {**said, METADATA: _plain(unpack(packed))}


def _plain(value: Any) -> Any:
    """`value` without what only numpy has: an array is its bytes, with dtype and shape."""
    match value:
        case np.ndarray():
            return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
        case np.generic():
            return value.item()
        case dict():
            return {_name(key): _plain(entry) for key, entry in value.items()}
        case list():
            return [_plain(entry) for entry in value]
    return value


def _name(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")
