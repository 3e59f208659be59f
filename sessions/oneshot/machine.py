"""The machine of a session of one turn: a request, its answer in pieces, the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec

from protocol.errors import ErrorInfo, InvalidRequest
from protocol.messages import Report, TurnEnded
from protocol.payloads import PayloadType
from sessions.actions import StageProduced, TurnMeasured
from sessions.bindings import Binding
from sessions.client import Refused
from sessions.client_pace import ClientPace
from sessions.flow import FlowEnded, FlowEvent, Produced
from sessions.lanes import DEFAULT_LANE, Lanes
from sessions.lifecycle import CloseReason
from sessions.oneshot.events import (
    CancelRequest,
    OneShotOutput,
    OneShotVerb,
    Piece,
    Request,
    RequestDone,
    RequestFailed,
)
from sessions.orchestrator import Orchestrator
from sessions.passed_on import check_inputs, check_parameters
from sessions.pipeline import Pipeline


class OneShotMachine:
    """One request. Times are monotonic ms.

    The settings given with the open are by stage. Once `finished` the session has nothing
    left to do, and closes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        bindings: Mapping[str, Binding],
        emit: Callable[[OneShotOutput], None],
        measured: Callable[[TurnMeasured], None],
        progress: Callable[[], None],
        settings_changed: Callable[[], None],
        new_id: Callable[[str], str],
    ) -> None:
        self.finished = False
        """Whether the answer's last word has been said."""
        self._pipeline = pipeline
        self._emit = emit
        self._measured = measured
        self._progress = progress
        self._lanes = Lanes()
        self._orchestrator = Orchestrator(pipeline, bindings, self._lanes, self._flow)
        self._settings: dict[str, Any] = {}
        self._turn: int | None = None
        self._asked_at_ms = 0.0
        self._first_at_ms: dict[PayloadType, float] = {}
        self._unsent: deque[Produced] = deque()
        """Pieces that wait for a client that does not read: their worker keeps them too, and
        is paced by what it keeps."""
        self._ended: FlowEnded | None = None
        self._pace = ClientPace(pipeline.limits.stall_ms)
        self._now_ms = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """The effective settings, by stage."""
        return self._settings

    @property
    def working(self) -> bool:
        """Whether the request is under way."""
        return self._turn is not None and not self.finished

    def facts(self) -> dict[str, Any]:
        """A request has nothing to add to an answer."""
        return {}

    def snapshot(self) -> None:
        """There is no state beside the answer, which is told again from the cursor."""

    def stage_settings(self, stage: str) -> dict[str, Any]:
        """The settings with which `stage` opens its part of this session."""
        settings: dict[str, Any] = self._settings.get(stage, {})
        return settings

    def prepare(self, patch: dict[str, Any]) -> None:
        """Settings given with the open, a map for each stage.

        Raises InvalidRequest naming what is no stage or no map, or when they are too long.
        """
        self._check_by_stage(patch, "settings")
        self._settings = {**self._settings, **patch}

    # Verbs

    def client(self, verb: OneShotVerb, now_ms: float) -> dict[str, Any]:
        """Take a verb up: what comes of it is told by outputs of its own.

        Raises AntiphonError, and then everything is as it was.
        """
        self._now_ms = now_ms
        match verb:
            case Request():
                self._request(verb)
            case CancelRequest():
                self._cancel()
            case _:
                assert_never(verb)
        return {}

    def refusal(self, verb: OneShotVerb, error: ErrorInfo) -> OneShotOutput:
        """How a verb that was not carried out is answered."""
        return Refused(error, verb.ref)

    def _request(self, verb: Request) -> None:
        if self._turn is not None:
            raise InvalidRequest("this session had its request", code="request_already_made")
        ports = frozenset(self._pipeline.outputs) if verb.ports is None else verb.ports
        if not ports or not ports <= self._pipeline.outputs.keys():
            raise InvalidRequest(
                f"the outputs of this pipeline are {', '.join(sorted(self._pipeline.outputs))}",
                field="ports",
            )
        check_inputs(verb.inputs)
        self._check_by_stage(verb.parameters, "parameters")
        self._turn = self._orchestrator.start(
            DEFAULT_LANE,
            self._pipeline.entry,
            ports,
            verb.inputs,
            verb.parameters,
            self._now_ms,
        )
        self._asked_at_ms = self._now_ms
        self._progress()

    def _check_by_stage(self, maps: dict[str, Any], field: str) -> None:
        for stage, given in maps.items():
            if stage not in self._pipeline.stages:
                raise InvalidRequest(
                    f"the stages of this pipeline are {', '.join(self._pipeline.stages)}",
                    field=f"{field}.{stage}",
                )
            if not isinstance(given, dict):
                raise InvalidRequest("not a map", field=f"{field}.{stage}")
        check_parameters(maps, field)

    def _cancel(self) -> None:
        if self._turn is None or self.finished:
            raise InvalidRequest("no request is under way", code="request_not_active")
        self._end_here(_cancelled("the request was cancelled"))

    # What the stages say

    def report(self, stage: str, report: Report, now_ms: float) -> None:
        """A worker's report about the turn."""
        self._now_ms = now_ms
        if isinstance(report, TurnEnded):
            self._orchestrator.ended(stage, report, now_ms)
        self._pump()

    def produced(self, piece: StageProduced, now_ms: float) -> None:
        """A stage made a piece of the turn's output."""
        self._now_ms = now_ms
        self._orchestrator.output(piece, now_ms)
        self._pump()

    def settings_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> bool:
        """Settings are fixed at the open: a stage that refuses them is of no use."""
        return False

    def stage_lost(
        self,
        stage: str,
        unapplied_bytes: int,
        now_ms: float,
        *,
        restorable: bool = False,
        reason: str | None = None,
    ) -> None:
        """The worker of `stage` is gone; nothing is kept there from turn to turn."""
        self._now_ms = now_ms
        self._orchestrator.stage_lost(stage)
        self._pump()

    def stage_restored(self, stage: str, step: int, now_ms: float) -> None:
        """A request that has not begun needs no state."""

    def stage_forked(self, stage: str, step: int, now_ms: float) -> None:
        """Raises ValueError: a request begins with nothing."""
        raise ValueError("a request is not forked")

    def stage_ready(self, stage: str, now_ms: float) -> None:
        """A worker of `stage` holds this session."""
        self._now_ms = now_ms
        self._orchestrator.workers_ready(now_ms)
        self._pump()

    def rebuilt(self, stage: str) -> bool:
        """Whether the new worker of `stage` was told all that the session is to go on from."""
        return True

    def stage_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> None:
        """A new worker of `stage` refused the session."""
        self._now_ms = now_ms
        self._orchestrator.stage_refused(stage, error)
        self._pump()

    def _flow(self, event: FlowEvent) -> None:
        match event:
            case Produced():
                self._first_at_ms.setdefault(event.payload.type, self._now_ms)
                self._unsent.append(event)
            case FlowEnded():
                self._send_pieces()
                self._ended = event
                if event.error is not None:
                    # The bytes of what has not been sent are not lent any longer.
                    self._unsent.clear()

    def _pump(self) -> None:
        """Send what is there, and after it the last word."""
        self._send_pieces()
        if self._ended is not None and not self._unsent and not self.finished:
            self._finish(self._ended.error, self._ended)

    def _send_pieces(self) -> None:
        while self._unsent and not self._pace.blocked:
            event = self._unsent.popleft()
            # Its bytes are lent until they are acknowledged.
            payload = msgspec.structs.replace(event.payload, data=bytes(event.payload.data))
            self._emit(Piece(event.port, payload))
            self._progress()
            self._orchestrator.acknowledge(event.turn, event.stage, event.sequence)
            if payload.attributes.get("clause_end"):
                self._orchestrator.take(event.turn, self._now_ms)

    def _finish(self, error: ErrorInfo | None, ended: FlowEnded | None) -> None:
        """Say the last word."""
        self.finished = True
        timelines = ended.timelines if ended is not None else {}
        if error is not None:
            self._emit(RequestFailed(error))
        else:
            assert ended is not None
            self._emit(RequestDone(ended.usage, timelines))
        self._progress()
        assert self._turn is not None
        status = "completed" if error is None else "failed"
        if error is not None and error.code == "request_cancelled":
            status = "cancelled"
        self._measured(
            TurnMeasured(
                turn=self._turn,
                lane=DEFAULT_LANE,
                status=status,
                reason=None,
                error=error.code if error is not None else None,
                ttft_ms=self._until_first(PayloadType.TEXT),
                ttfp_ms=self._until_first(PayloadType.AUDIO),
                rtf=None,
                audio_ms=0,
                prefill_tokens=None,
                timelines=timelines,
            )
        )

    def _until_first(self, kind: PayloadType) -> float | None:
        first = self._first_at_ms.get(kind)
        return None if first is None else first - self._asked_at_ms

    def _end_here(self, error: ErrorInfo) -> None:
        """End the answer here: what has not been sent never will be."""
        self._unsent.clear()
        self._orchestrator.cancel(DEFAULT_LANE)
        self._finish(error, self._ended)

    # Time and the client's pace

    def blocked(self, blocked: bool, now_ms: float) -> None:
        """The client's egress queue is full, or has room again."""
        self._now_ms = now_ms
        self._pace.set(blocked, now_ms)
        if not blocked:
            self._orchestrator.stir(now_ms)
            self._pump()

    def _paused(self, lane: str) -> bool:
        return self._pace.blocked

    def stalled(self, now_ms: float) -> bool:
        """Whether the client has left the answer unread for too long."""
        return self._pace.stalled(now_ms)

    def give_up(self, reason: str, now_ms: float) -> None:
        """Nobody takes the answer: it ends here."""
        self._now_ms = now_ms
        if self.working:
            self._end_here(_cancelled(f"the answer was not taken: {reason}"))

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        deadlines = [self._orchestrator.deadline(self._paused), self._pace.stalled_at_ms]
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """A deadline has come."""
        self._now_ms = now_ms
        self._orchestrator.tick(now_ms, self._paused)
        self._pump()

    def end(self, reason: CloseReason, error: ErrorInfo | None, now_ms: float) -> None:
        """The session closes: a request that is under way gets its last word."""
        self._now_ms = now_ms
        if self.working:
            self._end_here(error or _cancelled(f"the session ended: {reason}"))

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            tuple(sorted(self._settings)),
            self._lanes.freeze(),
            self._orchestrator.freeze(),
            self._turn,
            tuple((event.port, event.sequence) for event in self._unsent),
            self._ended is not None,
            self.finished,
            self._pace.blocked_since_ms,
        )


def _cancelled(reason: str) -> ErrorInfo:
    return InvalidRequest(reason, code="request_cancelled").info()
