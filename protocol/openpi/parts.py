"""A map of arrays as the payloads of a step: each array one payload, all the rest another.

So an array crosses to its engine as what it is, by whatever connector its edge has, and who
speaks another protocol can make one too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.arrays import BFLOAT16, array_of, array_payload
from protocol.errors import InvalidRequest
from protocol.openpi.msgpack_numpy import MAX_AXES, MAX_DEPTH, check_dtype, pack, unpack
from protocol.payloads import Payload, PayloadType

KEY = "key"
"""The attribute that says where an array belongs: its keys from the top, joined by `BELOW`."""
BELOW = "\0"
MAX_ARRAYS = 256
"""Payloads of one map; further arrays go with the rest."""


def to_parts(type: PayloadType, members: dict[Any, Any]) -> list[Payload]:
    """The payloads of a map; their data are views of its arrays.

    Arrays that only lists or keys of bytes lead to go with the rest. Raises InvalidRequest for
    what has no place on the wire.
    """
    parts: list[Payload] = []
    rest = _take_arrays(type, members, "", parts)
    if rest or not parts:
        parts.append(Payload(type, pack(rest)))
    return parts


def from_parts(parts: Iterable[Payload]) -> dict[Any, Any]:
    """The map of these payloads; its arrays are read-only views of their data.

    Raises InvalidRequest where they do not make one.
    """
    joined = Joined()
    for part in parts:
        joined.add(part)
    return joined.members()


class Joined:
    """`from_parts` for payloads that come one by one, each of which is looked at as it comes."""

    def __init__(self) -> None:
        self._rest: dict[Any, Any] = {}
        self._arrays: list[tuple[str, Any]] = []

    def add(self, part: Payload) -> None:
        """One more payload. Raises InvalidRequest where it is no part of a map."""
        if part.dtype:
            key = part.attributes.get(KEY)
            if not isinstance(key, str):
                raise InvalidRequest(f"an array without the attribute {KEY!r}", field="inputs")
            try:
                self._arrays.append((key, _array(part)))
            except InvalidRequest as error:
                error.field = key.replace(BELOW, ".")
                raise
            return
        rest = unpack(part.data)
        if not isinstance(rest, dict):
            raise InvalidRequest("a map is expected beside the arrays", field="inputs")
        self._rest.update(rest)

    def members(self) -> dict[Any, Any]:
        """The map, once all have come. Raises InvalidRequest where they do not make one."""
        for key, array in self._arrays:
            if BELOW in key:
                _put(self._rest, key.split(BELOW), array)
            elif key in self._rest:
                raise _twice(key)
            else:
                self._rest[key] = array
        return self._rest


def _array(part: Payload) -> npt.NDArray[Any]:
    """Raises InvalidRequest for one that OpenPI's wire has not either."""
    if part.dtype != BFLOAT16:
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # It has no such dtype.
            check_dtype(np.dtype(part.dtype))
    if len(part.shape) > MAX_AXES:
        raise InvalidRequest(f"an array of {len(part.shape)} axes; there are {MAX_AXES} at most")
    return array_of(part)


def _take_arrays(
    type: PayloadType, members: dict[Any, Any], above: str, parts: list[Payload], depth: int = 0
) -> dict[Any, Any]:
    """Moves arrays into `parts`; what remains."""
    rest = {}
    for key, value in members.items():
        if isinstance(key, str) and BELOW not in key:
            # Of dtypes that `Payload` cannot name the wire's own coding is taken.
            if (
                isinstance(value, np.ndarray)
                and value.dtype.kind in "biuf"
                and len(parts) < MAX_ARRAYS
            ):
                parts.append(array_payload(type, value, **{KEY: above + key}))
                continue
            if isinstance(value, dict) and value and depth < MAX_DEPTH:
                left = _take_arrays(type, value, above + key + BELOW, parts, depth + 1)
                if left:
                    rest[key] = left
                continue
        rest[key] = value
    return rest


def _put(members: dict[Any, Any], path: list[str], array: Any) -> None:
    if len(path) > MAX_DEPTH:
        raise InvalidRequest(f"an array {len(path)} keys deep", field="inputs")
    for key in path[:-1]:
        below = members.setdefault(key, {})
        if not isinstance(below, dict):
            raise InvalidRequest(f"{key!r:.64} is a map and something else", field="inputs")
        members = below
    if path[-1] in members:
        raise _twice(path[-1])
    members[path[-1]] = array


def _twice(key: str) -> InvalidRequest:
    return InvalidRequest(f"{key!r:.64} is there twice", field="inputs")
