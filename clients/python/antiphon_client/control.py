"""The control loop of a robot, free of I/O and of any clock: what to ask, what to do.

Time goes by ticks, one for each action. An observation is of one tick, and the policy's answer
to it is a chunk of actions: for this tick and those behind it. When the chunk comes some of them
have passed; the others take the place of what was planned before (real-time chunking). Whatever
happens, each tick gets an action: the policy's, the gateway's safe one, or the one configured
here. Times are monotonic ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from antiphon_client.actions import Action, Source, Vector, chunk_of
from antiphon_client.arrays import encoded_bytes, to_payloads
from antiphon_client.errors import AntiphonError, ProtocolError, SessionEnded, error_of
from antiphon_client.halt import Halt
from antiphon_client.limits import MAX_FRAME_BYTES
from antiphon_client.options import ControlOptions
from antiphon_client.steps import StepCounter
from antiphon_client.told import text, understood, yes_or_no

MAX_OBSERVATION_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""The rest is for what is said beside the observation."""
LATENCIES = 10
"""The delay that the next answer is expected to have is the longest of the last so many."""


_PREFIX_DTYPE = np.dtype(np.float32)


@dataclass
class Counts:
    """What a loop has done so far."""

    ticks: int = 0
    sent: int = 0
    """Observations that were sent."""
    superseded: int = 0
    """Observations that a newer one took the place of while the policy was busy."""
    answered: int = 0
    stale: int = 0
    """Chunks that came when all of their ticks had passed."""
    safe: dict[str, int] = field(default_factory=dict)
    """Safe actions, by reason."""


class Pace:
    """Ticks that are a period apart. Those that were missed are not made up for."""

    def __init__(self, period_ms: float) -> None:
        self._period_ms = period_ms
        self._next_ms: float | None = None

    def wait_ms(self, now_ms: float) -> float:
        """A tick is over: how long until the next one."""
        if self._next_ms is None or self._next_ms + self._period_ms <= now_ms:
            self._next_ms = now_ms
        self._next_ms += self._period_ms
        return self._next_ms - now_ms


@dataclass(frozen=True)
class _Observed:
    tick: int
    at_ms: float
    payloads: list[dict[str, Any]]


@dataclass(frozen=True)
class _Plan:
    """A chunk of actions: for the tick of its observation and those behind it."""

    tick: int
    observed_ms: float
    chunk: Vector

    @property
    def end(self) -> int:
        """The first tick that it has no action for."""
        return self.tick + len(self.chunk)


