"""Worlds that are stepped by requests: one hold on each session, and who waits for its steps.

Requests have control of a world from the first step or reset on, until a player takes it over
or the world ends: so it does not end for want of a connection, but when it is idle for `idle_s`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from gateway.hosting import Attachment, SessionHost, SessionSummary
from gateway.http_errors import HttpRefusal
from gateway.surfaces.worlds.form import Form, actions, as_written, check_kind
from protocol.errors import (
    AntiphonError,
    ErrorInfo,
    InvalidRequest,
    SessionBusy,
    raised,
)
from protocol.worlds import ChangeAnswer, StepBody
from sessions.client import Attached, LetGo, Refused, Role, SessionEnded
from sessions.lifecycle import State
from sessions.steps.events import (
    Checkpoint,
    CheckpointKept,
    Reset,
    Restore,
    Rewind,
    Step,
    StepDone,
    StepFailed,
    WasReset,
    WasRestored,
    WasRewound,
)

_REQUEST = "request-"
"""What the names of steps begin with that requests have asked for."""

Change = Reset | Checkpoint | Rewind | Restore
"""What is asked of the state between two steps."""


class StepRefused(InvalidRequest):
    """A step was not done; the state is the one after `committed_step`."""

    def __init__(self, error: ErrorInfo, committed_step: int) -> None:
        super().__init__(
            error.message,
            field=error.field,
            code=error.code,
            retry_after_ms=error.retry_after_ms,
        )
        self.kind = error.kind
        self.committed_step = committed_step


class WorldEnded(HttpRefusal):
    """The world is closed."""

    def __init__(self) -> None:
        super().__init__("The world has ended.", code="session_closed", status=410)


def living(host: SessionHost, session: str, tenant: str) -> SessionSummary:
    """A world of this tenant. Raises WorldEnded, and NotFound for one that there never was."""
    if host.ended(session, tenant):
        raise WorldEnded
    summary = host.summary(session, tenant)
    check_kind(summary)
    if summary.state == State.CLOSING:
        raise WorldEnded
    return summary


class Stepper:
    """The hold of requests on one world. `forget` is called when they have it no more."""

    def __init__(self, form: Form, forget: Callable[[], None]) -> None:
        self.form = form
        self._name = f"{_REQUEST}{secrets.token_hex(6)}"
        """Of the steps that are asked for here: another's may have the same number."""
        self._forget = forget
        self._attachment: Attachment | None = None
        self._committed = 0
        self._in_flight: int | None = None
        self._steps: dict[int, asyncio.Future[StepDone]] = {}
        self._changing: tuple[str, asyncio.Future[ChangeAnswer]] | None = None
        self._gone: AntiphonError | None = None

    async def take(self, host: SessionHost, session: str, tenant: str) -> None:
        """Get control. Raises AntiphonError."""
        self._attachment, _ = await host.attach(
            session,
            tenant=tenant,
            role=Role.CONTROLLER,
            secret=None,
            cursor=None,
            on_output=self._on_output,
        )

    async def step(self, asked: StepBody) -> StepDone:
        """The step, done now or before. Raises StepRefused, SessionBusy, InvalidRequest.

        One that is in flight, or was committed and is remembered, is not done again. Who is
        cancelled waits no more; the step goes on. None is given that a player has made, nor, to who
        names no number, one that was made of what another request has said.
        """
        self._check_change()
        number = asked.step
        if number is None:
            if self._in_flight is not None:
                raise SessionBusy(f"step {self._in_flight} is in flight")
            number = self._committed + 1
        elif self._in_flight is not None and number > self._in_flight:
            raise SessionBusy(f"step {self._in_flight} is in flight", field="step")
        waiting = self._steps.get(number)
        if waiting is None:
            waiting = self._steps[number] = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(_retrieve)
            if number == self._committed + 1:
                self._in_flight = number
            self._send(Step(number, *_said(asked, self.form), ref=self._name))
        done = await asyncio.shield(waiting)
        ours = done.ref is not None and done.ref.startswith(_REQUEST)
        if not ours or (asked.step is None and done.ref != self._name):
            taken = SessionBusy(f"somebody else has asked for step {number}")
            raise StepRefused(taken.info(), done.committed_step)
        return done

    async def change(self, change: Callable[[str], Change]) -> ChangeAnswer:
        """Have the state begin anew, be kept, or go back: what is said of it then. `change` makes
        the verb of our name for it. Raises AntiphonError where it is refused, and SessionBusy."""
        self._check_change()
        outcome: asyncio.Future[ChangeAnswer] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_retrieve)
        ref = f"change-{secrets.token_hex(6)}"
        self._changing = ref, outcome
        self._send(change(ref))
        return await asyncio.shield(outcome)

    def _check_change(self) -> None:
        if self._changing is not None:
            raise SessionBusy(
                "a reset, a checkpoint, a rewind or a restore is under way: wait for it",
                code="change_in_progress",
            )

    def _send(self, verb: Step | Change) -> None:
        if self._gone is not None:
            raise self._gone.again()
        assert self._attachment is not None
        self._attachment.send(verb)

    def _on_output(self, sequence: int, output: Any) -> None:
        match output:
            case Attached(snapshot=stands):
                self._committed, self._in_flight = stands.committed_step, stands.in_flight
            case StepDone(step=step, committed_step=committed):
                self._over(step, committed)
                if (waiting := self._steps.pop(step, None)) is not None and not waiting.done():
                    waiting.set_result(output)
                if self._attachment is not None:
                    self._attachment.has(sequence)
            case StepFailed(step=step, committed_step=committed, error=error, in_flight=False):
                self._over(step, committed)
                if (waiting := self._steps.pop(step, None)) is not None and not waiting.done():
                    waiting.set_exception(StepRefused(as_written(error), committed))
            case WasReset(committed_step=committed) | WasRewound(committed_step=committed):
                self._committed, self._in_flight = committed, None
                self._end_change(ChangeAnswer(committed))
            case CheckpointKept(committed_step=committed, kept=kept):
                self._end_change(ChangeAnswer(committed, list(kept)))
            case WasRestored(committed_step=committed, ref=ref):
                self._committed = committed
                if self._changing is not None and ref == self._changing[0]:
                    self._end_change(ChangeAnswer(committed))
            case Refused(error=error, ref=ref):
                if self._changing is not None and ref == self._changing[0]:
                    self._end_change(raised(as_written(error)))
            case LetGo():
                self._end(SessionBusy("a player has taken the world over"))
            case SessionEnded():
                self._end(WorldEnded())

    def _over(self, step: int, committed: int) -> None:
        self._committed = committed
        if step == self._in_flight:
            self._in_flight = None

    def _end_change(self, outcome: ChangeAnswer | AntiphonError) -> None:
        changing, self._changing = self._changing, None
        if changing is None or changing[1].done():
            return
        if isinstance(outcome, AntiphonError):
            changing[1].set_exception(outcome)
        else:
            changing[1].set_result(outcome)

    def _end(self, error: AntiphonError) -> None:
        self._gone = error
        waiting, self._steps = self._steps, {}
        for step in waiting.values():
            if not step.done():
                # The world may live on: then it is told how far it was.
                lives = isinstance(error, SessionBusy)
                told = StepRefused(error.info(), self._committed) if lives else error.again()
                step.set_exception(told)
        self._end_change(error.again())
        self._forget()


