"""One call to a Realtime server: speak, listen, interrupt, measure."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from antiphon.talk.dialogue import Dialogue, Reply
from antiphon.talk.errors import CallRefused, ConnectionEnded, NoAnswer, TalkError
from antiphon.talk.measures import InputTrack
from antiphon.talk.microphone import Microphone
from antiphon.talk.realtime_client import RealtimeClient
from antiphon.talk.speech import first_audible
from antiphon.talk.wav import RATE_HZ, Pcm

CHUNK_MS = 20
CHUNK = RATE_HZ * CHUNK_MS // 1000
SETTLE_S = 2.0
"""How long more speech is waited for, when an answer began before the sound had ended."""
RECORDED_CHUNKS = 60_000 // CHUNK_MS
"""Of a microphone's sound the last minute is kept to find the end of speech in."""


@dataclass(frozen=True)
class Order:
    """What to call and what to say. `sound` None: the microphone.

    `then` is a second sound, played `barge_in_at_ms` after the first audio of the
    answer is heard. `timeout_s` is the longest wait for the server to get on with
    an answer once there is nothing left to say.
    """

    url: str
    sound: Pcm | None
    model: str = "voice"
    key: str | None = None
    instructions: str | None = None
    then: Pcm | None = None
    barge_in_at_ms: int = 0
    timeout_s: float = 60.0


@dataclass
class Call:
    """A call in progress or ended: its record, and what was sent."""

    order: Order
    dialogue: Dialogue = field(default_factory=Dialogue)
    track: InputTrack = field(default_factory=InputTrack)
    error: TalkError | None = None
    input_level: Pcm = field(default_factory=lambda: np.zeros(0, np.int16))
    """The chunk that was sent last."""
    phase: str = "connecting"

    @property
    def answer(self) -> Reply | None:
        """The reply that the figures are about: the last one."""
        return self.dialogue.replies[-1] if self.dialogue.replies else None

    async def run(self, on_change: Callable[[Call], None] = lambda call: None) -> None:
        """Make the call; ends when the answer is complete.

        Raises TalkError (CannotConnect, CallRefused, ConnectionEnded, NoAnswer,
        NoAudioDevice); what was recorded until then stays in this object.
        """
        try:
            async with RealtimeClient.open(
                self.order.url, model=self.order.model, key=self.order.key
            ) as client:
                await _Exchange(self, client, on_change).run()
        except TalkError as error:
            self.error = error
            raise


