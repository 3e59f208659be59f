"""The encodings of a surface's stream and bodies, and what is said of what cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar, get_args

import msgspec

from protocol.free_form import Unreadable, check_plain
from protocol.validation import fault

_ENCODED_CHAR_BYTES = 12
"""The longest that a character of a name gets in an encoding: a pair of escapes in JSON."""
MAX_ID_CHARS = 128
MAX_REF_CHARS = 512

Frame = TypeVar("Frame")
Body = TypeVar("Body")
Told = TypeVar("Told", covariant=True)


class Wire(Protocol[Told]):
    """An encoding of a stream, by WebSocket sub-protocol."""

    subprotocol: str
    binary: bool
    """Whether its frames are binary, and have bytes in them as they are."""

    def read(self, frame: str | bytes) -> Told:
        """The frame that a client sent. Raises Unreadable."""

    def write(self, frame: Any) -> str | bytes:
        """A frame to be sent: text or binary, as this wire has them."""


class Grammar(Generic[Frame]):
    """What the clients of a surface say: one of the union `frames`, of `most_bytes` at most.

    `unions` are others within them, by the path of their tag.
    """

    def __init__(
        self, frames: Any, most_bytes: int, unions: Mapping[str, Any] | None = None
    ) -> None:
        self.frames = frames
        self.most_bytes = most_bytes
        self._kinds = {
            path: ", ".join(str(kind.__struct_config__.tag) for kind in get_args(union))
            for path, union in {"type": frames, **(unions or {})}.items()
        }

    def sketch(self, decode: Any, frame: str | bytes) -> None:
        """Raise Unreadable for what is not to be read at all. Nothing, unless it is overridden."""

    def check(self, frame: Frame) -> None:
        """Raise Unreadable for a frame that says what its type does not forbid."""
        check_plain(frame)

    def read(self, decode: Any, decoder: Any, frame: str | bytes) -> Frame:
        """The frame. Raises Unreadable, and what msgspec raises for what is no encoding of any."""
        try:
            self.sketch(decode, frame)
            said: Frame = decoder.decode(frame)
        except msgspec.ValidationError as error:
            raise self._explained(error, *names_of(decode, frame)) from None
        try:
            self.check(said)
        except Unreadable as error:
            error.id, error.ref = getattr(said, "id", None), getattr(said, "ref", None)
            raise
        return said

    def read_body(self, body: bytes, kind: type[Body]) -> Body:
        """The JSON body of a request; an empty one has no members. Raises Unreadable."""
        try:
            read = msgspec.json.decode(body if body.strip() else b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise self._explained(error) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Unreadable("The body is not valid JSON.", code="invalid_json") from None
        check_plain(read)
        return read

    def check_length(self, frame: str | bytes) -> None:
        """Raise Unreadable for a frame that is too long."""
        if len(frame) > self.most_bytes:
            raise Unreadable(
                f"The frame is longer than {self.most_bytes} bytes.", code="event_too_large"
            )

    # An error that a frame both raises and names holds all of that frame.
    def _explained(
        self, error: msgspec.ValidationError, command: str | None = None, ref: str | None = None
    ) -> Unreadable:
        found = fault(error)
        reason = found.reason
        if found.code == "invalid_value" and found.path in self._kinds:
            reason += f"; known are {self._kinds[found.path]}"
        place = f"'{found.path}': " if found.path else ""
        unreadable = Unreadable(f"{place}{reason}.", code=found.code, field=found.path or None)
        unreadable.id, unreadable.ref = command, ref
        return unreadable


class JsonWire(Generic[Frame]):
    """Text frames of JSON, bytes as base64. JSON in a binary frame is read as well."""

    subprotocol = "antiphon.json"
    binary = False

    def __init__(self, grammar: Grammar[Frame]) -> None:
        self._grammar = grammar
        self._decoder = msgspec.json.Decoder(grammar.frames)
        self._encoder = msgspec.json.Encoder()

    def read(self, frame: str | bytes) -> Frame:
        """The frame that a client sent. Raises Unreadable."""
        self._grammar.check_length(frame)
        try:
            return self._grammar.read(msgspec.json.decode, self._decoder, frame)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Unreadable("The frame is not valid JSON.", code="invalid_json") from None

    def write(self, frame: Any) -> str:
        """A text frame."""
        return self._encoder.encode(frame).decode()


class MsgpackWire(Generic[Frame]):
    """Binary frames of MessagePack, bytes as bin."""

    subprotocol = "antiphon.msgpack"
    binary = True

    def __init__(self, grammar: Grammar[Frame]) -> None:
        self._grammar = grammar
        self._decoder = msgspec.msgpack.Decoder(grammar.frames)
        self._encoder = msgspec.msgpack.Encoder()

    def read(self, frame: str | bytes) -> Frame:
        """The frame that a client sent. Raises Unreadable."""
        self._grammar.check_length(frame)
        if isinstance(frame, str):
            raise Unreadable("MessagePack comes in binary frames.", code="invalid_msgpack")
        try:
            return self._grammar.read(msgspec.msgpack.decode, self._decoder, frame)
        except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError):
            raise Unreadable("The frame is not MessagePack.", code="invalid_msgpack") from None

    def write(self, frame: Any) -> bytes:
        """A binary frame."""
        return self._encoder.encode(frame)


class Names(msgspec.Struct, frozen=True):
    """The client's names for a frame, unread."""

    id: msgspec.Raw = msgspec.Raw()
    ref: msgspec.Raw = msgspec.Raw()


def names_of(decode: Any, frame: str | bytes) -> tuple[str | None, str | None]:
    """The `id` and the `ref` of a frame that is wrong elsewhere, where they can be read."""
    try:
        names = decode(frame, type=Names)
    except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError):
        return None, None
    return named(decode, names.id, MAX_ID_CHARS), named(decode, names.ref, MAX_REF_CHARS)


def named(decode: Any, raw: msgspec.Raw, most: int) -> str | None:
    if not 0 < len(memoryview(raw)) <= _ENCODED_CHAR_BYTES * most + 2:
        return None
    try:
        name: str = decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return name if len(name) <= most else None
