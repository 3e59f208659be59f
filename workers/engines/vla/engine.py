"""The VLA engine: observations of many robots, answered by one policy in batches.

One thread a worker runs the policy, and the event loop is always free: a first call that
compiles for a minute delays answers, and nothing else. A session has one observation here at
a time, so what waits is bounded by the number of sessions.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic

from protocol.allocator import keep_freed_memory
from protocol.device_bytes import HOST
from protocol.errors import DeadlineMissed, EngineFailed, InvalidRequest
from protocol.messages import RESET
from protocol.openpi import Joined, pack, to_parts, unpack
from protocol.payloads import PayloadType
from workers.engine import (
    DeviceUse,
    EmitEvent,
    Engine,
    EngineSession,
    ParkableSession,
    Turn,
    TurnResult,
)
from workers.engines.vla.parked import create, read_state, write_state
from workers.engines.vla.policy import Policy, State, policy_class
from workers.engines.vla.policy_thread import PolicyThread
from workers.engines.vla.stacking import signature, stack, unstack
from workers.gathering import UNHURRIED_MS, Gathering, Waiting
from workers.reading import PARAMETERS, read
from workers.storages import storage_bytes
from workers.to_the_end import to_the_end

METADATA_BYTES = 64 * 1024


class VlaOptions(pydantic.BaseModel):
    """The options of a stage with this engine."""

    model_config = pydantic.ConfigDict(extra="forbid")

    policy: str
    """A registered policy, or `MODULE:CLASS`."""
    options: dict[str, Any] = {}
    """The policy's own."""
    batch: int = pydantic.Field(default=16, ge=1, le=1024)
    """How many observations go to the policy in one call at most."""
    window_ms: float = pydantic.Field(default=5.0, ge=0, le=1000)
    """How long an observation waits for the next to go with it; less where the policy is fast."""

    @pydantic.model_validator(mode="after")
    def _policy_is_there(self) -> VlaOptions:
        kind = policy_class(self.policy)
        try:
            kind.Options.model_validate(self.options)
        except pydantic.ValidationError as error:
            problems = [
                f"options.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise ValueError("; ".join(problems)) from None
        return self


class StepParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step may say beside its observation."""

    deadline_ms: float | None = None
    """Within what time its answer is wanted: the order of those that wait, no more."""
    stale_ms: float | None = None
    """Where it has not begun within that time it is not computed: the session's deadline."""


@dataclass(frozen=True)
class Observed:
    """What a robot senses, and what the policy keeps of its session."""

    observation: dict[Any, Any]
    state: State


@dataclass(frozen=True)
class Outcome:
    """What became of one observation: an answer and the state after it, or an error."""

    answer: dict[str, Any]
    state: State
    infer_ms: float
    batch: int
    error: Exception | None = None


class VlaEngine(Engine):
    """One policy for many robots."""

    Options = VlaOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.OBSERVATION})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.ACTIONS})

    def __init__(self, options: VlaOptions, policy: Policy) -> None:
        self._options = options
        self.policy = policy
        self._gathering: Gathering[Observed] = Gathering(options.window_ms, options.batch)
        self._answers: dict[Waiting[Observed], asyncio.Future[Outcome]] = {}
        self._thread = PolicyThread()
        self._running = False
        self._begun_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sessions = 0
        self.about: dict[str, Any] = {}
        """What clients are told of the policy."""

    @classmethod
    def create(cls, options: VlaOptions) -> VlaEngine:
        """An engine with the policy that `options` name."""
        kind = policy_class(options.policy)
        return cls(options, kind(kind.Options.model_validate(options.options)))

    async def load(self) -> None:
        """Load the policy, in its thread."""
        keep_freed_memory()
        metadata = pack(await self._thread.result(self.policy.load))
        if len(metadata) > METADATA_BYTES:
            raise RuntimeError(f"the policy's metadata is longer than {METADATA_BYTES} bytes")
        try:
            unpack(metadata)
        except InvalidRequest as error:
            raise RuntimeError(f"the policy's metadata is {error}") from error
        self.about = {"metadata": metadata}

    def devices(self) -> dict[str, DeviceUse]:
        """What the policy says that it holds."""
        return self.policy.devices()

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """A session's state, and the one that a step is making."""
        state = self.policy.initial_state(settings)
        return {HOST: 2 * sum(values.nbytes for values in state.values())}

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session that has sensed nothing yet."""
        return self._opened(settings, self.policy.initial_state(settings))

    def _opened(self, settings: dict[str, Any], state: State) -> RobotSession:
        self._sessions += 1
        return RobotSession(self, settings, state)

    def closed(self, session: RobotSession) -> None:
        """A session is gone: others need not wait for its company."""
        self._sessions -= 1
        self._gathering.forget(session)
        self._go_on()

    def weights(self) -> str:
        """Of the policy: its class, its options, and what it says itself."""
        named = [self._options.policy, self._options.options, self.policy.weights()]
        return hashlib.sha256(msgspec.json.encode(named, order="deterministic")).hexdigest()

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, path: Path
    ) -> EngineSession:
        """A session in the state of the snapshot at `path`. Raises as `open` does, and
        SessionStateLost."""
        initial = self.policy.initial_state(settings)
        return self._opened(settings, await asyncio.to_thread(read_state, path, initial))

    async def shutdown(self) -> None:
        """Stop the thread after the call that it is at."""
        if self._timer is not None:
            self._timer.cancel()
        await self._thread.shutdown()

    # Observations in, answers out

    @property
    def waiting(self) -> int:
        """How many observations the policy has not been given yet."""
        return len(self._gathering)

    def initial_state(self, settings: dict[str, Any]) -> State:
        """The state with which a session of these settings begins."""
        return self.policy.initial_state(settings)

    async def infer(
        self,
        session: Hashable,
        observation: dict[Any, Any],
        state: State,
        wanted: StepParameters,
    ) -> Outcome:
        """The policy's answer, after those it has to wait for. Cancelled it waits no more.

        Raises what the policy raised, and DeadlineMissed where it was not begun in time.
        """
        loop = asyncio.get_running_loop()
        now_ms = self._now_ms()
        within_ms = UNHURRIED_MS if wanted.deadline_ms is None else wanted.deadline_ms
        observed = Observed(observation, state)
        kind = signature(observation)
        waiting = Waiting(session, observed, kind, now_ms, now_ms + within_ms)
        look: asyncio.TimerHandle | None = None
        if wanted.stale_ms is not None:
            waiting.stale_ms = now_ms + wanted.stale_ms
            look = loop.call_at(waiting.stale_ms / 1000.0, self._drop_stale)
        answer: asyncio.Future[Outcome] = loop.create_future()
        self._answers[waiting] = answer
        self._gathering.add(waiting)
        self._go_on()
        try:
            outcome = await answer
        finally:
            if look is not None:
                look.cancel()
            self._answers.pop(waiting, None)
            self._gathering.remove(waiting)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _drop_stale(self) -> None:
        """What came too late to be of use is told so, and not computed."""
        for waiting in self._gathering.stale(self._now_ms()):
            answer = self._answers.get(waiting)
            if answer is not None and not answer.done():
                answer.set_exception(DeadlineMissed("it was not begun within its deadline"))

    def _go_on(self) -> None:
        """Hand the next batch to the policy, if both are ready, or look again when it is."""
        self._drop_stale()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._gathering.due_ms(self._sessions)
        if self._running or due_ms is None:
            return
        now_ms = self._now_ms()
        if due_ms > now_ms:
            self._timer = asyncio.get_running_loop().call_at(due_ms / 1000.0, self._go_on)
            return
        self._running = True
        self._begun_ms = now_ms
        batch = self._gathering.take()
        self._thread.call(
            lambda: _infer(self.policy, [one.work for one in batch]),
            lambda outcomes: self._answered(batch, outcomes),
        )

    def _answered(self, batch: list[Waiting[Observed]], outcomes: list[Outcome]) -> None:
        self._running = False
        now_ms = self._now_ms()
        sessions = [waiting.session for waiting in batch]
        self._gathering.answered(sessions, now_ms - self._begun_ms, now_ms)
        for waiting, outcome in zip(batch, outcomes, strict=True):
            answer = self._answers.get(waiting)
            if answer is not None and not answer.done():
                answer.set_result(outcome)
        self._go_on()

    @staticmethod
    def _now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000.0


class RobotSession(ParkableSession):
    """What the policy keeps of one robot."""

    def __init__(self, engine: VlaEngine, settings: dict[str, Any], state: State) -> None:
        self._engine = engine
        self._settings = settings
        self._state = state
        self._copied = False
        """Whether the state is one that a step made: arrays of its own, of a form that stays."""
        self._measured: dict[str, int] | None = None

    def describe(self) -> dict[str, Any]:
        """The policy's `metadata`, packed as OpenPI has it."""
        return self._engine.about

    async def run(self, turn: Turn) -> TurnResult:
        """Answer the observation with a chunk; the state moves on when that is committed."""
        wanted = _parameters(turn.parameters)
        # Its arrays may be views of the gateway's memory, which stays claimed while they live.
        joined = Joined()
        async for payload in turn.inputs:
            if payload.type is not PayloadType.OBSERVATION:
                raise InvalidRequest(
                    f"an observation is of the type {PayloadType.OBSERVATION.value!r}, "
                    f"not {payload.type.value!r}",
                    field="inputs",
                )
            joined.add(payload)
        observation = joined.members()
        outcome = await self._engine.infer(self, observation, self._state, wanted)
        for part in to_parts(PayloadType.ACTIONS, outcome.answer):
            await turn.room()
            if part.attributes.get("key") == "actions":
                timed = {**part.attributes, "infer_ms": outcome.infer_ms, "batch": outcome.batch}
                part = msgspec.structs.replace(part, attributes=timed)
            turn.emit(part)

        def commit() -> None:
            self._state = outcome.state
            if not self._copied:
                self._copied, self._measured = True, None

        return TurnResult({"infer_ms": outcome.infer_ms, "batch": outcome.batch}, commit)

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`reset`: the state is as at the open, with the settings that `arguments` replace."""
        if name != RESET:
            raise InvalidRequest(f"{name} is not a signal; there is {RESET}")
        self._state = self._engine.initial_state({**self._settings, **arguments})
        self._copied, self._measured = False, None
        return {}

    def measure(self) -> dict[str, int]:
        """The state's arrays."""
        if self._measured is None:
            self._measured = storage_bytes(self._state)
        return self._measured

    async def snapshot(self, path: Path) -> None:
        """Write the state. Cancelling leaves no file."""
        create(path)
        try:
            await to_the_end(asyncio.to_thread(write_state, path, self._state))
        except BaseException:
            await to_the_end(asyncio.to_thread(path.unlink, missing_ok=True))
            raise

    def close(self) -> None:
        """The state goes."""
        self._state = {}
        self._engine.closed(self)


