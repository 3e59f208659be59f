"""What a player holds down, as clients say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocol.arrays import array_payload
from protocol.errors import InvalidRequest
from protocol.payloads import PayloadType, text_payload
from workers.engines.world.actions import Held, held_of, rows_of
from workers.engines.world.architecture import Architecture

WORLD = Architecture(keys=("left", "right"), axes=("turn",))
NOTHING = Held((0.0, 0.0, 0.0))


def actions(values: Any, **attributes: Any) -> Any:
    return array_payload(PayloadType.ACTIONS, np.array(values, np.float32), **attributes)


def test_the_latest_is_held_with_its_number() -> None:
    held = held_of(actions([1, 0, -0.5], sequence=7), WORLD, NOTHING)
    assert held == Held((1.0, 0.0, -0.5), 7)
    assert held_of(actions([[0, 1, 1]]), WORLD, held) == Held((0.0, 1.0, 1.0), 8)
    assert held.released() == Held((0.0, 0.0, 0.0), 7)


def test_integers_are_numbers_too() -> None:
    payload = array_payload(PayloadType.ACTIONS, np.array([1, 0, -1], np.int8))
    assert rows_of(payload, WORLD).tolist() == [[1, 0, -1]]


@pytest.mark.parametrize(
    "payload",
    [
        actions([1, 0]),
        actions([[1, 0, 0], [0, 0, 0]]),
        actions([0.5, 0, 0]),
        actions([1, 0, 1.5]),
        actions([1, 0, float("nan")]),
        actions([[[1, 0, 0]]]),
        actions([1, 0, 0], sequence=-1),
        actions([1, 0, 0], sequence="7"),
        text_payload("left"),
    ],
)
def test_what_is_no_action_is_refused(payload: Any) -> None:
    with pytest.raises(InvalidRequest):
        held_of(payload, WORLD, NOTHING)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"height": 60}, "multiples"),
        ({"dim": 30}, "multiple of heads"),
        ({"window": 0}, "window"),
        ({"scenes": ()}, "scene"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused(changed: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Architecture(**changed)
