"""Which worker takes a session's stage, and which sessions wait for one.

Without I/O: the shell of the links (`gateway.pools`) says what becomes of the workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.compute_use import ComputeUse
from protocol.device_bytes import DeviceBytes
from protocol.errors import CapacityExceeded
from protocol.messages import Answer, Command, WorkerStatus

WEDGED_MS = 30_000.0
"""Work that waits this long without any progress of its worker makes the worker wedged."""


class CommandLink(Protocol):
    """A link to one worker as the sessions bound to it see it."""

    @property
    def endpoint(self) -> str:
        """Where the worker is reached."""

    @property
    def ready(self) -> bool:
        """Whether it is linked and has loaded its model."""

    @property
    def worker(self) -> str | None:
        """The incarnation that is linked now."""

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the worker that no more should be made for it."""

    @property
    def unacknowledged(self) -> int:
        """Messages that wait for the worker or for its acknowledgement."""

    def send(self, command: Command) -> None:
        """Send a command. Raises AntiphonError, and then it was not sent."""

    def start_afresh(self) -> None:
        """Give the link up and open a new one; the worker is not ready from now on."""


@dataclass
class Replica:
    """One worker process of a stage, whichever incarnation it is just now.

    `sessions` are the ids bound to this incarnation. `stuck_since_ms` is when the
    worker last reported work waiting without any progress since.
    """

    name: str
    stage: str
    link: CommandLink
    sessions: set[str] = field(default_factory=set)
    status: WorkerStatus | None = None
    incarnations: int = 0
    process: str = ""
    """The incarnation that was linked last, whether it is linked now or not."""
    stuck_since_ms: float | None = None
    consumer: str | None = None
    """Its name as a consumer of this gateway's arena; None without one."""
    attaching: bool = False
    """Whether it is not known yet how payloads reach it."""
    changed: bool = True
    """Whether the last heartbeat told of something that may have made room for a session."""
    _worked: bool = False
    """Whether it could take sessions when it was last heard of."""
    _seen: int | None = None
    """How far its progress had come when it was last heard of, or refused a session."""

    @property
    def ready(self) -> bool:
        """Whether a session can be opened on it: it is loaded, and its arena is attached."""
        return self.link.ready and not self.attaching

    @property
    def crowded(self) -> bool:
        """Whether so much waits for it that its sessions' clients are to wait."""
        return self.link.crowded

    def unacknowledged(self) -> int:
        """Messages to the worker that it has not acknowledged."""
        return self.link.unacknowledged

    def devices(self) -> Mapping[str, DeviceBytes]:
        """What it has reserved of its devices, as of its last heartbeat."""
        return {} if self.status is None or self.link.worker is None else self.status.devices

    def compute(self) -> ComputeUse:
        """What it takes of the processor, as of its last heartbeat."""
        status = self.status if self.link.worker is not None else None
        return (status.compute if status is not None else None) or ComputeUse()

    def counters(self) -> Mapping[str, int]:
        """What its engine has done, as of its last heartbeat."""
        return {} if self.status is None or self.link.worker is None else self.status.counters

    def came(self, worker: str) -> None:
        """A link to the incarnation `worker` is open; its arena is still to be attached."""
        # The link names its every opening; the process is what comes before the last dot.
        process = worker.rpartition(".")[0]
        if process != self.process:
            self.process = process
            self.incarnations += 1
        self.status = self._seen = None
        self.stuck_since_ms = None
        self.attaching = self.changed = True
        self._worked = False

    def attached(self, consumer: str | None) -> bool:
        """Payloads go by arena from here on, or inside messages; whether it is ready now."""
        self.consumer = consumer
        self.attaching = False
        self._worked = self.ready
        return self.ready

    def went(self) -> None:
        """The link is lost, with all that the worker held for it."""
        self.sessions = set()
        self.attaching = False
        self.changed = True
        self.consumer = None

    def beat(self, status: WorkerStatus, now_ms: float) -> bool:
        """Take a heartbeat's status in; whether the worker can take sessions again."""
        self.changed = status.progress != self._seen or _gave_up(self.status, status)
        self._seen = status.progress
        worked = self._worked and self.works(now_ms)
        self._note(status, now_ms)
        self._worked = self.works(now_ms)
        return self._worked and not worked

    def refused(self, answer: Answer) -> None:
        """It has refused something: what it had done before that has made no room."""
        progress = answer.result.get("progress")
        if isinstance(progress, int):
            self._seen = progress

    def wedged(self, now_ms: float) -> bool:
        """Whether work has waited for WEDGED_MS without progress."""
        return self.stuck_since_ms is not None and now_ms - self.stuck_since_ms >= WEDGED_MS

    def works(self, now_ms: float) -> bool:
        """Whether it can take a session and gets something done."""
        return self.ready and not self.wedged(now_ms)

    def _note(self, status: WorkerStatus, now_ms: float) -> None:
        before = self.status
        advanced = before is None or status.progress != before.progress or not status.waiting
        if advanced:
            self.stuck_since_ms = None
        elif self.stuck_since_ms is None:
            self.stuck_since_ms = now_ms
        self.status = status


def _gave_up(before: WorkerStatus | None, after: WorkerStatus) -> bool:
    """Whether more was free in the second of two heartbeats, as far as is known."""
    if before is None:
        return False
    if after.ready != before.ready:
        return True
    fits = [(status.compute or ComputeUse()).fits for status in (before, after)]
    return fits[1] > fits[0] or any(
        device.free is not None
        and (known := before.devices.get(name)) is not None
        and known.free is not None
        and device.free > known.free
        for name, device in after.devices.items()
    )


class Placement:
    """All replicas by stage, and the sessions that wait for one of a stage."""

    def __init__(self) -> None:
        self._by_stage: dict[str, list[Replica]] = {}
        self._waiting: dict[str, dict[str, None]] = {}

    def add(self, replica: Replica) -> None:
        """A worker that the config names."""
        self._by_stage.setdefault(replica.stage, []).append(replica)

    def of(self, stage: str) -> list[Replica]:
        """The replicas of a stage."""
        return self._by_stage.get(stage, [])

    def all(self) -> list[Replica]:
        """Every replica."""
        return [replica for replicas in self._by_stage.values() for replica in replicas]

    def pick(self, stage: str, now_ms: float) -> Replica:
        """The ready replica with the fewest sessions.

        Raises CapacityExceeded when there is none.
        """
        candidates = [replica for replica in self.of(stage) if replica.works(now_ms)]
        if not candidates:
            raise CapacityExceeded(
                f"no worker of stage {stage} is ready", code="engine_unavailable"
            )
        return min(candidates, key=lambda replica: len(replica.sessions))

    def wait(self, stage: str, session: str) -> None:
        """`session` takes a replica of `stage` once there is one, after those that came before."""
        self._waiting.setdefault(stage, {})[session] = None

    def forget(self, session: str) -> None:
        """`session` waits for nothing any more."""
        for waiting in self._waiting.values():
            waiting.pop(session, None)

    def served(self, stage: str, now_ms: float) -> Iterator[tuple[str, Replica]]:
        """The sessions that wait for `stage`, each with its replica, while there is one.

        Each has to be bound before the next is taken.
        """
        for session in self.waiting(stage):
            try:
                replica = self.pick(stage, now_ms)
            except CapacityExceeded:
                return
            if session in self._waiting[stage]:
                del self._waiting[stage][session]
                yield session, replica

    def waiting(self, stage: str) -> list[str]:
        """The sessions that wait for a replica of `stage`, in their order."""
        return list(self._waiting.get(stage, ()))