class _Exchange:
    """The part of a call that lies between connecting and hanging up."""

    def __init__(
        self, call: Call, client: RealtimeClient, on_change: Callable[[Call], None]
    ) -> None:
        self._call = call
        self._client = client
        self._on_change = on_change
        self._clock = asyncio.get_running_loop()
        self._configured = asyncio.Event()
        self._to_say: list[Pcm] = []
        self._saying: Pcm | None = None
        self._said = 0
        self._recorded: deque[Pcm] = deque(maxlen=RECORDED_CHUNKS)
        self._sound_ends = float("inf")
        """When the last sound has been said, by the loop's clock."""
        self._barge_in: asyncio.TimerHandle | None = None
        self._barged_in = call.order.then is None
        self._finished = asyncio.Event()
        self._settle: asyncio.TimerHandle | None = None
        self._deadline: asyncio.Timeout | None = None

    async def run(self) -> None:
        order = self._call.order
        if order.sound is not None:
            self._to_say.append(order.sound)
        try:
            async with asyncio.timeout(order.timeout_s) as self._deadline:
                await self._talk()
        except TimeoutError:
            raise NoAnswer(self._nothing_came()) from None
        finally:
            for timer in (self._barge_in, self._settle):
                if timer is not None:
                    timer.cancel()

    async def _talk(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._receive()),
                    tasks.create_task(self._speak()),
                ]
                await self._finished.wait()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            talk, others = group.split(TalkError)
            if talk is None or others is not None:
                raise
            raise _first(talk) from None

    async def _receive(self) -> None:
        call = self._call
        while True:
            try:
                received = await self._client.receive()
            except ConnectionEnded as ended:
                raise self._explained(ended) from ended
            try:
                answers = call.dialogue.handle(received, call.track.sent)
            except (KeyError, TypeError, ValueError, AttributeError) as problem:
                raise ConnectionEnded(f"the server sent a broken {received.type}") from problem
            for answer in answers:
                await self._client.send(answer)
            if received.type == "session.created":
                await self._client.send(_settings(call.order))
                call.phase = "configuring"
            elif received.type == "error" and call.phase == "configuring":
                raise CallRefused(f"the server refused the settings: {call.dialogue.errors[-1]}")
            elif received.type == "session.updated":
                call.phase = "in conversation"
                self._configured.set()
            elif received.type == "input_audio_buffer.speech_stopped" and self._recorded:
                kept = np.concatenate(self._recorded)
                call.track.replace(call.track.sent - len(kept), kept)
            elif received.type == "response.output_audio.delta":
                self._plan_barge_in()
            if received.type.startswith("response."):
                self._grant(call.order.timeout_s)
            self._look_for_end()
            self._on_change(call)

    async def _speak(self) -> None:
        await self._configured.wait()
        if self._call.order.sound is None:
            await self._speak_live()
        begun = time.monotonic()
        chunks = 0
        while True:
            chunks += 1
            await asyncio.sleep(max(0.0, begun + chunks * CHUNK_MS / 1000 - time.monotonic()))
            await self._send(self._next_chunk())
            if chunks % 5 == 0:
                self._on_change(self._call)

    async def _speak_live(self) -> None:
        async with Microphone.open(CHUNK_MS) as microphone:
            self._sound_ends = self._clock.time()
            while True:
                chunk = await microphone.read()
                await self._send(chunk)
                self._recorded.append(chunk)
                self._on_change(self._call)

    def _next_chunk(self) -> Pcm:
        """The next 20 ms to send: of the sound that is being said, or silence."""
        if self._saying is None and self._to_say:
            self._saying = self._to_say.pop(0)
            self._said = 0
            self._call.track.place(self._call.track.sent, self._saying)
            self._sound_ends = self._clock.time() + len(self._saying) / RATE_HZ
            self._grant(len(self._saying) / RATE_HZ + self._call.order.timeout_s)
        chunk = np.zeros(CHUNK, np.int16)
        if self._saying is not None:
            part = self._saying[self._said : self._said + CHUNK]
            chunk[: len(part)] = part
            self._said += CHUNK
            if self._said >= len(self._saying):
                self._saying = None
        return chunk

    async def _send(self, chunk: Pcm) -> None:
        await self._client.append(chunk.astype("<i2").tobytes())
        self._call.track.add(len(chunk), time.monotonic())
        self._call.input_level = chunk

    def _plan_barge_in(self) -> None:
        order, reply = self._call.order, self._call.answer
        if self._barged_in or self._barge_in is not None or reply is None or order.then is None:
            return
        audible = first_audible(np.frombuffer(bytes(reply.audio), "<i2"))
        due = None if audible is None else reply.player.due(audible)
        if due is None:
            return
        delay_s = max(0.0, due + order.barge_in_at_ms / 1000 - time.monotonic())
        self._barge_in = self._clock.call_later(delay_s, self._interrupt, order.then)
        self._grant(delay_s + order.timeout_s)

    def _interrupt(self, sound: Pcm) -> None:
        self._barged_in = True
        self._saying = None
        self._to_say.append(sound)
        self._sound_ends = float("inf")
        if self._settle is not None:
            self._settle.cancel()

    def _look_for_end(self) -> None:
        """The call is over when everything was said, and answered completely."""
        call, reply = self._call, self._call.answer
        if self._settle is not None:
            self._settle.cancel()
            self._settle = None
        failed = reply is not None and reply.status == "failed"
        if reply is None or not call.dialogue.idle or not (self._barged_in or failed):
            return
        last = call.track.last_speech()
        said_at = None if last is None else call.track.sent_at(last)
        if failed or (said_at is not None and reply.created_at >= said_at):
            self._finished.set()
        elif self._sound_ends < float("inf"):
            wait_s = max(0.0, self._sound_ends - self._clock.time()) + SETTLE_S
            self._settle = self._clock.call_later(wait_s, self._finished.set)

    def _grant(self, seconds: float) -> None:
        """The server has got on: from now it has this long to get on further."""
        if self._deadline is not None and not self._deadline.expired():
            when = self._clock.time() + seconds
            self._deadline.reschedule(max(when, self._deadline.when() or when))

    def _explained(self, ended: TalkError) -> TalkError:
        """The end of the connection, with what the server had complained of before."""
        errors = self._call.dialogue.errors
        if not errors:
            return ended
        return type(ended)(f"{ended.message}; before that: {errors[-1]}", code=ended.code)

    def _nothing_came(self) -> str:
        dialogue, seconds = self._call.dialogue, f"{self._call.order.timeout_s:g} s"
        if dialogue.session is None:
            return f"no session within {seconds}: is it a Realtime server?"
        if not dialogue.configured:
            return f"the server did not confirm the settings within {seconds}"
        if not dialogue.turns:
            return f"no answer within {seconds}: the server heard no speech"
        if dialogue.speaking:
            return f"no answer within {seconds}: the server heard no end of the speech"
        if not dialogue.replies:
            return f"no answer within {seconds}: the server heard speech and did not answer"
        return f"the answer was not complete after {seconds} without progress"


def _settings(order: Order) -> dict[str, Any]:
    session: dict[str, Any] = {
        "type": "realtime",
        "output_modalities": ["audio"],
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": RATE_HZ},
                "transcription": {"language": "en"},
                "turn_detection": {
                    "type": "server_vad",
                    "create_response": True,
                    "interrupt_response": True,
                },
            },
            "output": {"format": {"type": "audio/pcm", "rate": RATE_HZ}},
        },
    }
    if order.instructions is not None:
        session["instructions"] = order.instructions
    return {"type": "session.update", "session": session}


def _first(group: BaseExceptionGroup[TalkError]) -> TalkError:
    """The one error to report of a group: an explained refusal before a plain end."""
    errors: list[TalkError] = []
    for error in group.exceptions:
        errors.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return max(errors, key=lambda error: len(error.message))
