"""The wire's coder, held against openpi-client's own."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.openpi import MAX_DEPTH, MAX_TEXT_BYTES, MAX_VALUES, pack, unpack
from protocol.openpi.msgpack_numpy import MAX_AXES
from tests.official_client.environment import ROOT, openpi_python
from tests.protocol.openpi.values import maps, same

ECHO = ROOT / "tests" / "official_client" / "openpi_echo.py"
LENGTH = struct.Struct(">I")

Echo = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    """The official coder, which reads what it gets and writes it again."""
    with subprocess.Popen(
        [openpi_python(), ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def official(echo: Echo, message: bytes) -> bytes:
    assert echo.stdin is not None
    assert echo.stdout is not None
    echo.stdin.write(LENGTH.pack(len(message)) + message)
    echo.stdin.flush()
    (length,) = LENGTH.unpack(echo.stdout.read(LENGTH.size))
    return echo.stdout.read(length)


@given(value=maps())
@settings(deadline=None)
def test_the_official_coder_reads_and_writes_the_same_bytes(echo: Echo, value: Any) -> None:
    message = pack(value)
    assert official(echo, message) == message
    assert same(unpack(message), value)


def test_arrays_are_read_only_views() -> None:
    message = bytearray(pack({"image": np.arange(6, dtype=np.uint8).reshape(2, 3)}))
    image = unpack(message)["image"]
    assert not image.flags.writeable
    assert not image.flags.owndata
    message[message.index(bytes(range(6)))] = 77
    assert image[0, 0] == 77


def test_bytes_stay_bytes_and_keys_of_text_make_no_array() -> None:
    looks_like_one = {"__ndarray__": True, "data": b"\0", "dtype": "|u1", "shape": [1]}
    value = {"blob": b"\x80", b"data": b"abc", "like": looks_like_one}
    assert unpack(pack(value)) == value
    assert all(type(unpack(pack(value))[key]) is bytes for key in ("blob", b"data"))


def test_an_array_is_read_whatever_the_order_of_its_members() -> None:
    members = {b"shape": [2], b"data": b"\1\2", b"dtype": b"|u1", b"__ndarray__": True}
    assert unpack(pack({"a": members}))["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, "c8"),
        np.complex64(1),
        np.array([{}], object),
        np.zeros(2, [("x", "<f4")]),
        np.zeros(2, "V3"),
    ],
)
def test_dtypes_that_the_wire_does_not_have_are_refused_both_ways(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="kind") as refused:
        pack({"a": value})
    assert refused.value.code == "unsupported_dtype"
    name = "<i4,<f4" if value.dtype.kind == "V" else value.dtype.str
    kind = b"__ndarray__" if isinstance(value, np.ndarray) else b"__npgeneric__"
    member: dict[bytes, Any] = {kind: True, b"data": b"", b"dtype": name, b"shape": [0]}
    with pytest.raises(InvalidRequest, match="kind"):
        unpack(pack({"a": member}))


@pytest.mark.parametrize("dtype", ["|S0", "<U0"])
def test_as_many_as_one_likes_of_nothing_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidRequest, match="nothing") as refused:
        unpack(pack(array(data=b"", dtype=dtype, shape=[2**40])))
    assert refused.value.code == "unsupported_dtype"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": {"b": {b"__ndarray__": True}}}, "a.b"),
        ({"a": [{"b": {b"__npgeneric__": True}}]}, "a.b"),
        ({"a": {b"__npgeneric__": True, b"dtype": "<c8", b"data": 1}}, "a"),
        ({"a": {b"__ndarray__": True, b"dtype": "O", b"data": b"", b"shape": [0]}}, "a"),
        ({b"a": {b"__ndarray__": True, b"dtype": "x", b"data": b"", b"shape": [0]}}, "a"),
        ({"a": {b"__ndarray__": True, b"dtype": "|u1", b"data": b"", b"shape": [1]}}, "a"),
        ({b"__ndarray__": True}, None),
        ({"a": {1: 2}}, None),
    ],
)
def test_an_array_that_is_none_is_named_by_its_keys(value: Any, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        unpack(pack(value))
    assert refused.value.field == field


def test_an_array_has_so_many_axes_that_a_batch_of_it_is_one() -> None:
    most = np.zeros([1] * MAX_AXES)
    assert unpack(pack({"a": most}))["a"].shape == most.shape
    with pytest.raises(InvalidRequest, match="axes"):
        unpack(pack(array(data=b"\0", shape=[1] * (MAX_AXES + 1))))


@pytest.mark.parametrize(
    "time",
    [
        np.datetime64("2020-01-01T00:00:00.123456789", "ns"),
        np.datetime64("200000-01-01", "s"),
        np.datetime64("NaT", "ns"),
        np.datetime64("NaT"),
        np.timedelta64(5, "s"),
        np.timedelta64(-5, "ns"),
        np.timedelta64(5),
    ],
)
def test_a_time_keeps_its_unit(time: Any) -> None:
    came = unpack(pack(unpack(pack({"a": time}))))["a"]
    assert (came.dtype, came.view(np.int64)) == (time.dtype, time.view(np.int64))


@pytest.mark.parametrize("item", ["2020-01-01", 1.5, True, None, 2**63])
def test_a_time_that_is_no_whole_number_of_its_unit_is_refused(item: Any) -> None:
    with pytest.raises(InvalidRequest):
        unpack(pack({"a": {b"__npgeneric__": True, b"dtype": "<M8[ns]", b"data": item}}))


def test_a_scalar_that_python_has_no_number_for_is_named() -> None:
    with pytest.raises(InvalidRequest, match="scalar"):
        pack({"a": np.longdouble(1)})


def array(**changed: Any) -> dict[bytes, Any]:
    """An array of two bytes, with members changed."""
    members = {"__ndarray__": True, "data": b"\1\2", "dtype": "|u1", "shape": [2], **changed}
    return {key.encode(): value for key, value in members.items()}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\xc7\x01\x01\x00",
        b"\xa2\xff\xff",
        b"\x81\x01\x02",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\x00",
        b"\xc6\xff\xff\xff\xff\x00",
        b"\x91" * MAX_DEPTH + b"\x91\x00",
        b"\xdd" + struct.pack(">I", MAX_VALUES) + b"\xc0" * MAX_VALUES,
        pack(1) + b"\x01",
        pack({"a": 1})[:-1],
        b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x00\x90\x00\x90\x00",
        *(
            pack(array(**changed))
            for changed in (
                {"shape": [3]},
                {"shape": [1]},
                {"shape": [-1, -2]},
                {"shape": [2**40, 2**40]},
                {"shape": [2**64 - 1]},
                {"data": b"", "shape": [0] * 14 + [2**64 - 1]},
                {"shape": 2},
                {"shape": [2.0]},
                {"shape": [1] * 70},
                {"dtype": "nothing"},
                {"dtype": "(" * 60},
                {"dtype": "x" * 1000},
                {"dtype": 5},
                {"data": "text"},
            )
        ),
        pack({b"__npgeneric__": True, b"data": "no number", b"dtype": "<i4"}),
        pack({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
        pack({b"__npgeneric__": True, b"dtype": "|u1"}),
        # A number of bytes or letters to be made.
        pack({b"__npgeneric__": True, b"data": 2**40, b"dtype": "|S1"}),
        pack({b"__npgeneric__": True, b"data": True, b"dtype": "<U1"}),
        pack({b"__npgeneric__": True, b"data": "text", b"dtype": "|S4"}),
        pack({b"__ndarray__": True}),
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a message") as refused:
        unpack(message)
    assert refused.value.code == "invalid_message"


@given(message=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        unpack(message)


@given(value=maps(), at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_message_is_read_or_refused(value: Any, at: int, byte: int) -> None:
    message = bytearray(pack(value))
    message[at % len(message)] = byte
    with contextlib.suppress(InvalidRequest):
        unpack(message)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(InvalidRequest, match="object"):
        pack({"a": object()})
    with pytest.raises(InvalidRequest):
        pack({"a": 2**64})


@pytest.mark.parametrize("shape", [(), (0,), (127, 1), (128,), (300, 2), (70_000,)])
@pytest.mark.parametrize("dtype", ["|u1", "<f8", ">i2", "<U7"])
def test_every_form_of_an_array_is_read_whole_or_not_at_all(
    shape: tuple[int, ...], dtype: str
) -> None:
    array = np.zeros(shape, dtype)
    message = pack({"a": array, "b": 1})
    assert same(unpack(message), {"a": array, "b": 1})
    for end in {*range(60), *range(len(message) - 20, len(message))} & {*range(len(message))}:
        with pytest.raises(InvalidRequest):
            unpack(message[:end])


FEW = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("many", "each"),
    [
        ([0.5], 1),
        ([{"k": 1}], 3),
        ([{}], 1),
        ([["a"]], 2),
        # As its members are written: flag, data, dtype and shape with their keys.
        ([FEW], 10),
        ([array(shape=[2])], 10),
        ([np.float32(1)], 7),
    ],
)
def test_values_are_bounded_whatever_they_are(many: list[Any], each: int) -> None:
    fits = (MAX_VALUES - 1) // each
    assert len(unpack(pack(many * fits))) == fits
    refuse(pack(many * (fits + 1)), "more than 4096 values")
    assert len(unpack(pack(many * (fits + 1)), 2 * MAX_VALUES)) == fits + 1


def test_a_long_array_is_no_more_than_a_short_one() -> None:
    assert unpack(pack([np.zeros(1_000_000, np.uint8)] * 3))[2].size == 1_000_000


@pytest.mark.parametrize("letter", ["x", "é"])
def test_text_is_bounded_in_one_piece_as_in_many(letter: str) -> None:
    text = letter * (MAX_TEXT_BYTES // len(letter.encode()) // 4)
    assert unpack(pack([text] * 4)) == [text] * 4
    for much in ([text] * 4 + ["x"], {text: text, "k": text + text}, text * 5):
        refuse(pack(much), "bytes of text")


def refuse(message: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        unpack(message)
    assert refused.value.code == "invalid_message"
