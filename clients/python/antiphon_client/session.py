"""A session over asyncio: it comes back by itself when its connection breaks.

What came and was not read waits in a bounded queue. When that is full no more is read off the
connection, so that the gateway paces whoever makes the output: nothing is thrown away here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from antiphon_client.closing import ClosedOnLeaving
from antiphon_client.connection import Connections, Line
from antiphon_client.errors import AntiphonError, NoAnswer, OutputsLost, SessionEnded
from antiphon_client.requests import Requests
from antiphon_client.stream import (
    Answered,
    Attached,
    Event,
    Lost,
    Output,
    Over,
    StreamMachine,
    Token,
    token_of,
)

QUEUE_OUTPUTS = 256
QUEUE_BYTES = 16 * 1024 * 1024
"""Outputs that wait to be read. With either more than this no more is taken off the network."""

OPEN_TIMEOUT_S = 150.0
"""How long an open may wait for a place."""
RESUME_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 10.0
PING_S = 5.0


@contextlib.asynccontextmanager
async def answered_within(timeout_s: float, otherwise: str) -> AsyncIterator[None]:
    """Raises NoAnswer, which says what is the case `otherwise`, after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        if isinstance(error, AntiphonError):
            raise
        raise NoAnswer(f"{otherwise} within {timeout_s:.3g} s") from None


class Gateway:
    """A gateway at `url` (`http://` or `https://`), with its key if it has keys.

    `ping_s` is how soon a connection that fell silent is given up for a new one.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        ping_s: float = PING_S,
    ) -> None:
        self.requests = Requests(url, key, tls)
        self.line = Line("ws" + url.rstrip("/").removeprefix("http"), key, tls, ping_s)

    async def open(
        self,
        model: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, float] | None = None,
        control: Mapping[str, Any] | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Session:
        """A new session of the pipeline `model`, attached. Waits where there is a queue. `control`
        is that of the gateway's control loop, for robots.

        Raises Refused, NoRoom, NotReachable and other AntiphonErrors; NoAnswer where it was opened
        and could not be attached within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        body: dict[str, Any] = {}
        if model is not None:
            body["model"] = model
        if settings:
            body["settings"] = settings
        if limits:
            body["limits"] = limits
        if control:
            body["control"] = control
        opened = await self.requests.ask("POST", "/v1/sessions", body, timeout_s)
        return await self.resume(token_of(opened), timeout_s=max(until_s - loop.time(), 0.0))

    async def resume(self, token: Token, *, timeout_s: float = RESUME_TIMEOUT_S) -> Session:
        """The session that `token` names, as another process left it. Raises AntiphonError, such as
        NoAnswer where it could not be attached within `timeout_s`."""
        session = Session(self, token)
        try:
            async with answered_within(timeout_s, "the session is not attached"):
                await session.until_attached()
        except BaseException:
            await session.detach()
            raise
        return session


