"""The workers that this gateway knows: a link each, which says what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from gateway.placement import Placement, Replica
from protocol.link_frames import WorkerInfo
from protocol.messages import Report, WorkerStatus
from protocol.worker_link import WorkerLink

_log = structlog.get_logger(__name__)


class Pools:
    """The links of all replicas, which are added to `placement`.

    `on_report(replica, report)` gets everything but status; `on_ready(stage)` is
    called when a replica can take sessions, `on_lost(replica)` when one is gone with all
    that it held; `on_change` after either. `on_crowded(replica)` is called in a loop turn of
    its own when the link to a replica has become crowded, or has room again.
    """

    def __init__(
        self,
        incarnation: str,
        placement: Placement,
        clock_ms: Callable[[], float],
        *,
        on_report: Callable[[Replica, Report], None],
        on_ready: Callable[[str], None],
        on_lost: Callable[[Replica], None],
        on_change: Callable[[Replica], None],
        on_crowded: Callable[[Replica], None],
        attach: Callable[[str], Awaitable[str | None]],
    ) -> None:
        self._incarnation = incarnation
        self._placement = placement
        self._clock_ms = clock_ms
        self._on_report = on_report
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_change = on_change
        self._on_crowded = on_crowded
        self._attach = attach
        self._links: list[WorkerLink] = []
        self._attaching: dict[str, asyncio.Task[None]] = {}

    def add(self, name: str, stage: str, endpoint: str) -> Replica:
        """Link to the worker at `endpoint`; it may come and go. Needs a running loop."""
        replica: Replica

        def on_up(worker: str, info: WorkerInfo) -> None:
            replica.came(worker)
            if info.stage != replica.stage:
                _log.error("wrong_worker", worker=name, stage=info.stage, expected=replica.stage)
                link.close()
                return
            _log.info("worker_up", worker=name, incarnation=worker, ready=info.ready)
            self._attaching[name] = asyncio.create_task(self._attached(replica))
            self._on_change(replica)

        def on_down(reason: str) -> None:
            _log.warning("worker_lost", worker=name, stage=stage, reason=reason)
            replica.went()
            self._stop_attaching(name)
            self._on_lost(replica)
            self._on_change(replica)

        def on_report(report: Report) -> None:
            if isinstance(report, WorkerStatus):
                if replica.beat(report, self._clock_ms()):
                    self._on_ready(stage)
                self._on_change(replica)
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
        self._links.append(link)
        self._placement.add(replica)
        return replica

    async def _attached(self, replica: Replica) -> None:
        """Payloads can go by arena from here on, or it is known that they cannot."""
        consumer = None
        try:
            consumer = await self._attach(replica.link.endpoint)
        except Exception:
            # Its payloads go inside messages; without this it would never be ready.
            _log.exception("attach_failed", worker=replica.name)
        del self._attaching[replica.name]
        if replica.attached(consumer):
            self._on_ready(replica.stage)
        self._on_change(replica)

    def _stop_attaching(self, name: str) -> None:
        if (attaching := self._attaching.pop(name, None)) is not None:
            attaching.cancel()

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()
        for name in list(self._attaching):
            self._stop_attaching(name)
