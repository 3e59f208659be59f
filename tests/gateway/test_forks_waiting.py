"""What forks wait for, of sessions that are played by the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from gateway.forks import Forks
from protocol.errors import CapacityExceeded, ErrorInfo
from sessions.bindings import BindingState
from sessions.lifecycle import State
from sessions.session import Session
from sessions.steps.events import StepSnapshot

STAGE = "world"


@dataclass
class Source:
    """The session that is to be forked."""

    binding: BindingState = BindingState.READY
    working: bool = True
    refused: ErrorInfo | None = None
    state: State = State.DETACHED
    stands: StepSnapshot = field(default_factory=lambda: StepSnapshot(3, False, None))
    restored: int = 0

    @property
    def parked(self) -> tuple[str, ...]:
        return (STAGE,) if self.binding is BindingState.PARKED else ()

    def stage_state(self, stage: str) -> BindingState:
        return self.binding

    def refused_by_worker(self, stage: str) -> ErrorInfo | None:
        return self.refused

    def restore(self, session: str) -> None:
        self.restored += 1
        self.binding = BindingState.BINDING


def waiting() -> tuple[Forks, Source]:
    """A fork that waits for a checkpoint of its source."""
    source = Source()
    forks = Forks(lambda name: cast(Session, cast(Any, source)), source.restore)
    assert not forks.ready("fork", "source", STAGE)
    return forks, source


def test_a_source_that_has_made_room_for_others_meanwhile_is_brought_back() -> None:
    forks, source = waiting()
    source.working, source.binding = False, BindingState.PARKED
    assert forks.due("source") == []
    assert source.restored == 1
    # Its worker may be lost, and another be waited for.
    assert forks.due("source") == []
    source.binding = BindingState.READY
    assert forks.due("source") == [("fork", STAGE, None)]
    assert not forks


def test_a_source_that_does_not_come_back_is_told_with_why() -> None:
    forks, source = waiting()
    source.binding = BindingState.PARKED
    source.refused = CapacityExceeded("loading", code="not_ready").info()
    ((fork, _, error),) = forks.due("source")
    assert fork == "fork"
    assert isinstance(error, CapacityExceeded)
    assert (error.code, "loading" in error.message) == ("not_ready", True)
    assert (source.restored, len(forks)) == (0, 0)