class Session(ClosedOnLeaving):
    """One session, in control. Iterate over it for its outputs; leave the context to close it.

    Made by `Gateway.open` and `Gateway.resume`. Outputs have to be read: while the queue is
    full answers to commands wait as well.
    """

    def __init__(self, gateway: Gateway, token: Token) -> None:
        self._gateway = gateway
        self._machine = StreamMachine(token, lambda: f"c-{secrets.token_hex(8)}")
        # Bounded by who fills it: while there are QUEUE_OUTPUTS or QUEUE_BYTES no frame is taken
        # off the network, and one frame puts in two entries at most.
        self._queue: deque[tuple[Output | Attached | Lost, int]] = deque()
        self._queued_bytes = 0
        self._handed: Output | None = None
        self._answers: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._to_read = asyncio.Event()
        self._has_reader = False
        self._room_for_input = asyncio.Event()
        self._begun = asyncio.Event()
        self._connections = Connections(gateway.line, self._machine, self._handle)
        self._task = asyncio.create_task(self._connections.run(), name=f"session {token.session}")

    @property
    def id(self) -> str:
        """The session's id."""
        return self._machine.session

    @property
    def token(self) -> Token:
        """What it takes to come back from another process; it changes with each connection and
        each output that is read."""
        return self._machine.token

    @property
    def limits(self) -> Mapping[str, Any]:
        """The session's limits in seconds; `grace_s` is its lease without a connection."""
        return self._machine.limits

    @property
    def unread(self) -> int:
        """How many outputs wait to be read."""
        return len(self._queue)

    @property
    def connections(self) -> int:
        """How many connections controlled the session so far."""
        return self._machine.attachments

    @property
    def connected(self) -> bool:
        """Whether there is a connection that controls the session just now."""
        return self._machine.attached

    @property
    def error(self) -> AntiphonError | None:
        """Why the session can be used no more."""
        return self._machine.over

    async def until_attached(self) -> None:
        """Wait for the first connection. Raises what prevents it."""
        await self._begun.wait()
        if not self.connections and self._machine.over is not None:
            raise self._machine.over

    # What a client says

    async def update(
        self, input: Mapping[str, Any], *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Mapping[str, Any]:
        """Hand in an input: the `result` of its answer. While 64 or 32 MiB of them are not
        answered it waits.

        Raises Refused and other AntiphonErrors with which it was answered, or, with
        `payload_too_large`, for one that is longer than the gateway takes (`MAX_FRAME_BYTES`), of
        which nothing is sent; NoAnswer after `timeout_s`, and what ended the session.
        """
        async with self._limit(timeout_s):
            return await (await self.submit(input))

    async def submit(self, input: Mapping[str, Any]) -> asyncio.Future[Mapping[str, Any]]:
        """Hand in an input without waiting for its answer, which the future will have. Waits, and
        raises at once, as `update` does."""
        await self._room()
        return self.submit_now(input)

    async def _room(self) -> None:
        while not self._machine.room and self._machine.over is None:
            self._room_for_input.clear()
            await self._room_for_input.wait()

    def submit_now(self, input: Mapping[str, Any]) -> asyncio.Future[Mapping[str, Any]]:
        """The same, without waiting for room: for who has few inputs without an answer. Raises
        Refused, `too_many_events`, for who has not."""
        return self._command(self._machine.update(input))

    async def signal(
        self,
        signal: Mapping[str, Any],
        *,
        urgent: bool = False,
        id: str | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Mapping[str, Any]:
        """Give a signal: the `result` of its answer. One that is `urgent` goes before all
        inputs that wait here, and waits for none. Raises as `update` does, and ValueError for an
        `id` that is none, or has no answer yet."""
        async with self._limit(timeout_s):
            if not urgent:
                await self._room()
            return await self._command(self._machine.signal(signal, urgent=urgent, id=id))

    def _command(self, id: str) -> asyncio.Future[Mapping[str, Any]]:
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: self._forget(id, done))
        self._answers[id] = answer
        self._connections.to_send.set()
        return answer

    def _forget(self, id: str, answer: asyncio.Future[Mapping[str, Any]]) -> None:
        """Nobody waits for this answer any more, or it has come."""
        self._answers.pop(id, None)
        self._room_for_input.set()
        if answer.cancelled():
            self._machine.forget(id)
        else:
            answer.exception()  # Who does not await it does not want to know.

    @contextlib.asynccontextmanager
    async def _limit(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            if isinstance(error, AntiphonError):
                raise
            unread = len(self._queue)
            raise NoAnswer(
                f"no answer within {timeout_s:g} s; {unread} outputs wait to be read"
            ) from None

    # What a client is told

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """The next output. Ends with a session that its client closed; raises as `next` does."""
        try:
            return await self.next()
        except SessionEnded as ended:
            if ended.reason in ("client", "completed"):
                raise StopAsyncIteration from None
            raise

    async def next(self) -> Output:
        """The next output; the one before it counts as dealt with. For one reader.

        Raises OutputsLost once where the gateway could not keep some, SessionEnded,
        ConnectionLost, ControlLost: each behind all outputs that came before it.
        """
        while True:
            match await self.next_event():
                case Output() as output:
                    return output
                case Lost(first=first, last=last):
                    raise OutputsLost(first, last)

    async def next_event(self) -> Output | Attached | Lost:
        """The next output, also that there is another connection, and what was lost with the one
        before. Raises as `next` does."""
        if self._has_reader:
            raise RuntimeError("the session has a reader already: two would miss half of it each")
        if self._handed is not None:
            self._machine.read(self._handed)
            self._handed = None
            self._connections.to_send.set()
        self._has_reader = True
        try:
            while not self._queue:
                if self._machine.over is not None:
                    raise self._machine.over
                self._to_read.clear()
                await self._to_read.wait()
        finally:
            self._has_reader = False
        event, size = self._queue.popleft()
        self._queued_bytes -= size
        self._check_room()
        if isinstance(event, Output):
            self._handed = event
        return event

    def _check_room(self) -> None:
        if len(self._queue) < QUEUE_OUTPUTS and self._queued_bytes < QUEUE_BYTES:
            self._connections.room_to_read.set()
        else:
            self._connections.room_to_read.clear()

    # The end

    async def close(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """End the session, if it has not ended; what was not read is thrown away."""
        try:
            if self._machine.over is None:
                with contextlib.suppress(AntiphonError):
                    await self._gateway.requests.ask(
                        "DELETE", f"/v1/sessions/{self.id}", None, timeout_s
                    )
        finally:
            await self.detach()

    async def detach(self) -> None:
        """Hang up. The session waits for who comes with its `token`, for its lease."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._handle(self._machine.give_up(SessionEnded("client")), 0)

    def _handle(self, events: list[Event], size: int) -> None:
        """What a frame of `size` bytes, or the end of a connection, means."""
        for event in events:
            match event:
                case Output() | Lost():
                    self._put(event, size)
                    size = 0
                case Answered(id=id, result=result, error=error):
                    self._answer(id, result, error)
                case Attached():
                    self._put(event, 0)
                    self._begun.set()
                    self._connections.to_send.set()
                case Over(error=reason):
                    for id in list(self._answers):
                        self._answer(id, {}, reason)
                    self._begun.set()
                    self._room_for_input.set()
        self._to_read.set()

    def _put(self, event: Output | Attached | Lost, size: int) -> None:
        self._queue.append((event, size))
        self._queued_bytes += size
        self._check_room()

    def _answer(self, id: str, result: Mapping[str, Any], error: AntiphonError | None) -> None:
        answer = self._answers.get(id)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
