"""The two encodings of a world's stream."""

from __future__ import annotations

from typing import Any, Protocol, get_args

import msgspec

from protocol.native.wires import Unreadable, check_plain, names_of
from protocol.validation import fault
from protocol.worlds.frames import ClientFrame

MAX_CONTROL_BYTES = 256 * 1024
"""What a client says is short; a longer frame is refused unread."""


class Wire(Protocol):
    """An encoding, by WebSocket sub-protocol."""

    subprotocol: str
    joined: bool
    """Whether a picture lies in the frame that tells of it, and is no message of its own."""

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""

    def write(self, frame: Any) -> str | bytes:
        """A frame to be sent."""


class JsonWire:
    """Text frames of JSON; a picture is the binary message behind its frame."""

    subprotocol = "antiphon.json"
    joined = False

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(ClientFrame)
        self._encoder = msgspec.json.Encoder()

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""
        _check_length(frame)
        try:
            return _checked(self._decoder.decode(frame))
        except msgspec.ValidationError as error:
            raise _explained(error, msgspec.json.decode, frame) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Unreadable("The frame is not valid JSON.", code="invalid_json") from None

    def write(self, frame: Any) -> str:
        """A text frame."""
        return self._encoder.encode(frame).decode()


class MsgpackWire:
    """Binary frames of MessagePack, pictures in them."""

    subprotocol = "antiphon.msgpack"
    joined = True

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)
        self._encoder = msgspec.msgpack.Encoder()

    def read(self, frame: str | bytes) -> ClientFrame:
        """The frame that a client sent. Raises Unreadable."""
        _check_length(frame)
        try:
            if isinstance(frame, str):
                raise Unreadable("MessagePack comes in binary frames.", code="invalid_msgpack")
            return _checked(self._decoder.decode(frame))
        except msgspec.ValidationError as error:
            raise _explained(error, msgspec.msgpack.decode, frame) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError):
            raise Unreadable("The frame is not MessagePack.", code="invalid_msgpack") from None

    def write(self, frame: Any) -> bytes:
        """A binary frame."""
        return self._encoder.encode(frame)


WIRES: tuple[Wire, ...] = (JsonWire(), MsgpackWire())

_KNOWN = tuple(str(kind.__struct_config__.tag) for kind in get_args(ClientFrame))


def _check_length(frame: str | bytes) -> None:
    if len(frame) > MAX_CONTROL_BYTES:
        raise Unreadable(
            f"The frame is longer than {MAX_CONTROL_BYTES} bytes.", code="event_too_large"
        )


def _checked(frame: ClientFrame) -> ClientFrame:
    try:
        check_plain(frame)
    except Unreadable as error:
        error.ref = getattr(frame, "ref", None)
        raise
    return frame


def _explained(error: msgspec.ValidationError, decode: Any, frame: str | bytes) -> Unreadable:
    found = fault(error)
    known = f"; known are {', '.join(_KNOWN)}" if found.path == "type" else ""
    place = f"'{found.path}': " if found.path else ""
    unreadable = Unreadable(
        f"{place}{found.reason}{known}.", code=found.code, field=found.path or None
    )
    _, unreadable.ref = names_of(decode, frame)
    return unreadable