class ControlMachine:
    """The loop of one robot on one session."""

    def __init__(self, options: ControlOptions) -> None:
        self.options = options
        self.counts = Counts()
        self.steps = StepCounter()
        self.connected = False
        """Whether there is a connection. Without one what is planned is executed while it is
        young enough."""
        self.error: AntiphonError | None = None
        """Why the policy gave no answer last; None once it has given one."""
        self.over: AntiphonError | None = None
        """Why no answer will ever come."""
        self._halt = Halt()
        self._stopped_as_of = 0
        """As of this output the gateway holds the session still: those up to it that are told
        again, answers and releases of the time before, do not end that."""
        self._tick = 0
        self._began_ms = 0.0
        self._observed: _Observed | None = None
        self._asked: _Observed | None = None
        self._asked_tick: int | None = None
        self._plan: _Plan | None = None
        self._from_gateway: tuple[int, Vector, str] | None = None
        self._delays: deque[int] = deque(maxlen=LATENCIES)
        self._last: Vector | None = None
        self._dimensions = options.safely(None).size
        """How many numbers an action has."""

    @property
    def stopped(self) -> bool:
        """Whether nothing but the safe action is taken: an emergency stop."""
        return self._halt.stopped

    # Ticks

    def begin(self, observation: Mapping[str, Any], now_ms: float) -> None:
        """The next tick begins, with what the robot senses. Raises TypeError or ValueError for an
        observation that cannot be sent, and then the tick has not begun."""
        self._check_members(observation)
        payloads = to_payloads("observation", observation)
        length = encoded_bytes(payloads)
        if self.options.prefix_steps is not None:
            length += self.options.prefix_steps * self._dimensions * _PREFIX_DTYPE.itemsize
        if length > MAX_OBSERVATION_BYTES:
            raise ValueError(
                f"an observation of {length} bytes: at most {MAX_OBSERVATION_BYTES} can be sent"
                f" (a frame of {MAX_FRAME_BYTES // 2**20} MiB)"
            )
        self._tick += 1
        self._began_ms = now_ms
        self.counts.ticks += 1
        if self._observed is not None and self.steps.in_flight is not None:
            self.counts.superseded += 1
        self._observed = _Observed(self._tick, now_ms, payloads)
        if self._plan is not None and self._plan.end <= self._tick:
            self._plan = None

    def _check_members(self, observation: Mapping[str, Any]) -> None:
        prefix = self.options.prefix_key
        for name in () if prefix is None else (prefix, f"{prefix}_length"):
            if isinstance(observation, Mapping) and name in observation:
                raise ValueError(f"{name!r} is the prefix's (prefix_key), and no member of its own")

    def decided(self, now_ms: float) -> bool:
        """Whether there is no use in waiting longer for this tick's action."""
        if self.stopped or self.over is not None or not self.connected:
            return True
        return self._planned(now_ms) is not None or self._safe_from_gateway() is not None

    @property
    def deadline_ms(self) -> float:
        """Until when this tick's action may be waited for."""
        return self._began_ms + self.options.deadline_ms

    def end(self, now_ms: float) -> Action:
        """This tick's action."""
        action = self._action(now_ms)
        if action.reason is not None:
            self.counts.safe[action.reason] = self.counts.safe.get(action.reason, 0) + 1
        self._last = action.values
        return action

    def _action(self, now_ms: float) -> Action:
        if self.stopped:
            return self._watchdog("stopped")
        planned = self._planned(now_ms)
        if planned is not None:
            values, age_ms = planned.chunk[self._tick - planned.tick], now_ms - planned.observed_ms
            return Action(values, Source.POLICY, self._tick, age_ms)
        safe = self._safe_from_gateway()
        if safe is not None:
            return Action(safe[0], Source.GATEWAY, self._tick, reason=safe[1])
        return self._watchdog(self._why_nothing_came())

    def _planned(self, now_ms: float) -> _Plan | None:
        """The plan, if it has an action for this tick that is young enough."""
        if self._plan is None or now_ms - self._plan.observed_ms > self.options.max_age_ms:
            return None
        return self._plan

    def _safe_from_gateway(self) -> tuple[Vector, str] | None:
        if self._from_gateway is None or self._from_gateway[0] != self._tick:
            return None
        return self._from_gateway[1:]

    def _watchdog(self, reason: str) -> Action:
        values = self.options.safely(self._last)
        return Action(values, Source.WATCHDOG, self._tick, reason=reason)

    def _why_nothing_came(self) -> str:
        if self.over is not None:
            return self.over.code
        if not self.connected:
            return "disconnected"
        if self.steps.lost:
            return "session_state_lost"
        if self.error is not None:
            return self.error.code
        return "late" if self.counts.answered else "not_started"

    # What is asked of the policy

    def ask(self) -> dict[str, Any] | None:
        """The step to send now, if there is one: the input of an update."""
        observed = self._observed
        if observed is None or self.over is not None or not self.connected:
            return None
        if not self.steps.ready or self._waits():
            return None
        self._observed, self._asked, self._asked_tick = None, observed, observed.tick
        self.counts.sent += 1
        payloads = observed.payloads
        if self.options.prefix_key is not None and self.options.prefix_steps is not None:
            key, steps = self.options.prefix_key, self.options.prefix_steps
            prefix, count = self._prefix(observed.tick, steps)
            payloads += to_payloads("observation", {key: prefix, f"{key}_length": count})
        return {
            "type": "step",
            "step": self.steps.begin(),
            "inputs": payloads,
            "parameters": {"deadline_ms": self._wanted_within_ms()},
        }

    def _wanted_within_ms(self) -> float:
        """When the plan has run out: in the first tick that has no action."""
        ticks = 0 if self._plan is None else self._plan.end - self._tick
        return ticks * self.options.period_ms + self.options.deadline_ms

    def _waits(self) -> bool:
        """Whether the plan is to be executed further before the policy is asked again."""
        if self._asked_tick is None or self._plan is None:
            return False
        return self._tick - self._asked_tick < self.options.execute

    def _prefix(self, tick: int, steps: int) -> tuple[Vector, int]:
        """The actions of `tick` and on that will be taken before an answer can be there, in
        `steps` rows, and how many they are."""
        prefix = np.zeros((steps, self._dimensions), _PREFIX_DTYPE)
        if self._plan is None:
            return prefix, 0
        count = min(max(self._delays, default=0), steps, self._plan.end - tick)
        first = tick - self._plan.tick
        prefix[:count] = self._plan.chunk[first : first + count]
        return prefix, count

    # What the gateway says

    def told(self, type: str, sequence: int, fields: Mapping[str, Any], now_ms: float) -> None:
        """Output number `sequence` of the session. Actions that are none count as a failure of the
        policy, whose code is `protocol_error`. Raises ProtocolError for an output that is none."""
        with understood(f"an output {type!r:.64}"):
            self._told(type, sequence, fields)

    def _told(self, type: str, sequence: int, fields: Mapping[str, Any]) -> None:
        ended = self.steps.told(type, sequence, fields)
        news = sequence > self._stopped_as_of
        match type:
            case "step_done" if ended:
                self._answered(fields)
            case "step_failed" if ended:
                self._failed(error_of(fields["error"]))
            case "safe_action":
                self._safe(fields, over=ended)
            case "was_reset":
                self._halt.was_reset()
                self._begin_anew()
            case "emergency_stopped" if news:
                self._hold(by_client=fields["by"] == "client")
            case "stop_released" if news and self.stopped:  # A reset may have ended it already.
                self._released()

    def _answered(self, fields: Mapping[str, Any]) -> None:
        asked, self._asked = self._asked, None
        self._halt.step_answered()
        if asked is None or self.stopped:
            return
        try:
            chunk = chunk_of(fields, self._dimensions)
        except ProtocolError as error:
            self._failed(error)
            return
        self.error = None
        self.counts.answered += 1
        self._delays.append(self._tick - asked.tick)
        plan = _Plan(asked.tick, asked.at_ms, chunk)
        if plan.end <= self._tick:
            self.counts.stale += 1
            return
        self._plan = plan

    def _safe(self, fields: Mapping[str, Any], *, over: bool) -> None:
        """The gateway gives its safe action; if the step is not `over`, its own is not given."""
        reason = text(fields["reason"], "reason")
        if over:
            self._asked = None
        try:
            self._from_gateway = (self._tick, chunk_of(fields, self._dimensions)[0], reason)
        except ProtocolError as error:
            self.error = error
        if reason == "stopped" and not self.stopped:
            self._hold()  # An operator has joined in a stop that a reset has ended.

    def _failed(self, error: AntiphonError) -> None:
        self._asked = None
        # What was late has been answered with a safe action, and was no fault of the policy.
        self.error = None if error.code == "step_late" else error

    def begin_reset(self) -> None:
        """A reset was asked for: nothing is asked of the policy, and nothing of it is done, until
        it has come about."""
        self.steps.resetting = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._plan = None
        self._observed = self._asked = self._asked_tick = self._from_gateway = None
        self.error = None

    def refused(self, error: AntiphonError) -> None:
        """The step that was asked for was not taken up."""
        self.steps.not_taken()
        self._failed(error)
        if error.code == "emergency_stopped":
            self._halt.step_refused()
            self._plan = None

    def attached(self, fields: Mapping[str, Any]) -> None:
        """There is a connection, the first one or another. Raises ProtocolError where it does not
        say how the loop stands."""
        with understood("where the loop stands"):
            self.steps.attached(fields["snapshot"], fields["sequence"])
            stopped = yes_or_no(fields["snapshot"].get("stopped", False), "stopped")
        self.connected = True
        if stopped:
            self._stopped_as_of = fields["sequence"]
            self._hold()
        elif self._halt.held:
            self._released()

    def outputs_lost(self) -> None:
        """Some of what the session said will never come."""
        if self.steps.outputs_lost():
            self._asked = None

    def end_session(self, error: AntiphonError) -> None:
        """There will be no connection any more."""
        self.connected = False
        self.over = self.over or error

    def close(self) -> None:
        """Who controls the robot ends the session: what is planned is not done either."""
        self._begin_anew()
        self.end_session(SessionEnded("client"))

    # Emergency stop

    def stop(self) -> None:
        """From now on, and until a release or a reset, every action is the safe one."""
        self._halt.stop()
        self._plan = None

    def stop_known(self) -> None:
        """The gateway has answered to the stop."""
        self._halt.stop_known()

    def release(self) -> None:
        """The stop from here is over; where the gateway held the session it tells that itself."""
        self._halt.release()
        self._begin_anew()

    def _hold(self, *, by_client: bool = False) -> None:
        self._halt.hold(by_client=by_client)
        self._plan = None

    def _released(self) -> None:
        """Nothing that was planned or asked before is done."""
        self._halt.released()
        self._begin_anew()
