"""Values of the OpenPI wire for property tests, and whether two of them are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

DTYPES = [
    *("<f2", "<f4", "<f8", ">f4", ">f8", "|b1", "|u1", "|i1"),
    *("<i2", "<i4", "<i8", ">i4", ">u2", "<u8", "<U3", "|S4"),
]


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Arrays of 0 to 3 dimensions, also empty ones and ones that are not contiguous."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values: npt.NDArray[Any] = draw(
        arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
    if values.ndim > 0 and draw(st.booleans()):
        values = values[::2]
    return values.T if draw(st.booleans()) else values


def scalars() -> st.SearchStrategy[Any]:
    """numpy's own scalars."""
    return st.sampled_from(["<f2", "<f4", "<f8", "|b1", "|u1", "<i8"]).flatmap(
        lambda name: arrays_of.from_dtype(np.dtype(name), allow_nan=False)
    )


def plain() -> st.SearchStrategy[Any]:
    """What is no array."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=40),
        st.binary(max_size=300),
    )


def maps(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[dict[Any, Any]]:
    """Maps of `leaves`, by default of everything, also within each other."""
    keys = st.one_of(st.text(max_size=8), st.binary(max_size=4))
    values = st.recursive(
        leaves if leaves is not None else st.one_of(plain(), arrays(), scalars()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )
    return st.dictionaries(keys, values, max_size=4)


def same(one: Any, other: Any) -> bool:
    """Whether both say the same to the last bit, with the same types."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and (one.dtype.str, one.shape) == (other.dtype.str, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    # float64 is Python's own number too, and travels as that.
    kinds = {float if isinstance(value, float) else type(value) for value in (one, other)}
    return len(kinds) == 1 and bool(one == other)
