"""The duplex machine: a conversation by voice (or text) over a pipeline that
hears, thinks and speaks.

It owns items, responses, playback and the policy of interruption. Surfaces
translate; the orchestrator moves turns across stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protocol.errors import AntiphonError, ErrorInfo, InvalidRequest
from protocol.messages import Report, StageEvent, TurnEnded
from sessions.actions import StageProduced, TurnMeasured
from sessions.bindings import Binding
from sessions.client import Refused
from sessions.client_pace import ClientPace
from sessions.duplex import events as said
from sessions.duplex.context import DuplexContext
from sessions.duplex.conversation import Conversation, is_audio
from sessions.duplex.input import Input
from sessions.duplex.replies import Replies
from sessions.duplex.settings import (
    INPUT_RATE_HZ,
    OUTPUT_RATE_HZ,
    DuplexSettings,
    initial,
    patched,
)
from sessions.flow import FlowEnded, FlowEvent, Produced
from sessions.lanes import DEFAULT_LANE, INPUT_LANE, Lanes
from sessions.lifecycle import CloseReason
from sessions.orchestrator import Orchestrator
from sessions.pipeline import DuplexRoles, Pipeline

_PROGRESS = said.CreateItem | said.CommitInput | said.CreateResponse
"""Verbs that get something done: others may come for ever and do not keep a session alive."""


class DuplexMachine:
    """The conversation of one session. Times are monotonic ms."""

    def __init__(
        self,
        pipeline: Pipeline,
        bindings: Mapping[str, Binding],
        emit: Callable[[said.ClientOutput], None],
        measured: Callable[[TurnMeasured], None],
        progress: Callable[[], None],
        settings_changed: Callable[[], None],
        new_id: Callable[[str], str],
    ) -> None:
        self._settings_changed = settings_changed
        self._lanes = Lanes()
        self._context = DuplexContext(
            pipeline=pipeline,
            roles=DuplexRoles.of(pipeline),
            bindings=bindings,
            orchestrator=Orchestrator(pipeline, bindings, self._lanes, self._flow),
            conversation=Conversation(),
            conversation_id=new_id("conv"),
            settings=initial(pipeline.instructions, pipeline.voice),
            emit=emit,
            measured=measured,
            progress=progress,
            new_id=new_id,
        )
        self._replies = Replies(self._context, lambda: self._input.hearing)
        self._input = Input(self._context, self._replies)
        self._pace = ClientPace(pipeline.limits.stall_ms)

    @property
    def settings(self) -> DuplexSettings:
        """The effective settings."""
        return self._context.settings

    @property
    def working(self) -> bool:
        """Whether a turn is in flight: a response, or words that are being heard."""
        return self._replies.any or self._input.hearing

    @property
    def finished(self) -> bool:
        """A conversation goes on until somebody ends it."""
        return False

    def facts(self) -> dict[str, Any]:
        """A conversation has nothing to add to an answer."""
        return {}

    def snapshot(self) -> said.DuplexSnapshot:
        """The conversation, and the responses in progress as far as they were told."""
        return said.DuplexSnapshot(
            self._context.conversation.copy(),
            self._replies.progress(),
            self._input.speaking_item,
            self._input.clock_ms,
        )

    def stage_settings(self, stage: str) -> dict[str, Any]:
        """The settings with which `stage` opens its part of this session."""
        roles = self._context.roles
        if stage == roles.hear:
            return self._input.stage_settings()
        if stage == roles.speak:
            return {"output_rate_hz": OUTPUT_RATE_HZ}
        return {}

    # Verbs

    def client(self, verb: said.ClientVerb, now_ms: float) -> dict[str, Any]:
        """Carry a verb out; the id of what it made: an item, a response.

        Raises AntiphonError, and then everything is as it was.
        """
        self._context.now_ms = now_ms
        made = self._carry_out(verb)
        if isinstance(verb, _PROGRESS):
            self._context.progress()
        self._pump()
        return made

    def refusal(self, verb: said.ClientVerb, error: ErrorInfo) -> said.ClientOutput:
        """How a verb that was not carried out is answered."""
        return Refused(error, verb.ref)

    def prepare(self, patch: dict[str, Any]) -> None:
        """Settings given with the open, before any stage knows of the session.

        Raises InvalidRequest.
        """
        context = self._context
        context.settings = patched(
            context.settings, patch, voices=context.pipeline.voices, spoken=False
        )

    def _carry_out(self, verb: said.ClientVerb) -> dict[str, Any]:
        context = self._context
        conversation = context.conversation
        match verb:
            case said.AppendAudio():
                self._input.append(verb.pcm)
            case said.PatchSettings():
                self._patch(verb.patch)
            case said.CreateItem():
                self._create_item(verb)
                return {"item_id": verb.item.id}
            case said.DeleteItem():
                conversation.remove(verb.item_id)
                context.emit(said.ItemDeleted(verb.item_id))
            case said.RetrieveItem():
                item = conversation.get(verb.item_id, code="item_retrieve_invalid_item_id")
                context.emit(said.ItemRetrieved(item.copy()))
            case said.TruncateItem():
                self._truncate(verb)
            case said.CommitInput():
                return {"item_id": self._input.commit()}
            case said.ClearInput():
                self._input.clear()
            case said.CreateResponse():
                return {"response_id": self._replies.create(verb)}
            case said.CancelResponse():
                self._replies.cancel(verb.response_id)
            case said.Reset():
                self._replies.reset()
                self._input.reset()
                context.emit(said.ConversationReset(conversation.clear()))
        return {}

    def _patch(self, patch: dict[str, Any]) -> None:
        context = self._context
        before = context.settings
        stage_before = self._input.stage_settings()
        context.settings = patched(
            before, patch, voices=context.pipeline.voices, spoken=self._replies.spoken
        )
        if self._input.stage_settings() != stage_before:
            try:
                context.bindings[context.roles.hear].configure()
            except AntiphonError:
                context.settings = before
                raise
            self._input.reconfigured()
        self._settings_changed()

    def _create_item(self, verb: said.CreateItem) -> None:
        context = self._context
        item = verb.item
        context.conversation.check(item, verb.after)
        unheard = [
            index
            for index, part in enumerate(item.parts)
            if part.kind is said.PartKind.INPUT_AUDIO and part.text is None
        ]
        if len(unheard) > 1:
            raise InvalidRequest(
                "an item holds at most one audio part that has no transcript", field="item.content"
            )
        if unheard:
            self._input.check_room()
        pcm = b""
        for index, part in enumerate(item.parts):
            if part.audio is not None:
                part.audio_ms = len(part.audio) // 2 * 1000 // INPUT_RATE_HZ
                if index in unheard:
                    pcm = part.audio
                part.audio = None
        previous = context.conversation.insert(item, verb.after)
        context.emit(said.ItemAdded(item.copy(), previous))
        context.emit(said.ItemDone(item.copy(), previous))
        if unheard:
            self._input.hear_item(item, unheard[0], pcm)

    def _truncate(self, verb: said.TruncateItem) -> None:
        context = self._context
        item = context.conversation.get(verb.item_id)
        if not is_audio(item):
            raise InvalidRequest("only an assistant's audio can be truncated", field="item_id")
        if verb.content_index != 0:
            raise InvalidRequest("the item has one content part", field="content_index")
        part = item.parts[0]
        playback = self._replies.playback(item.id)
        writing = self._replies.writing(item.id)
        length_ms = playback.sent_ms if writing and playback is not None else part.audio_ms
        if not 0 <= verb.audio_end_ms <= length_ms:
            raise InvalidRequest(
                f"audio of {length_ms} ms cannot end at {verb.audio_end_ms} ms",
                field="audio_end_ms",
            )
        if playback is not None:
            part.text = playback.spoken_text(verb.audio_end_ms)
        elif verb.audio_end_ms < length_ms:
            # The alignment of an old reply is gone: a proportion of its words is what is left.
            words = (part.text or "").split(" ")
            part.text = " ".join(words[: len(words) * verb.audio_end_ms // length_ms])
        if writing:
            # Its closing events tell what was heard of it.
            self._replies.interrupt_current("client_cancelled")
        part.audio_ms = verb.audio_end_ms
        context.emit(said.ItemTruncated(item.id, verb.content_index, verb.audio_end_ms))

    # What the stages say

    def report(self, stage: str, report: Report, now_ms: float) -> None:
        """A worker's report about a turn or an event of this session."""
        self._context.now_ms = now_ms
        match report:
            case StageEvent():
                self._input.stage_event(report)
            case TurnEnded():
                self._context.orchestrator.ended(stage, report, now_ms)
        self._pump()

    def produced(self, piece: StageProduced, now_ms: float) -> None:
        """A stage made a piece of a turn's output."""
        self._context.now_ms = now_ms
        self._context.orchestrator.output(piece, now_ms)
        self._pump()

    def settings_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> bool:
        """The stage cannot do what was asked of it: back to how it hears by default.

        The client, who was told that its settings hold, is told what holds instead. False
        when the stage refuses the default as well: nobody knows how it hears.
        """
        context = self._context
        context.now_ms = now_ms
        default = initial(context.pipeline.instructions, context.pipeline.voice).audio.input
        audio = msgspec.structs.replace(
            context.settings.audio,
            input=msgspec.structs.replace(
                default, turn_detection=context.settings.audio.input.turn_detection
            ),
        )
        binding = context.bindings[stage]
        again = audio == context.settings.audio
        if again and not binding.configuring:
            return False
        context.settings = msgspec.structs.replace(context.settings, audio=audio)
        field = (
            f"settings.audio.input.transcription.{error.field}"
            if error.field == "language"
            else None
        )
        context.emit(Refused(msgspec.structs.replace(error, field=field), None))
        if not again:
            binding.configure()
        self._settings_changed()
        return True

    def stage_lost(
        self,
        stage: str,
        unapplied_bytes: int,
        now_ms: float,
        *,
        restorable: bool = False,
        reason: str | None = None,
    ) -> None:
        """The worker of `stage` is gone, with what it held of this session.

        Of the stream input it was sent it had not applied `unapplied_bytes`.
        """
        self._context.now_ms = now_ms
        if stage == self._context.roles.hear:
            self._input.lost(unapplied_bytes)
        self._context.orchestrator.stage_lost(stage)
        self._pump()

    def stage_restored(self, stage: str, step: int, now_ms: float) -> None:
        """A conversation is said to the stage with each turn: it goes on from any state."""

    def stage_forked(self, stage: str, step: int, now_ms: float) -> None:
        """Raises ValueError: a conversation begins with nothing."""
        raise ValueError("a conversation is not forked")

    def stage_ready(self, stage: str, now_ms: float) -> None:
        """A worker of `stage` holds this session."""
        self._context.now_ms = now_ms
        if stage == self._context.roles.hear:
            self._input.found()
        self._context.orchestrator.workers_ready(now_ms)
        self._pump()

    def rebuilt(self, stage: str) -> bool:
        """Whether the new worker of `stage` was told all that the session is to go on from."""
        return True

    def stage_refused(self, stage: str, error: ErrorInfo, now_ms: float) -> None:
        """A new worker of `stage` refused the session."""
        self._context.now_ms = now_ms
        self._context.orchestrator.stage_refused(stage, error)
        self._pump()

    # Time and the client's pace

    def blocked(self, blocked: bool, now_ms: float) -> None:
        """The client's egress queue is full, or has room again."""
        self._context.now_ms = now_ms
        self._pace.set(blocked, now_ms)
        if not blocked:
            self._context.orchestrator.stir(now_ms)
            self._pump()

    def stalled(self, now_ms: float) -> bool:
        """Whether the client has left its answer unread for too long."""
        return self._pace.stalled(now_ms)

    def give_up(self, reason: str, now_ms: float) -> None:
        """Nobody takes what is said: every response ends incomplete, for `reason`."""
        self._context.now_ms = now_ms
        self._replies.give_up_all(reason)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        turns = self._context.orchestrator.deadline(self._paused)
        deadlines = [turns, self._pace.stalled_at_ms]
        if not self._pace.blocked:
            deadlines.append(self._replies.deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, now_ms: float) -> None:
        """A deadline has come."""
        self._context.now_ms = now_ms
        self._context.orchestrator.tick(now_ms, self._paused)
        self._pump()

    def end(self, reason: CloseReason, error: ErrorInfo | None, now_ms: float) -> None:
        """The session closes: every response gets its last word."""
        if reason is CloseReason.STALLED:
            self.give_up("stalled", now_ms)
            return
        self._context.now_ms = now_ms
        self._replies.end_all(error)

    def _flow(self, event: FlowEvent) -> None:
        if isinstance(event, Produced) and self._input.produced(event):
            return
        if isinstance(event, FlowEnded) and self._input.ended(event):
            return
        self._replies.flow(event)

    def _paused(self, lane: str) -> bool:
        """Whether turns of this lane may stand still: nobody takes what they make."""
        if lane == INPUT_LANE:
            return False
        return self._pace.blocked or (self._replies.held and lane == DEFAULT_LANE)

    def _pump(self) -> None:
        self._replies.pump(blocked=self._pace.blocked)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        context = self._context
        return (
            context.settings,
            self._lanes.freeze(),
            context.orchestrator.freeze(),
            context.conversation.freeze(),
            self._input.freeze(),
            self._replies.freeze(),
            self._pace.blocked_since_ms,
        )
