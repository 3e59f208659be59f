"""The two encodings of the native surface, and what is said of a message that is unreadable."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar, get_args

import msgspec

from protocol.errors import InvalidRequest
from protocol.native.frames import ClientFrame, Input, Signals
from protocol.validation import fault

MAX_FRAME_BYTES = 15 * 1024 * 1024
"""A longer frame is refused unread; the connection stays open."""
MAX_DEPTH = 32
"""How deep settings and parameters may be nested."""
MAX_VALUES = 16_384
"""How many values settings or parameters may hold: each is looked at, while all others wait."""

MAX_FREE_BYTES = 1024 * 1024
"""How long settings, parameters or metadata may be: what is free in form is slow to read."""

_ENCODED_CHAR_BYTES = 12
"""The longest that a character of a name gets in an encoding: a pair of escapes in JSON."""
_INTEGERS = range(-(2**63), 2**64)

Body = TypeVar("Body")


class Unreadable(InvalidRequest):
    """A message that is none of the protocol's; nothing of it was carried out.

    `id` and `ref` are the client's names for it, where they could be read.
    """

    id: str | None = None
    ref: str | None = None


class Wire(Protocol):
    """An encoding of the stream, by WebSocket sub-protocol."""

    subprotocol: str

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""

    def write(self, frame: Any) -> str | bytes:
        """A frame to be sent: text or binary, as this wire has them."""


class _Free(msgspec.Struct, frozen=True):
    """What in an input or a signal is free in form, unread."""

    settings: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


class _Names(msgspec.Struct, frozen=True):
    """The client's names for a frame, unread."""

    id: msgspec.Raw = msgspec.Raw()
    ref: msgspec.Raw = msgspec.Raw()


class _Sketch(_Names, frozen=True):
    """A frame of which no more is made than it takes to refuse it."""

    input: _Free = _Free()
    signal: _Free = _Free()


class JsonWire:
    """Text frames of JSON, bytes as base64. JSON in a binary frame is read as well."""

    subprotocol = "antiphon.json"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(ClientFrame)
        self._encoder = msgspec.json.Encoder()

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""
        _check_length(frame)
        try:
            _check_free_length(msgspec.json.decode, frame)
            return _checked(self._decoder.decode(frame))
        except msgspec.ValidationError as error:
            raise _explained(error, *names_of(msgspec.json.decode, frame)) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Unreadable("The frame is not valid JSON.", code="invalid_json") from None

    def write(self, frame: Any) -> str:
        """A text frame."""
        return self._encoder.encode(frame).decode()


class MsgpackWire:
    """Binary frames of MessagePack, bytes as bin."""

    subprotocol = "antiphon.msgpack"

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)
        self._encoder = msgspec.msgpack.Encoder()

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""
        _check_length(frame)
        try:
            if isinstance(frame, str):
                raise Unreadable("MessagePack comes in binary frames.", code="invalid_msgpack")
            _check_free_length(msgspec.msgpack.decode, frame)
            return _checked(self._decoder.decode(frame))
        except msgspec.ValidationError as error:
            raise _explained(error, *names_of(msgspec.msgpack.decode, frame)) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError):
            raise Unreadable("The frame is not MessagePack.", code="invalid_msgpack") from None

    def write(self, frame: Any) -> bytes:
        """A binary frame."""
        return self._encoder.encode(frame)


WIRES: tuple[Wire, ...] = (JsonWire(), MsgpackWire())


def read_body(body: bytes, kind: type[Body]) -> Body:
    """The JSON body of a request; an empty one has no members. Raises Unreadable."""
    try:
        read = msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _explained(error) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Unreadable("The body is not valid JSON.", code="invalid_json") from None
    check_plain(read)
    return read


