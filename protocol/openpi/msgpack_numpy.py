"""Values with numpy arrays as msgpack, byte for byte as `openpi_client.msgpack_numpy` has them.

An array is the map `{b"__ndarray__": True, b"data": ..., b"dtype": "<f4", b"shape": [...]}`, a
numpy scalar `{b"__npgeneric__": True, b"data": item, b"dtype": ...}`; their keys are bytes.
The dtype kinds V (structures), O (objects) and c (complex) do not exist on this wire.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest

MAX_DEPTH = 32
"""Maps and lists within each other."""
MAX_VALUES = 4096
"""Of one message, keys included: arrays and scalars count with their members. Reading so many
takes the event loop, and all other robots, some 20 ms."""
MAX_TEXT_BYTES = 1024 * 1024
"""Of all text of one message, keys included."""
MAX_DTYPE_LENGTH = 64
MAX_AXES = 31
"""Of an array: a batch of them has one more, and numpy 1 has 32."""

REFUSED_KINDS = "VOc"
TIMES = "mM"

_ARRAY, _SCALAR, _DATA, _DTYPE, _SHAPE = (
    b"__ndarray__",
    b"__npgeneric__",
    b"data",
    b"dtype",
    b"shape",
)

_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_LENGTH_BYTES = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
_BEGINS = b"\xc4\x0b__ndarray__\xc3\xc4\x04data"
_DTYPE_NEXT = b"\xc4\x05dtype"
_SHAPE_NEXT = b"\xc4\x05shape"
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def pack(value: Any) -> bytes:
    """`value` as one message. Arrays of any layout are written in C order.

    Raises InvalidRequest for what this wire does not have.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"cannot be packed: {error}") from error


def unpack(data: bytes | bytearray | memoryview, most_values: int = MAX_VALUES) -> Any:
    """The value in `data`, which is one message and nothing more, of `most_values` at most.

    Arrays are read-only views of `data`, whatever their size: what is kept of them keeps all of
    it. Raises InvalidRequest for anything else than a message of this wire, at a cost that is
    bounded by its length; its `field` are the keys that lead to an array that is none.
    """
    reader = _Reader(memoryview(data).toreadonly().cast("B"), most_values)
    try:
        value = reader.value(0)
    except InvalidRequest as error:
        error.field = error.field or None
        raise
    reader.check_end()
    return value


