"""The link over sockets: a worker listens, a gateway has one connection a worker.

The shells of both ends own a socket and one timer, armed for the machine's next deadline.
What is sent in one loop turn leaves at its end, several messages a frame.

On one host the sockets are Unix sockets, and between hosts ZeroMQ's: a worker binds one
ROUTER, a gateway has one DEALER a worker. The end of a Unix socket is the peer's end, and the
peer is declared lost at once. A tcp connection may come back: there only silence tells.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog

from protocol.deadline_timer import DeadlineTimer
from protocol.link import GatewayEnd, WorkerEnd
from protocol.link_events import Action, Event, Flush, Tick

_log = structlog.get_logger(__name__)

FLUSH_S = 0.025
"""How long what is in no hurry waits for something to travel with."""
UNHURRIED = 64
"""So many of it wait for nothing."""


class LinkShell(ABC):
    """What both shells share: the clock, the timer and the end of the loop turn."""

    def __init__(self, end: GatewayEnd | WorkerEnd, endpoint: str) -> None:
        self.endpoint = endpoint
        self._machine = end
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._tick, self._now_ms)
        self._flush_due = False
        self._flush_at: asyncio.TimerHandle | None = None
        self._unhurried = 0
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @abstractmethod
    def _carry_out(self, action: Action) -> None: ...

    @abstractmethod
    def _before_tick(self) -> None: ...

    def _handle(self, event: Event) -> None:
        if self._closed.done():
            return
        for action in self._machine.handle(event, self._now_ms()):
            self._carry_out(action)
        if not self._closed.done():
            self._timer.arm(self._machine.deadline_ms)

    def _now_ms(self) -> float:
        return self._loop.time() * 1000.0

    def _tick(self) -> None:
        # After a pause of this process the peer's frames wait in the socket: read them
        # before judging its silence.
        self._before_tick()
        self._handle(Tick())

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush_later(self) -> None:
        """Let go what was sent with what is sent next, or after FLUSH_S, or if it is much."""
        self._unhurried += 1
        if self._unhurried >= UNHURRIED:
            self._flush_soon()
        elif not self._flush_due and self._flush_at is None:
            self._flush_at = self._loop.call_later(FLUSH_S, self._flush_late)

    def _flush_late(self) -> None:
        self._flush_at = None
        self._flush()

    def _flush(self) -> None:
        self._flush_due = False
        self._unhurried = 0
        self._handle(Flush())

    def _stop(self) -> None:
        self._timer.cancel()
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        if not self._closed.done():
            self._closed.set_result(None)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            _log.exception("link_callback_failed", endpoint=self.endpoint)
