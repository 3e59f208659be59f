"""Maps of arrays on their way to the gateway and back: both ends have one idea of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon_client.arrays import encoded_bytes, from_payloads, to_payloads
from antiphon_client.errors import ProtocolError
from protocol.openpi import from_parts, to_parts
from protocol.payloads import Payload, PayloadType

OBSERVATION: dict[str, Any] = {
    "image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    "turned": np.arange(6, dtype="<f4").reshape(2, 3).T,
    "big": np.array([1, 2], ">i4"),
    "half": np.array([0.5], np.float16),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "one": np.array(7),
    "text": np.array(["a", "bc"]),
    "scalar": np.float32(0.25),
    "number": np.float64(0.5),
    "prompt": "pick up the cup",
    "nested": {"state": np.array([1.0]), "name": "arm", "deeper": {"x": np.array([2], "<u2")}},
    "list": [np.array([1, 2]), "x", None, True],
    "data": b"bytes",
}


def parts(payloads: list[dict[str, Any]]) -> list[Payload]:
    """Payloads as the gateway reads them."""
    return [
        Payload(
            PayloadType(one["type"]),
            one["data"],
            one.get("dtype", ""),
            tuple(one.get("shape", ())),
            one.get("attributes", {}),
        )
        for one in payloads
    ]


def payloads(parts: list[Payload]) -> list[dict[str, Any]]:
    """Payloads as the gateway writes them."""
    return [
        {
            "type": part.type.value,
            "data": bytes(part.data),
            "dtype": part.dtype,
            "shape": list(part.shape),
            "attributes": part.attributes,
        }
        for part in parts
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, dtypes and shapes included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and np.array_equal(one, other)
        )
    return bool(one == other)


def test_the_gateway_reads_what_the_client_writes() -> None:
    assert same(from_parts(parts(to_payloads("observation", OBSERVATION))), OBSERVATION)


def test_the_client_reads_what_the_gateway_writes() -> None:
    written = payloads(to_parts(PayloadType.ACTIONS, OBSERVATION))
    assert same(from_payloads(written), OBSERVATION)


def test_what_is_sent_may_change_at_once() -> None:
    state = np.zeros(3)
    written = to_payloads("observation", {"state": state})
    state[:] = 1
    assert from_parts(parts(written))["state"].tolist() == [0, 0, 0]


def test_more_arrays_than_a_step_takes_go_with_the_rest() -> None:
    many = {f"array {number}": np.array([number]) for number in range(100)}
    written = to_payloads("observation", many)
    assert len(written) < 64
    assert same(from_parts(parts(written)), many)


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array([1j]), np.complex64(1)])
def test_what_has_no_place_on_the_wire_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        to_payloads("observation", {"value": value})


class Posing(dict[str, Any]):
    """A map that cannot be read."""

    def items(self) -> Any:
        raise KeyError("no")


IN_ITSELF: list[Any] = []
IN_ITSELF.append(IN_ITSELF)


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({1: 2}, TypeError),
        ({"a": {"b": [{None: 2}]}}, TypeError),
        (None, TypeError),
        ([1], TypeError),
        (Posing(), TypeError),
        ({"value": IN_ITSELF}, ValueError),
        ({"value": 2**70}, ValueError),
        ({"value": "\ud800"}, ValueError),
        ({"\ud800": np.zeros(2)}, ValueError),
        ({"\ud800": 1}, ValueError),
    ],
)
def test_what_cannot_be_encoded_is_a_type_or_a_value_error(
    members: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        to_payloads("observation", members)
    assert raised.type is error


@pytest.mark.parametrize("key", ["image", "ä" * 40])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536, 70_000])
def test_the_length_in_a_frame_is_known_before_it_is_made(length: int, key: str) -> None:
    written = to_payloads("observation", {key: np.zeros(length, np.uint8), "other": "x" * length})
    known, real = encoded_bytes(written), len(msgspec.msgpack.encode(written))
    assert real - 1 <= known <= real + 3 * len(written)


@pytest.mark.parametrize(
    "payload",
    [
        {"data": b"1234", "dtype": "<f4", "shape": [2], "attributes": {"key": "a"}},
        {"data": b"1234", "dtype": "O", "shape": [1], "attributes": {"key": "a"}},
        {"data": b"1234", "dtype": "<f4", "shape": [1], "attributes": {}},
        {"data": b"\xc1", "dtype": "", "shape": [], "attributes": {}},
        {"data": b"\x01", "dtype": "", "shape": [], "attributes": {}},
    ],
)
def test_what_is_no_map_is_said_so(payload: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        from_payloads([payload])


@given(st.binary(max_size=200))
def test_nothing_but_a_map_or_a_protocol_error_comes_of_bytes(data: bytes) -> None:
    try:
        read = from_payloads([{"data": data, "dtype": "", "shape": [], "attributes": {}}])
    except ProtocolError:
        return
    assert isinstance(read, dict)


@pytest.mark.parametrize(
    "time", [np.datetime64("200000-01-01", "s"), np.datetime64("NaT"), np.timedelta64(5, "ms")]
)
def test_a_time_keeps_its_unit(time: Any) -> None:
    written = to_payloads("observation", {"a": time})
    told = [{"dtype": "", **payload} for payload in written]
    for came in (from_parts(parts(written))["a"], from_payloads(told)["a"]):
        assert (came.dtype, came.view(np.int64)) == (time.dtype, time.view(np.int64))