class _Reader:
    """Reads values one after the other. Lengths are held against what is there at once."""

    def __init__(self, data: memoryview, most_values: int) -> None:
        self._data = data
        self._at = 0
        self._most = most_values
        self._left = most_values
        self._text_left = MAX_TEXT_BYTES

    def check_end(self) -> None:
        """Raise InvalidRequest when something follows."""
        if self._at != len(self._data):
            raise _unreadable(f"{len(self._data) - self._at} bytes follow the message")

    def value(self, depth: int, *, borrow: bool = False) -> Any:
        """The next value. Bytes are a view of the data if `borrow`."""
        self._left -= 1
        if self._left < 0:
            raise self._too_many()
        if self._at >= len(self._data):
            raise _unreadable("it ends too early")
        code = self._data[self._at]
        self._at += 1
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code >= 0xC0:
            if code in _CONSTANTS:
                return _CONSTANTS[code]
            if (number := _NUMBERS.get(code)) is not None:
                return number.unpack(self._take(number.size))[0]
            if code not in _LENGTH_BYTES:
                raise _unreadable(f"extension types are not read (0x{code:02x})")
            length = int.from_bytes(self._take(_LENGTH_BYTES[code]), "big")
            if code <= 0xC6:
                taken = self._take(length)
                return taken if borrow else bytes(taken)
            if code <= 0xDB:
                return self._text(length)
            return self._map(length, depth) if code >= 0xDE else self._list(length, depth)
        if code >= 0xA0:
            return self._text(code & 0x1F)
        return self._map(code & 0x0F, depth) if code < 0x90 else self._list(code & 0x0F, depth)

    def _too_many(self) -> InvalidRequest:
        return _unreadable(f"more than {self._most} values outside of arrays")

    def _take(self, length: int) -> memoryview:
        end = self._at + length
        if end > len(self._data):
            raise _unreadable("it ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _text(self, length: int) -> str:
        self._text_left -= length
        if self._text_left < 0:
            raise _unreadable(f"more than {MAX_TEXT_BYTES} bytes of text")
        begin = self._at
        end = self._at = begin + length
        if end > len(self._data):
            raise _unreadable("it ends too early")
        try:
            return str(self._data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise _unreadable(f"text that is not UTF-8: {error.reason}") from None

    def _list(self, length: int, depth: int) -> list[Any]:
        self._check_members(length, depth)
        return [self.value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> Any:
        self._check_members(2 * length, depth)
        if length == 4 and (array := self._usual_array()) is not None:
            return array
        members: dict[str | bytes, Any] = {}
        for _ in range(length):
            key = self._key(depth)
            # Only here an array's bytes can be: they are looked at where they lie.
            try:
                members[key] = self.value(depth + 1, borrow=key == _DATA)
            except InvalidRequest as error:
                if error.field is not None:
                    error.field = _led_to(key, error.field)
                raise
        if _ARRAY in members:
            return _array(members)
        if _SCALAR in members:
            return _scalar(members)
        if isinstance(members.get(_DATA), memoryview):
            members[_DATA] = bytes(members[_DATA])
        return members

    def _usual_array(self) -> npt.NDArray[Any] | None:
        """The array that follows, if it is written as every packer writes one: the same as its
        members one by one, at a tenth of the cost. None: nothing was read."""
        data, at = self._data, self._at
        begins = at + len(_BEGINS)
        if data[at:begins] != _BEGINS:
            return None
        try:
            at = begins
            size = _LENGTH_BYTES[data[at]] if data[at] <= 0xC6 else 0
            first = at + 1 + size
            at = first + int.from_bytes(data[at + 1 : first], "big")
            end = at + len(_DTYPE_NEXT)
            if not size or data[at:end] != _DTYPE_NEXT or data[end] & 0xE0 != 0xA0:
                return None
            content, named = data[first:at], end + 1
            at = named + (data[end] & 0x1F)
            name = bytes(data[named:at])
            end = at + len(_SHAPE_NEXT)
            if data[at:end] != _SHAPE_NEXT or data[end] & 0xF0 != 0x90:
                return None
            at = end + 1
            shape = []
            for _ in range(data[end] & 0x0F):
                code = data[at]
                size = 0 if code < 0x80 else _UNSIGNED[code]
                shape.append(int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else code)
                at += 1 + size
        except (IndexError, KeyError):
            return None
        if at > len(data):
            return None
        self._at = at
        self._left -= 8 + len(shape)
        if self._left < 0:
            raise self._too_many()
        return _array_of(content, _known_dtype(name), shape)

    def _key(self, depth: int) -> str | bytes:
        data, at = self._data, self._at
        if self._left and at < len(data) and data[at] & 0xE0 == 0xA0:
            # A short text, as nearly all keys are.
            self._left -= 1
            self._at = at + 1
            return self._text(data[at] & 0x1F)
        key = self.value(depth + 1)
        if not isinstance(key, str | bytes):
            raise _unreadable(f"a key that is neither text nor bytes: {key!r:.64}")
        return key

    def _check_members(self, count: int, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _unreadable(f"more than {MAX_DEPTH} maps and lists within each other")
        if count > len(self._data) - self._at:
            raise _unreadable("it ends too early")


def _array(members: dict[str | bytes, Any]) -> npt.NDArray[Any]:
    data, shape = members.get(_DATA), members.get(_SHAPE)
    dtype = _dtype(members.get(_DTYPE))
    if not isinstance(data, memoryview) or not isinstance(shape, list):
        raise _no_array("an array without data or shape")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise _no_array(f"an array of shape {shape!r:.64}")
    return _array_of(data, dtype, shape)


def _array_of(data: memoryview, dtype: np.dtype[Any], shape: list[int]) -> npt.NDArray[Any]:
    if len(shape) > MAX_AXES:
        raise _no_array(f"an array of {len(shape)} axes; there are {MAX_AXES} at most")
    try:
        values: npt.NDArray[Any] = np.ndarray(shape, dtype, data)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise _no_array(f"{len(data)} bytes for {dtype} of shape {shape!r:.64}: {error}") from None
    if values.nbytes != len(data):
        raise _no_array(f"{len(data)} bytes for {dtype} of shape {shape!r:.64}")
    return values


def _scalar(members: dict[str | bytes, Any]) -> Any:
    dtype, item = _dtype(members.get(_DTYPE)), members.get(_DATA)
    if isinstance(item, memoryview):
        item = bytes(item)
    if not isinstance(item, bool | int | float | str | bytes):
        raise _no_array("a scalar without data")
    # Of a number numpy makes so many bytes or letters.
    if dtype.kind in "SU" and not isinstance(item, str if dtype.kind == "U" else bytes):
        raise _no_array(f"{item!r:.64} is no {dtype}")
    if dtype.kind in TIMES:
        return _time(dtype, item)
    try:
        return dtype.type(item)
    except (TypeError, ValueError, OverflowError) as error:
        raise _no_array(f"{item!r:.64} is no {dtype}: {error}") from None


def _time(dtype: np.dtype[Any], item: object) -> Any:
    """Of the number that its array would hold; numpy makes none of it where it has a unit."""
    if type(item) is not int or not -(2**63) <= item < 2**63:
        raise _no_array(f"{item!r:.64} is no {dtype}")
    return np.int64(item).view(dtype.newbyteorder("="))


@functools.lru_cache(maxsize=256)
def _known_dtype(name: bytes) -> np.dtype[Any]:
    return _dtype(name)


def _dtype(name: Any) -> np.dtype[Any]:
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    if not isinstance(name, str) or len(name) > MAX_DTYPE_LENGTH:
        raise _no_array(f"an array of dtype {name!r:.64}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        raise _no_array(f"there is no dtype {name!r}") from None
    try:
        check_dtype(dtype)
    except InvalidRequest as error:
        error.field = ""
        raise
    return dtype


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise InvalidRequest for arrays that this wire does not have."""
    if dtype.kind in REFUSED_KINDS:
        raise InvalidRequest(
            f"arrays of dtype {dtype} (kind {dtype.kind}) have no place here: structures, objects "
            "and complex numbers are not carried",
            code="unsupported_dtype",
        )
    if not dtype.itemsize:
        # No bytes hold any number of them.
        raise InvalidRequest(
            f"arrays of dtype {dtype} hold nothing, however many", code="unsupported_dtype"
        )


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"not a message of arrays: {reason}", code="invalid_message")


def _no_array(reason: str) -> InvalidRequest:
    """Whose `field` becomes the keys that lead to it, on the way out."""
    error = _unreadable(reason)
    error.field = ""
    return error


def _led_to(key: str | bytes, below: str) -> str:
    name = key if isinstance(key, str) else key.decode("ascii", "replace")
    return f"{name}.{below}" if below else name


def _plain(value: Any) -> Any:
    """What msgspec does not know, as the wire has it."""
    if isinstance(value, np.ndarray):
        check_dtype(value.dtype)
        contiguous = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        data = contiguous.reshape(-1).view(np.uint8).data if value.nbytes else b""
        return {_ARRAY: True, _DATA: data, _DTYPE: value.dtype.str, _SHAPE: value.shape}
    # Those that are Python's own numbers or text too travel as such.
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, np.generic):
        check_dtype(value.dtype)
        item = int(value.view(np.int64)) if value.dtype.kind in TIMES else value.item()
        if isinstance(item, np.generic):
            raise TypeError(f"a {value.dtype} scalar has no number of Python's")
        return {_SCALAR: True, _DATA: item, _DTYPE: value.dtype.str}
    raise TypeError(f"a {type(value).__name__} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
