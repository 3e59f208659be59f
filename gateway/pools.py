"""The workers that this gateway knows: a link each, gathered into a pool a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from protocol.errors import CapacityExceeded
from protocol.link_frames import WorkerInfo
from protocol.link_zmq import WorkerLink
from protocol.messages import Report, WorkerStatus

_log = structlog.get_logger(__name__)


WEDGED_MS = 30_000.0
"""Work that waits this long without any progress of its worker makes the worker wedged."""


@dataclass
class Replica:
    """One worker process of a stage, whichever incarnation it is just now.

    `sessions` are the ids bound to this incarnation. `stuck_since_ms` is when the
    worker last reported work waiting without any progress since.
    """

    name: str
    stage: str
    link: WorkerLink
    sessions: set[str] = field(default_factory=set)
    status: WorkerStatus | None = None
    incarnations: int = 0
    process: str = ""
    """The incarnation that was linked last, whether it is linked now or not."""
    stuck_since_ms: float | None = None
    consumer: str | None = None
    """Its name as a consumer of this gateway's arena; None without one."""
    attaching: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a session can be opened on it: it is loaded, and its arena is attached."""
        return self.link.ready and self.attaching is None

    @property
    def crowded(self) -> bool:
        """Whether so much waits for it that its sessions' clients are to wait."""
        return self.link.crowded

    def unacknowledged(self) -> int:
        """Messages to the worker that it has not acknowledged."""
        return self.link.unacknowledged

    def note(self, status: WorkerStatus, now_ms: float) -> None:
        """Take a heartbeat's status in."""
        before = self.status
        advanced = before is None or status.progress != before.progress or not status.waiting
        if advanced:
            self.stuck_since_ms = None
        elif self.stuck_since_ms is None:
            self.stuck_since_ms = now_ms
        self.status = status

    def wedged(self, now_ms: float) -> bool:
        """Whether work has waited for WEDGED_MS without progress."""
        return self.stuck_since_ms is not None and now_ms - self.stuck_since_ms >= WEDGED_MS

    def works(self, now_ms: float) -> bool:
        """Whether it can take a session and gets something done."""
        return self.ready and not self.wedged(now_ms)


class Pools:
    """All replicas by stage.

    `on_report(replica, report)` gets everything but status; `on_ready(stage)` is
    called when a replica can take sessions, `on_lost(replica)` when one is gone with all
    that it held; `on_change` after either. `on_crowded(replica)` is called in a loop turn of
    its own when the link to a replica has become crowded, or has room again.
    """

    def __init__(
        self,
        incarnation: str,
        clock_ms: Callable[[], float],
        *,
        on_report: Callable[[Replica, Report], None],
        on_ready: Callable[[str], None],
        on_lost: Callable[[Replica], None],
        on_change: Callable[[], None],
        on_crowded: Callable[[Replica], None],
        attach: Callable[[str], Awaitable[str | None]],
    ) -> None:
        self._incarnation = incarnation
        self._clock_ms = clock_ms
        self._on_report = on_report
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_change = on_change
        self._on_crowded = on_crowded
        self._attach = attach
        self._by_stage: dict[str, list[Replica]] = {}

    def add(self, name: str, stage: str, endpoint: str) -> Replica:
        """Link to the worker at `endpoint`; it may come and go. Needs a running loop."""
        replica: Replica

        def on_up(worker: str, info: WorkerInfo) -> None:
            # The link names its every opening; the process is what comes before the last dot.
            process = worker.rpartition(".")[0]
            if process != replica.process:
                replica.process = process
                replica.incarnations += 1
            replica.status = None
            replica.stuck_since_ms = None
            if info.stage != replica.stage:
                _log.error("wrong_worker", worker=name, stage=info.stage, expected=replica.stage)
                replica.link.close()
                return
            _log.info("worker_up", worker=name, incarnation=worker, ready=info.ready)
            replica.attaching = asyncio.create_task(self._attached(replica))
            self._on_change()

        def on_down(reason: str) -> None:
            _log.warning("worker_lost", worker=name, stage=stage, reason=reason)
            replica.sessions = set()
            if replica.attaching is not None:
                replica.attaching.cancel()
                replica.attaching = None
            replica.consumer = None
            self._on_lost(replica)
            self._on_change()

        def on_report(report: Report) -> None:
            if isinstance(report, WorkerStatus):
                now_ms = self._clock_ms()
                known = replica.status is not None and replica.status.ready
                worked = known and replica.works(now_ms)
                replica.note(report, now_ms)
                if replica.works(now_ms) and not worked:
                    self._on_ready(stage)
                self._on_change()
            else:
                self._on_report(replica, report)

        def on_crowded(_crowded: bool) -> None:
            # It comes from within the sending of a command, whose session is being handled.
            asyncio.get_running_loop().call_soon(self._on_crowded, replica)

        link = WorkerLink(
            endpoint,
            self._incarnation,
            on_report=on_report,
            on_up=on_up,
            on_down=on_down,
            on_crowded=on_crowded,
        )
        replica = Replica(name, stage, link)
        self._by_stage.setdefault(stage, []).append(replica)
        return replica

    async def _attached(self, replica: Replica) -> None:
        """Payloads can go by arena from here on, or it is known that they cannot."""
        try:
            replica.consumer = await self._attach(replica.link.endpoint)
        except Exception:
            # Its payloads go inside messages; without this it would never be ready.
            _log.exception("attach_failed", worker=replica.name)
        replica.attaching = None
        if replica.ready:
            self._on_ready(replica.stage)
        self._on_change()

    def pick(self, stage: str) -> Replica:
        """The ready replica with the fewest sessions.

        Raises CapacityExceeded when there is none.
        """
        now_ms = self._clock_ms()
        candidates = [replica for replica in self.of(stage) if replica.works(now_ms)]
        if not candidates:
            raise CapacityExceeded(
                f"no worker of stage {stage} is ready", code="engine_unavailable"
            )
        return min(candidates, key=lambda replica: len(replica.sessions))

    def of(self, stage: str) -> list[Replica]:
        """The replicas of a stage."""
        return self._by_stage.get(stage, [])

    def all(self) -> list[Replica]:
        """Every replica."""
        return [replica for replicas in self._by_stage.values() for replica in replicas]

    def close(self) -> None:
        """Close all links."""
        for replica in self.all():
            replica.link.close()
            if replica.attaching is not None:
                replica.attaching.cancel()
