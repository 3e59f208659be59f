"""Observations of several robots as one batch, and the answers of a batch one by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.engines.vla.policy import Batch, Inferred, State


class MisshapenAnswer(RuntimeError):
    """A policy gave something else than one answer a session."""


def signature(observation: Any) -> Hashable:
    """What observations have in common that can be stacked."""
    if isinstance(observation, np.ndarray):
        return observation.dtype.str, observation.shape
    if isinstance(observation, dict):
        return frozenset((key, signature(value)) for key, value in observation.items())
    return None


def stack(observations: Sequence[dict[Any, Any]], states: Sequence[State]) -> Batch:
    """The batch of observations that have one signature; a single one is not copied."""
    return Batch(
        len(observations),
        {key: _stacked([each[key] for each in observations]) for key in observations[0]},
        {name: _stacked([each[name] for each in states]) for name in states[0]},
    )


def unstack(
    inferred: Inferred, size: int, initial: State
) -> list[tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]:
    """Answer and state of each session. Raises MisshapenAnswer.

    `initial` shows what a state looks like. States are copied: a view would keep the whole batch.
    """
    actions = inferred.answers.get("actions")
    if not isinstance(actions, np.ndarray) or actions.ndim != 3 or len(actions) != size:
        shape = getattr(actions, "shape", None)
        raise MisshapenAnswer(
            f"'actions' must be an array of ({size}, horizon, dimensions), not of {shape}"
        )
    states = inferred.states
    if states.keys() != initial.keys():
        raise MisshapenAnswer(f"the states have {sorted(states)}, not {sorted(initial)}")
    for name, first in initial.items():
        if (states[name].dtype, states[name].shape) != (first.dtype, (size, *first.shape)):
            raise MisshapenAnswer(f"state {name!r} has become another")
    return [
        (
            {key: _row(value, index, size, key) for key, value in inferred.answers.items()},
            {name: np.array(values[index]) for name, values in states.items()},
        )
        for index in range(size)
    ]


def _stacked(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return first[np.newaxis] if len(values) == 1 else np.stack(values)
    if isinstance(first, dict):
        return {key: _stacked([each[key] for each in values]) for key in first}
    return values


def _row(values: Any, index: int, size: int, key: object) -> Any:
    if isinstance(values, dict):
        return {name: _row(value, index, size, name) for name, value in values.items()}
    if isinstance(values, np.ndarray) and values.ndim == 0:
        values = None
    if not isinstance(values, np.ndarray | list) or len(values) != size:
        raise MisshapenAnswer(f"{key!r} has not one entry a session")
    return values[index]