def _check_length(frame: str | bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise Unreadable(
            f"The frame is longer than {MAX_FRAME_BYTES} bytes.", code="event_too_large"
        )


def _checked(frame: ClientFrame) -> ClientFrame:
    try:
        check_plain(frame)
        if getattr(frame, "id", None) is not None and getattr(frame, "ref", None) is not None:
            raise Unreadable("a frame with an 'id' is answered: leave 'ref' out", field="ref")
    except Unreadable as error:
        error.id, error.ref = getattr(frame, "id", None), getattr(frame, "ref", None)
        raise
    return frame


def check_plain(message: Any, path: str = "") -> None:
    """Raise Unreadable unless all that is free in form is what JSON and MessagePack both have."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        place = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            _FreeForm(place).check(value)
        elif isinstance(value, msgspec.Struct):
            check_plain(value, place)


class _FreeForm:
    """A look at each value below one that is free in form.

    Paths are put together for what is wrong only: keys may be long, and values many.
    """

    def __init__(self, path: str) -> None:
        self._place = [path]
        self._left = MAX_VALUES

    def check(self, value: Any) -> None:
        """Raise Unreadable for the first value that has no place here."""
        self._left -= 1
        if self._left < 0:
            raise Unreadable(f"holds more than {MAX_VALUES} values", field=self._place[0])
        match value:
            case None | bool() | str():
                pass
            case int():
                if value not in _INTEGERS:
                    raise self._refusal("an integer has at most 64 bits")
            case float():
                if not math.isfinite(value):
                    raise self._refusal("a number is finite")
            case list():
                for index, entry in enumerate(value):
                    self._check_below(f"[{index}]", entry)
            case dict():
                for key, entry in value.items():
                    if not isinstance(key, str):
                        raise self._refusal("the keys of a map are strings")
                    self._check_below(key, entry)
            case _:
                raise self._refusal("of a type that JSON does not have", "invalid_type")

    def _check_below(self, step: str, value: Any) -> None:
        self._place.append(step)
        if len(self._place) > MAX_DEPTH + 1:
            raise self._refusal(f"nested deeper than {MAX_DEPTH}")
        self.check(value)
        self._place.pop()

    def _refusal(self, message: str, code: str = "invalid_value") -> Unreadable:
        first, *below = self._place
        path = first + "".join(step if step[0:1] == "[" else f".{step}" for step in below)
        return Unreadable(message, code=code, field=path)


def _check_free_length(decode: Any, frame: str | bytes) -> None:
    """Raise Unreadable for a frame in which something free in form is too long."""
    if len(frame) <= MAX_FREE_BYTES:
        return
    try:
        sketch = decode(frame, type=_Sketch)
    except (msgspec.ValidationError, TypeError):
        return  # Not a frame: what is wrong is found out when it is read.
    for said in ("input", "signal"):
        for name in _Free.__struct_fields__:
            if len(memoryview(getattr(getattr(sketch, said), name))) > MAX_FREE_BYTES:
                place = f"{said}.{name}"
                unreadable = Unreadable(
                    f"'{place}' is longer than {MAX_FREE_BYTES} bytes.",
                    code="event_too_large",
                    field=place,
                )
                unreadable.id = _named(decode, sketch.id, 128)
                unreadable.ref = _named(decode, sketch.ref, 512)
                raise unreadable


def names_of(decode: Any, frame: str | bytes) -> tuple[str | None, str | None]:
    """The `id` and the `ref` of a frame that is wrong elsewhere, where they can be read."""
    try:
        names = decode(frame, type=_Names)
    except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError):
        return None, None
    return _named(decode, names.id, 128), _named(decode, names.ref, 512)


def _explained(
    error: msgspec.ValidationError, command: str | None = None, ref: str | None = None
) -> Unreadable:
    found = fault(error)
    reason = found.reason
    if (kinds := _KINDS.get(found.path)) is not None:
        reason += f"; known are {', '.join(kinds)}"
    place = f"'{found.path}': " if found.path else ""
    unreadable = Unreadable(f"{place}{reason}.", code=found.code, field=found.path or None)
    unreadable.id, unreadable.ref = command, ref
    return unreadable


def _named(decode: Any, raw: msgspec.Raw, most: int) -> str | None:
    if not 0 < len(memoryview(raw)) <= _ENCODED_CHAR_BYTES * most + 2:
        return None
    try:
        name: str = decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return name if len(name) <= most else None


def _tags(union: Any) -> tuple[str, ...]:
    return tuple(str(kind.__struct_config__.tag) for kind in get_args(union))


_KINDS = {
    "type": _tags(ClientFrame),
    "input.type": _tags(Input),
    "signal.type": _tags(Signals),
}
