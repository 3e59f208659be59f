"""The gateway's payloads: input to the workers and output from them, by message or arena.

Input goes through this gateway's arena where its edge says so. Stream input goes in the order
in which it came; what finds no room waits, and the session's backlog bounds it. What a turn
begins with is named by its command, and is inside it where there is no room. Output that came
through a worker's arena is read in place until it is released.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from msgspec.structs import replace

from protocol.connector_errors import NoCredit, NotAttached, PayloadTooLarge, PeerLost, TurnVoid
from protocol.connectors import Descriptor, InlineDescriptor, ShmDescriptor, Traffic
from protocol.edges import (
    CLIENT,
    COPIED_BYTES,
    INPUT_WINDOW_BYTES,
    ConnectorKind,
    InputNote,
    edge_name,
    encode_note,
    gateway_arena,
    worker_arena,
)
from protocol.errors import AntiphonError
from protocol.messages import Run, Update
from protocol.payloads import Payload
from protocol.shm_connector import ShmConnector, ShmFlow, usable_kind

_log = structlog.get_logger(__name__)

ATTACH_S = 5.0
INPUT_TURN = 0
"""The number under which a session's stream input has its credit."""
_ABOUT_BYTES = 1024
"""What a payload takes in the arena beside its data, at most as a rule."""


@dataclass(eq=False)
class _Input:
    """A session's stream input on its way to one stage. `waiting` found no room yet.

    Until the worker is known to be `opened` for the session, input goes inside messages:
    it must not come there before the command that opens the session.
    """

    session: str
    flow: ShmFlow
    opened: bool = False
    waiting: deque[Update] = field(default_factory=deque)
    pump: asyncio.Task[None] | None = None


