"""What the two ends of an edge say about its payloads, checked before anything runs."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from protocol.arrays import BFLOAT16
from protocol.errors import ConfigError, InvalidRequest
from protocol.payloads import Payload, PayloadType


class PayloadSchema(msgspec.Struct, frozen=True):
    """What an end of an edge produces or takes.

    `dtype` is numpy's `dtype.str` or "bfloat16", "" for any; `shape` has None for a
    dimension of any length, and is None for any shape. `attributes` are the names that
    are produced, or needed.
    """

    type: PayloadType
    dtype: str = ""
    shape: tuple[int | None, ...] | None = None
    attributes: frozenset[str] = frozenset()


def schema_of(schemas: tuple[PayloadSchema, ...], payload: PayloadType) -> PayloadSchema | None:
    """What an engine says of its payloads of a type."""
    return next((schema for schema in schemas if schema.type is payload), None)


def check_edge(edge: str, produced: PayloadSchema, taken: PayloadSchema) -> None:
    """Raise ConfigError when what one end produces is not what the other end takes.

    An end that says nothing of dtype or shape agrees with every other.
    """
    reason = None
    if produced.type is not taken.type:
        reason = f"carries {produced.type}, and its consumer takes {taken.type}"
    elif produced.dtype and taken.dtype and not _same_dtype(produced.dtype, taken.dtype):
        reason = f"carries dtype {produced.dtype}, and its consumer takes {taken.dtype}"
    elif (
        produced.shape is not None
        and taken.shape is not None
        and not _may_match(produced.shape, taken.shape)
    ):
        reason = (
            f"carries shape {_shown(produced.shape)}, and its consumer takes {_shown(taken.shape)}"
        )
    if reason is None and (missing := taken.attributes - produced.attributes):
        reason = f"does not say {', '.join(sorted(missing))}, which its consumer needs"
    if reason is not None:
        raise ConfigError(f"edge {edge} {reason}", field=edge)


def check_payload(payload: Payload, schema: PayloadSchema) -> None:
    """Raise InvalidRequest when a payload is not what `schema` says, or contradicts itself."""
    if payload.type is not schema.type:
        raise InvalidRequest(f"a payload of {payload.type} where {schema.type} is expected")
    if schema.dtype and not _same_dtype(payload.dtype, schema.dtype):
        raise InvalidRequest(f"dtype {payload.dtype!r} where {schema.dtype!r} is expected")
    if schema.shape is not None and not _may_match(payload.shape, schema.shape):
        raise InvalidRequest(
            f"shape {_shown(payload.shape)} where {_shown(schema.shape)} is expected"
        )
    if missing := schema.attributes - payload.attributes.keys():
        raise InvalidRequest(f"the payload does not say {', '.join(sorted(missing))}")
    if payload.dtype:
        size = _itemsize(payload.dtype) * math.prod(payload.shape)
        if size != len(payload.data) or any(length < 0 for length in payload.shape):
            raise InvalidRequest(
                f"{len(payload.data)} bytes are no array of dtype {payload.dtype!r} and shape "
                f"{_shown(payload.shape)}"
            )


def _may_match(one: tuple[int | None, ...], other: tuple[int | None, ...]) -> bool:
    return len(one) == len(other) and all(
        a is None or b is None or a == b for a, b in zip(one, other, strict=True)
    )


def _same_dtype(one: str, other: str) -> bool:
    if BFLOAT16 in (one, other):
        return one == other
    try:
        return np.dtype(one) == np.dtype(other)
    except TypeError:
        return False


def _itemsize(dtype: str) -> int:
    try:
        return 2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize
    except TypeError as error:
        raise InvalidRequest(f"{dtype!r} is no dtype") from error


def _shown(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if length is None else str(length) for length in shape) + ")"
