"""The invariants that are checked after every step."""

from tests.simulation.invariants.answers import I7Answers
from tests.simulation.invariants.attachments import I7Attachments
from tests.simulation.invariants.budget import I3Budget
from tests.simulation.invariants.control import ControlLoop
from tests.simulation.invariants.cores import Cores
from tests.simulation.invariants.endings import I6Cancel, ResponsesEnd
from tests.simulation.invariants.eviction import I8Eviction
from tests.simulation.invariants.fence import I1Fence
from tests.simulation.invariants.floor import I2Floor
from tests.simulation.invariants.isolation import I11Isolation
from tests.simulation.invariants.kept import I7Kept
from tests.simulation.invariants.nothing_left import I4NothingLeft
from tests.simulation.invariants.parked import I5Parked
from tests.simulation.invariants.queue import Queue
from tests.simulation.invariants.readiness import I10Readiness
from tests.simulation.invariants.room import I8Room
from tests.simulation.invariants.state import I5State
from tests.simulation.invariants.steps import I5Steps

ALL = (
    I1Fence,
    I2Floor,
    I3Budget,
    I4NothingLeft,
    I5Parked,
    I5State,
    I5Steps,
    I6Cancel,
    I7Answers,
    I7Attachments,
    I7Kept,
    I8Eviction,
    I8Room,
    I10Readiness,
    I11Isolation,
    ControlLoop,
    Cores,
    Queue,
    ResponsesEnd,
)

__all__ = ["ALL"]
