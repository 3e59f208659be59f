"""A worker's payloads: input that comes and output that goes, by message or by arena.

A turn's output leaves in order. While its window is full it waits here, and so does
its engine at the next `turn.room()`; its end waits behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from msgspec.structs import replace

from protocol.arena import Arrival
from protocol.connector_errors import (
    DescriptorRefused,
    NoCredit,
    NotAttached,
    PeerLost,
    TransferTimeout,
    TurnVoid,
)
from protocol.connectors import Descriptor, InlineConnector
from protocol.edges import COPIED_BYTES, ConnectorKind, OutputEdge, gateway_arena, worker_arena
from protocol.errors import AntiphonError, CapacityExceeded, EngineLost
from protocol.messages import Output, TurnEnded, TurnStatus
from protocol.payloads import Payload
from protocol.shm_connector import ShmConnector, ShmFlow, usable_kind
from workers.control_events import SendOutput

_log = structlog.get_logger(__name__)

ATTACH_S = 5.0
"""How long a turn waits for another process to attach to an arena."""

_LOST = (DescriptorRefused, NotAttached, PeerLost, TransferTimeout, TurnVoid)

Send = Callable[[str, Output | TurnEnded], None]
"""Hand a report to the link: (gateway, report)."""


@dataclass
class _Outlet:
    """Where a session's output goes."""

    owner: str
    edge: OutputEdge


@dataclass(frozen=True)
class _Readers:
    """Who reads a turn's output: other workers by edge, and the gateway or not."""

    workers: dict[str, str]
    to_client: bool


@dataclass(eq=False)
class _Stream:
    """One turn's output on its way. `waiting` is what found no room yet, in order.

    `flow` is None until all its readers have attached.
    """

    gateway: str
    session: str
    turn: int
    consumers: dict[str, str]
    window_bytes: int
    flow: ShmFlow | None = None
    waiting: deque[SendOutput] = field(default_factory=deque)
    ended: TurnEnded | None = None
    pump: asyncio.Task[None] | None = None
    room: asyncio.Event = field(default_factory=asyncio.Event)


