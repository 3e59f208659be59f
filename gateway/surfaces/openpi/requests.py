"""The requests of one OpenPI connection: which run, which are superseded, what each is answered.

Free of I/O; times are monotonic ms. Requests are answered in the order in which they came, each
once. One step runs at a time; of the observations that wait only the newest is computed, and
those before it are answered with its actions, said to be not fresh. Where there is nothing
fresh in time all of them are answered with the safe action of their session.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec
import numpy as np

from protocol.errors import EngineFailed, InvalidRequest
from protocol.openpi import from_parts, pack, to_parts, unpack
from protocol.payloads import Payload, PayloadType
from sessions.passed_on import MAX_INPUT_BYTES
from sessions.steps.events import (
    NEXT,
    Reason,
    Reset,
    SafeAction,
    Step,
    StepDone,
    StepFailed,
    StepVerb,
)

MAX_PENDING = 16
"""Requests that wait for an answer; who sends more is not read until there is room."""

_RESET = "reset"
"""What the resets of a connection are called, by which their answers are known."""
_ENDPOINT = "endpoint"
_LABEL = "session_id"


class Observed(msgspec.Struct, frozen=True):
    """What a robot senses, to be answered with actions."""

    inputs: list[Payload]


class ResetAsked(msgspec.Struct, frozen=True):
    """The session is to begin anew."""


Asked = Observed | ResetAsked


def read_request(frame: bytes | str) -> Asked:
    """What a client asks for. Raises InvalidRequest.

    `endpoint`, if it is "infer" or "reset", is no part of the observation, and neither is the
    `session_id` beside it: that is the client's own label, and a connection has one session.
    """
    if isinstance(frame, str):
        raise InvalidRequest("an observation is a binary message", code="invalid_message")
    if len(frame) > MAX_INPUT_BYTES:
        raise InvalidRequest(
            f"an observation has at most {MAX_INPUT_BYTES} bytes, not {len(frame)}",
            code="payload_too_large",
        )
    observation = unpack(frame)
    if not isinstance(observation, dict):
        raise InvalidRequest("an observation is a map", code="invalid_message")
    endpoint = observation.get(_ENDPOINT)
    if isinstance(endpoint, str) and endpoint in ("infer", "reset"):
        if endpoint == "reset":
            return ResetAsked()
        del observation[_ENDPOINT]
        observation.pop(_LABEL, None)
    return Observed(to_parts(PayloadType.OBSERVATION, observation))


class _Request(msgspec.Struct, frozen=True):
    asked: Asked
    received_ms: float
    said_ms: float


class Requests:
    """Of one connection to a session at `committed`, where step `in_flight` of an earlier
    connection may still run: nobody waits for its answer, and ours begin after it. So it is with
    a step of ours that has been answered before it was done, and with a reset. Who has `resumed`
    does not know of those."""

    def __init__(
        self, committed: int, in_flight: int | None = None, *, resumed: bool = False
    ) -> None:
        self.committed = committed
        self.superseded = 0
        """Observations that were answered without being computed, so far."""
        self._stray = in_flight
        self._unsure = resumed
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        """What the step that runs, or waits to, answers; it was begun for the last one."""
        self._reset: _Request | None = None
        """The reset that is under way, while it has no answer."""
        self._resetting = False
        """Whether one is under way."""
        self._stopped_ms = -math.inf
        self._unsent: deque[float] = deque()
        """When the requests came whose answers are on their way to the client."""
        self._prev_total_ms: float | None = None

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._waiting) + len(self._running) + (self._reset is not None)

    def ask(self, asked: Asked, now_ms: float, said_ms: float | None = None) -> None:
        """A request has come; `said_ms` is the earliest that it may have been said."""
        request = _Request(asked, now_ms, now_ms if said_ms is None else said_ms)
        self._waiting.append(self._as_stopped(request))

    def begin(self) -> StepVerb | None:
        """What is to be done next; None while something runs, or nothing waits."""
        if not self._waiting or (self._running and not self._replaceable):
            return None
        if isinstance(self._waiting[0].asked, ResetAsked):
            if self._running or self._reset is not None:
                return None
            self._reset = self._waiting.popleft()
            self._resetting = True
            asked = self._reset
            return Reset(ref=_RESET, since_ms=asked.received_ms, said_ms=asked.said_ms)
        newest = self._waiting[0].asked
        while self._waiting and isinstance(self._waiting[0].asked, Observed):
            newest = self._waiting[0].asked
            self._running.append(self._waiting.popleft())
        assert isinstance(newest, Observed)
        known = self._stray is None and not self._resetting and not self._unsure
        number = self.committed + 1 if known else NEXT
        return Step(number, newest.inputs, since_ms=self._running[0].received_ms)

    @property
    def _replaceable(self) -> bool:
        """Whether what was begun waits for a reset, or for the step of which nobody wants the
        answer: a newer observation takes its place."""
        return self._stray is not None or self._resetting

    def step_over(self, step: int, committed: int) -> bool:
        """A step has ended, well or not; whether it was one of this connection's."""
        self.committed = committed
        if step == self._stray:
            self._stray = None
            return False
        if step != NEXT:
            self._unsure = False
        return bool(self._running)

    def failed(self, failed: StepFailed) -> bool:
        """A step has ended without an output; whether that is an error of this connection's."""
        ours = self.step_over(failed.step, failed.committed_step)
        # What took the place of one that waited is of the same requests.
        return ours and failed.error.code != Reason.SUPERSEDED

    def done(self, done: StepDone, state: str, now_ms: float) -> list[bytes]:
        """The answers that a step gives; `state` is the stage that keeps the policy.

        Raises EngineFailed where its output is no map with `actions`, or more than the wire has.
        """
        pieces = [piece for port in done.outputs.values() for piece in port]
        try:
            answer = from_parts(pieces)
        except InvalidRequest as error:
            raise EngineFailed(f"the policy's answer is {error}") from error
        if not isinstance(answer.get("actions"), np.ndarray):
            raise EngineFailed("the policy's answer has no array of actions", code="no_actions")
        answer.setdefault("policy_timing", {"infer_ms": _infer_ms(pieces, done, state)})
        answered, self._running = self._running, []
        self.superseded += len(answered) - 1
        frames = []
        for request in answered:
            fresh = request is answered[-1]
            said: dict[str, Any] = {"fresh": fresh, "step": done.step}
            if not fresh:
                said["reason"] = "superseded"
            frames.append(self._answer({**answer, "antiphon": said}, request, now_ms))
        return frames

    def safe(self, given: SafeAction, now_ms: float) -> list[bytes]:
        """The answers where there is nothing fresh. A step that is still in flight is nobody's
        from here on."""
        self.committed = given.committed_step
        if given.reason is Reason.SUPERSEDED or given.step == self._stray:
            # What took its place is of the same requests; or nobody waits for this answer.
            return []
        if given.ref == _RESET:
            answered, self._reset = [] if self._reset is None else [self._reset], None
        else:
            if given.in_flight and self._running:
                self._stray = given.step
            answered, self._running = self._running, []
        pieces = [piece for port in given.outputs.values() for piece in port]
        step = given.step or given.committed_step
        answer = {
            **from_parts(pieces),
            "policy_timing": {"infer_ms": 0.0},
            "antiphon": {"fresh": False, "step": step, "reason": given.reason.value},
        }
        return [self._answer(answer, request, now_ms) for request in answered]

    def stopped(self, now_ms: float) -> None:
        """An emergency stop: a reset that was asked for before it must not release it, and is
        answered as what was observed then."""
        self._stopped_ms = now_ms
        self._waiting = deque(map(self._as_stopped, self._waiting))

    def _as_stopped(self, request: _Request) -> _Request:
        if isinstance(request.asked, ResetAsked) and request.said_ms <= self._stopped_ms:
            return msgspec.structs.replace(request, asked=Observed([]))
        return request

    def was_reset(self, now_ms: float) -> bytes | None:
        """The answer to a reset: a map whose `actions` are none. None: nobody asked for it."""
        self.committed = 0
        self._resetting = self._unsure = False
        request, self._reset = self._reset, None
        if request is None:
            return None
        said = {"fresh": True, "step": 0, "reason": "reset"}
        actions = np.zeros((0, 0), np.float32)
        return self._answer({"actions": actions, "antiphon": said}, request, now_ms)

    def sent(self, now_ms: float) -> None:
        """An answer has been handed to the connection, the oldest that was not."""
        if self._unsent:
            self._prev_total_ms = now_ms - self._unsent.popleft()

    def _answer(self, answer: dict[Any, Any], request: _Request, now_ms: float) -> bytes:
        timing = {"infer_ms": now_ms - request.received_ms}
        if self._prev_total_ms is not None:
            timing["prev_total_ms"] = self._prev_total_ms
        self._unsent.append(request.received_ms)
        return pack({**answer, "server_timing": timing})


def _infer_ms(pieces: list[Payload], done: StepDone, state: str) -> float:
    """What the policy took, as it says itself, or its stage for the whole step."""
    for piece in pieces:
        said = piece.attributes.get("infer_ms")
        if isinstance(said, int | float):
            return float(said)
    hops = done.timeline.get(state, {})
    return float(hops.get("done", 0.0) - hops.get("started", 0.0))
