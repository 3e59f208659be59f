"""The stages of one session: bound in their order at the open, and again when a worker is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorInfo,
    ErrorKind,
    SessionStateLost,
)
from protocol.messages import Answer, Fence, Fork, RoomWanted, SnapshotTaken
from sessions.actions import (
    Action,
    NotRestored,
    Reported,
    StageBound,
    StageCrowded,
    StageLost,
    StageProduced,
    StageUnavailable,
    Unbind,
)
from sessions.bindings import Binding, BindingState
from sessions.client import Origin, Parked, Parking, Restored, Restoring, SnapshotFailed
from sessions.lifecycle import CloseReason, Lifecycle, State
from sessions.machine import Machine
from sessions.pipeline import Pipeline

StageEvent = StageBound | StageUnavailable | StageCrowded | StageLost | Reported | StageProduced


class Stages:
    """What becomes of each stage, and what `machine` is told of it. Times are monotonic ms.

    `bindings` is filled with one for each stage; `forks` are those whose state begins as another
    session's is. `emit` tells the clients. `opened` is called
    once every stage holds the session, `close` when it cannot go on, and `freed` when a stage
    holds nothing of it any more after that.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        fence: Callable[[], Fence],
        lifecycle: Lifecycle,
        bindings: dict[str, Binding],
        machine: Machine,
        *,
        tenant: str,
        expires_at_s: int,
        forks: Mapping[str, Fork],
        act: Callable[[Action], None],
        emit: Callable[[Any], None],
        opened: Callable[[], None],
        close: Callable[[CloseReason, ErrorInfo | None], None],
        freed: Callable[[], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._act = act
        self._expires_at_s = expires_at_s
        self._bindings = bindings
        self._machine = machine
        self._emit = emit
        self._opened = opened
        self._close = close
        self._freed = freed
        self.refused_by: str | None = None
        """The stage that did not take the session, so that it could not be opened."""
        for stage in pipeline.opening_order or pipeline.stages:
            bindings[stage] = Binding(
                stage,
                fence,
                self._settings_of(stage),
                act,
                pipeline.output_edge(stage),
                tenant=tenant,
                priority=pipeline.priority if pipeline.parks else None,
                durable_until_s=expires_at_s if pipeline.durable else None,
                peer=lambda of: bindings[of],
            )
            bindings[stage].fork = forks.get(stage)
        self._order = list(bindings.values())
        self._rounds_left = len(self._order)

    @property
    def full(self) -> bool:
        """Whether so much waits for a worker that no more should be made for it."""
        return any(binding.full for binding in self._bindings.values())

    @property
    def freed(self) -> bool:
        """Whether no worker holds anything of the session."""
        return all(binding.freed for binding in self._bindings.values())

    @property
    def parked(self) -> tuple[str, ...]:
        """The stages whose state is in the store, or on its way there or back."""
        return tuple(b.stage for b in self._bindings.values() if b.away)

    @property
    def putting_away(self) -> tuple[str, ...]:
        """The stages whose state is on its way into the store."""
        return tuple(b.stage for b in self._bindings.values() if b.state is BindingState.PARKING)

    @property
    def stored(self) -> tuple[str, ...]:
        """The stages whose workers have said that their state is in the store."""
        return tuple(b.stage for b in self._bindings.values() if b.state is BindingState.PARKED)

    @property
    def kept(self) -> dict[str, AntiphonError]:
        """Why the others are not parked, by stage."""
        kept = {b.stage: b.kept for b in self._bindings.values()}
        return {stage: error for stage, error in kept.items() if error is not None}

    @property
    def reserved(self) -> dict[str, dict[str, int]]:
        """What workers have reserved for the session: bytes by stage and device."""
        return {stage: binding.reserved for stage, binding in self._bindings.items()}

    @property
    def about(self) -> dict[str, dict[str, Any]]:
        """What the engine of each stage says of its model."""
        return {stage: binding.about for stage, binding in self._bindings.items()}

    def state_of(self, stage: str) -> BindingState:
        """Where a stage stands."""
        return self._bindings[stage].state

    def refused_by_worker(self, stage: str) -> ErrorInfo | None:
        """Why a stage that is parked was not brought back when that was last asked for."""
        return self._bindings[stage].refused

    def workers(self) -> dict[str, str | None]:
        """The worker incarnation of each stage."""
        return {stage: binding.worker for stage, binding in self._bindings.items()}

    def open(self) -> None:
        """Bind the stages one after the other, in an order that all pipelines agree on.

        The first alone waits for room. A later one that lacks it is begun with once the others
        have been given back, so that nothing is held while the session waits.
        """
        if any(binding.state is BindingState.CLOSING for binding in self._order):
            return
        for binding in self._order:
            if binding.state is BindingState.UNBOUND:
                binding.bind(waits=binding is self._order[0])
                return
            if not binding.ready:
                return
        for binding in self._order:
            # Whoever opens it again goes on from its own state.
            binding.fork = None
        self._opened()

    def _begin_with(self, lacking: Binding, error: ErrorInfo) -> bool:
        """Wait for room at the stage that has refused for want of it, and hold nothing
        meanwhile. False where that stage has waited, lacks something else, or has had its turn:
        stages that lose their room to others by turns do not go on like that for ever."""
        if error.kind is not ErrorKind.CAPACITY or lacking is self._order[0]:
            return False
        if not self._rounds_left:
            return False
        self._rounds_left -= 1
        others = [binding for binding in self._bindings.values() if binding is not lacking]
        self._order = [lacking, *others]
        for binding in reversed(others):
            if not binding.freed:
                binding.close("room")
        self.open()
        return True

    def handle(self, event: StageEvent, now_ms: float) -> None:
        """Something has become of a stage, or has come from it."""
        binding = self._bindings[event.stage]
        match event:
            case StageBound():
                if binding.state is BindingState.BINDING:
                    if binding.restoring:
                        self._emit(Restoring(binding.stage))
                    binding.bound(event.worker, event.crowded)
            case StageUnavailable():
                if self._lifecycle.state is State.OPENING:
                    self.refused_by = binding.stage
                    self._close(CloseReason.ADMISSION, event.error)
            case StageCrowded():
                binding.link_crowded(event.crowded)
            case StageLost():
                self._lost(binding, now_ms)
            case Reported():
                if binding.reported(event.report):
                    self._reported(binding, event, now_ms)
                if now_ms < binding.room_wanted_until_ms:
                    # As soon as it has nothing to do: who has always more would never yield.
                    self._park(binding, "room_wanted")
            case StageProduced():
                if self._lifecycle.live and binding.ready:
                    self._machine.produced(event, now_ms)
            case _:
                assert_never(event)

    def park(self) -> None:
        """Put away what has nothing to do and can be."""
        for binding in self._bindings.values():
            self._park(binding, "requested")

    def restore(self) -> None:
        """Bring back what is parked."""
        for binding in self._bindings.values():
            binding.wake()

    def _park(self, binding: Binding, reason: str) -> None:
        read = any(other.feeds(binding.stage) for other in self._bindings.values())
        if binding.parks and binding.idle and not read and self._lifecycle.live:
            self._emit(Parking(binding.stage, reason))
            binding.park(self._expires_at_s)

    def close(self, reason: CloseReason) -> None:
        """Free the session on every stage, in the reverse order."""
        if self.refused_by is None:
            self.refused_by = next((b.stage for b in self._order if not b.ready), None)
        for binding in reversed(self._bindings.values()):
            binding.close(reason.value)

    def give_up(self) -> dict[str, str]:
        """Wait for no worker any longer: what it holds of the session ends by its own clock.

        The stages whose workers were told to close it, and the ids of those commands.
        """
        unanswered = {}
        for binding in self._bindings.values():
            if (command := binding.closing) is not None:
                unanswered[binding.stage] = command
            if not binding.freed:
                binding.lost()
        return unanswered

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple(binding.freeze() for binding in self._bindings.values())

    def _lost(self, binding: Binding, now_ms: float) -> None:
        if binding.state in (BindingState.UNBOUND, BindingState.BINDING, BindingState.PARKED):
            return
        stage, parking = binding.stage, binding.state is BindingState.PARKING
        given_back = binding.state is BindingState.CLOSING
        unapplied_bytes = binding.lost()
        if self._lifecycle.live and binding.restoring and not unapplied_bytes:
            # Nothing but the state was there, and that may well be in the store.
            if parking:
                # Whether it was stored before is known once it is back.
                binding.doubtful = True
                self._emit(Restoring(stage))
            binding.bind()
            return
        if self._lifecycle.live and binding.restorable and not unapplied_bytes:
            # Whether it is what the session goes on from is known once it is back.
            binding.restoring = True
            self._emit(Restoring(stage))
            self._machine.stage_lost(stage, 0, now_ms, restorable=True)
            binding.bind()
            return
        binding.forget_parked()
        if self._lifecycle.state is State.OPENING and given_back:
            self.open()
        elif self._lifecycle.state is State.OPENING:
            error = CapacityExceeded(
                f"the worker of stage {stage} was lost", code="engine_unavailable"
            ).info()
            self._close(CloseReason.ENGINE_LOST, error)
        elif self._lifecycle.live:
            self._emit(Restoring(stage))
            self._machine.stage_lost(stage, unapplied_bytes, now_ms)
            binding.bind()
        else:
            self._freed()

    def _reported(self, binding: Binding, event: Reported, now_ms: float) -> None:
        report = event.report
        if isinstance(report, Answer) and binding.awaits(report):
            self._bound_or_freed(binding, report, now_ms)
        elif isinstance(report, Answer):
            self._command_answered(binding, report, now_ms)
        elif isinstance(report, RoomWanted):
            binding.want_room(now_ms)
        elif isinstance(report, SnapshotTaken):
            if not binding.snapshot_taken(report) and self._lifecycle.live:
                self._snapshot_failed(binding, report)
        elif self._lifecycle.live and binding.ready:
            self._machine.report(binding.stage, report, now_ms)

    def _command_answered(self, binding: Binding, answer: Answer, now_ms: float) -> None:
        """A worker answered a signal, or a change of settings."""
        refused = binding.refused_settings(answer)
        if not self._lifecycle.live or not binding.ready:
            return
        if _state_is_lost(answer):
            # It does not have the session any more, and nobody has said so before.
            self._machine.report(binding.stage, answer, now_ms)
            self._lost(binding, now_ms)
        elif refused is None:
            self._machine.report(binding.stage, answer, now_ms)
        elif not self._machine.settings_refused(binding.stage, refused, now_ms):
            self._close(CloseReason.ENGINE_LOST, refused)

    def _bound_or_freed(self, binding: Binding, answer: Answer, now_ms: float) -> None:
        """A worker answered that the session is opened, parked or closed."""
        stage, restored = binding.stage, binding.restoring
        parking = binding.state is BindingState.PARKING
        if parking and self._lifecycle.live and _state_is_lost(answer):
            # The worker does not have the session any more, and nobody has said so before.
            if not binding.restorable:
                binding.forget_parked()
            self._lost(binding, now_ms)
            return
        if restored and not parking and self._lifecycle.live and answer.error is None:
            # Before anything that waits for it runs on it.
            step = answer.result.get("committed_step", 0)
            self._machine.stage_restored(stage, step, now_ms)
        if binding.fork is not None and answer.error is None and "committed_step" in answer.result:
            self._machine.stage_forked(stage, answer.result["committed_step"], now_ms)
        error = binding.answered(answer)
        if self._lifecycle.state is State.OPENING:
            if error is None:
                if binding.freed:
                    self._act(Unbind(stage))
                self.open()
            elif not self._begin_with(binding, error):
                self.refused_by = stage
                self._close(CloseReason.ADMISSION, error)
        elif not self._lifecycle.live:
            self._freed()
        elif parking:
            self._put_away(binding, error, now_ms)
        elif error is not None and restored:
            self._not_restored(binding, error, now_ms)
        elif error is not None:
            # The new worker will not have the session: there is nothing to go on with.
            self._machine.stage_refused(stage, error, now_ms)
            self._close(CloseReason.ENGINE_LOST, error)
        else:
            for other in self._bindings.values():
                other.send_waiting()
            self._machine.stage_ready(stage, now_ms)
            made = Origin.REBUILT if self._machine.rebuilt(stage) else Origin.NOTHING
            error, binding.unrestored = binding.unrestored, None
            self._emit(Restored(stage, Origin.SNAPSHOT if restored else made, error))

    def _put_away(self, binding: Binding, error: ErrorInfo | None, now_ms: float) -> None:
        """A worker has parked the state, or kept it."""
        if error is not None:
            self._machine.stage_ready(binding.stage, now_ms)
            self._emit(Restored(binding.stage, Origin.KEPT, error))
            return
        self._act(Unbind(binding.stage))
        self._emit(Parked(binding.stage))
        binding.wake_if_wanted()

    def _not_restored(self, binding: Binding, error: ErrorInfo, now_ms: float) -> None:
        """What was parked did not come back: it is lost, or there is no room for it now."""
        stage = binding.stage
        self._act(Unbind(stage))
        if error.code != SessionStateLost.code:
            binding.stays_parked(error)
            binding.give_up_waiting()
            self._machine.stage_refused(stage, error, now_ms)
            self._emit(Parked(stage, error))
            return
        if binding.doubtful:
            why = f"its worker was lost before the snapshot was finished: {error.message}"
            error = msgspec.structs.replace(error, message=why)
        self._act(NotRestored(stage, error))
        binding.unrestored = error
        binding.forget_parked()
        self._machine.stage_lost(stage, 0, now_ms, reason=error.message)
        binding.bind()

    def _snapshot_failed(self, binding: Binding, taken: SnapshotTaken) -> None:
        if taken.error is not None:
            self._emit(SnapshotFailed(binding.stage, taken.error))

    def _settings_of(self, stage: str) -> Callable[[], dict[str, Any]]:
        return lambda: self._machine.stage_settings(stage)


def _state_is_lost(answer: Answer) -> bool:
    return answer.error is not None and answer.error.code == SessionStateLost.code
