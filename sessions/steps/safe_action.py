"""What a robot is given where there is nothing fresh: its safe action.

It has the form of what the robot was given last, so that whoever cuts chunks into actions
need not know of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from protocol.errors import EngineFailed
from protocol.payloads import Payload, PayloadType
from protocol.safe_action import HOLD, ZERO, SafeValue
from sessions.pipeline import Control

KEY = "key"
ACTIONS = "actions"
"""The key of the array whose rows are the actions, and of one that names none."""

Outputs = dict[str, list[Payload]]


class SafeActions:
    """The safe action of one session, made of the arrays of its last fresh answer."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._given: Outputs | None = None
        self._given_ms = 0.0
        self._made: Outputs | None = None

    @property
    def armed(self) -> bool:
        """Whether there has been a fresh answer: from then on deadlines count."""
        return self._given is not None

    def given(self, outputs: Mapping[str, list[Payload]], now_ms: float) -> None:
        """The robot gets these, fresh.

        Raises EngineFailed where the safe action does not fit to them: better now than when
        it is needed.
        """
        arrays = {port: [p for p in pieces if p.dtype] for port, pieces in outputs.items()}
        if self._control.safe_action is not None and _form(arrays) != _form(self._given or {}):
            self._made_of(arrays, 0)
        self._given, self._given_ms, self._made = arrays, now_ms, None

    def make(self, now_ms: float) -> Outputs | None:
        """The safe action; None where none is configured, or its form is not known yet.

        What is held once is held until there is something fresh.
        """
        if self._control.safe_action is None:
            return None
        if self._given is None:
            return self._before_all()
        if self._made is None:
            played = _rows(self._given.values())
            if self._control.rate_hz is not None:
                played = int((now_ms - self._given_ms) * self._control.rate_hz / 1000.0)
            self._made = self._made_of(self._given, played)
        return self._made

    def _before_all(self) -> Outputs | None:
        """Before there was anything to hold: what was configured as it is to be."""
        value = self._value(ACTIONS)
        if value is None or isinstance(value, str):
            return None
        actions = np.atleast_2d(np.asarray(value, "<f4"))
        named = {KEY: ACTIONS}
        safe = Payload(PayloadType.ACTIONS, actions.tobytes(), "<f4", actions.shape, named)
        return {ACTIONS: [safe]}

    def _value(self, key: str) -> SafeValue | None:
        """What is to become of the array of that key; None: it is left out."""
        configured = self._control.safe_action
        if isinstance(configured, Mapping):
            return configured.get(key)
        if key != ACTIONS and not isinstance(configured, str):
            return HOLD
        return configured

    def _made_of(self, given: Outputs, played: int) -> Outputs:
        rows = _rows(given.values())
        made: Outputs = {}
        for port, arrays in given.items():
            made[port] = [
                safe
                for array in arrays
                if (safe := _safe(array, self._value(_key(array)), rows, played)) is not None
            ]
        return made

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (self._given is not None, self._made is not None)


def _safe(array: Payload, value: SafeValue | None, rows: int, played: int) -> Payload | None:
    if value is None:
        return None
    named = {KEY: array.attributes[KEY]} if KEY in array.attributes else {}
    bare = msgspec.structs.replace(array, attributes=named)
    if value == ZERO:
        return msgspec.structs.replace(bare, data=bytes(len(array.data)))
    if value != HOLD:
        return msgspec.structs.replace(bare, data=_configured(array, value))
    if not array.shape or array.shape[0] != rows or not rows:
        return bare  # It has no rows to play.
    row_bytes = len(array.data) // rows
    at = min(played, rows - 1) * row_bytes
    return msgspec.structs.replace(bare, data=bytes(array.data[at : at + row_bytes]) * rows)


def _configured(array: Payload, value: SafeValue) -> bytes:
    """The configured numbers in the form of the policy's. Raises EngineFailed where they have
    none in it: no motor is told another number than the one that was chosen."""
    wanted = np.asarray(value, np.float64)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            values = wanted.astype(np.dtype(array.dtype))
        if wanted.shape != array.shape[-wanted.ndim :]:
            raise ValueError("of another shape")
        exact = values.dtype.kind in "biu"
        if not (values == wanted if exact else np.isfinite(values)).all():
            raise ValueError("no number of this dtype")
        return np.broadcast_to(values, array.shape).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineFailed(
            f"the safe action of {_key(array)!r} has the shape {wanted.shape}, and the "
            f"policy's answer {array.shape} of {array.dtype}: {error}",
            code="safe_action_mismatch",
        ) from None


def _key(array: Payload) -> str:
    return str(array.attributes.get(KEY, ACTIONS))


def _rows(ports: Iterable[list[Payload]]) -> int:
    """The horizon: how many actions a chunk has."""
    for arrays in ports:
        for array in arrays:
            if _key(array) == ACTIONS and array.shape:
                return array.shape[0]
    return 0


def _form(outputs: Outputs) -> list[tuple[str, str, str, tuple[int, ...]]]:
    return [
        (port, _key(array), array.dtype, array.shape)
        for port, arrays in outputs.items()
        for array in arrays
    ]
