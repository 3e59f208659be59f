"""The machine of each kind of session."""

from __future__ import annotations

from sessions.duplex.machine import DuplexMachine
from sessions.oneshot.machine import OneShotMachine
from sessions.pipeline import Kind
from sessions.steps.machine import StepMachine

MACHINES: dict[Kind, type[DuplexMachine | StepMachine | OneShotMachine]] = {
    Kind.DUPLEX: DuplexMachine,
    Kind.WORLD: StepMachine,
    Kind.ROBOT: StepMachine,
    Kind.ONE_SHOT: OneShotMachine,
}
