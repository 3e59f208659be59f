"""Maps of numpy arrays as the gateway's robot sessions carry them.

Each array of numbers is a payload; everything else goes together as one more, in msgpack with
arrays coded as `openpi_client.msgpack_numpy` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from antiphon_client.errors import ProtocolError

BELOW = "\0"
"""Joins the keys that lead to an array."""
MAX_ARRAYS = 61
"""A step takes 64 payloads, of which the rest is one, and two are left for who has to add an array
and a number; further arrays go with the rest."""
MAX_DEPTH = 32

_LENGTH_BYTES = 3
"""The length of data that is long takes so much more than that of no data."""
_NUMBERS = "biuf"
_REFUSED = "VOc"
_TIMES = "mM"


def to_payloads(type: str, members: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The payloads of a map. All arrays are copied, so that they may change at once.

    Raises TypeError for what has no place on the wire, such as objects, or keys that are neither
    text nor bytes, and ValueError for values that have none, such as integers of more than 64 bits.
    """
    payloads: list[dict[str, Any]] = []
    try:
        _check_keys(members)
        rest = _take_arrays(type, members, "", payloads, 0)
        if rest or not payloads:
            payloads.append({"type": type, "data": _encoder.encode(rest)})
    except UnicodeError as error:
        raise ValueError(f"text that is no Unicode: {error}") from error
    except OverflowError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deep, or in itself") from error
    except (TypeError, ValueError):
        raise
    except Exception as error:  # Of objects that pose as maps, numbers or text.
        raise TypeError(f"what cannot be encoded: {error!r}") from error
    return payloads


def encoded_bytes(payloads: Iterable[Mapping[str, Any]]) -> int:
    """How long these payloads are in a frame."""
    return sum(
        len(_encoder.encode({**payload, "data": b""})) + _LENGTH_BYTES + len(payload["data"])
        for payload in payloads
    )


def from_payloads(payloads: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The map of these payloads; its arrays are read-only. Raises ProtocolError."""
    members: dict[str, Any] = {}
    arrays = []
    try:
        for payload in payloads:
            if payload["dtype"]:
                arrays.append((payload["attributes"]["key"].split(BELOW), array(payload)))
            else:
                members.update(_plain(msgspec.msgpack.decode(payload["data"]), 0))
        for path, values in arrays:
            place = members
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = values
    except Exception as error:  # What numpy raises of names, shapes and numbers is not told.
        raise ProtocolError(f"payloads that make no map: {error!r:.200}") from error
    return members


def array(payload: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The array of a payload that is one, read-only. Raises ValueError, TypeError."""
    dtype = np.dtype(payload["dtype"])
    if dtype.kind in _REFUSED:
        raise TypeError(f"an array of dtype {dtype}")
    data, shape = payload["data"], payload["shape"]
    values: npt.NDArray[Any] = np.ndarray(shape, dtype, data)
    if values.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {shape}")
    return values


def _take_arrays(
    type: str, members: Mapping[str, Any], above: str, payloads: list[dict[str, Any]], depth: int
) -> dict[str, Any]:
    """Moves arrays into `payloads`; what remains."""
    if not isinstance(members, Mapping):
        raise TypeError(f"a map is needed, not a {members.__class__.__name__}")
    rest: dict[str, Any] = {}
    for key, value in members.items():
        if isinstance(key, str) and BELOW not in key:
            if (
                isinstance(value, np.ndarray)
                and value.dtype.kind in _NUMBERS
                and len(payloads) < MAX_ARRAYS
            ):
                payloads.append(_payload(type, value, above + key))
                continue
            if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
                if left := _take_arrays(type, value, above + key + BELOW, payloads, depth + 1):
                    rest[key] = left
                continue
        rest[key] = value
    return rest


def _check_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str | bytes):
                raise TypeError(f"a key is text or bytes, not {key!r:.100}")
            _check_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_keys(entry)


def _payload(type: str, values: npt.NDArray[Any], key: str) -> dict[str, Any]:
    key.encode()  # Raises what the wire would.
    return {
        "type": type,
        "data": values.tobytes(),
        "dtype": values.dtype.str,
        "shape": list(values.shape),
        "attributes": {"key": key},
    }


def _coded(value: Any) -> Any:
    """What msgpack has no form for, as the wire has it."""
    if isinstance(value, np.ndarray):
        _check(value.dtype)
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    # Those that are Python's own numbers or text too travel as such.
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, np.generic):
        _check(value.dtype)
        item = int(value.view(np.int64)) if value.dtype.kind in _TIMES else value.item()
        if isinstance(item, np.generic):
            raise TypeError(f"a {value.dtype} scalar has no number of Python's")
        return {b"__npgeneric__": True, b"data": item, b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} has no place in an observation")


def _check(dtype: np.dtype[Any]) -> None:
    if dtype.kind in _REFUSED:
        raise TypeError(f"arrays of dtype {dtype} are not carried")


def _plain(value: Any, depth: int) -> Any:
    """What was coded, as arrays and scalars again."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_plain(entry, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if b"__ndarray__" in value:
        return array({name.decode(): entry for name, entry in value.items()})
    if b"__npgeneric__" in value:
        dtype = np.dtype(value[b"dtype"])
        _check(dtype)
        if dtype.kind in "SU":
            raise TypeError(f"a {dtype} scalar travels as it is")
        if dtype.kind in _TIMES:
            return np.int64(value[b"data"]).view(dtype.newbyteorder("="))
        return dtype.type(value[b"data"])
    return {key: _plain(entry, depth + 1) for key, entry in value.items()}


_encoder = msgspec.msgpack.Encoder(enc_hook=_coded)
