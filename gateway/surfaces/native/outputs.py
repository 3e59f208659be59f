"""What a session puts out, as frames: made from the session core's types, of every kind.

The frame of an output is named after its type in snake case and has its fields. An output
of a further kind joins by `OUTPUTS`.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_type_hints

import msgspec

from gateway.surfaces.native.cursors import Cursors
from gateway.surfaces.native.verbs import as_written
from protocol.errors import ErrorInfo
from protocol.native import ClientFrame, SessionLimits
from protocol.wires import Wire
from sessions import client
from sessions.duplex import events as duplex
from sessions.duplex.settings import DuplexSettings
from sessions.oneshot import events as oneshot
from sessions.pipeline import Limits
from sessions.steps import events as steps

OUTPUTS: tuple[type, ...] = tuple(
    dict.fromkeys(
        output
        for outputs in (duplex.ClientOutput, steps.StepOutput, oneshot.OneShotOutput)
        for output in get_args(outputs)
    )
)
"""The outputs of sessions of every kind."""

FREE_FIELDS: dict[str, tuple[type, ...]] = {
    "settings": (DuplexSettings, dict),
    "snapshot": (duplex.DuplexSnapshot, steps.StepSnapshot, NoneType),
}
"""The fields that differ by kind, and what each kind has there."""


class OutputFrame(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """What the session put out as number `sequence`.

    Frames for one connection alone take the number of the output before them. A client
    that resumes with `cursor` is told what came after this frame.
    """

    sequence: int
    cursor: str


_DEFS = "#/$defs/"
_PLAIN: dict[type, dict[str, str]] = {dict: {"type": "object"}, NoneType: {"type": "null"}}

_NAMES: dict[type, str] = {client.Answered: "answer"}
_FIELDS: dict[type, dict[str, str]] = {client.Answered: {"command": "id"}}


def _frame_type(output: type) -> type[OutputFrame]:
    """The frame of an output's type."""
    hints = get_type_hints(output, include_extras=True)
    named = _FIELDS.get(output, {})
    fields = [
        (named.get(name, name), _wire_type(name, kind))
        for name, kind in hints.items()
        if name not in OutputFrame.__struct_fields__
    ]
    tag = _NAMES.get(output) or re.sub(r"(?<=.)(?=[A-Z])", "_", output.__name__).lower()
    frame = msgspec.defstruct(
        "".join(word.title() for word in tag.split("_")) + "Frame",
        fields,
        bases=(OutputFrame,),
        namespace={"__doc__": output.__doc__},
        module=__name__,
        kw_only=True,
        frozen=True,
        tag=tag,
    )
    return cast("type[OutputFrame]", frame)


def _wire_type(name: str, kind: Any) -> Any:
    if kind is Limits:
        return SessionLimits
    if name in FREE_FIELDS:
        return free_type(name)
    return kind


def free_type(name: str) -> Any:
    """The type of a field that differs by kind: any, and in a schema one of the kinds'."""
    kinds = [_PLAIN.get(kind) or {"$ref": _DEFS + kind.__name__} for kind in FREE_FIELDS[name]]
    return Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": kinds})]


FRAMES: dict[type, type[OutputFrame]] = {output: _frame_type(output) for output in OUTPUTS}
"""The frame of each output."""

_CARRIED = {
    output: tuple(
        (name, _FIELDS.get(output, {}).get(name, name))
        for name in get_type_hints(output)
        if name not in OutputFrame.__struct_fields__
    )
    for output in OUTPUTS
}


class OutputWriter:
    """The frames of one connection, in its encoding."""

    def __init__(self, wire: Wire[ClientFrame], cursors: Cursors) -> None:
        self._wire = wire
        self._cursors = cursors
        self._through = 0

    def write(self, sequence: int, output: Any) -> str | bytes:
        """The frame of output number `sequence`."""
        self._through = max(self._through, sequence)
        return self._write(sequence, output)

    def attached(self, attached: client.Attached, cursor: int | None) -> str | bytes:
        """The first frame, for a client that came with `cursor`: the numbers go on there."""
        if attached.lost is not None:
            self._through = attached.lost[1]
        else:
            self._through = attached.sequence if cursor is None else cursor
        return self._write(attached.sequence, attached)

    def alone(self, output: Any) -> str | bytes:
        """The frame of what is said to this connection, and is none of the session's outputs."""
        return self._write(self._through, output)

    def _write(self, sequence: int, output: Any) -> str | bytes:
        values = {
            written: _value(getattr(output, name)) for name, written in _CARRIED[type(output)]
        }
        frame = FRAMES[type(output)](
            sequence=sequence, cursor=self._cursors.write(self._through), **values
        )
        return self._wire.write(frame)


def limits_out(limits: Limits) -> SessionLimits:
    """A session's limits as its client is told them."""
    return SessionLimits(
        idle_s=limits.idle_ms / 1000,
        max_age_s=limits.max_age_ms / 1000,
        grace_s=limits.grace_ms / 1000,
        stall_s=limits.stall_ms / 1000,
        replay_bytes=limits.replay_bytes,
    )


def _value(value: Any) -> Any:
    if isinstance(value, ErrorInfo):
        return as_written(value)
    return limits_out(value) if isinstance(value, Limits) else value