def _infer(policy: Policy, batch: Sequence[Observed]) -> list[Outcome]:
    """In the policy's thread. Where several fail together each is tried alone."""
    begun_s = time.perf_counter()
    try:
        inferred = policy.infer(
            stack([one.observation for one in batch], [one.state for one in batch])
        )
        answers = unstack(inferred, len(batch), batch[0].state)
    except Exception as error:
        if len(batch) > 1:
            return [outcome for one in batch for outcome in _infer(policy, [one])]
        return [Outcome({}, {}, 0.0, 1, error)]
    infer_ms = (time.perf_counter() - begun_s) * 1000.0
    return [
        Outcome(answer, state, infer_ms, len(batch))
        if _finite(answer["actions"])
        else Outcome({}, {}, infer_ms, len(batch), _not_finite(one.observation))
        for one, (answer, state) in zip(batch, answers, strict=True)
    ]


def _finite(actions: npt.NDArray[Any]) -> bool:
    """No motor is told what is no number."""
    return actions.dtype.kind in "biuf" and bool(np.isfinite(actions).all())


def _not_finite(observation: dict[Any, Any]) -> Exception:
    """Whose fault it is that the actions are not."""
    named = _where_not_finite(observation)
    if named is None:
        return EngineFailed("the actions are not finite")
    return InvalidRequest(f"{named!r} is not finite, and so the actions are not", field=named)


def _where_not_finite(observation: dict[Any, Any]) -> str | None:
    for key, value in observation.items():
        if isinstance(value, dict):
            if (below := _where_not_finite(value)) is not None:
                return f"{key}.{below}"
        elif np.asarray(value).dtype.kind == "f" and not np.isfinite(value).all():
            return str(key)
    return None


def _parameters(given: dict[str, Any]) -> StepParameters:
    wanted = read(given, StepParameters, PARAMETERS)
    for name in ("deadline_ms", "stale_ms"):
        within_ms = getattr(wanted, name)
        if within_ms is not None and not 0 <= within_ms < math.inf:
            raise InvalidRequest("a time is 0 ms or more", field=f"parameters.{name}")
    return wanted
