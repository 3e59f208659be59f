"""The responses of a duplex session: begun, interrupted, failed, completed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo, InvalidRequest
from protocol.payloads import conversation_payload
from sessions.actions import TurnMeasured
from sessions.duplex.context import DuplexContext
from sessions.duplex.conversation import messages_of
from sessions.duplex.events import (
    CreateResponse,
    Item,
    Response,
    ResponseCreated,
    ResponseProgress,
    ResponseStatus,
    Usage,
)
from sessions.duplex.generation import Generation, Taken
from sessions.duplex.playback import Playback
from sessions.duplex.settings import check_instructions, check_voice
from sessions.flow import ClauseCut, FlowEnded, FlowEvent, Produced
from sessions.lanes import DEFAULT_LANE

MAX_OUT_OF_BAND = 4
"""Out-of-band responses that may run at once."""
PLAYBACKS_KEPT = 32
"""Finished replies that can still be truncated by what was heard of them."""


@dataclass(frozen=True)
class _Request:
    """What a response was asked to work from."""

    given: list[Item] | None
    instructions: str | None


class Replies:
    """All responses in progress: one in the default lane, others in lanes of their own."""

    def __init__(self, context: DuplexContext, hearing: Callable[[], bool]) -> None:
        self._context = context
        self._hearing = hearing
        self._generations: dict[str, Generation] = {}
        self._requests: dict[str, _Request] = {}
        self._playbacks: dict[str, Playback] = {}
        self._answer_wanted = False
        self._user_turn_ended_ms = 0.0
        self._held = False
        """Whether the default lane's reply waits to hear if the user has said words."""
        self.spoken = False
        """Whether any audio was ever sent: from then on the voice is frozen."""

    # What asks for responses

    def create(self, verb: CreateResponse) -> str:
        """The client asks for one; its id. Raises InvalidRequest."""
        context = self._context
        settings = context.settings
        voice = settings.audio.output.voice if verb.voice is None else verb.voice
        check_voice(voice, context.pipeline.voices, "response.audio.output.voice")
        modalities = verb.output_modalities or settings.output_modalities
        if modalities not in (("audio",), ("text",)):
            raise InvalidRequest(
                'output_modalities is ["audio"] or ["text"]', field="response.output_modalities"
            )
        if verb.conversation and self.current() is not None:
            raise InvalidRequest(
                "a response is in progress; cancel it or wait for its end",
                code="conversation_already_has_active_response",
            )
        out_of_band = sum(g.lane != DEFAULT_LANE for g in self._generations.values())
        if not verb.conversation and out_of_band >= MAX_OUT_OF_BAND:
            raise CapacityExceeded(
                f"at most {MAX_OUT_OF_BAND} out-of-band responses run at once",
                code="rate_limit_exceeded",
            )
        given = None
        if verb.input is not None:
            given = context.conversation.given(verb.input, "response.input")
        if verb.instructions is not None:
            check_instructions(verb.instructions, "response.instructions")
        response = self._response(modalities, voice, verb.conversation)
        limit = verb.max_output_tokens
        if limit is not None:
            response.max_output_tokens = None if limit == "inf" else limit
        response.metadata = verb.metadata
        self._begin(response, _Request(given, verb.instructions), context.now_ms)
        self.think_waiting()
        return response.id

    def answer(self, user_speaks: bool) -> None:
        """The user's turn has words: answer it as turn detection is set."""
        context = self._context
        detection = context.settings.audio.input.turn_detection
        interrupts = detection is not None and detection.interrupt_response
        if user_speaks and interrupts:
            return  # The next commit is answered, and its answer sees this item too.
        current = self.current()
        if current is not None:
            if current.turn is None:
                return  # It waits for these very words.
            if not interrupts:
                self._answer_wanted = True
                return
            self._interrupt(current, "turn_detected")
        self._begin_default()

    def user_turn_ended(self) -> None:
        """Latencies of the next answer count from now."""
        self._user_turn_ended_ms = self._context.now_ms

    def unheard(self, error: ErrorInfo, answer: bool) -> None:
        """A user's item has no transcript: what should answer it fails, and says why."""
        waiting = [g for g in self._generations.values() if g.turn is None]
        if not waiting and answer and self.current() is None:
            waiting = [self._begin_default(think=False)]
        for generation in waiting:
            self._fail(generation, error)

    def cancel(self, response_id: str | None) -> None:
        """The client wants no more of it. Raises InvalidRequest when there is none."""
        wanted = self.current() if response_id is None else self._generations.get(response_id)
        if wanted is None:
            raise InvalidRequest(
                "no such response is in progress", code="response_cancel_not_active"
            )
        self._interrupt(wanted, "client_cancelled")

    def interrupt_current(self, reason: str) -> None:
        """End the response of the default lane, if there is one."""
        current = self.current()
        if current is not None:
            self._interrupt(current, reason)

    def hold(self) -> None:
        """Send nothing more of the default lane's reply until it is known what was said."""
        self._held = self.current() is not None

    def let_go(self) -> None:
        """Nothing was said: the reply goes on."""
        if self._held:
            self._held = False
            self._context.orchestrator.stir(self._context.now_ms)

    @property
    def held(self) -> bool:
        """Whether the conversation's reply waits to hear what was said."""
        return self._held

    def words_came(self) -> None:
        """Something was said: a reply that waited for that ends."""
        if self._held:
            self.interrupt_current("turn_detected")

    def end_all(self, error: ErrorInfo | None) -> None:
        """The session ends: every response gets its last word."""
        self._answer_wanted = False
        for generation in list(self._generations.values()):
            if error is None:
                self._interrupt(generation, "client_cancelled")
            else:
                self._fail(generation, error)

    def reset(self) -> None:
        """Cancel every response, and forget what was heard of those before."""
        self.end_all(None)
        self._playbacks.clear()

    def give_up_all(self, reason: str) -> None:
        """The client does not take what is made: its responses stay incomplete."""
        self._answer_wanted = False
        for generation in list(self._generations.values()):
            self._context.orchestrator.cancel(generation.lane)
            self._finish(generation, ResponseStatus.INCOMPLETE, reason, None)

    # What is known of them

    def current(self) -> Generation | None:
        """The response that writes to the conversation."""
        return next((g for g in self._generations.values() if g.lane == DEFAULT_LANE), None)

    @property
    def any(self) -> bool:
        """Whether a response is in progress."""
        return bool(self._generations)

    def progress(self) -> list[ResponseProgress]:
        """The responses in progress, as far as they were told."""
        return [generation.progress() for generation in self._generations.values()]

    def writing(self, item_id: str) -> bool:
        """Whether a response in progress makes this item."""
        return any(g.item is not None and g.item.id == item_id for g in self._generations.values())

    def playback(self, item_id: str) -> Playback | None:
        """The playback ledger of an assistant's audio item, while it is kept."""
        return self._playbacks.get(item_id)

    def deadline(self) -> float | None:
        """When more audio may be sent."""
        deadlines = [g.deadline() for g in self._generations.values() if not self._waits(g)]
        return min((at for at in deadlines if at is not None), default=None)

    # Progress

    def think_waiting(self) -> None:
        """Start the responses that wait for transcripts, unless one is still under way."""
        if self._hearing():
            return
        for generation in list(self._generations.values()):
            if generation.turn is None:
                self._think(generation)

    def flow(self, event: FlowEvent) -> None:
        """The orchestrator has something of a response's turn."""
        generation = self._of_turn(event.turn)
        if generation is None:
            return
        self._context.progress()
        match event:
            case Produced(port="text"):
                text = bytes(event.payload.data).decode()
                generation.text(event.sequence, text, self._context.now_ms)
            case Produced(port="audio"):
                attributes = event.payload.attributes
                generation.audio(
                    event.sequence,
                    attributes["clause"],
                    event.payload.data,
                    attributes["clause_end"],
                )
            case ClauseCut():
                generation.clause(event.text)
            case FlowEnded(error=None):
                self._drained(generation, event)
            case FlowEnded():
                assert event.error is not None
                self._fail(generation, event.error)

    def pump(self, blocked: bool) -> None:
        """Send what may be sent now, and complete what is complete."""
        context = self._context
        for generation in list(self._generations.values()):
            sent_ms = generation.playback.sent_ms
            waits = blocked or self._waits(generation)
            taken = generation.pump(context.now_ms, waits)
            if generation.first_audio_at_ms is not None:
                self.spoken = True
            if generation.item is not None and generation.spoken:
                self._playbacks.setdefault(generation.item.id, generation.playback)
            self._acknowledge(generation, taken)
            if taken.clauses and generation.turn is not None:
                for _ in taken.clauses:
                    context.orchestrator.take(generation.turn, context.now_ms)
                self._acknowledge(generation, generation.pump(context.now_ms, waits))
            if generation.playback.sent_ms != sent_ms:
                context.progress()
            if generation.complete and not waits and not generation.done:
                self._complete(generation)
        while len(self._playbacks) > PLAYBACKS_KEPT:
            self._playbacks.pop(next(iter(self._playbacks)))

    def _waits(self, generation: Generation) -> bool:
        return self._held and generation.lane == DEFAULT_LANE

    def _acknowledge(self, generation: Generation, taken: Taken) -> None:
        """Tell the stages what of their output was sent, and need not be kept."""
        context = self._context
        if generation.turn is None:
            return
        if taken.text:
            context.orchestrator.acknowledge(generation.turn, context.roles.think, taken.text)
        if taken.audio:
            context.orchestrator.acknowledge(generation.turn, context.roles.speak, taken.audio)

    def _response(self, modalities: tuple[str, ...], voice: str, in_conversation: bool) -> Response:
        context = self._context
        limit = context.settings.max_output_tokens
        return Response(
            id=context.new_id("resp"),
            status=ResponseStatus.IN_PROGRESS,
            conversation=context.conversation_id if in_conversation else None,
            output_modalities=modalities,
            voice=voice,
            max_output_tokens=None if limit == "inf" else limit,
            metadata=None,
        )

    def _begin_default(self, think: bool = True) -> Generation:
        settings = self._context.settings
        response = self._response(settings.output_modalities, settings.audio.output.voice, True)
        generation = self._begin(response, _Request(None, None), self._user_turn_ended_ms)
        if think:
            self.think_waiting()
        return generation

    def _begin(self, response: Response, request: _Request, asked_at_ms: float) -> Generation:
        context = self._context
        in_conversation = response.conversation is not None
        generation = Generation(
            response,
            DEFAULT_LANE if in_conversation else response.id,
            context.new_id("item"),
            context.pipeline.limits.lead_ms,
            asked_at_ms,
            context.emit,
            context.conversation.insert if in_conversation else None,
        )
        self._generations[response.id] = generation
        self._requests[response.id] = request
        # As it is now: it may have failed before the client reads this.
        context.emit(ResponseCreated(replace(response, output=[])))
        return generation

    def _think(self, generation: Generation) -> None:
        context = self._context
        request = self._requests[generation.response.id]
        response = generation.response
        if request.given is not None:
            messages = messages_of(request.given)
        else:
            messages = context.conversation.messages()
        instructions = request.instructions
        if instructions is None:
            instructions = context.settings.instructions
        parameters: dict[str, dict[str, Any]] = {
            context.roles.think: {
                "instructions": instructions,
                "max_output_tokens": response.max_output_tokens,
            },
            context.roles.speak: {
                "voice": context.pipeline.voices[response.voice],
                "speed": context.settings.audio.output.speed,
            },
        }
        try:
            generation.turn = context.orchestrator.start(
                generation.lane,
                context.roles.think,
                frozenset({"text", "audio"} if generation.spoken else {"text"}),
                [conversation_payload(messages)],
                parameters,
                context.now_ms,
            )
        except AntiphonError as error:
            self._fail(generation, error.info())

    def _of_turn(self, turn: int) -> Generation | None:
        return next((g for g in self._generations.values() if g.turn == turn), None)

    # Ends

    def _drained(self, generation: Generation, ended: FlowEnded) -> None:
        usage = ended.usage.get(self._context.roles.think, {})
        if "output_tokens" in usage:
            generation.response.usage = Usage(
                int(usage.get("input_tokens", 0)),
                int(usage.get("cached_tokens", 0)),
                int(usage["output_tokens"]),
            )
        generation.finish_reason = usage.get("finish_reason")
        generation.timelines = ended.timelines
        generation.synthesis_ms = ended.usage.get(self._context.roles.speak, {}).get("synthesis_ms")
        generation.drained()

    def _complete(self, generation: Generation) -> None:
        if generation.finish_reason == "length":
            self._finish(generation, ResponseStatus.INCOMPLETE, "max_output_tokens", None)
        else:
            self._finish(generation, ResponseStatus.COMPLETED, None, None)

    def _interrupt(self, generation: Generation, reason: str) -> None:
        self._context.orchestrator.cancel(generation.lane)
        self._finish(generation, ResponseStatus.CANCELLED, reason, None)

    def _fail(self, generation: Generation, error: ErrorInfo) -> None:
        if generation.turn is not None and self._context.orchestrator.running(generation.turn):
            self._context.orchestrator.cancel(generation.lane)
        self._finish(generation, ResponseStatus.FAILED, None, error)

    def _finish(
        self,
        generation: Generation,
        status: ResponseStatus,
        reason: str | None,
        error: ErrorInfo | None,
    ) -> None:
        context = self._context
        if generation.lane == DEFAULT_LANE:
            self._held = False
        del self._generations[generation.response.id]
        del self._requests[generation.response.id]
        self._acknowledge(generation, generation.unsent())
        generation.finish(status, reason, error)
        context.orchestrator.forget(generation.lane)
        context.measured(_measured(generation))
        if self._answer_wanted and generation.lane == DEFAULT_LANE:
            self._answer_wanted = False
            self._begin_default()

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            tuple((g.response.id, g.turn, g.lane, g.freeze()) for g in self._generations.values()),
            tuple(self._playbacks),
            self._answer_wanted,
            self._held,
            self.spoken,
        )


def _measured(generation: Generation) -> TurnMeasured:
    """The figures of a response that has ended."""
    response = generation.response
    audio_ms = generation.playback.sent_ms
    rtf = None
    if audio_ms and generation.synthesis_ms is not None:
        rtf = generation.synthesis_ms / audio_ms
    asked = generation.asked_at_ms
    first_text, first_audio = generation.first_text_at_ms, generation.first_audio_at_ms
    return TurnMeasured(
        turn=generation.turn or 0,
        lane="default" if generation.lane == DEFAULT_LANE else "out_of_band",
        status=response.status.value,
        reason=response.reason,
        error=response.error.code if response.error else None,
        ttft_ms=None if first_text is None else first_text - asked,
        ttfp_ms=None if first_audio is None else first_audio - asked,
        rtf=rtf,
        audio_ms=audio_ms,
        prefill_tokens=None
        if response.usage is None
        else response.usage.input_tokens - response.usage.cached_tokens,
        timelines=generation.timelines,
    )
