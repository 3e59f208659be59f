"""Maps of arrays as payloads, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from protocol.errors import InvalidRequest
from protocol.openpi import from_parts, pack, to_parts
from protocol.openpi.parts import MAX_ARRAYS
from protocol.payloads import Payload, PayloadType
from tests.protocol.openpi.values import maps, same

FRAMES = PayloadType.FRAMES


@given(value=maps())
def test_a_map_comes_back_from_its_parts(value: dict[Any, Any]) -> None:
    assert same(from_parts(to_parts(FRAMES, value)), value)


def test_an_array_is_a_payload_of_its_own_and_not_copied() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    state = np.arange(3, dtype=">f4")
    parts = to_parts(FRAMES, {"images": {"wrist": image}, "state": state, "prompt": "go"})
    described = [(part.dtype, part.shape, part.attributes) for part in parts]
    assert described == [
        ("|u1", (4, 4, 3), {"key": "images\0wrist"}),
        (">f4", (3,), {"key": "state"}),
        ("", (), {}),
    ]
    assert np.shares_memory(np.frombuffer(parts[0].data, np.uint8), image)


def test_more_arrays_than_payloads_may_be_go_with_the_rest() -> None:
    value = {str(number): np.array([number]) for number in range(MAX_ARRAYS + 5)}
    parts = to_parts(FRAMES, value)
    assert len(parts) == MAX_ARRAYS + 1
    assert same(from_parts(parts), value)


def test_an_empty_map_has_a_part() -> None:
    assert from_parts(to_parts(FRAMES, {})) == {}


@pytest.mark.parametrize(
    "parts",
    [
        [Payload(FRAMES, b"\0", "|u1", (1,))],
        [Payload(FRAMES, b"\0", "|u1", (1,), {"key": "a"})] * 2,
        [
            Payload(FRAMES, b"\0", "|u1", (1,), {"key": "a"}),
            Payload(FRAMES, b"\0", "|u1", (1,), {"key": "a\0b"}),
        ],
        [Payload(FRAMES, b"\0", "|u1", (1,), {"key": "\0" * 100})],
        [Payload(FRAMES, b"\0\0", "|u1", (1,), {"key": "a"})],
        [Payload(FRAMES, pack([1]))],
        [Payload(FRAMES, b"\xc1")],
    ],
)
def test_payloads_that_make_no_map_are_refused(parts: list[Payload]) -> None:
    with pytest.raises(InvalidRequest):
        from_parts(parts)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("|V4", "unsupported_dtype"), ("<c8", "unsupported_dtype"), ("|O", "unsupported_dtype"),
     ("<U0", "unsupported_dtype"), ("nothing", "invalid_value")],
)  # fmt: skip
def test_an_array_that_the_wire_has_not_is_refused_by_its_keys(dtype: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        from_parts([Payload(FRAMES, bytes(8), dtype, (1,), {"key": "a\0b"})])
    assert (refused.value.code, refused.value.field) == (code, "a.b")


def test_an_array_of_too_many_axes_is_refused_by_its_keys() -> None:
    with pytest.raises(InvalidRequest, match="axes") as refused:
        from_parts([Payload(FRAMES, b"\0", "|u1", (1,) * 40, {"key": "a"})])
    assert refused.value.field == "a"
