"""A synthetic engine for tests of the worker: it echoes, fails, blocks and waits on demand.

`run` does what its parameter `do` says:

- `echo` (default): each input text comes back as one output piece.
- `fail`: raises. `refuse`: raises InvalidRequest.
- `block`: never ends by itself.
- `wait`: emits "waiting", then ends once the signal `release` has come.
- `stubborn`: as `block`, and ends normally when it is cancelled.
- `flood`: emits `count` pieces of `size` bytes at once, then blocks.
- `pour`: emits as many once there is room for each, then ends.
- `sleep_forever_in_thread`: as `block`, in a thread that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

from protocol.errors import CapacityExceeded, InvalidRequest, ModelFileError
from protocol.payloads import Payload, PayloadType, text_payload
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult


class SyntheticOptions(pydantic.BaseModel):
    """What a test wants of the engine."""

    model_config = pydantic.ConfigDict(extra="forbid")

    load: Literal["well", "no_model", "crash"] = "well"
    load_gate: Path | None = None
    """A FIFO: loading ends when it has been opened for writing."""
    sessions: int = 8


class SyntheticEngine(Engine):
    """Counts what is open, so that a test can see that nothing is left."""

    Options = SyntheticOptions
    inputs = frozenset({PayloadType.TEXT})
    outputs = frozenset({PayloadType.TEXT})

    def __init__(self, options: SyntheticOptions) -> None:
        self.options = options
        self.open_sessions: set[str] = set()
        self.cancelled = 0

    @classmethod
    def create(cls, options: SyntheticOptions) -> SyntheticEngine:
        return cls(options)

    async def load(self) -> None:
        match self.options.load:
            case "no_model":
                raise ModelFileError("the synthetic model is missing: fetch it")
            case "crash":
                raise RuntimeError("the synthetic engine crashed while loading")
        if self.options.load_gate is not None:
            await asyncio.to_thread(self.options.load_gate.read_bytes)

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        if "bad" in settings:
            raise InvalidRequest("bad is not a setting", field="bad")
        if len(self.open_sessions) >= self.options.sessions:
            raise CapacityExceeded("the synthetic engine is full")
        self.open_sessions.add(session)
        return SyntheticSession(self, session, settings, emit)

    async def shutdown(self) -> None:
        if self.open_sessions:
            raise RuntimeError("sessions were left open")


class SyntheticSession(EngineSession):
    """The state of one session: its settings, its inputs, its gate."""

    def __init__(
        self, engine: SyntheticEngine, name: str, settings: dict[str, Any], emit: EmitEvent
    ) -> None:
        self._engine = engine
        self._name = name
        self._settings = settings
        self._emit = emit
        self._inputs: list[str] = []
        self._released = asyncio.Event()

    async def run(self, turn: Turn) -> TurnResult:
        try:
            action = self._actions[turn.parameters.get("do", "echo")]
            result: TurnResult = await action(self, turn)
            return result
        except asyncio.CancelledError:
            self._engine.cancelled += 1
            raise

    async def _echo(self, turn: Turn) -> TurnResult:
        pieces = 0
        async for payload in turn.inputs:
            turn.emit(payload)
            pieces += 1
        return TurnResult({"pieces": pieces})

    async def _fail(self, turn: Turn) -> TurnResult:
        raise RuntimeError("the synthetic engine failed on purpose")

    async def _refuse(self, turn: Turn) -> TurnResult:
        raise InvalidRequest("the synthetic engine refuses", field="do")

    async def _block(self, turn: Turn) -> TurnResult:
        turn.emit(text_payload("blocked"))
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _wait(self, turn: Turn) -> TurnResult:
        turn.emit(text_payload("waiting"))
        await self._released.wait()
        return TurnResult()

    async def _stubborn(self, turn: Turn) -> TurnResult:
        turn.emit(text_payload("blocked"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            turn.emit(text_payload("a last word"))
        return TurnResult()

    async def _flood(self, turn: Turn) -> TurnResult:
        piece = text_payload("x" * turn.parameters["size"])
        for _ in range(turn.parameters["count"]):
            turn.emit(piece)
        return await self._block(turn)

    async def _pour(self, turn: Turn) -> TurnResult:
        piece = text_payload("x" * turn.parameters["size"])
        for _ in range(turn.parameters["count"]):
            await turn.room()
            turn.emit(piece)
        return TurnResult()

    async def _sleep_forever_in_thread(self, turn: Turn) -> TurnResult:
        turn.emit(text_payload("blocked"))
        await asyncio.to_thread(threading.Event().wait)
        raise AssertionError("unreachable")

    _actions: dict[str, Callable[..., Any]] = {
        "echo": _echo,
        "fail": _fail,
        "refuse": _refuse,
        "block": _block,
        "wait": _wait,
        "stubborn": _stubborn,
        "flood": _flood,
        "pour": _pour,
        "sleep_forever_in_thread": _sleep_forever_in_thread,
    }

    def update(self, payload: Payload) -> None:
        text = payload.data.decode()
        if text == "bad":
            raise InvalidRequest("bad input")
        self._inputs.append(text)
        self._emit("heard", {"text": text})

    def configure(self, settings: dict[str, Any]) -> None:
        if "bad" in settings:
            raise InvalidRequest("bad is not a setting", field="bad")
        self._settings = settings

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match name:
            case "release":
                self._released.set()
                return {}
            case "state":
                return {
                    "settings": self._settings,
                    "inputs": self._inputs,
                    "open_sessions": len(self._engine.open_sessions),
                    "cancelled": self._engine.cancelled,
                }
            case "break":
                raise RuntimeError("the synthetic engine failed on purpose")
            case "lack":
                raise NotImplementedError("a library of the engine lacks something")
        raise InvalidRequest(f"{name} is not a signal")

    def close(self) -> None:
        self._engine.open_sessions.remove(self._name)