class Transfers:
    """All payloads of one gateway. Make it on a running loop.

    `on_lost(session, stage)` is called when a session's input cannot reach its stage.
    """

    def __init__(
        self, incarnation: str, endpoints: list[str], on_lost: Callable[[str, str], None]
    ) -> None:
        self._on_lost = on_lost
        self._shm: ShmConnector | None = None
        self._producers: dict[str, str] = {}
        self._inline: dict[str, Traffic] = {}
        self._relayed: dict[str, Traffic] = {}
        self._inputs: dict[tuple[str, str], _Input] = {}
        self._turn_inputs: dict[tuple[str, int], str] = {}
        """The turns whose inputs lie in the arena, each with the stage that is to read them."""
        paths = [path for e in endpoints if (path := gateway_arena(e, incarnation)) is not None]
        if paths and usable_kind(ConnectorKind.SHM) == ConnectorKind.SHM:
            self._shm = ShmConnector(paths[0], incarnation, copied_bytes=COPIED_BYTES)

    async def attach(self, endpoint: str) -> str | None:
        """Attach to the arena of the worker at `endpoint`, and wait until it has attached here.

        Its name as a consumer; None when there is no shared memory between the two.
        """
        path = worker_arena(endpoint)
        if self._shm is None or path is None:
            return None
        try:
            # A worker that only fell silent is attached still.
            name = self._producers.get(path, "")
            if name not in self._shm.producers:
                name = await self._shm.attach(path, timeout_s=ATTACH_S)
                self._producers[path] = name
            await self._shm.consumer(name, timeout_s=ATTACH_S)
        except (AntiphonError, OSError) as error:
            _log.warning("arena_not_attached", endpoint=endpoint, reason=str(error))
            return None
        return name

    # Input

    def open_input(self, session: str, stage: str, consumer: str | None, kind: str) -> None:
        """Reserve room for the session's stream input to `stage`, where it goes by arena."""
        if self._shm is None or consumer is None or kind != ConnectorKind.SHM:
            return
        edge = edge_name(CLIENT, stage)
        try:
            flow = self._shm.open(session, INPUT_TURN, {edge: consumer}, INPUT_WINDOW_BYTES)
        except (NoCredit, NotAttached) as error:
            _log.warning("input_goes_inline", session=session, edge=edge, reason=error.message)
            return
        self._inputs[session, stage] = _Input(session, flow)

    def opened(self, session: str, stage: str) -> None:
        """The worker has answered the session's open: it knows it."""
        stream = self._inputs.get((session, stage))
        if stream is not None:
            stream.opened = True

    def put_input(self, stage: str, update: Update) -> Update | None:
        """Send stream input by arena; the update itself when it goes inside a message."""
        stream = self._inputs.get((update.fence.session, stage))
        if stream is None or not stream.opened:
            self._count(edge_name(CLIENT, stage), _inline_bytes(update.payload))
            return update
        if stream.waiting or not self._try(stream, update):
            stream.waiting.append(update)
            if stream.pump is None:
                stream.pump = asyncio.create_task(self._pump(stream, stage))
        return None

    def put_inputs(self, stage: str, run: Run, consumer: str | None, kind: str) -> Run:
        """The command with what it brings: payloads above COPIED_BYTES lie in the arena, where
        their edge says so and there is room, and are named by it."""
        if self._shm is None or consumer is None or kind != ConnectorKind.SHM:
            return run
        sizes = [_inline_bytes(each) for each in run.inputs]
        large = [size for size in sizes if size > COPIED_BYTES]
        if not large:
            return run
        session, edge = run.fence.session, edge_name(CLIENT, stage)
        window_bytes = sum(large) + len(large) * _ABOUT_BYTES
        try:
            flow = self._shm.open(session, run.turn, {edge: consumer}, window_bytes)
        except (NoCredit, NotAttached, PayloadTooLarge):
            return run  # The message carries the bytes, and the link bounds them.
        self._turn_inputs[session, run.turn] = stage
        inputs = [
            self._put_input(flow, each) if size > COPIED_BYTES else each
            for each, size in zip(run.inputs, sizes, strict=True)
        ]
        self._shm.close_flow(flow)
        return replace(run, inputs=inputs)

    def _put_input(self, flow: ShmFlow, descriptor: Descriptor) -> Descriptor:
        assert self._shm is not None
        if isinstance(descriptor, InlineDescriptor):
            with contextlib.suppress(AntiphonError):
                return self._shm.put(descriptor.payload, flow)
        return descriptor

    def inputs_read(self, session: str, turn: int) -> None:
        """The turn has ended: what it brought has been read, or never will be."""
        self._turn_inputs.pop((session, turn), None)

    def close_input(self, session: str, stage: str) -> None:
        """The session's input goes to this worker no more; it may have lost what names it."""
        turns = [key for key, by in self._turn_inputs.items() if key[0] == session and by == stage]
        for key in turns:
            del self._turn_inputs[key]
            assert self._shm is not None
            self._shm.void(*key)
        stream = self._inputs.pop((session, stage), None)
        if stream is None:
            return
        if stream.pump is not None:
            stream.pump.cancel()
        assert self._shm is not None
        self._shm.void(session, INPUT_TURN)

    def _try(self, stream: _Input, update: Update) -> bool:
        assert self._shm is not None
        payload, note = _parts(update)
        try:
            self._shm.put(payload, stream.flow, note, tell=True)
        except NoCredit:
            return False
        except (TurnVoid, PeerLost):
            # The link's end says the same, and what follows from it.
            return True
        return True

    async def _pump(self, stream: _Input, stage: str) -> None:
        assert self._shm is not None
        try:
            while stream.waiting:
                payload, note = _parts(stream.waiting[0])
                await self._shm.put_when_ready(payload, stream.flow, note=note, tell=True)
                stream.waiting.popleft()
        except (TurnVoid, PeerLost):
            stream.waiting.clear()
        except AntiphonError as error:
            _log.error("input_lost", session=stream.session, stage=stage, reason=error.message)
            self._on_lost(stream.session, stage)
        finally:
            stream.pump = None

    # Output

    def get(self, stage: str, of: Descriptor) -> Payload:
        """The payload of a piece of a stage's output; one from an arena is readable until
        `release`.

        Raises AntiphonError when it cannot be had.
        """
        if isinstance(of, InlineDescriptor):
            self._count(edge_name(stage, CLIENT), len(of.payload.data))
            return of.payload
        if self._shm is None:
            raise NotAttached("this gateway reads no arena")
        return self._shm.get(of)

    def release(self, descriptor: ShmDescriptor) -> None:
        """The payload is read no longer: its views die."""
        assert self._shm is not None
        with contextlib.suppress(AntiphonError):
            self._shm.release(descriptor)

    def discard(self, descriptor: Descriptor) -> None:
        """Nobody here wants this piece."""
        if self._shm is not None:
            self._shm.discard(descriptor)

    def void(self, session: str, turn: int) -> None:
        """The turn's content is not wanted: what still comes of it is given back unread."""
        if self._shm is not None:
            self._shm.void(session, turn)

    def close(self) -> None:
        """End the arena and detach from the workers'."""
        for stream in self._inputs.values():
            if stream.pump is not None:
                stream.pump.cancel()
        if self._shm is not None:
            self._shm.close()

    # What has gone over which edge

    def traffic(self) -> Mapping[tuple[str, str], Traffic]:
        """By edge and connector."""
        result = {(edge, "inline"): traffic for edge, traffic in self._inline.items()}
        result.update({(edge, "shm"): traffic for edge, traffic in self._relayed.items()})
        if self._shm is not None:
            health = self._shm.health()
            for edges in (health.put, health.got):
                result.update({(edge, "shm"): traffic for edge, traffic in edges.items()})
        return result

    def count(self, source: str, target: str, descriptor: Descriptor) -> None:
        """A payload goes from stage to stage, inside a message or named by one."""
        edge = edge_name(source, target)
        if isinstance(descriptor, InlineDescriptor):
            self._count(edge, descriptor.size_bytes)
        else:
            self._relayed.setdefault(edge, Traffic()).count(descriptor.size_bytes)

    def _count(self, edge: str, size_bytes: int) -> None:
        traffic = self._inline.get(edge)
        if traffic is None:
            traffic = self._inline[edge] = Traffic()
        traffic.count(size_bytes)


def _parts(update: Update) -> tuple[Payload, bytes]:
    """The payload of stream input, and the note that goes with it through an arena."""
    assert isinstance(update.payload, InlineDescriptor)
    fence = update.fence
    note = InputNote(fence.epoch, fence.owner, update.sequence, update.after_controls)
    return update.payload.payload, encode_note(note)


def _inline_bytes(descriptor: Descriptor) -> int:
    return len(descriptor.payload.data) if isinstance(descriptor, InlineDescriptor) else 0
