"""A synthetic engine for step loops (world, robot): no model, known cost, honest state.

A session's state is a counter, a checksum and a blob of chosen size. Each step folds its
input into the checksum, which it emits: a step that was lost, done twice or done on
another state than it should have been shows in every answer after it. `checksum_after`
says what is to be expected.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import pydantic

from protocol.arrays import array_of, array_payload
from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded, InvalidRequest, SessionStateLost
from protocol.messages import CHECKPOINT, RESET, REWIND
from protocol.payloads import Payload, PayloadType
from sessions.steps.refusals import no_checkpoint
from workers.engine import EmitEvent, Engine, EngineSession, ParkableSession, Turn, TurnResult
from workers.storages import storage_bytes
from workers.to_the_end import to_the_end

T = TypeVar("T", bound=msgspec.Struct)

_HEAD = struct.Struct("<Q32s")
"""In a snapshot, before the blob and once more for each checkpoint: the steps done and the
checksum."""
KEPT = 2
"""Checkpoints of a session."""


class StepOptions(pydantic.BaseModel):
    """What a synthetic step costs: its sleep, its work in a thread, its state and output."""

    model_config = pydantic.ConfigDict(extra="forbid")

    sessions: int = pydantic.Field(256, ge=1)
    step_ms: float = pydantic.Field(0.0, ge=0.0)
    work_bytes: int = pydantic.Field(0, ge=0)
    """Bytes hashed in a thread for each step."""
    step_work_ms: float = pydantic.Field(0.0, ge=0.0)
    """Processor time that each step takes in a thread."""
    state_bytes: int = pydantic.Field(64, ge=0)
    pieces: int = pydantic.Field(1, ge=1)
    frame_bytes: int = pydantic.Field(0, ge=0)
    """Bytes of each output piece beyond the checksum."""


class StepParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step is asked for beside its input: where it is to go wrong."""

    fail: bool = False
    fail_after_output: bool = False
    fail_in_commit: bool = False
    stall: bool = False
    """Never ends by itself."""
    finish_when_cancelled: bool = False
    """Stalls, and ends as if it were completed when it is cancelled."""


class ResetArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From where a session's state begins; None: from where it began at the open, where that
    was said, and else from 0."""

    seed: int | None = None


class RewindArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step whose state is gone back to."""

    step: int


@dataclass(frozen=True)
class StepState:
    """A session's state. `blob` repeats the checksum, so that half a state shows."""

    steps: int
    checksum: bytes
    blob: memoryview


Checkpoints = dict[int, bytes]
"""The checksums after the steps whose states are kept."""