class _Taking:
    """Requests that want control of the same world: one of them gets it for all."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class Steppers:
    """The worlds that requests have control of. There are no more of them than sessions."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host
        self._steppers: dict[str, Stepper] = {}
        self._taking: dict[str, _Taking] = {}

    async def of(self, session: str, tenant: str, form: Form) -> Stepper:
        """The hold on a session. Raises SessionBusy while a player has control, and AntiphonError.

        Two requests for the same world get the same one.
        """
        taking = self._taking.setdefault(session, _Taking())
        taking.waiting += 1
        try:
            async with taking.lock:
                stepper = self._steppers.get(session)
                if stepper is None:
                    stepper = await self._take(session, tenant, form)
                return stepper
        finally:
            taking.waiting -= 1
            if not taking.waiting:
                del self._taking[session]

    async def _take(self, session: str, tenant: str, form: Form) -> Stepper:
        if self._host.summary(session, tenant).state == State.ACTIVE:
            raise SessionBusy("a player has control of this world")
        stepper = Stepper(form, lambda: self._forget(session))
        self._steppers[session] = stepper
        try:
            await stepper.take(self._host, session, tenant)
        except BaseException:
            self._steppers.pop(session, None)
            raise
        return stepper

    def _forget(self, session: str) -> None:
        self._steppers.pop(session, None)


def _said(asked: StepBody, form: Form) -> tuple[list[Any], dict[str, Any]]:
    """Inputs and parameters of the step. Without actions nothing is held."""
    parameters: dict[str, Any] = {"frames": asked.frames}
    if asked.scene is not None:
        parameters["scene"] = asked.scene
    if asked.deadline_ms is not None:
        parameters["deadline_ms"] = asked.deadline_ms
    return [actions(asked.actions or [form.nothing_held])], parameters


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Whoever asked may have hung up: then nobody reads the error."""
    if not done.cancelled():
        done.exception()
