"""All that operators see of a gateway in one document, and the stream of it.

Nothing is made while nobody looks. While somebody does, one task makes each document once
for all who look: when something has changed, not before `PERIOD_S` after the last one, and
after `CLOCKS_S` at the latest, since clocks move by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.health import described
from gateway.hosting import SessionHost
from protocol.errors import CapacityExceeded

PERIOD_S = 0.5
CLOCKS_S = 3.0
REST = 20
"""A document that took long to make is followed by a rest of this many times as long, up to
`CLOCKS_S`: it holds up all else that the gateway does."""
VIEWERS = 16
SESSIONS = 500
"""Sessions in a document, and opens that wait; the sessions with the fewest bytes, and the last
to be let in, are left out where there are more."""

_HEADERS = {
    "cache-control": "no-store",
    # nginx would keep the documents back until it has enough of them.
    "x-accel-buffering": "no",
}

_log = structlog.get_logger(__name__)


def overview(host: SessionHost) -> dict[str, Any]:
    """All that operators see: workers with their devices, pipelines by name, sessions, and the
    opens that wait."""
    pipelines = host.health()
    return {
        "draining": host.draining,
        "workers": host.workers(),
        "pipelines": {state.name: described(state) for state in pipelines},
        "sessions": host.sessions(SESSIONS),
        "sessions_total": sum(state.sessions for state in pipelines),
        "waiting": host.waiting(SESSIONS),
    }


class LiveOverview:
    """The overview as server-sent events, for at most `VIEWERS` at once."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host
        self._feed: Feed | None = None
        self.viewers = 0
        """How many look."""

    def stream(self, *, body: bool = True) -> Response:
        """The answer to who wants to look; without `body` only its head.

        Raises CapacityExceeded where as many look already as may, or the gateway drains.
        """
        if self._host.draining:
            raise CapacityExceeded("this gateway is draining", code="draining")
        if self.viewers >= VIEWERS:
            raise CapacityExceeded(
                f"{VIEWERS} viewers look at this gateway already",
                code="too_many_viewers",
            )
        return _EventStream(self) if body else _EventStream.head()

    @contextlib.contextmanager
    def looking(self) -> Iterator[Feed]:
        """One more looks, at the documents that come meanwhile."""
        self.viewers += 1
        try:
            if self._feed is None:
                self._feed = Feed(self._host)
            yield self._feed
        finally:
            self.viewers -= 1
            if not self.viewers and self._feed is not None:
                self._feed.stop()
                self._feed = None


class Feed:
    """The documents, from the coming of the first viewer to the going of the last."""

    def __init__(self, host: SessionHost) -> None:
        self.document = b""
        """The latest, as an event."""
        self.made = 0
        """How many there have been."""
        self._host = host
        self._over = False
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def after(self, seen: int) -> bool:
        """Wait until there are more than `seen` documents; whether there ever are."""
        while self.made <= seen:
            if self._over:
                return False
            await self._news.wait()
        return True

    def stop(self) -> None:
        """Nobody looks any more."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while not self._host.draining:
                took_s = self._make()
                await asyncio.sleep(min(max(PERIOD_S, took_s * REST), CLOCKS_S))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOCKS_S):
                        await self._host.overview_changed.wait()
            self._make()
        except Exception:
            # Its viewers come back, and nothing else is touched.
            _log.exception("overview_failed")
        finally:
            self._over = True
            self._tell()

    def _make(self) -> float:
        """Make a document; the seconds that it took."""
        begun_s = time.monotonic()
        self._host.overview_changed.clear()
        self.document = b"data: " + msgspec.json.encode(overview(self._host)) + b"\n\n"
        self.made += 1
        self._tell()
        return time.monotonic() - begun_s

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class _EventStream(Response):
    """The stream to one viewer, who leaves nothing behind when it goes away."""

    media_type = "text/event-stream"

    def __init__(self, live: LiveOverview) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._live = live

    @staticmethod
    def head() -> Response:
        """The answer to who asks for no more."""
        return Response(headers=_HEADERS, media_type=_EventStream.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the viewer goes away, or there is nothing more to send."""
        with self._live.looking() as feed:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            sending = asyncio.create_task(_send_all(feed, send))
            going = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait((sending, going), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                going.cancel()
                await asyncio.wait((sending, going))
            if not sending.cancelled():
                # A viewer may go away while it is sent something.
                with contextlib.suppress(OSError):
                    sending.result()


async def _send_all(feed: Feed, send: Send) -> None:
    """Send every document, or only the latest to who reads slowly."""
    seen = 0
    while await feed.after(seen):
        seen, body = feed.made, feed.document
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
