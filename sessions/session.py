"""One session: its lifecycle, its stages, and the machine of its kind.

`handle(event, now_ms)` is the only way in; what it returns is the only way out.
The shell calls it for one event at a time, in the order of arrival, and again with
`Tick` when `deadline` has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorInfo,
    Fenced,
    InvalidRequest,
    SessionStateLost,
)
from protocol.messages import Fence, Fork
from sessions.actions import (
    Action,
    AskDirectory,
    AttachRefused,
    AttachRequested,
    ClientBlocked,
    ClientHas,
    ClientMisspoke,
    ClientSaid,
    CloseRequested,
    Detached,
    DirectoryAnswered,
    Event,
    HoldClient,
    OpenRequested,
    ParkRequested,
    Released,
    RestoreRequested,
    Tick,
)
from sessions.attachments import Attachments
from sessions.bindings import Binding, BindingState
from sessions.client import (
    Attached,
    LetGo,
    Refused,
    SessionCreated,
    SessionEnded,
    SettingsUpdated,
)
from sessions.commands import Commands
from sessions.deadlines import earliest
from sessions.directory import Create, Outcome, Record, Reply, Request, Write
from sessions.kinds import MACHINES
from sessions.lifecycle import CloseReason, Lifecycle, State, Trigger
from sessions.machine import Machine
from sessions.pipeline import Limits, Pipeline, StepRoles
from sessions.record import SessionRecord
from sessions.stages import Stages

FIRST_CLIENT_MS = 5_000.0
"""How long a session that was opened without a client makes room for nobody."""


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
    """A session of any kind.

    `controller` is the attachment that opens it; None: one is to come later. With
    `secret_digest` a client that was cut off can come back. `limits` are the pipeline's
    unless the client has chosen others. A step loop may begin as a `fork` of another.
    """

    def __init__(
        self,
        identity: Identity,
        pipeline: Pipeline,
        new_id: Callable[[str], str],
        now_ms: float,
        *,
        controller: str | None,
        secret_digest: str | None = None,
        limits: Limits | None = None,
        fork: Fork | None = None,
    ) -> None:
        self.fork = fork
        self.identity = identity
        self.pipeline = pipeline
        self.limits = limits or pipeline.limits
        self.fence = Fence(identity.session, identity.epoch, identity.owner)
        self._actions: list[Action] = []
        self._now_ms = now_ms
        self._announced = False
        self._opened_ms = now_ms
        self._visited = controller is not None
        """Whether a client has had control of it."""
        self._held = False
        self._error: ErrorInfo | None = None
        self._unanswered: dict[str, str] = {}
        self._lifecycle = Lifecycle(self.limits, now_ms)
        record = Record(
            identity.session,
            identity.epoch,
            identity.owner,
            pipeline.name,
            identity.tenant,
            secret_digest,
        )
        self._record = SessionRecord(record, self._ask)
        self._attachments = Attachments(
            controller,
            secret_digest,
            self.limits.replay_bytes,
            act=self._actions_append,
            write_digest=self._record.write,
            about=self._about,
            gained=self._gained,
        )
        self._commands = Commands(self._attachments.emit)
        bindings: dict[str, Binding] = {}
        self._machine: Machine = MACHINES[pipeline.kind](
            replace(pipeline, limits=self.limits),
            bindings,
            emit=self._attachments.emit,
            measured=self._actions_append,
            progress=self._progress,
            settings_changed=self._settings_changed,
            new_id=new_id,
        )
        self._stages = Stages(
            pipeline,
            lambda: self.fence,
            self._lifecycle,
            bindings,
            self._machine,
            tenant=identity.tenant,
            expires_at_s=identity.expires_at_s,
            forks={} if fork is None else {StepRoles.of(pipeline).state: fork},
            act=self._actions_append,
            emit=self._attachments.emit,
            opened=self._opened,
            close=self._close,
            freed=self._release_if_free,
        )

    @property
    def parked(self) -> tuple[str, ...]:
        """The stages whose state is parked, or on its way into the store or out of it."""
        return self._stages.parked

    @property
    def putting_away(self) -> tuple[str, ...]:
        """Those whose state is on its way into the store."""
        return self._stages.putting_away

    @property
    def stored(self) -> tuple[str, ...]:
        """Those whose workers have said that their state is in the store."""
        return self._stages.stored

    @property
    def kept(self) -> dict[str, AntiphonError]:
        """Why the state of the others is not parked, by stage."""
        return self._stages.kept

    @property
    def reserved(self) -> dict[str, dict[str, int]]:
        """What workers have reserved for it: bytes by stage and device."""
        return self._stages.reserved

    @property
    def about(self) -> dict[str, dict[str, Any]]:
        """What the engine of each stage says of its model to clients."""
        return self._stages.about

    @property
    def reserved_bytes(self) -> int:
        """All of that."""
        return sum(sum(held.values()) for held in self._stages.reserved.values())

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._lifecycle.state

    @property
    def error(self) -> ErrorInfo | None:
        """What went wrong, for a session that could not open or was ended by a fault."""
        return self._error

    @property
    def refused_by(self) -> str | None:
        """The stage that did not take the session, so that it could not be opened."""
        return self._stages.refused_by

    @property
    def idle_since_ms(self) -> float:
        """When the session last got anything done (monotonic)."""
        return self._lifecycle.idle_since_ms

    @property
    def ends(self) -> list[tuple[float, CloseReason]]:
        """When its clocks end it (monotonic ms), and for what reason, while it is open."""
        return self._lifecycle.ends

    @property
    def announced(self) -> bool:
        """Whether anybody has been told that it is open."""
        return self._announced

    @property
    def stopped(self) -> bool:
        """Whether it stands still after an emergency stop."""
        return bool(self._machine.facts().get("stopped"))

    @property
    def stands(self) -> Any:
        """Its state as a client that comes back has to know it."""
        return self._machine.snapshot()

    def stage_state(self, stage: str) -> BindingState:
        """Where a stage stands."""
        return self._stages.state_of(stage)

    def refused_by_worker(self, stage: str) -> ErrorInfo | None:
        """Why a stage that is parked was not brought back when that was last asked for."""
        return self._stages.refused_by_worker(stage)

    def source_of(self, stage: str) -> str | None:
        """The session on whose worker `stage` has to open, as it begins with its state."""
        opening = self.state is State.OPENING
        if self.fork is None or not opening or stage != StepRoles.of(self.pipeline).state:
            return None
        return self.fork.session

    @property
    def working(self) -> bool:
        """Whether a turn is in flight."""
        return self._machine.working

    @property
    def evictable(self) -> bool:
        """Whether it may end to make room: nobody is there, and no turn is in flight.

        The first client of a session that was opened without one has FIRST_CLIENT_MS to come.
        """
        return (
            self.state is State.DETACHED
            and not self._machine.working
            and (self._visited or self._now_ms >= self._opened_ms + FIRST_CLIENT_MS)
        )

    def observed_by(self, attachment: str) -> bool:
        """Whether this attachment only looks on."""
        return self._attachments.observes(attachment)

    @property
    def settings(self) -> Any:
        """The effective settings."""
        return self._machine.settings

    @property
    def kept_bytes(self) -> int:
        """Bytes of output that are kept for a client that comes back."""
        return self._attachments.kept_bytes

    def facts(self) -> dict[str, Any]:
        """What is said of it beside its state, as with every answer to a command."""
        return self._machine.facts()

    def workers(self) -> dict[str, str | None]:
        """The worker incarnation of each stage."""
        return self._stages.workers()

    def prepare(self, patch: dict[str, Any]) -> None:
        """Take settings given with the open. Raises InvalidRequest."""
        self._machine.prepare(patch)

    def handle(self, event: Event, now_ms: float) -> list[Action]:
        """Take `event` in at monotonic time `now_ms`; what the shell must do, in order."""
        self._now_ms = now_ms
        match event:
            case OpenRequested():
                self._record.create()
            case DirectoryAnswered():
                self._directory_answered(event.reply)
            case ClientSaid():
                self._client_said(event)
            case ClientMisspoke():
                self._client_misspoke(event)
            case ClientHas():
                self._attachments.has(event.attachment, event.through)
            case ClientBlocked():
                if self.state is State.ACTIVE and event.attachment == self._attachments.controller:
                    self._machine.blocked(event.blocked, now_ms)
            case AttachRequested():
                self._attach(event)
            case Detached():
                self._detached(event.attachment)
            case CloseRequested(attachment=attachment):
                if attachment in (None, self._attachments.controller):
                    self._close(event.reason, None)
            case ParkRequested():
                self._stages.park()
            case RestoreRequested():
                self._stages.restore()
            case Tick():
                self._tick()
            case _:
                self._stages.handle(event, now_ms)
        lifecycle = self._lifecycle
        if lifecycle.state is State.DETACHED and self._attachments.full:
            self._machine.give_up("stalled", now_ms)
        live = lifecycle.live
        if live and self._machine.finished:
            self._close(CloseReason.COMPLETED, None)
            live = lifecycle.live
        # Who has a deadline is answered at it, and has one step at its workers at most.
        hold = live and self.pipeline.control.deadline_ms is None and self._stages.full
        if hold != self._held:
            self._held = hold
            self._actions.append(HoldClient(hold))
        actions, self._actions[:] = list(self._actions), []
        return actions

    def deadline(self) -> float | None:
        """When `Tick` is due."""
        own = self._lifecycle.deadline()
        if own is None:
            return None
        first_ms: float | None = own[0]
        if self._lifecycle.live:
            first_ms = earliest(first_ms, self._machine.deadline())
        if not self._visited and self.state is State.DETACHED:
            first_client_ms = self._opened_ms + FIRST_CLIENT_MS
            if self._now_ms < first_client_ms:
                first_ms = earliest(first_ms, first_client_ms)
        return first_ms

    # Opening

    def _directory_answered(self, reply: Reply) -> None:
        settled = self._record.answered(reply)
        if settled is None:
            return
        call, outcome = settled
        if isinstance(call, Write):
            self._digest_written(outcome)
        elif isinstance(call, Create) and self.state is State.OPENING:
            if outcome is Outcome.OK:
                self._stages.open()
            else:
                error = AntiphonError(f"the directory answered {outcome} to the open").info()
                self._close(CloseReason.ERROR, error)
        self._release_if_free()

    def _opened(self) -> None:
        """Every stage holds the session."""
        self._lifecycle.move(Trigger.OPENED, self._now_ms)
        self._announced = True
        self._opened_ms = self._now_ms
        identity = self.identity
        self._attachments.emit(
            SessionCreated(
                identity.session,
                identity.model,
                self._machine.settings,
                identity.expires_at_s,
                self.limits,
            )
        )
        if self._attachments.controller is None:
            self._lifecycle.move(Trigger.DETACHED, self._now_ms)

    # Clients

    def _client_said(self, event: ClientSaid) -> None:
        if self.state is State.OPENING:
            raise ValueError("a client speaks only after the session was created")
        if not self._lifecycle.live:
            return
        attachments = self._attachments
        error: ErrorInfo | None = None
        result: dict[str, Any] = {}
        if event.attachment is not None and not attachments.speaks(event.attachment):
            if attachments.observes(event.attachment):
                error = InvalidRequest("an observer only looks on", code="not_controller").info()
                attachments.tell(event.attachment, Refused(error, event.verb.ref))
            return
        if event.command is not None and self._commands.repeated(event.command):
            return
        try:
            result = self._machine.client(event.verb, self._now_ms)
        except AntiphonError as refusal:
            error = refusal.info()
        if event.command is not None:
            self._commands.answer(event.command, error, {**self._machine.facts(), **result})
        elif error is not None:
            attachments.emit(self._machine.refusal(event.verb, error))

    def _client_misspoke(self, event: ClientMisspoke) -> None:
        if (
            self._lifecycle.live
            and self._attachments.speaks(event.attachment)
            and not self._commands.repeated(event.command)
        ):
            self._commands.answer(event.command, event.error, self._machine.facts())

    def _attach(self, request: AttachRequested) -> None:
        if self._lifecycle.live:
            self._attachments.request(request)
        else:
            error = SessionStateLost("the session has ended").info()
            self._actions.append(AttachRefused(request.attachment, error))

    def _digest_written(self, outcome: Outcome) -> None:
        """The directory knows the secret of who arrives, or another owner of the session."""
        if not self._lifecycle.live:
            return
        if outcome is Outcome.OK:
            self._attachments.digest_written()
        else:
            error = Fenced("another gateway owns this session").info()
            self._attachments.refuse_arriving(error)
            self._close(CloseReason.FENCED, error)

    def _gained(self) -> None:
        """A client has control: whoever was blocked is not who takes the output now."""
        self._visited = True
        if self.state is State.DETACHED:
            self._lifecycle.move(Trigger.ATTACHED, self._now_ms)
        self._machine.blocked(False, self._now_ms)

    def _detached(self, attachment: str) -> None:
        """A transport is gone: the session waits for its client, if that can come back."""
        attachments = self._attachments
        if attachments.leave(attachment) and self.state is State.ACTIVE:
            if attachments.resumable:
                self._lifecycle.move(Trigger.DETACHED, self._now_ms)
                self._machine.blocked(False, self._now_ms)
            else:
                self._close(CloseReason.CLIENT, None)

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
        if not self._lifecycle.live:
            return
        if self._machine.stalled(self._now_ms):
            self._stalled()
        else:
            self._machine.tick(self._now_ms)

    def _stalled(self) -> None:
        """The client leaves its output unread: let it go, or end a session without return."""
        controller = self._attachments.controller
        if controller is None or not self._attachments.resumable:
            self._close(CloseReason.STALLED, None)
            return
        self._attachments.tell(controller, LetGo("stalled"))
        self._detached(controller)

    def _close(self, reason: CloseReason, error: ErrorInfo | None) -> None:
        if self.state in (State.CLOSING, State.CLOSED):
            return
        if self._lifecycle.live:
            self._machine.end(reason, error, self._now_ms)
        self._error = error
        self._lifecycle.reason = reason
        self._lifecycle.move(Trigger.CLOSE, self._now_ms)
        ended = SessionStateLost("the session has ended").info()
        self._attachments.refuse_arriving(ended)
        if self._announced:
            self._attachments.emit(SessionEnded(reason.value, error))
        self._attachments.end()
        self._stages.close(reason)
        self._release_if_free()

    def _give_up_waiting(self) -> None:
        """A worker did not answer the close, or the directory did not: what they hold of the
        session ends there by their own clocks."""
        self._unanswered = self._stages.give_up()
        if not self._record.busy:
            self._record.remove()
        if self._record.busy:
            self._record.abandon()
        self._release_if_free()

    def _release_if_free(self) -> None:
        if self.state is not State.CLOSING:
            return
        if not self._stages.freed:
            return
        if self._record.held:
            self._record.remove()
            return
        assert self._lifecycle.reason is not None
        self._lifecycle.move(Trigger.RELEASED, self._now_ms)
        self._actions.append(Released(self._lifecycle.reason, self._unanswered))

    # What the parts call

    def _about(self) -> Attached:
        identity = self.identity
        return Attached(
            identity.session,
            identity.model,
            self._machine.settings,
            identity.expires_at_s,
            self.limits,
            self._attachments.sequence,
            self._machine.snapshot(),
        )

    def _ask(self, request: Request) -> None:
        self._actions.append(AskDirectory(request))

    def _actions_append(self, action: Action) -> None:
        self._actions.append(action)

    def _progress(self) -> None:
        self._lifecycle.progress(self._now_ms)

    def _settings_changed(self) -> None:
        identity = self.identity
        self._attachments.emit(
            SettingsUpdated(
                identity.session, identity.model, self._machine.settings, identity.expires_at_s
            )
        )

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self._lifecycle.freeze(),
            self._attachments.freeze(),
            self._commands.freeze(),
            self._record.freeze(),
            self._held,
            self._stages.freeze(),
            self._machine.freeze(),
        )
