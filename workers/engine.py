"""The engine interface: what a plug-in inside a worker implements.

An engine owns one model in one worker process and makes one `EngineSession` for
each session bound to the worker. All methods are called on the worker's event
loop and must return quickly; heavy work belongs in threads that the engine owns
(`asyncio.to_thread` or an executor of its own). An engine never imports the
gateway. Third parties register theirs in the entry-point group
`antiphon.engines`; the entry point names the `Engine` subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from protocol.errors import CapacityExceeded, InvalidRequest
from protocol.payloads import Payload, PayloadType
from protocol.schema import PayloadSchema


@dataclass(frozen=True)
class DeviceUse:
    """What a loaded engine holds of one device for all its sessions together, in bytes.

    `model`: weights and work space; of the host's memory ("cpu") the runtime measures it
    itself. `pool`: what was set aside for sessions; what they declare comes out of it, and
    together they cannot have more.
    `total`: the device's memory, the budget where the config names none.
    """

    model: int = 0
    pool: int = 0
    total: int | None = None


EmitEvent = Callable[[str, dict[str, Any]], None]
"""Report something that the engine noticed outside any turn: (name, arguments)."""


class NeedsRoom(CapacityExceeded):
    """A session cannot be restored before others have made room: it `needs` so many bytes, by
    device, more than was declared for it."""

    def __init__(self, message: str, needs: dict[str, int]) -> None:
        super().__init__(message)
        self.needs = needs


async def no_more(needs: dict[str, int]) -> None:
    """Nobody can make room."""
    raise CapacityExceeded("no more bytes can be reserved here")


async def no_wait() -> None:
    """Room for output is there at once."""


@dataclass
class Turn:
    """One unit of work handed to an engine session.

    `inputs` yields the payloads of the turn in order and ends after the last; a
    turn that streams (text clauses into a voice) gets them one by one. `emit`
    hands an output piece to the runtime and may be called only on the loop. `room`
    waits while too much output of the session has not been taken by its consumer: an
    engine that makes much awaits it between pieces. An engine that may need more than it has
    declared for the session awaits `reserve` with the bytes that the session will hold then, by
    device, before it takes them: others may have to be parked for it. It raises CapacityExceeded
    where there is none to be had. They are reserved until the turn is over; from then on the
    session counts with what is measured. `step` is the number of a turn that
    moves the session's state on, None of any other.
    """

    number: int
    lane: str
    parameters: dict[str, Any]
    inputs: AsyncIterator[Payload]
    emit: Callable[[Payload], None]
    room: Callable[[], Awaitable[None]] = no_wait
    step: int | None = None
    reserve: Callable[[dict[str, int]], Awaitable[None]] = no_more


@dataclass
class TurnResult:
    """What a completed turn used: counters by name, for `usage`.

    `commit` puts the state that the turn has come to in the place of the session's
    state. The runtime calls it on the loop, at once and at most once, and only when the
    turn counts as completed: one that was cancelled while it finished never happened.
    It should be no more than an assignment; when it raises the session's state is lost.
    """

    usage: dict[str, Any] = field(default_factory=dict)
    commit: Callable[[], None] | None = None


class EngineSession(ABC):
    """The state of one session inside an engine."""

    @abstractmethod
    async def run(self, turn: Turn) -> TurnResult:
        """Carry out `turn`.

        Cancellation (asyncio.CancelledError) means that its content is no longer
        wanted: stop computing as soon as the engine can and leave the session's
        state as if the turn had produced only what was emitted. Any other
        exception fails this turn only.

        A step (`turn.step`) changes nothing of the session's state: what it has come to
        takes effect in `TurnResult.commit` alone, so that a step that fails or is
        cancelled leaves the state as it was. Steps run one after the other, except that
        one which does not stop when it is cancelled may still be running.
        """

    def update(self, payload: Payload) -> None:
        """Apply one piece of stream input. Engines without stream input refuse it."""
        raise InvalidRequest("this engine takes no stream input", code="unsupported")

    def configure(self, settings: dict[str, Any]) -> None:
        """Replace the session's settings.

        Raises protocol.errors.InvalidRequest naming the field; the old settings stay.
        """
        raise InvalidRequest("this engine's session settings are fixed at open", code="unsupported")

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Out-of-turn control; the returned map is the answer's result.

        Raises protocol.errors.InvalidRequest for a name it does not know. An engine of
        steps knows `protocol.messages.RESET`: the session's state is as at its open, with
        what `arguments` say; an error leaves it as it was. `CHECKPOINT`, `REWIND` and
        `RELEASE` are there for engines that can; what they mean is said with their names.
        """
        raise InvalidRequest("this engine takes no signals", code="unsupported")

    def fork(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """Another session, whose state is as this one's is now, with nothing held down, and
        with `settings` in the place of this one's. This one is as it was.

        Called between two steps, where the bytes that `Engine.declare` says of the new session
        are reserved. Raises as `Engine.open` does.
        """
        raise InvalidRequest("this engine forks no sessions", field="fork", code="unsupported")

    def measure(self) -> dict[str, int] | None:
        """The bytes that the session holds now, by device, counted and not estimated
        (`workers.storages` does so for arrays); None where the engine cannot tell.

        Asked for after the open, after settings and signals and after every turn: it must
        be quick. A session counts with the larger of this and what was declared.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """What clients may be told of the model, once the session is open: a small map of what
        msgpack has."""
        return {}

    def kept(self) -> list[int]:
        """After which steps states are kept, of an engine that knows CHECKPOINT. Asked for when
        the session is there, or is again; from then on the answers to CHECKPOINT say so."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Free everything that the session holds. Running turns are cancelled before.

        If it raises what was declared for the session stays reserved, and it is called again
        after a while, until it does not.
        """


class ParkableSession(EngineSession):
    """A session whose state can leave the device and come back.

    Its engine overrides `Engine.restore` and `Engine.weights`.
    """

    @abstractmethod
    async def snapshot(self, path: Path) -> None:
        """Write the session's state to a new file at `path`, where none is yet.

        No turn runs meanwhile and nothing is applied; afterwards the session is closed or goes
        on as it was, also if this raises or is cancelled. Whoever restores it gets the same
        state to the last bit of what later turns depend on.
        """


class Engine(ABC):
    """One model in one worker process."""

    Options: ClassVar[type[pydantic.BaseModel]]
    """The stage options that config may set; unknown names are refused."""

    inputs: ClassVar[frozenset[PayloadType]]
    outputs: ClassVar[frozenset[PayloadType]]

    takes: ClassVar[tuple[PayloadSchema, ...]] = ()
    produces: ClassVar[tuple[PayloadSchema, ...]] = ()
    """What is known of dtype, shape and attributes beyond the type, at most one each.

    Both ends of an edge are held against each other when a config is loaded, and what
    is emitted against `produces`.
    """

    @classmethod
    @abstractmethod
    def create(cls, options: Any) -> Engine:
        """An engine from a validated `Options`. Nothing is loaded yet."""

    @abstractmethod
    async def load(self) -> None:
        """Load the model and warm it up.

        Raises protocol.errors.ModelFileError when a file is missing or not the
        pinned one.
        """

    def devices(self) -> dict[str, DeviceUse]:
        """What it holds for all sessions together, by device ("cpu", "cuda:0"), once loaded."""
        return {}

    def counters(self) -> dict[str, int]:
        """What it has done since it was created, by name, for metrics: a few numbers that only
        grow. Asked for with each heartbeat."""
        return {}

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """The most bytes that a session with `settings` holds, by device; its inputs and what
        it emits do not count.

        They are reserved before `open` and `configure` are called, and for a session that
        is refused they are free again. A function of options and settings alone. Raises
        protocol.errors.InvalidRequest for settings that it cannot honour.
        """
        return {}

    @abstractmethod
    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's state on this engine.

        Raises protocol.errors.InvalidRequest for settings it cannot honour and
        protocol.errors.CapacityExceeded when it has no room.
        """

    def weights(self) -> str:
        """What a snapshot fits: a digest of the weights and of every option that decides how
        a state is read. Known once it is loaded; empty for engines that restore nothing."""
        return ""

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, path: Path
    ) -> EngineSession:
        """A session with the state of the snapshot at `path`, made under the same `weights`.

        Raises as `open` does, NeedsRoom where others have to make room first (then it is called
        again), and protocol.errors.SessionStateLost for a snapshot that it cannot read. The file
        is gone after this returns.
        """
        raise InvalidRequest("this engine restores nothing", code="unsupported")

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop threads and free the model. Sessions are closed before."""