class Transfers:
    """All payloads of one worker. Make it on a running loop.

    `send` hands a report to the link; `on_failed(session, turn, error)` is called when
    output cannot reach its consumer, with what the client is to be told; `on_input` gets
    stream input that came by arena.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        send: Send,
        on_failed: Callable[[str, int, AntiphonError], None],
        on_input: Callable[[Arrival], None],
    ) -> None:
        self._endpoint = endpoint
        self._send = send
        self._on_failed = on_failed
        self._inline = InlineConnector()
        self._shm: ShmConnector | None = None
        self._outlets: dict[str, _Outlet] = {}
        self._readers: dict[tuple[str, int], _Readers] = {}
        self._paths: dict[str, str] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}
        path = worker_arena(endpoint)
        if path is not None and usable_kind(ConnectorKind.SHM) == ConnectorKind.SHM:
            self._shm = ShmConnector(path, name, copied_bytes=COPIED_BYTES, on_arrival=on_input)

    @property
    def arena_bytes(self) -> int:
        """The size of this worker's arena; 0 without one."""
        return 0 if self._shm is None else self._shm.size_bytes

    # Peers

    def gateway_up(self, gateway: str) -> None:
        """Attach to the gateway's arena; its input may come that way from then on."""
        path = gateway_arena(self._endpoint, gateway)
        if self._shm is None or path is None or gateway in self._shm.producers:
            return
        self.read_from(path)

    def read_from(self, path: str) -> None:
        """Attach to the arena at `path`, unless its producer is attached already."""
        if self._shm is None or self._paths.get(path) in self._shm.producers:
            return
        if path not in self._attaching:
            task = asyncio.create_task(self._attach(self._shm, path))
            self._attaching[path] = task
            task.add_done_callback(lambda _: self._attaching.pop(path, None))

    async def _attach(self, shm: ShmConnector, path: str) -> None:
        try:
            producer = await shm.attach(path)
            attached = shm.producers
            self._paths = {at: name for at, name in self._paths.items() if name in attached}
            self._paths[path] = producer
        except (AntiphonError, OSError) as error:
            # What has no arena sends everything inside messages.
            _log.warning("arena_not_attached", path=path, reason=str(error))

    # Sessions

    def opened(self, session: str, owner: str, edge: OutputEdge | None) -> None:
        """Output of the session leaves on `edge`; None: inside messages."""
        if edge is not None and self._shm is not None:
            self._outlets[session] = _Outlet(owner, edge)

    def freed(self, session: str) -> None:
        """The session is gone, and with it what was on its way."""
        self._outlets.pop(session, None)
        for key in [key for key in (*self._readers, *self._streams) if key[0] == session]:
            self._drop(*key)
        if self._shm is not None:
            self._shm.void(session)

    # Input

    def get(self, descriptor: Descriptor) -> Payload:
        """The payload of a descriptor; to be released."""
        if self._shm is None:
            return self._inline.get(descriptor)
        return self._shm.get(descriptor)

    async def receive(self, descriptor: Descriptor) -> Payload:
        """`get` for a turn, waiting for an arena that is being attached.

        Raises EngineLost when the worker that made it is gone, or has taken it back.
        """
        if self._shm is None:
            return self._inline.get(descriptor)
        try:
            return await self._shm.receive(descriptor, timeout_s=ATTACH_S)
        except AntiphonError as error:
            raise _ending_the_turn(error) from error

    def release(self, descriptor: Descriptor) -> None:
        """A payload that was got is needed no longer, also when its arena is gone meanwhile."""
        if self._shm is not None:
            self._shm.release(descriptor)

    def discard(self, descriptor: Descriptor) -> None:
        """The payload will not be read."""
        if self._shm is not None:
            self._shm.discard(descriptor)

    # Output

    def begin(self, session: str, turn: int, readers: dict[str, str], to_client: bool) -> None:
        """A turn starts: `readers` are the other workers that read its output, by edge."""
        if readers or not to_client:
            self._readers[session, turn] = _Readers(readers, to_client)

    def put(self, output: SendOutput) -> None:
        """Send a piece, now or when its turn has room; `on_failed` is told if it cannot be."""
        try:
            stream = self._streams.get((output.session, output.turn)) or self._open(output)
        except AntiphonError as error:
            self._fail(output.session, output.turn, error)
            return
        if stream is None:
            self._send_inline(output)
        elif stream.flow is None or stream.waiting or not self._try(stream, output):
            stream.waiting.append(output)
            stream.room.clear()
            if stream.pump is None:
                stream.pump = asyncio.create_task(self._pump(stream))

    def end(self, gateway: str, ended: TurnEnded) -> bool:
        """Say the end of a turn behind its output; False when nothing is before it."""
        self._readers.pop((ended.session, ended.turn), None)
        stream = self._streams.get((ended.session, ended.turn))
        if stream is None:
            return False
        if stream.waiting:
            stream.ended = ended
            return True
        self._close(stream)
        return False

    def has_room(self, session: str, turn: int) -> bool:
        """Whether none of the turn's output waits."""
        stream = self._streams.get((session, turn))
        return stream is None or stream.room.is_set()

    async def room(self, session: str, turn: int) -> None:
        """Wait until the turn's output does not wait."""
        stream = self._streams.get((session, turn))
        if stream is not None:
            await stream.room.wait()

    def void(self, session: str, turn: int) -> None:
        """The turn's content is not wanted any more: what is on its way goes.

        Also after the turn's end, when its last pieces may not have been read. An end that
        waits behind pieces which go is said now.
        """
        stream = self._streams.get((session, turn))
        self._drop(session, turn)
        if stream is not None and stream.ended is not None:
            self._send(stream.gateway, stream.ended)
        if self._shm is not None:
            self._shm.void(session, turn)

    def _drop(self, session: str, turn: int) -> None:
        self._readers.pop((session, turn), None)
        stream = self._streams.pop((session, turn), None)
        if stream is None:
            return
        stream.waiting.clear()
        stream.room.set()
        if stream.pump is not None:
            stream.pump.cancel()

    async def close(self) -> None:
        """Give everything up and end the arena, all before the first wait; then wait for the
        tasks that this ends."""
        tasks = [*self._attaching.values()]
        tasks += [stream.pump for stream in self._streams.values() if stream.pump is not None]
        for task in tasks:
            task.cancel()
        if self._shm is not None:
            self._shm.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, output: SendOutput) -> _Stream | None:
        outlet = self._outlets.get(output.session)
        readers = self._readers.get((output.session, output.turn), _Readers({}, True))
        if outlet is None or self._shm is None or outlet.owner != output.gateway:
            return None
        if outlet.edge.connector is not ConnectorKind.SHM and not readers.workers:
            return None
        consumers = dict(readers.workers)
        if readers.to_client:
            consumers[outlet.edge.name] = output.gateway
        stream = _Stream(
            output.gateway, output.session, output.turn, consumers, outlet.edge.window_bytes
        )
        try:
            self._open_flow(stream)
        except (NotAttached, NoCredit) as error:
            if not readers.workers:
                # Nothing is lost: the message carries the bytes, and the link bounds them.
                _log.warning("output_goes_inline", session=output.session, reason=error.message)
                return None
        stream.room.set()
        self._streams[output.session, output.turn] = stream
        return stream

    def _open_flow(self, stream: _Stream) -> ShmFlow:
        assert self._shm is not None
        stream.flow = self._shm.open(
            stream.session, stream.turn, stream.consumers, stream.window_bytes
        )
        return stream.flow

    async def _flow(self, stream: _Stream) -> ShmFlow:
        """The stream's flow, once all its readers have attached. Raises TransferTimeout."""
        assert self._shm is not None
        if stream.flow is not None:
            return stream.flow
        for consumer in stream.consumers.values():
            await self._shm.consumer(consumer, timeout_s=ATTACH_S)
        return self._open_flow(stream)

    def _try(self, stream: _Stream, output: SendOutput) -> bool:
        assert self._shm is not None
        assert stream.flow is not None
        try:
            descriptor = self._shm.put(output.payload, stream.flow)
        except NoCredit:
            return False
        except AntiphonError as error:
            self._fail(stream.session, stream.turn, error)
            return True
        self._tell(output, descriptor)
        return True

    async def _pump(self, stream: _Stream) -> None:
        """Send what waits, as room comes."""
        assert self._shm is not None
        failure: AntiphonError | None = None
        try:
            flow = await self._flow(stream)
            while stream.waiting:
                output = stream.waiting[0]
                descriptor = await self._shm.put_when_ready(output.payload, flow)
                stream.waiting.popleft()
                self._tell(output, descriptor)
        except TurnVoid:
            return
        except AntiphonError as error:
            failure = error
        finally:
            stream.pump = None
            stream.room.set()
        if stream.ended is None:
            if failure is not None:
                self._fail(stream.session, stream.turn, failure)
            return
        ended, stream.ended = stream.ended, None
        if failure is None:
            self._close(stream)
        else:
            # Its engine has done all of it, but its consumer has not got all of it.
            self.void(stream.session, stream.turn)
            told = self._told(stream.session, stream.turn, failure)
            ended = replace(ended, status=TurnStatus.FAILED, error=told.info())
        self._send(stream.gateway, ended)

    def _fail(self, session: str, turn: int, error: AntiphonError) -> None:
        self._on_failed(session, turn, self._told(session, turn, error))

    @staticmethod
    def _told(session: str, turn: int, error: AntiphonError) -> AntiphonError:
        _log.warning(
            "output_lost", session=session, turn=turn, error=error.code, reason=error.message
        )
        return _ending_the_turn(error)

    def _close(self, stream: _Stream) -> None:
        assert self._shm is not None
        self._streams.pop((stream.session, stream.turn), None)
        if stream.flow is not None:
            self._shm.close_flow(stream.flow)

    def _send_inline(self, output: SendOutput) -> None:
        self._tell(output, self._inline.put(output.payload))

    def _tell(self, output: SendOutput, descriptor: Descriptor) -> None:
        report = Output(output.session, output.turn, output.sequence, descriptor)
        self._send(output.gateway, report)


def _ending_the_turn(error: AntiphonError) -> AntiphonError:
    """What a client is told of a transfer that failed: how it did is said in the message alone.

    A payload that its producer has taken back is refused to who would read it.
    """
    if isinstance(error, _LOST):
        return EngineLost(f"a payload on its way to another process was lost: {error.message}")
    if isinstance(error, NoCredit):
        return CapacityExceeded(error.message)
    return error
