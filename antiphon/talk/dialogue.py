"""What happened in a call, from the server's events: turns, replies, interruptions.

No I/O: `handle` takes an event with its time and returns the client events that a
well-behaved client answers with. Times are monotonic seconds, positions are samples
at 24 kHz.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from antiphon.talk.player import Player
from antiphon.talk.realtime_client import Received, decode_audio
from antiphon.talk.wav import RATE_HZ

IN_PROGRESS = "in_progress"


@dataclass
class UserTurn:
    """One stretch of the user's speech, as the server saw it."""

    item_id: str
    started_at: float
    audio_start_ms: int
    stopped_at: float | None = None
    audio_end_ms: int | None = None
    sent_at_stop: int | None = None
    """How many samples had been sent when the server said that speech stopped."""
    committed: bool = False
    transcript: str | None = None


@dataclass
class Reply:
    """One response, what of it arrived, and what of it was heard."""

    id: str
    created_at: float
    turn: UserTurn | None
    status: str = IN_PROGRESS
    reason: str | None = None
    error: str | None = None
    transcript: str = ""
    audio: bytearray = field(default_factory=bytearray)
    player: Player = field(default_factory=Player)
    first_text_at: float | None = None
    first_audio_at: float | None = None
    last_audio_at: float | None = None
    done_at: float | None = None
    interrupted: bool = False
    server_rtf: float | None = None
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    """Audio parts in order: (item id, content index, first sample)."""

    def heard(self, now: float) -> bytes:
        """The audio that a listener has heard or, if not interrupted, will hear."""
        samples = self.player.played(now) if self.interrupted else self.player.received
        return bytes(self.audio[: 2 * samples])


class Dialogue:
    """The record of one call."""

    def __init__(self) -> None:
        self.session: str | None = None
        self.configured = False
        self.turns: list[UserTurn] = []
        self.replies: list[Reply] = []
        self.errors: list[str] = []
        self._by_id: dict[str, Reply] = {}
        self._answered: set[str] = set()

    @property
    def speaking(self) -> bool:
        """Whether the server takes the user to be speaking."""
        return bool(self.turns) and self.turns[-1].stopped_at is None

    @property
    def idle(self) -> bool:
        """Whether nothing is open: no speech, no unanswered turn, no response."""
        if self.speaking or any(reply.done_at is None for reply in self.replies):
            return False
        if not self.turns:
            return True
        last = self.turns[-1]
        return last.item_id in self._answered or last.transcript == ""

    def handle(self, received: Received, sent: int) -> list[dict[str, Any]]:
        """Take in one event; `sent` is how many input samples have been sent by then.

        Returns what to send in answer: truncations of replies that were interrupted.
        """
        event, now = received.event, received.at
        match received.type:
            case "session.created":
                self.session = event.get("session", {}).get("id")
            case "session.updated":
                self.configured = True
            case "input_audio_buffer.speech_started":
                self.turns.append(
                    UserTurn(event["item_id"], now, int(event.get("audio_start_ms", 0)))
                )
                return self._interrupt(now)
            case "input_audio_buffer.speech_stopped":
                if turn := self._turn(event["item_id"]):
                    turn.stopped_at = now
                    turn.audio_end_ms = int(event.get("audio_end_ms", 0))
                    turn.sent_at_stop = sent
            case "input_audio_buffer.committed":
                if turn := self._turn(event["item_id"]):
                    turn.committed = True
            case "conversation.item.input_audio_transcription.delta":
                if turn := self._turn(event["item_id"]):
                    turn.transcript = (turn.transcript or "") + event["delta"]
            case "conversation.item.input_audio_transcription.completed":
                if turn := self._turn(event["item_id"]):
                    turn.transcript = event["transcript"]
            case "conversation.item.input_audio_transcription.failed" | "error":
                error = event.get("error") or {}
                self.errors.append(str(error.get("message") or error.get("code") or "error"))
            case "response.created":
                self._begin(event["response"]["id"], now)
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                if (reply := self._by_id.get(event["response_id"])) and event["delta"]:
                    reply.transcript += event["delta"]
                    reply.first_text_at = reply.first_text_at or now
            case "response.output_audio.delta":
                self._audio(event, now)
            case "response.done":
                self._end(event, now)
        return []

    def _turn(self, item_id: str) -> UserTurn | None:
        return next((turn for turn in reversed(self.turns) if turn.item_id == item_id), None)

    def _begin(self, response_id: str, now: float) -> None:
        turn = next((turn for turn in reversed(self.turns) if turn.committed), None)
        reply = Reply(response_id, now, turn)
        self.replies.append(reply)
        self._by_id[response_id] = reply
        if turn is not None:
            self._answered.add(turn.item_id)

    def _audio(self, event: dict[str, Any], now: float) -> None:
        reply = self._by_id.get(event["response_id"])
        pcm = decode_audio(event["delta"])
        if reply is None or not pcm:
            return
        reply.first_audio_at = reply.first_audio_at or now
        reply.last_audio_at = now
        if reply.interrupted:
            return
        part = (event["item_id"], int(event["content_index"]))
        if not reply.parts or reply.parts[-1][:2] != part:
            reply.parts.append((*part, reply.player.received))
        reply.audio += pcm
        reply.player.add(len(pcm) // 2, now)

    def _interrupt(self, now: float) -> list[dict[str, Any]]:
        """The user speaks: stop what is playing and tell the server what was heard."""
        truncations = []
        for reply in self.replies:
            unfinished = reply.done_at is None or reply.player.playing(now)
            if reply.interrupted or not reply.parts or not unfinished:
                continue
            reply.interrupted = True
            played = reply.player.stop(now)
            item_id, content_index, begin = next(
                part for part in reversed(reply.parts) if part[2] <= played
            )
            truncations.append(
                {
                    "type": "conversation.item.truncate",
                    "item_id": item_id,
                    "content_index": content_index,
                    "audio_end_ms": (played - begin) * 1000 // RATE_HZ,
                }
            )
        return truncations

    def _end(self, event: dict[str, Any], now: float) -> None:
        response = event["response"]
        reply = self._by_id.get(response["id"])
        if reply is None:
            return
        reply.done_at = now
        reply.status = str(response.get("status"))
        details = response.get("status_details") or {}
        reply.reason = details.get("reason")
        error = details.get("error") or {}
        reply.error = error.get("message") or error.get("code")
        rtf = event.get("server_rtf")
        reply.server_rtf = float(rtf) if isinstance(rtf, int | float) else None
