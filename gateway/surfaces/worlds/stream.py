"""The WebSocket of a world: `WS /v1/worlds/{id}/stream`.

The connection that controls a world makes it go on, step by step; when it is gone the world
stands still, with nothing held down. Who looks on gets the same pictures. Control goes through
the egress queue; a picture is put there when nothing else waits, so that the newest few are all
that is ever old.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway.access import Access
from gateway.hosting import Attachment, SessionHost, SessionSummary
from gateway.metrics import GatewayMetrics
from gateway.surfaces.attaching import Upgrade, first_frame
from gateway.surfaces.farewell import CLOSE_POLICY, LET_GO, farewell
from gateway.surfaces.faults import faults
from gateway.surfaces.outlet import Outlet
from gateway.surfaces.worlds.form import Form, as_written, form_of
from gateway.surfaces.worlds.pictures import FORMATS, Look, Picture, Shot, Studio
from gateway.surfaces.worlds.playing import AskedScene, Done, Held, Playing, Stepped
from gateway.surfaces.worlds.slots import Slots
from gateway.surfaces.worlds.stepping import WorldEnded, living
from protocol import worlds as wire_of
from protocol.errors import AntiphonError, ErrorInfo, InvalidRequest, SessionBusy
from protocol.free_form import Unreadable
from protocol.wires import Wire
from protocol.worlds import WIRES, ClientFrame
from sessions import client
from sessions.client import Role
from sessions.steps import events as steps

Change = steps.Reset | steps.Checkpoint | steps.Rewind

_CHANGE = "change"
"""Among the client's names, that of the change of the state which is under way."""

_log = structlog.get_logger(__name__)


