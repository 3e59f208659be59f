"""Arrays as payloads, and payloads as arrays, without a copy where there need be none.

numpy is enough. A torch tensor on the CPU comes in through the interfaces that torch
offers, and goes out when torch is loaded in the process that asks; this module never
loads it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest
from protocol.payloads import Payload, PayloadType

BFLOAT16 = "bfloat16"
"""The dtype of payloads that numpy has no name for: 16-bit brain floats."""


def array_payload(type: PayloadType, values: Any, **attributes: Any) -> Payload:
    """A payload of `values`: a numpy array, a CPU tensor, anything that lends its memory.

    The data is a view of the values, which must not change until the payload has been
    put; what is not C-contiguous is copied once. Raises InvalidRequest for values that
    are not on the CPU, or are Python objects.
    """
    values, dtype = _as_array(values)
    if values.dtype.hasobject:
        raise InvalidRequest("an array of Python objects is no payload")
    shape = values.shape
    if not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    data = values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
    return Payload(type, cast(bytes, data), dtype or values.dtype.str, shape, attributes)


def array_of(payload: Payload) -> npt.NDArray[Any]:
    """The payload's data as an array of its dtype and shape, read-only, not copied.

    Brain floats come as int16. Raises InvalidRequest when data, dtype and shape
    disagree. Keep no reference after the payload's release: its bytes stay claimed.
    """
    name = "<i2" if payload.dtype == BFLOAT16 else payload.dtype
    try:
        dtype = np.dtype(name)
        if dtype.hasobject or not dtype.itemsize or min(payload.shape, default=0) < 0:
            raise ValueError("neither objects nor unknown lengths")
        values: npt.NDArray[Any] = np.frombuffer(payload.data, np.uint8)
        values = values.view(dtype).reshape(payload.shape)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{len(payload.data)} bytes are no array of dtype {payload.dtype!r} and shape "
            f"{payload.shape}"
        ) from error
    values.flags.writeable = False
    return values


def tensor_of(payload: Payload) -> Any:
    """The payload's data as a torch tensor on the CPU, not copied; never write to it.

    Raises RuntimeError when this process has not loaded torch, InvalidRequest as
    `array_of` does.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        raise RuntimeError("this process has not loaded torch")
    values = array_of(payload)
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns of each.
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if payload.dtype == BFLOAT16 else tensor


def _as_array(values: Any) -> tuple[npt.NDArray[Any], str]:
    """An array of the same memory, and the name of a dtype that numpy does not know."""
    if isinstance(values, np.ndarray):
        return values, ""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise InvalidRequest(f"a tensor on {values.device} has to be copied to the CPU first")
        values = values.detach()
        if values.dtype == torch.bfloat16:
            return values.contiguous().view(torch.int16).numpy(), BFLOAT16
        return values.numpy(), ""
    try:
        if hasattr(values, "__array_interface__"):
            return np.asarray(values), ""
        if hasattr(values, "__dlpack__"):
            return np.from_dlpack(values), ""
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"a {type(values).__name__} lends no memory: {error}") from error
    raise InvalidRequest(f"a {type(values).__name__} is no array")