class SyntheticStep(Engine):
    """Steps that cost what `StepOptions` say; as many sessions as it is told to hold."""

    Options = StepOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.ACTIONS, PayloadType.FRAMES})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.FRAMES})

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        self.open_sessions = 0

    @classmethod
    def create(cls, options: StepOptions) -> SyntheticStep:
        """An engine with `options`."""
        return cls(options)

    async def load(self) -> None:
        """Nothing to load."""

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """A session's state, and the one that a step is making."""
        return {HOST: 2 * self.options.state_bytes}

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session at step 0; `settings` may hold its `seed`."""
        return self.admit(settings)

    def admit(self, settings: dict[str, Any]) -> _SyntheticLoop:
        """The same. Raises CapacityExceeded."""
        if self.open_sessions >= self.options.sessions:
            raise CapacityExceeded("the synthetic engine is full")
        return _SyntheticLoop(self, _arguments(settings, ResetArguments).seed or 0)

    def weights(self) -> str:
        """Of the size of a state: there is nothing else to fit."""
        return hashlib.sha256(str(self.options.state_bytes).encode()).hexdigest()

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, path: Path
    ) -> EngineSession:
        """A session in the state of the snapshot at `path`.

        Raises as `open` does, and SessionStateLost for a file that is not whole.
        """
        restored = self.admit(settings)
        try:
            restored.resume(*await asyncio.to_thread(_read_state, path, self.options.state_bytes))
        except BaseException:
            restored.close()
            raise
        return restored

    async def shutdown(self) -> None:
        """Every session must have been closed."""
        if self.open_sessions:
            raise RuntimeError("sessions were left open")


class _SyntheticLoop(ParkableSession):
    def __init__(self, engine: SyntheticStep, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._state = self._begin(seed)
        self._checkpoints: Checkpoints = {}
        engine.open_sessions += 1

    async def run(self, turn: Turn) -> TurnResult:
        """Fold the input into a new state; the old one holds until that is committed."""
        wanted = _arguments(turn.parameters, StepParameters)
        options = self._engine.options
        state = self._state
        if turn.step != state.steps + 1:
            raise RuntimeError(f"step {turn.step} was run on the state after {state.steps}")
        if len(state.blob) != options.state_bytes or not _repeats(state):
            raise RuntimeError("the state is not whole")
        checksum = state.checksum
        async for payload in turn.inputs:
            checksum = _fold(checksum, payload)
        if options.step_ms:
            await asyncio.sleep(options.step_ms / 1000.0)
        if options.work_bytes:
            await asyncio.to_thread(_work, options.work_bytes)
        if options.step_work_ms:
            await asyncio.to_thread(_work_for, options.step_work_ms / 1000.0)
        if wanted.fail:
            raise RuntimeError("the synthetic step failed on purpose")
        for number in range(options.pieces):
            await turn.room()
            turn.emit(_frame(checksum, options.frame_bytes, step=turn.step, piece=number))
        if wanted.fail_after_output:
            raise RuntimeError("the synthetic step failed on purpose after its output")
        if wanted.stall or wanted.finish_when_cancelled:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not wanted.finish_when_cancelled:
                    raise
        following = self._state_of(state.steps + 1, checksum)

        def commit() -> None:
            if wanted.fail_in_commit:
                raise RuntimeError("the synthetic commit failed on purpose")
            self._state = following

        return TurnResult({"state_bytes": options.state_bytes}, commit)

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`reset`, with a `seed`; `checkpoint` and `rewind`; `state` tells of it."""
        state, kept = self._state, self._checkpoints
        match name:
            case "reset":
                wanted = _arguments(arguments, ResetArguments).seed
                self._state = self._begin(self._seed if wanted is None else wanted)
                self._checkpoints = {}
                return {}
            case "checkpoint":
                kept[state.steps] = state.checksum
                for oldest in sorted(kept)[:-KEPT]:
                    del kept[oldest]
                return {"kept": sorted(kept)}
            case "rewind":
                step = _arguments(arguments, RewindArguments).step
                if step not in kept:
                    raise no_checkpoint(step, sorted(kept))
                self._state = self._state_of(step, kept[step])
                self._checkpoints = {one: kept[one] for one in kept if one <= step}
                return {}
            case "state":
                return {"steps": state.steps, "checksum": state.checksum.hex()}
        known = ", ".join((RESET, CHECKPOINT, REWIND))
        raise InvalidRequest(f"{name} is not a signal; there are {known} and state")

    def fork(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session whose state is as this one's is now; a `seed` is what its resets begin with.

        Raises as `open` does.
        """
        forked = self._engine.admit({"seed": self._seed, **settings})
        forked.resume(self._state, {})
        return forked

    def measure(self) -> dict[str, int]:
        """The state."""
        return storage_bytes(self._state.blob)

    async def snapshot(self, path: Path) -> None:
        """Write counter, checksum and blob, the checkpoints, and a digest of all that.

        Cancelling leaves no file.
        """
        _create(path)
        try:
            kept = dict(self._checkpoints)
            await to_the_end(asyncio.to_thread(_write_state, path, self._state, kept))
        except BaseException:
            await to_the_end(asyncio.to_thread(path.unlink, missing_ok=True))
            raise

    def resume(self, state: StepState, checkpoints: Checkpoints) -> None:
        """Go on from `state`, where nothing was done yet."""
        self._state, self._checkpoints = state, checkpoints

    def close(self) -> None:
        """The state goes."""
        self._engine.open_sessions -= 1
        self._state = StepState(0, b"", memoryview(b""))

    def _begin(self, seed: int) -> StepState:
        return self._state_of(0, _seeded(seed))

    def _state_of(self, steps: int, checksum: bytes) -> StepState:
        size = self._engine.options.state_bytes
        whole = checksum * -(-size // len(checksum))
        return StepState(steps, checksum, memoryview(whole)[:size])


def actions(values: Iterable[float]) -> Payload:
    """An input payload of a step: one row of actions."""
    return array_payload(PayloadType.ACTIONS, np.asarray(list(values), "<f4").reshape(1, -1))


def checksum_after(steps: Iterable[list[Payload]], seed: int = 0) -> str:
    """The checksum (hex) of the state to which steps with these inputs lead."""
    checksum = _seeded(seed)
    for inputs in steps:
        for payload in inputs:
            checksum = _fold(checksum, payload)
    return checksum.hex()


def checksum_of(output: Payload) -> str:
    """The checksum (hex) that an output piece tells."""
    return bytes(output.data[:32]).hex()


def _seeded(seed: int) -> bytes:
    return hashlib.sha256(str(seed).encode()).digest()


def _fold(checksum: bytes, payload: Payload) -> bytes:
    return hashlib.sha256(checksum + array_of(payload).tobytes()).digest()


def _repeats(state: StepState) -> bool:
    return state.blob[:32] == state.checksum[: len(state.blob)]


def _create(path: Path) -> None:
    path.touch(mode=0o600, exist_ok=False)


def _write_state(path: Path, state: StepState, checkpoints: Checkpoints) -> None:
    head = _HEAD.pack(state.steps, state.checksum)
    kept = b"".join(_HEAD.pack(step, checksum) for step, checksum in checkpoints.items())
    digest = hashlib.sha256(head)
    digest.update(state.blob)
    digest.update(kept)
    with path.open("r+b") as file:
        for part in (digest.digest(), head, state.blob, kept):
            file.write(part)


def _read_state(path: Path, state_bytes: int) -> tuple[StepState, Checkpoints]:
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = f"the parked state cannot be read: {error.strerror}"
        raise SessionStateLost(reason) from error
    digest_bytes = hashlib.sha256().digest_size
    body = memoryview(content)[digest_bytes:]
    own_bytes = _HEAD.size + state_bytes
    whole = hashlib.sha256(body).digest() == bytes(content[:digest_bytes])
    kept = body[own_bytes:]
    if not whole or len(body) < own_bytes or len(kept) % _HEAD.size:
        raise SessionStateLost("the parked state is not whole")
    steps, checksum = _HEAD.unpack_from(body)
    blob = memoryview(bytes(body[_HEAD.size : own_bytes]))
    return StepState(steps, checksum, blob), dict(_HEAD.iter_unpack(kept))


def _frame(checksum: bytes, extra_bytes: int, **attributes: Any) -> Payload:
    pixels = np.frombuffer(checksum + bytes(extra_bytes), np.uint8).reshape(1, -1)
    return array_payload(PayloadType.FRAMES, pixels, **attributes)


def _work(size_bytes: int) -> None:
    hashlib.sha256(bytes(size_bytes)).digest()


def _work_for(seconds: float) -> None:
    """Take that much processor time; the hash of a block lets other threads run beside."""
    until_s = time.thread_time() + seconds
    block = bytes(64 * 1024)
    while time.thread_time() < until_s:
        hashlib.sha256(block).digest()


def _arguments(given: dict[str, Any], kind: type[T]) -> T:
    """`given` as a `kind`. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.seed`"; "Object contains unknown field `sed`"
        field = str(error).rstrip("`").rpartition("`")[2].removeprefix("$.")
        raise InvalidRequest(str(error), field=field) from None