class WorldStream:
    """The ASGI application of the stream. Host and Origin are checked before it."""

    def __init__(
        self, host: SessionHost, access: Access, metrics: GatewayMetrics, studio: Studio
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._studio = studio
        self._upgrade = Upgrade("worlds", host, access, metrics, wire_of.Failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it ends."""
        accepted = await self._upgrade.accept(WIRES, self._find, scope, receive, send)
        if accepted is None:
            return
        wire, summary = accepted
        outlet = Outlet(send, self._metrics.frames("worlds"))
        connection = _Connection(
            self._host, self._metrics, self._studio, wire, summary, receive, outlet
        )
        try:
            with faults(summary.id):
                attach = await connection.attach()
        except AntiphonError as error:
            connection.leave()
            # It may have ended since the upgrade.
            ended = self._host.ended(summary.id, summary.tenant)
            await self._upgrade.refuse(outlet, wire, WorldEnded() if ended else error)
            return
        except BaseException:
            connection.leave()
            raise
        if attach:
            await connection.run()

    def _find(self, session: str, tenant: str) -> SessionSummary:
        return living(self._host, session, tenant)


@dataclass(frozen=True)
class _Shown:
    """A frame on its way to this client, and what is known of its step here."""

    shot: Shot
    done: Done
    life: int
    """Of the world: how often it had begun anew."""


class _Connection:
    """One connection, from the upgrade to the close."""

    def __init__(
        self,
        host: SessionHost,
        metrics: GatewayMetrics,
        studio: Studio,
        wire: Wire[ClientFrame],
        summary: SessionSummary,
        receive: Receive,
        outlet: Outlet,
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._studio = studio
        self._wire = wire
        self._summary = summary
        self._receive = receive
        self._frames = metrics.frames("worlds")
        self._outlet = outlet
        self._egress = outlet.egress
        self._slots: Slots[_Shown] = Slots()
        self._attachment: Attachment | None = None
        self._form: Form | None = None
        self._look = Look("png", 80)
        self._playing: Playing | None = None
        """None for who only looks on."""
        self._late_told = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refs: dict[str, str | None] = {}
        """The client's names for verbs that have no answer yet, by ours."""
        self._name = secrets.token_hex(6)
        self._asked = 0
        self._told_step = 0
        """The last step whose frames were shown: an answer that is told again has none."""
        self._life = 0
        """How often the world has begun anew, or gone back, while this client was there."""
        self._over = False

    # Coming

    async def attach(self) -> bool:
        """Let the client in as its first frame says; False where it has hung up.

        Raises AntiphonError.
        """
        attach: wire_of.Attach | None = await first_frame(
            self._receive, self._read_frame, wire_of.Attach
        )
        if attach is None:
            return False
        self._look = Look(attach.format, attach.quality).check()
        summary = self._summary
        description = self._host.describe(summary.id, summary.tenant)
        self._form = form_of(self._host, description, FORMATS)
        if attach.role == "controller":
            name = f"{self._name}-step"
            self._playing = Playing(self._form, attach.window, name, _now_ms())
        self._attachment, _ = await self._host.attach(
            summary.id,
            tenant=summary.tenant,
            role=Role(attach.role),
            secret=attach.secret,
            cursor=None,
            on_output=self.on_output,
        )
        self._go_on()
        return True

    def leave(self) -> None:
        """This connection is nobody's any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attachment is not None:
            self._attachment.detach()

    async def run(self) -> None:
        """Carry frames both ways until either side ends it."""
        attachment = self._attachment
        assert attachment is not None
        self._metrics.watch_egress(self._egress)
        try:
            await self._outlet.carry(
                self._both_ways(attachment),
                self._summary.id,
                self._stalled,
                self._end,
                attachment.set_blocked,
            )
        finally:
            self._over = True
            self._metrics.forget_egress(self._egress)
            self.leave()

    def _stalled(self) -> None:
        _log.info("client_does_not_read", session=self._summary.id)

    async def _both_ways(self, attachment: Attachment) -> None:
        async with asyncio.TaskGroup() as tasks:
            showing = tasks.create_task(self._show())
            await self._read(attachment)
            showing.cancel()

    # Pictures

    async def _show(self) -> None:
        while True:
            await self._slots.filled()
            await self._egress.idle()
            if self._over:
                return
            if not self._slots.waiting:
                continue  # They were of a world that has begun anew meanwhile.
            shown = self._slots.take()
            try:
                picture = await shown.shot.picture(self._look)
            except AntiphonError as error:
                self._end(error)
                return
            if shown.life == self._life:
                self._put(shown, picture)

    def _put(self, shown: _Shown, picture: Picture) -> None:
        shot, done, now_ms = shown.shot, shown.done, _now_ms()
        control_ms = None if done.held_since_ms is None else now_ms - done.held_since_ms
        frame = wire_of.Frame(
            frame=shot.attribute("frame"),
            step=shot.done.step,
            action_sequence=shot.attribute("action_sequence"),
            denoising_steps=shot.attribute("steps"),
            format=self._look.format,
            width=picture.width,
            height=picture.height,
            picture_bytes=len(picture.data),
            made_ms=shot.attribute("made_ms", 0.0),
            encoded_ms=picture.encoded_ms,
            age_ms=_rounded(now_ms - shot.done_ms),
            dropped=self._slots.dropped,
            scene=shot.attribute("scene", None),
            engine_ms=self._engine_ms(shot.done),
            step_ms=None if done.took_ms is None else _rounded(done.took_ms),
            control_ms=None if control_ms is None else _rounded(control_ms),
            data=picture.data if self._wire.binary else None,
        )
        self._tell(frame)
        if not self._wire.binary:
            self._egress.put(picture.data)
        self._metrics.picture_sent(
            self._summary.pipeline, None if control_ms is None else control_ms / 1000
        )

    def _engine_ms(self, done: steps.StepDone) -> float | None:
        assert self._form is not None
        hops = done.timeline.get(self._form.state, {})
        if "done" not in hops or "started" not in hops:
            return None
        return _rounded(hops["done"] - hops["started"])

    # What the session says

    def on_output(self, sequence: int, output: Any) -> None:
        """Tell the client what its world says, in the words of this surface."""
        if self._over:
            return
        now_ms = _now_ms()
        playing = self._playing
        match output:
            case client.Attached(snapshot=stands):
                self._told_step = stands.committed_step
                if playing is not None:
                    playing.stands(stands.committed_step, stands.in_flight, lost=stands.lost)
                self._tell(self._welcome(output))
            case steps.StepDone():
                self._done(output, now_ms)
                if playing is not None and self._attachment is not None:
                    # Nobody is told a picture again: what is kept for that may go.
                    self._attachment.has(sequence)
            case steps.StepFailed(step=step, committed_step=committed, error=error):
                self._tell(wire_of.StepFailed(step, committed, error))
                if playing is not None:
                    fatal = playing.failed(output, now_ms)
                    if fatal is not None:
                        self._tell(wire_of.Paused(error=fatal))
            case steps.WasReset(committed_step=committed):
                self._begun_anew(0)
                self._tell(wire_of.WasReset(committed, self._refs.pop(_CHANGE, None)))
            case steps.WasRewound(committed_step=committed):
                self._begun_anew(committed)
                self._tell(wire_of.WasRewound(committed, self._refs.pop(_CHANGE, None)))
            case steps.CheckpointKept(committed_step=committed, kept=kept):
                if playing is not None:
                    playing.kept()
                ref = self._refs.pop(_CHANGE, None)
                self._tell(wire_of.CheckpointKept(committed, kept, ref))
            case steps.WasRestored(committed_step=committed, ref=ref, kept=kept):
                self._begun_anew(committed)
                ours = None if ref is None else self._refs.pop(ref, None)
                self._tell(wire_of.WasRestored(committed, ours, kept))
            case steps.StateLost(committed_step=committed, restorable_step=step, reason=reason):
                if playing is not None:
                    playing.state_lost()
                self._tell(wire_of.StateLost(committed, step, reason))
            case client.Refused(error=error, ref=ref):
                self._refused(error, ref)
            case client.Parking() | client.Parked() | client.Restoring() | client.Restored():
                self._tell(wire_of.Waits(type(output).__name__.lower()))
            case client.LetGo(reason=reason):
                self._tell(wire_of.LetGo(reason))
                self._finish(*LET_GO.get(reason, (CLOSE_POLICY, reason)))
            case client.SessionEnded(reason=reason, error=error):
                ending = farewell(reason, error)
                if ending.error is not None:
                    self._metrics.error_told(ending.error.code)
                self._tell(wire_of.SessionEnded(reason, ending.error))
                self._finish(ending.code, ending.reason)
        self._go_on()

    def _welcome(self, attached: client.Attached) -> wire_of.Attached:
        assert self._form is not None
        stands = attached.snapshot
        return wire_of.Attached(
            session=attached.session,
            model=attached.model,
            role=attached.role.value,
            world=self._form.capabilities,
            committed_step=stands.committed_step,
            lost=stands.lost,
            expires_at_s=attached.expires_at_s,
            grace_s=attached.limits.grace_ms / 1000,
            secret=attached.secret,
            restorable_step=stands.restorable_step,
            kept=list(stands.kept),
        )

    def _done(self, done: steps.StepDone, now_ms: float) -> None:
        mine = Done() if self._playing is None else self._playing.done(done, now_ms)
        if mine.scene is not None:
            self._tell(wire_of.SceneChanged(mine.scene.scene, done.step, mine.scene.ref))
        if done.step <= self._told_step:
            return
        self._told_step = done.step
        for shot in self._studio.shots(done, now_ms):
            if self._slots.put(_Shown(shot, mine, self._life)):
                self._metrics.picture_dropped(self._summary.pipeline)

    def _begun_anew(self, committed: int) -> None:
        """Pictures that wait are of what never was."""
        if self._playing is not None:
            self._playing.changed(committed)
            self._tell_what_is_over(self._playing)
        self._told_step = committed
        self._life += 1
        self._slots.clear()

    def _refused(self, error: ErrorInfo, ref: str | None) -> None:
        error = as_written(error)
        if self._playing is not None and self._playing.change_refused(ref):
            self._tell_refused(error, self._refs.pop(_CHANGE, None))
        elif ref is not None and ref in self._refs:
            self._tell_refused(error, self._refs.pop(ref))

    # What the client says

    async def _read(self, attachment: Attachment) -> None:
        while True:
            await self._egress.room()
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            if self._over:
                continue  # It spoke before it read that this is over.
            ref: str | None = None
            try:
                frame = self._read_frame(message)
                ref = getattr(frame, "ref", None)
                await attachment.room()
                if not self._over:
                    self._carry_out(frame, attachment)
            except Unreadable as error:
                self._tell_refused(error.info(), error.ref)
            except AntiphonError as error:
                self._tell_refused(error.info(), ref)
            self._go_on()

    def _read_frame(self, message: Message) -> ClientFrame:
        self._frames.received += 1
        text = message.get("text")
        return self._wire.read(message["bytes"] if text is None else text)

    def _carry_out(self, frame: ClientFrame, attachment: Attachment) -> None:
        """Raises InvalidRequest, and then nothing of it was carried out."""
        if isinstance(frame, wire_of.Ping):
            self._tell(wire_of.Pong(frame.at))
            return
        if isinstance(frame, wire_of.Attach):
            raise InvalidRequest("this connection is attached already", field="type")
        playing = self._playing
        if isinstance(frame, wire_of.Seen):
            if playing is not None:
                playing.seen(frame.frame)
            return
        if playing is None:
            raise InvalidRequest("an observer only looks on", code="not_controller")
        assert self._form is not None
        now_ms = _now_ms()
        match frame:
            case wire_of.Hold():
                row = self._form.row(frame.keys, frame.axes)
                playing.hold(Held(frame.sequence, row, now_ms))
            case wire_of.Play():
                playing.play(now_ms)
                self._tell(wire_of.Playing(frame.ref))
            case wire_of.Pause():
                playing.pause()
                self._tell(wire_of.Paused(frame.ref))
            case wire_of.Step():
                playing.step(frame.frames, frame.ref)
            case wire_of.Scene():
                playing.change_scene(AskedScene(frame.scene, frame.ref))
            case wire_of.Reset():
                self._change(
                    playing, steps.Reset(frame.settings, self._ours()), attachment, frame.ref
                )
            case wire_of.Checkpoint():
                self._change(playing, steps.Checkpoint(self._ours()), attachment, frame.ref)
            case wire_of.Rewind():
                verb = steps.Rewind(frame.step, self._ours())
                self._change(playing, verb, attachment, frame.ref)
            case wire_of.Restore():
                ours = self._ours()
                self._refs[ours] = frame.ref
                attachment.send(steps.Restore(ours))
            case wire_of.Close():
                attachment.close("client")

    def _change(
        self, playing: Playing, verb: Change, attachment: Attachment, ref: str | None
    ) -> None:
        assert verb.ref is not None
        playing.change(verb.ref)
        self._refs[_CHANGE] = ref
        attachment.send(verb)

    def _ours(self) -> str:
        """A name of our own for a verb: those of several clients must not be taken for another."""
        self._asked += 1
        return f"{self._name}-{self._asked}"

    # Going on

    def _go_on(self) -> None:
        """Begin the step that is due, or look again when one is."""
        playing = self._playing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if playing is None or self._attachment is None or self._over:
            return
        self._tell_what_is_over(playing)
        step = playing.begin(_now_ms())
        self._metrics.steps_late(self._summary.pipeline, playing.late - self._late_told)
        self._late_told = playing.late
        if step is not None:
            self._attachment.send(step)
        elif (due_ms := playing.due_ms()) is not None:
            wait_s = max(0.0, due_ms - _now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)

    # Telling

    def _tell(self, frame: Any) -> None:
        self._egress.put(self._wire.write(frame))

    def _tell_what_is_over(self, playing: Playing) -> None:
        for over in playing.what_is_over():
            if isinstance(over, Stepped):
                self._tell(wire_of.Stepped(over.frames, over.ref, over.error))
            else:
                newer = SessionBusy(over.why, code="superseded")
                self._tell_refused(newer.info(), over.scene.ref)

    def _tell_refused(self, error: Any, ref: str | None) -> None:
        self._metrics.error_told(error.code)
        self._tell(wire_of.Refused(error, ref))

    def _end(self, error: AntiphonError) -> None:
        """This connection cannot go on."""
        self._metrics.error_told(error.code)
        self._tell(wire_of.Failed(error.info()))
        self._finish(*LET_GO["failed"])

    def _finish(self, code: int, reason: str) -> None:
        self._over = True
        self._outlet.finish(code, reason)


def _rounded(ms: float) -> float:
    return round(ms, 3)


def _now_ms() -> float:
    return time.monotonic() * 1000.0
