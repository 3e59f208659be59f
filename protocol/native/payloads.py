"""Typed data that a client hands to a step or a request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.native.fields import Index, Text
from protocol.payloads import PayloadType

MAX_INPUTS = 64
"""Payloads of one step or request."""

_Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class NewPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of data: text as UTF-8, audio as PCM16, arrays C-contiguous.

    Arrays say their `dtype` as numpy's `dtype.str`, or "bfloat16", and their `shape`.
    """

    type: PayloadType
    data: bytes
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""
    shape: Annotated[list[Index], msgspec.Meta(max_length=16)] = []
    attributes: Annotated[
        dict[str, _Integer | float | bool | Text | None], msgspec.Meta(max_length=64)
    ] = {}


Inputs = Annotated[list[NewPayload], msgspec.Meta(max_length=MAX_INPUTS)]
