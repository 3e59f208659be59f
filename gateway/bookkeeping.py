"""What is logged, counted and noted of a gateway's sessions and workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import structlog

from gateway.hosted import Hosted
from gateway.hosting import SessionSummary
from gateway.metrics import GatewayMetrics
from gateway.placement import Replica
from gateway.step_figures import StepFigures
from gateway.timeline import Timelines
from protocol.errors import AntiphonError, ErrorInfo
from sessions.actions import NotFresh, ToClient, TurnMeasured
from sessions.client import Role
from sessions.lifecycle import CloseReason, State
from sessions.pipeline import Kind
from sessions.session import Session
from sessions.steps.events import EmergencyStopped

_log = structlog.get_logger(__name__)

_STEPS = (Kind.WORLD, Kind.ROBOT)


class Bookkeeping:
    """The `Observer` of the hosted sessions, and what else the shell has to tell."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.timelines = Timelines()
        self.changed = asyncio.Event()
        """Set when something of what operators see has changed; its one reader clears it."""
        self._metrics = metrics
        self._figures: dict[str, StepFigures] = {}
        self._incarnations: dict[str, int] = {}

    # Sessions

    def begun(self, session: Session, now_ms: float) -> None:
        """The open of a session begins."""
        self.timelines.begin(session.identity.session, now_ms)
        if session.pipeline.kind in _STEPS:
            self._figures[session.identity.session] = StepFigures()
        self.changed.set()

    def opened(self, session: Session, after_ms: float) -> None:
        """A client was told that its session is open, so long after it asked for one."""
        self._metrics.session_opened(session.pipeline.name, after_ms / 1000)

    def told(self, session: Session, action: ToClient) -> None:
        """Clients are told an output, of a type in `timeline.NOTED`."""
        if (timeline := self.timelines.of(session.identity.session)) is not None:
            timeline.told(_now_ms(), action)
            self.changed.set()
        if isinstance(action.output, EmergencyStopped) and action.to is None:
            by = action.output.by
            self._metrics.stopped(session.pipeline.name, by)
            _log.warning("emergency_stop", session=session.identity.session, by=by.value)

    def attached(self, session: Session, role: Role) -> None:
        """A client came to a session that was open."""
        self._metrics.attach_ended(session.pipeline.name, role.value)

    def attach_refused(self, session: Session, error: AntiphonError) -> None:
        """A client came to a session that was open, and was not let in."""
        self._metrics.attach_ended(session.pipeline.name, error.code)
        self._note(session.identity.session, "attach_refused", error=error.code)
        _log.warning("attach_refused", session=session.identity.session, code=error.code)

    def failed(self, session: str, error: Exception) -> None:
        """A session's machine raised."""
        self._note(session, "failed")
        _log.error("session_failed", session=session, exc_info=error)

    def unsent(self, session: str, stage: str, error: AntiphonError) -> None:
        """A command or an output did not come across."""
        self._note(session, "stage_given_up", stage=stage, error=error.code)
        _log.warning("stage_given_up", session=session, stage=stage, error=error.code)

    def not_restored(self, session: str, stage: str, error: ErrorInfo) -> None:
        """What was stored of a session on a stage did not come back."""
        _log.warning(
            "not_restored", session=session, stage=stage, code=error.code, reason=error.message
        )

    def measured(self, hosted: Hosted, turn: TurnMeasured) -> None:
        """A turn has ended."""
        identity = hosted.session.identity
        self._metrics.turn_finished(hosted.session.pipeline.name, turn)
        if (figures := self._figures.get(identity.session)) is not None:
            figures.ended(turn)
        if (timeline := self.timelines.of(identity.session)) is not None:
            timeline.turn_ended(_now_ms(), turn)
            self.changed.set()
        # A step is done many times a second: what is worth a line is one that was not.
        quiet = hosted.session.pipeline.kind in _STEPS and turn.status == "completed"
        log = _log.debug if quiet else _log.info
        log(
            "turn_ended",
            session=identity.session,
            epoch=identity.epoch,
            turn=turn.turn,
            lane=turn.lane,
            status=turn.status,
            reason=turn.reason,
            error=turn.error,
            server_ttft_ms=turn.ttft_ms,
            server_ttfp_ms=turn.ttfp_ms,
            server_rtf=turn.rtf,
            audio_ms=turn.audio_ms,
            prefill_tokens=turn.prefill_tokens,
            timelines=turn.timelines,
        )

    def not_fresh(self, hosted: Hosted, answered: NotFresh) -> None:
        """An observation was answered without anything fresh."""
        self._metrics.not_fresh(hosted.session.pipeline.name, answered)
        if (figures := self._figures.get(hosted.id)) is not None:
            figures.not_fresh(answered)
            self.changed.set()

    def superseded(self, session: Session, count: int) -> None:
        """So many observations were not computed, because a newer one had come."""
        self._metrics.observations_superseded(session.pipeline.name, count)
        if (figures := self._figures.get(session.identity.session)) is not None:
            figures.superseded(count)

    def figures(self, session: str) -> dict[str, Any] | None:
        """The figures of a session that moves by steps."""
        figures = self._figures.get(session)
        return None if figures is None else figures.described()

    def evicted(self, hosted: Hosted) -> None:
        """A session that nobody is at ends, to make room for another."""
        _log.info("session_evicted", session=hosted.id)

    def state_changed(self, hosted: Hosted, before: State | None, after: State | None) -> None:
        """A session entered a state, or was let go."""
        self._metrics.session_state_changed(hosted.session.pipeline.name, before, after)
        if after is State.DETACHED:
            self._note(hosted.id, "detached")
        self.changed.set()

    def released(self, session: Session, reason: CloseReason, *, opened: bool) -> None:
        """Nothing of a session is held any more; `opened`: a client had been told of it."""
        if opened:
            self._metrics.session_closed(session.pipeline.name, reason)
        error = None if session.error is None else session.error.code
        if error is None and reason is CloseReason.ERROR:
            error = AntiphonError.code
        # Whoever was refused an open has its answer, and nothing of it was lost.
        log = _log.warning if error is not None and opened else _log.info
        identity = session.identity
        log(
            "session_released",
            session=identity.session,
            epoch=identity.epoch,
            reason=reason,
            error=error,
        )
        self._note(identity.session, "closed")

    def forget(self, summary: SessionSummary, *, keep: bool) -> None:
        """What was noted of a session that was released may go, or is to `keep` for a while."""
        self.timelines.end(summary, keep=keep)
        self._figures.pop(summary.id, None)

    def _note(self, session: str, event: str, **details: Any) -> None:
        if (timeline := self.timelines.of(session)) is not None:
            timeline.note(_now_ms(), event, **details)
            self.changed.set()

    # Workers

    def watch(self, replica: Replica) -> None:
        """A worker that the config names: it is not there yet."""
        self._metrics.worker_state_changed(replica.stage, replica.name, False)
        self._metrics.watch_link(replica.name, replica.unacknowledged)
        self._metrics.watch_devices(replica.stage, replica.name, replica.devices)
        self._metrics.watch_compute(replica.stage, replica.name, replica.compute)
        self._metrics.watch_counters(replica.stage, replica.name, replica.counters)

    def workers_changed(self, replicas: Iterable[Replica]) -> None:
        """A worker came, went or gave a sign of life."""
        self.changed.set()
        begun_s = time.monotonic()
        asyncio.get_running_loop().call_soon(self._sample_lag, begun_s)
        for replica in replicas:
            self._metrics.worker_state_changed(
                replica.stage, replica.name, replica.link.worker is not None
            )
            known = self._incarnations.get(replica.name, 0)
            if known and replica.incarnations > known:
                self._metrics.worker_restarted(replica.stage, replica.name)
            self._incarnations[replica.name] = replica.incarnations

    def _sample_lag(self, begun_s: float) -> None:
        # The loop's own clock stands still while it runs what is due.
        self._metrics.loop_lag(time.monotonic() - begun_s)


def _now_ms() -> float:
    return time.monotonic() * 1000.0
