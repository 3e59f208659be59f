"""One session: its lifecycle, its stages, and the machine of its kind.

`handle(event, now_ms)` is the only way in; what it returns is the only way out.
The shell calls it for one event at a time, in the order of arrival, and again with
`Tick` when `deadline` has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo
from protocol.messages import Answer, Fence
from sessions import directory
from sessions.actions import (
    Action,
    AskDirectory,
    ClientBlocked,
    ClientSaid,
    CloseRequested,
    DirectoryAnswered,
    Event,
    HoldClient,
    OpenRequested,
    Released,
    Reported,
    StageBound,
    StageLost,
    StageProduced,
    StageUnavailable,
    Tick,
    ToClient,
)
from sessions.bindings import Binding, BindingState
from sessions.duplex.events import (
    ClientOutput,
    SessionCreated,
    SessionEnded,
    SettingsUpdated,
)
from sessions.duplex.machine import DuplexMachine
from sessions.lifecycle import CloseReason, Lifecycle, State, Trigger
from sessions.pipeline import Pipeline


@dataclass(frozen=True)
class Identity:
    """Who a session is. `model` is the name by which the client asked for the pipeline."""

    session: str
    epoch: int
    owner: str
    tenant: str
    model: str
    expires_at_s: int


class Session:
    """A session of a duplex pipeline."""

    def __init__(
        self,
        identity: Identity,
        pipeline: Pipeline,
        new_id: Callable[[str], str],
        now_ms: float,
    ) -> None:
        self.identity = identity
        self.pipeline = pipeline
        self._fence = Fence(identity.session, identity.epoch, identity.owner)
        self._actions: list[Action] = []
        self._now_ms = now_ms
        self._sequence = 0
        self._recorded = False
        self._announced = False
        self._held = False
        self._error: ErrorInfo | None = None
        self._lifecycle = Lifecycle(pipeline.limits, now_ms)
        self._bindings: dict[str, Binding] = {}
        self._machine = DuplexMachine(
            pipeline,
            self._bindings,
            emit=self._emit,
            measured=self._actions_append,
            progress=self._progress,
            settings_changed=self._settings_changed,
            new_id=new_id,
        )
        for stage in pipeline.stages:
            self._bindings[stage] = Binding(
                stage,
                lambda: self._fence,
                self._settings_of(stage),
                self._actions_append,
                pipeline.output_edge(stage),
            )

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._lifecycle.state

    @property
    def error(self) -> ErrorInfo | None:
        """What went wrong, for a session that could not open or was ended by a fault."""
        return self._error

    @property
    def idle_since_ms(self) -> float:
        """When the session last got anything done (monotonic)."""
        return self._lifecycle.idle_since_ms

    def workers(self) -> dict[str, str | None]:
        """The worker incarnation of each stage."""
        return {stage: binding.worker for stage, binding in self._bindings.items()}

    def prepare(self, patch: dict[str, Any]) -> None:
        """Take settings given with the open. Raises InvalidRequest."""
        self._machine.prepare(patch)

    def handle(self, event: Event, now_ms: float) -> list[Action]:
        """Take `event` in at monotonic time `now_ms`; what the shell must do, in order."""
        self._now_ms = now_ms
        match event:
            case OpenRequested():
                self._open()
            case DirectoryAnswered():
                self._directory_answered(event.outcome)
            case StageBound():
                self._stage_bound(event)
            case StageUnavailable():
                self._stage_unavailable(event)
            case StageLost():
                self._stage_lost(event.stage)
            case Reported():
                self._reported(event)
            case StageProduced():
                if self.state is State.ACTIVE and self._bindings[event.stage].ready:
                    self._machine.produced(event, now_ms)
            case ClientSaid():
                if self.state is State.ACTIVE:
                    self._machine.client(event.verb, now_ms)
                elif self.state is State.OPENING:
                    raise ValueError("a client speaks only after the session was created")
            case ClientBlocked():
                if self.state is State.ACTIVE:
                    self._machine.blocked(event.blocked, now_ms)
            case CloseRequested():
                self._close(event.reason, None)
            case Tick():
                self._tick()
            case _:
                assert_never(event)
        hold = self.state is State.ACTIVE and any(b.full for b in self._bindings.values())
        if hold != self._held:
            self._held = hold
            self._actions.append(HoldClient(hold))
        actions, self._actions[:] = list(self._actions), []
        return actions

    def deadline(self) -> float | None:
        """When `Tick` is due."""
        deadlines = []
        if (own := self._lifecycle.deadline()) is not None:
            deadlines.append(own[0])
        if self.state is State.ACTIVE and (due := self._machine.deadline()) is not None:
            deadlines.append(due)
        return min(deadlines, default=None)

    # Opening

    def _open(self) -> None:
        identity = self.identity
        record = directory.Record(
            identity.session, identity.epoch, identity.owner, self.pipeline.name, identity.tenant
        )
        self._actions.append(AskDirectory(directory.Create(record)))

    def _directory_answered(self, outcome: directory.Outcome) -> None:
        if self.state is State.OPENING:
            if outcome is directory.Outcome.OK:
                self._recorded = True
                self._bind_next()
            else:
                error = AntiphonError(f"the directory answered {outcome} to the open").info()
                self._close(CloseReason.ERROR, error)
        elif self.state is State.CLOSING:
            self._recorded = False
            self._release_if_free()

    def _bind_next(self) -> None:
        """Bind the stages one after the other, in the order of the pipeline."""
        for binding in self._bindings.values():
            if binding.state is BindingState.UNBOUND:
                binding.bind()
                return
            if not binding.ready:
                return
        self._lifecycle.move(Trigger.OPENED, self._now_ms)
        self._announced = True
        identity = self.identity
        self._emit(
            SessionCreated(
                identity.session, identity.model, self._machine.settings, identity.expires_at_s
            )
        )

    # Stages

    def _stage_bound(self, event: StageBound) -> None:
        binding = self._bindings[event.stage]
        if binding.state is BindingState.BINDING and self.state in (State.OPENING, State.ACTIVE):
            binding.bound(event.worker)

    def _stage_unavailable(self, event: StageUnavailable) -> None:
        if self.state is State.OPENING:
            self._close(CloseReason.ADMISSION, event.error)

    def _stage_lost(self, stage: str) -> None:
        binding = self._bindings[stage]
        if binding.state in (BindingState.UNBOUND, BindingState.BINDING):
            return
        unapplied_bytes = binding.lost()
        match self.state:
            case State.OPENING:
                error = CapacityExceeded(f"the worker of stage {stage} was lost").info()
                self._close(CloseReason.ENGINE_LOST, error)
            case State.ACTIVE:
                self._machine.stage_lost(stage, unapplied_bytes, self._now_ms)
                binding.bind()
            case State.CLOSING:
                self._release_if_free()

    def _reported(self, event: Reported) -> None:
        binding = self._bindings[event.stage]
        binding.reported(event.report)
        if not isinstance(event.report, Answer):
            if self.state is State.ACTIVE and binding.ready:
                self._machine.report(event.stage, event.report, self._now_ms)
            return
        if (refused := binding.refused_settings(event.report)) is not None:
            if self.state is State.ACTIVE and not self._machine.settings_refused(
                event.stage, refused, self._now_ms
            ):
                self._close(CloseReason.ENGINE_LOST, refused)
            return
        was_opening = binding.state is BindingState.OPENING
        error = binding.answered(event.report)
        match self.state:
            case State.OPENING if error is not None:
                self._close(CloseReason.ADMISSION, error)
            case State.OPENING:
                self._bind_next()
            case State.ACTIVE if error is not None:
                # The new worker will not have the session: there is nothing to go on with.
                self._machine.stage_refused(event.stage, error, self._now_ms)
                self._close(CloseReason.ENGINE_LOST, error)
            case State.ACTIVE if was_opening and binding.ready:
                self._machine.stage_ready(event.stage, self._now_ms)
            case State.CLOSING:
                self._release_if_free()

    # Closing

    def _tick(self) -> None:
        due = self._lifecycle.deadline()
        if due is not None and due[0] <= self._now_ms:
            if self.state is State.CLOSING:
                self._give_up_waiting()
                return
            error = None
            if self.state is State.OPENING:
                error = CapacityExceeded("the workers did not answer in time").info()
            self._close(due[1], error)
            return
        if self.state is State.ACTIVE:
            if self._machine.stalled(self._now_ms):
                self._close(CloseReason.STALLED, None)
            else:
                self._machine.tick(self._now_ms)

    def _close(self, reason: CloseReason, error: ErrorInfo | None) -> None:
        if self.state in (State.CLOSING, State.CLOSED):
            return
        if self.state is State.ACTIVE:
            self._machine.end(reason, error, self._now_ms)
        self._error = error
        self._lifecycle.reason = reason
        self._lifecycle.move(Trigger.CLOSE, self._now_ms)
        if self._announced:
            self._emit(SessionEnded(reason.value, error))
        for binding in reversed(self._bindings.values()):
            binding.close(reason.value)
        self._release_if_free()

    def _give_up_waiting(self) -> None:
        """A worker did not answer the close: its own clock frees the session there."""
        for binding in self._bindings.values():
            if not binding.freed:
                binding.lost()
        self._release_if_free()

    def _release_if_free(self) -> None:
        if self.state is not State.CLOSING:
            return
        if not all(binding.freed for binding in self._bindings.values()):
            return
        if self._recorded:
            request = directory.Remove(self.identity.session, self.identity.epoch)
            self._actions.append(AskDirectory(request))
            return
        assert self._lifecycle.reason is not None
        self._lifecycle.move(Trigger.RELEASED, self._now_ms)
        self._actions.append(Released(self._lifecycle.reason))

    # What the parts call

    def _emit(self, output: ClientOutput) -> None:
        self._sequence += 1
        self._actions.append(ToClient(self._sequence, output))

    def _actions_append(self, action: Action) -> None:
        self._actions.append(action)

    def _progress(self) -> None:
        self._lifecycle.progress(self._now_ms)

    def _settings_changed(self) -> None:
        identity = self.identity
        self._emit(
            SettingsUpdated(
                identity.session, identity.model, self._machine.settings, identity.expires_at_s
            )
        )

    def _settings_of(self, stage: str) -> Callable[[], dict[str, Any]]:
        return lambda: self._machine.stage_settings(stage)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self._lifecycle.freeze(),
            self._sequence,
            self._recorded,
            self._held,
            tuple(binding.freeze() for binding in self._bindings.values()),
            self._machine.freeze(),
        )
