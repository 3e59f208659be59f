"""What operators and probes are told of sessions and workers."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.hosting import SessionSummary, StageHealth, WaitingSummary, WorkerSummary
from gateway.placement import Replica
from protocol.device_bytes import DeviceBytes
from sessions.lifecycle import CloseReason
from sessions.opening import Opening
from sessions.session import Session


def stage_health(replicas: list[Replica], now_ms: float) -> StageHealth:
    """What can be said of the replicas of a stage, taken together."""
    if any(replica.works(now_ms) for replica in replicas):
        return StageHealth.READY
    if any(replica.ready for replica in replicas):
        return StageHealth.WEDGED
    if any(replica.link.worker is not None or not replica.incarnations for replica in replicas):
        return StageHealth.STARTING
    return StageHealth.LOST


def session_summary(
    session: Session,
    turns: int,
    opened_at_ms: float,
    noted: int,
    steps: dict[str, Any] | None,
    now_ms: float,
) -> SessionSummary:
    """One session; its times are monotonic ms."""
    identity = session.identity
    left = {reason: round((at - now_ms) / 1000, 3) for at, reason in session.ends}
    return SessionSummary(
        id=identity.session,
        pipeline=session.pipeline.name,
        kind=session.pipeline.kind.value,
        tenant=identity.tenant,
        state=session.state.value,
        epoch=identity.epoch,
        turns=turns,
        age_s=round((now_ms - opened_at_ms) / 1000, 3),
        idle_s=round((now_ms - session.idle_since_ms) / 1000, 3),
        facts=session.facts(),
        parked=session.parked,
        bytes=session.reserved,
        idle_left_s=left.get(CloseReason.IDLE),
        age_left_s=left.get(CloseReason.MAX_AGE),
        grace_left_s=left.get(CloseReason.DETACHED),
        stopped=session.stopped,
        noted=noted,
        steps=steps,
    )


def waiting_summary(
    opening: Opening, position: int, reason: str | None, now_ms: float
) -> WaitingSummary:
    """One open that waits, and why."""
    return WaitingSummary(
        pipeline=opening.pipeline.name,
        tenant=opening.tenant,
        priority=opening.priority,
        position=position,
        opening=opening.trying,
        waited_s=round((now_ms - opening.since_ms) / 1000, 3),
        estimate_ms=None if opening.told is None else opening.told.estimate_ms,
        reason=reason,
    )


def worker_summary(replica: Replica, now_ms: float) -> WorkerSummary:
    """One worker."""
    status = replica.status
    if replica.link.worker is None:
        state = "starting" if replica.incarnations == 0 else "lost"
    elif replica.wedged(now_ms):
        state = "wedged"
    else:
        state = "ready" if replica.ready else "starting"
    return WorkerSummary(
        stage=replica.stage,
        worker=replica.name,
        incarnation=replica.link.worker or "",
        state=state,
        sessions=status.sessions if status else 0,
        waiting=status.waiting if status else 0,
        progress=status.progress if status else 0,
        resident_bytes=status.resident_bytes if status else 0,
        devices={device: _described(held) for device, held in replica.devices().items()},
        compute=replica.compute(),
    )


def _described(held: DeviceBytes) -> dict[str, int | None]:
    return {**msgspec.structs.asdict(held), "reserved": held.reserved, "free": held.free}
