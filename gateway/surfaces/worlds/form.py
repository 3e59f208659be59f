"""What a world is, as its engine says: the size of its pictures, and what can be held down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gateway.hosting import SessionDescription, SessionHost, SessionSummary
from protocol.arrays import array_payload
from protocol.errors import ErrorInfo, InvalidRequest, NotFound
from protocol.payloads import Payload, PayloadType
from protocol.worlds import Capabilities
from sessions.pipeline import Kind, Pipeline, StepRoles

Row = tuple[float, ...]
"""The keys (0 or 1), then the axes (-1 to 1)."""


@dataclass(frozen=True)
class Form:
    """A world as its clients see it; `state` is the stage that keeps it."""

    capabilities: Capabilities
    state: str

    @property
    def nothing_held(self) -> Row:
        """The action of who holds nothing."""
        return (0.0,) * (len(self.capabilities.keys) + len(self.capabilities.axes))

    def row(self, keys: Iterable[str], axes: Mapping[str, float]) -> Row:
        """The action of who holds these. Raises InvalidRequest for what the world has not."""
        known = self.capabilities
        held = set(keys)
        if unknown := sorted(held - set(known.keys)):
            raise InvalidRequest(
                f"there is no key {unknown[0]!r}; there are {', '.join(known.keys)}", field="keys"
            )
        if others := sorted(set(axes) - set(known.axes)):
            raise InvalidRequest(
                f"there is no axis {others[0]!r}; there are {', '.join(known.axes) or 'none'}",
                field="axes",
            )
        pressed = [float(key in held) for key in known.keys]
        return (*pressed, *(float(axes.get(axis, 0.0)) for axis in known.axes))

    def check_rows(self, rows: Sequence[Sequence[float]], frames: int) -> None:
        """Raise InvalidRequest unless these are actions for so many frames of one step."""
        known = self.capabilities
        if frames > known.chunk:
            raise InvalidRequest(f"a step has up to {known.chunk} frames", field="frames")
        if rows and len(rows) not in (1, frames):
            raise InvalidRequest(f"{len(rows)} rows for {frames} frames", field="actions")
        size = len(self.nothing_held)
        for number, row in enumerate(rows):
            if len(row) != size:
                raise InvalidRequest(
                    f"a row has {size} numbers, not {len(row)}", field=f"actions[{number}]"
                )
            for place, pressed in enumerate(row[: len(known.keys)]):
                if pressed not in (0, 1):
                    raise InvalidRequest("a key is 0 or 1", field=f"actions[{number}][{place}]")

    def check_scene(self, scene: str) -> None:
        """Raise InvalidRequest for a scene that the world has not."""
        if scene not in self.capabilities.scenes:
            names = ", ".join(self.capabilities.scenes)
            raise InvalidRequest(f"there is no scene {scene!r}; there are {names}", field="scene")


def actions(rows: Sequence[Sequence[float]], sequence: int = 0) -> Payload:
    """Rows as the input of a step; what was held had this number."""
    return array_payload(PayloadType.ACTIONS, np.array(rows, "<f4"), sequence=sequence)


_WRITTEN = {
    "reset.parameters": "settings",
    "rewind.step": "step",
    "inputs": "actions",
}
_PARAMETERS = "parameters."


def as_written(error: ErrorInfo) -> ErrorInfo:
    """The error with its field as the client of a world has written it: the session core says
    where it is in the verb, and the engine where it is among what it was given."""
    field = error.field or ""
    written = _WRITTEN.get(field, field.removeprefix(_PARAMETERS))
    return error if written == field else msgspec.structs.replace(error, field=written)


def check_kind(summary: SessionSummary) -> None:
    """Raise NotFound for a session that is no world, in the words for one that is not there."""
    if summary.kind != Kind.WORLD:
        raise NotFound(f"there is no world {summary.id!r}", code="session_not_found")


def form_of(host: SessionHost, description: SessionDescription, formats: Sequence[str]) -> Form:
    """The form of a session's world. Raises InvalidRequest where its engine says none."""
    pipeline: Pipeline = host.pipelines[description.summary.pipeline]
    state = StepRoles.of(pipeline).state
    about: Mapping[str, Any] = description.about.get(state, {})
    try:
        capabilities = Capabilities(
            width=int(about["width"]),
            height=int(about["height"]),
            rate_hz=pipeline.play.rate_hz,
            chunk=int(about["chunk"]),
            denoising_steps=int(about["steps"]),
            keys=list(about["keys"]),
            axes=list(about["axes"]),
            scenes=list(about["scenes"]),
            formats=list(formats),
        )
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest(
            f"the engine of {state} does not say what its world is: step it as a session",
            code="unsupported",
        ) from None
    return Form(capabilities, state)
