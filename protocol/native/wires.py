"""The two encodings of the native surface's stream."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.free_form import Unreadable
from protocol.native.frames import ClientFrame, Input, Signals
from protocol.wires import (
    MAX_ID_CHARS,
    MAX_REF_CHARS,
    Grammar,
    JsonWire,
    MsgpackWire,
    Names,
    Wire,
    named,
)

MAX_FRAME_BYTES = 15 * 1024 * 1024
"""A longer frame is refused unread; the connection stays open."""
MAX_FREE_BYTES = 1024 * 1024
"""How long settings, parameters or metadata may be: what is free in form is slow to read."""


class _Free(msgspec.Struct, frozen=True):
    """What in an input or a signal is free in form, unread."""

    settings: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


class _Sketch(Names, frozen=True):
    """A frame of which no more is made than it takes to refuse it."""

    input: _Free = _Free()
    signal: _Free = _Free()


class _Native(Grammar[ClientFrame]):
    def __init__(self) -> None:
        super().__init__(
            ClientFrame, MAX_FRAME_BYTES, {"input.type": Input, "signal.type": Signals}
        )

    def sketch(self, decode: Any, frame: str | bytes) -> None:
        _check_free_length(decode, frame)

    def check(self, frame: ClientFrame) -> None:
        super().check(frame)
        if getattr(frame, "id", None) is not None and getattr(frame, "ref", None) is not None:
            raise Unreadable("a frame with an 'id' is answered: leave 'ref' out", field="ref")


_NATIVE = _Native()

WIRES: tuple[Wire[ClientFrame], ...] = (JsonWire(_NATIVE), MsgpackWire(_NATIVE))

read_body = _NATIVE.read_body


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
                raise _too_long(f"{said}.{name}", decode, sketch)


def _too_long(place: str, decode: Any, sketch: _Sketch) -> Unreadable:
    unreadable = Unreadable(
        f"'{place}' is longer than {MAX_FREE_BYTES} bytes.", code="event_too_large", field=place
    )
    unreadable.id = named(decode, sketch.id, MAX_ID_CHARS)
    unreadable.ref = named(decode, sketch.ref, MAX_REF_CHARS)
    return unreadable
