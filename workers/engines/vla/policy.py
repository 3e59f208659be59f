"""What a policy implements to be served to robots.

A policy maps observations to chunks of actions, for several robots in one call. It is made
and called in one thread that belongs to it alone. Third parties name theirs `MODULE:CLASS` in
the config, or register it in the entry-point group `antiphon.policies`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy.typing as npt
import pydantic

from workers.engine import DeviceUse

ENTRY_POINTS = "antiphon.policies"

State = Mapping[str, npt.NDArray[Any]]
"""What a policy keeps of one session between two calls, by name: arrays that never change."""


@dataclass(frozen=True)
class Batch:
    """Observations of `size` sessions whose arrays have the same names, dtypes and shapes.

    Each array of `observations` has one axis more, the first, of length `size`; whatever else
    they hold, such as a prompt, is a list with one entry a session. Maps within them are maps
    here. `states` are stacked like the arrays. All of it may be read-only.
    """

    size: int
    observations: dict[Any, Any]
    states: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Inferred:
    """What a policy makes of a batch, stacked as the batch is; new arrays each time.

    `answers` has `actions`, of shape (size, horizon, dimensions), and what else is to be told.
    `states` replaces the batch's, with the same names, dtypes and shapes.
    """

    answers: dict[str, Any]
    states: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class NoOptions(pydantic.BaseModel):
    """Of a policy that has none."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Policy(ABC):
    """One policy with its weights."""

    Options: ClassVar[type[pydantic.BaseModel]] = NoOptions
    """What the stage's `options` may hold."""

    def __init__(self, options: Any) -> None:
        """Takes a validated `Options`. Nothing is loaded yet."""
        self.options = options

    def load(self) -> dict[str, Any]:
        """Load the weights and warm up, in the policy's thread; it may take its time.

        The map is what clients are told first, such as the form of a chunk; at most 64 KB.
        """
        return {}

    def initial_state(self, settings: dict[str, Any]) -> State:
        """The state with which a session of these settings begins; empty: it keeps none.

        A quick function of options and settings alone: it also says how many bytes a session
        takes. Called on the event loop. Raises protocol.errors.InvalidRequest for settings that
        it does not know.
        """
        return {}

    @abstractmethod
    def infer(self, batch: Batch) -> Inferred:
        """The answers to a batch. In the policy's thread.

        Raises whatever goes wrong: then each session of the batch is tried alone, so that one
        that cannot be served harms no other. A protocol.errors.InvalidRequest is told to its
        client as it is.
        """

    def weights(self) -> str:
        """A digest of what a session's state depends on beside class and options; once it is
        loaded."""
        return ""

    def devices(self) -> dict[str, DeviceUse]:
        """What it holds of each device for all sessions, as `Engine.devices` has it."""
        return {}


def policy_class(name: str) -> type[Policy]:
    """The policy registered as `name`, or in a module as `MODULE:CLASS`.

    Imports its module. Raises ValueError when there is none.
    """
    registered = importlib.metadata.entry_points(group=ENTRY_POINTS)
    module, colon, attribute = name.partition(":")
    if not colon and name not in registered.names:
        known = ", ".join(sorted(registered.names)) or "none"
        raise ValueError(f"there is no policy {name}; installed are {known}")
    try:
        if colon:
            policy = getattr(importlib.import_module(module), attribute)
        else:
            policy = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {name} cannot be loaded: {error}") from None
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(f"policy {name} is not a Policy but {policy!r}")
    return policy
