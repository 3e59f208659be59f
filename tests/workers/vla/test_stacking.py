"""Observations as a batch, and a batch's answers one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workers.engines.vla.policy import Inferred
from workers.engines.vla.stacking import MisshapenAnswer, signature, stack, unstack

STATE = {"n": np.zeros(2, np.int64)}


def observation(value: int, prompt: str = "go") -> dict[str, Any]:
    return {"images": {"top": np.full((2, 2), value, np.uint8)}, "prompt": prompt}


def test_arrays_get_an_axis_and_the_rest_becomes_lists() -> None:
    batch = stack([observation(1), observation(2, "stop")], [STATE, STATE])
    assert batch.observations["images"]["top"].shape == (2, 2, 2)
    assert batch.observations["images"]["top"][1, 0, 0] == 2
    assert batch.observations["prompt"] == ["go", "stop"]
    assert batch.states["n"].shape == (2, 2)


def test_a_single_observation_is_not_copied() -> None:
    one = observation(1)
    assert np.shares_memory(
        stack([one], [STATE]).observations["images"]["top"], one["images"]["top"]
    )


def test_what_cannot_be_stacked_has_another_signature() -> None:
    one = observation(1)
    assert signature(one) == signature({"prompt": "other", "images": observation(2)["images"]})
    for other in (
        {"images": {"top": np.zeros((2, 3), np.uint8)}, "prompt": "go"},
        {"images": {"top": np.zeros((2, 2), np.int8)}, "prompt": "go"},
        {"images": {"front": np.zeros((2, 2), np.uint8)}, "prompt": "go"},
        {"images": {"top": np.zeros((2, 2), np.uint8)}},
    ):
        assert signature(one) != signature(other)


def test_answers_come_apart_and_states_are_copies() -> None:
    states = np.arange(4, dtype=np.int64).reshape(2, 2)
    answers = {"actions": np.zeros((2, 3, 1)), "more": {"name": ["a", "b"]}}
    first, second = unstack(Inferred(answers, {"n": states}), 2, STATE)
    assert first[0]["actions"].shape == (3, 1)
    assert second[0]["more"] == {"name": "b"}
    assert second[1]["n"].tolist() == [2, 3]
    assert not np.shares_memory(second[1]["n"], states)


@pytest.mark.parametrize(
    ("answers", "states"),
    [
        ({}, STATE),
        ({"actions": [[1.0]]}, STATE),
        ({"actions": np.zeros((1, 2))}, STATE),
        ({"actions": np.zeros((2, 2, 2))}, STATE),
        ({"actions": np.zeros((1, 2, 2)), "x": np.zeros(())}, {"n": np.zeros((1, 2), np.int64)}),
        ({"actions": np.zeros((1, 2, 2)), "x": "text"}, {"n": np.zeros((1, 2), np.int64)}),
        ({"actions": np.zeros((1, 2, 2)), "x": {"y": []}}, {"n": np.zeros((1, 2), np.int64)}),
        ({"actions": np.zeros((1, 2, 2))}, {}),
        ({"actions": np.zeros((1, 2, 2))}, {"n": np.zeros((1, 3), np.int64)}),
        ({"actions": np.zeros((1, 2, 2))}, {"n": np.zeros((1, 2), np.int32)}),
    ],
)
def test_anything_but_one_answer_a_session_is_refused(
    answers: dict[str, Any], states: dict[str, Any]
) -> None:
    with pytest.raises(MisshapenAnswer):
        unstack(Inferred(answers, states), 1, STATE)
