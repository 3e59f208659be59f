"""What a call came to: one JSON object, or lines for a person."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np

from antiphon.talk.call import Call
from antiphon.talk.dialogue import Reply
from antiphon.talk.measures import Measures, measure
from antiphon.talk.speech import AUDIBLE_DBFS, level_dbfs, window_levels_dbfs
from antiphon.talk.wav import RATE_HZ

_LABELS = (
    ("ttft_ms", "TTFT", "end of turn to first text"),
    ("ttfp_ms", "TTFP", "end of turn to first audio packet"),
    ("first_audio_heard_ms", "heard", "end of turn to first audible sample played"),
    ("speech_stopped_ms", "end seen", "end of turn to speech_stopped"),
    ("e2el_ms", "E2EL", "end of turn to response complete"),
    ("underrun_ms", "underrun", "longest deficit of a player"),
    ("barge_in_ms", "barge-in", "first sample of speech to last sample of the old reply"),
)


def answer_audio(call: Call) -> bytes:
    """What was heard of all replies, one after the other: PCM16, 24 kHz, mono."""
    now = time.monotonic()
    return b"".join(reply.heard(now) for reply in call.dialogue.replies)


def was_heard(call: Call) -> bool:
    """Whether the last reply has sound that can be heard, and did not fail."""
    reply = call.answer
    if reply is None or reply.status == "failed" or not reply.audio:
        return False
    levels = window_levels_dbfs(np.frombuffer(reply.heard(time.monotonic()), "<i2"))
    return bool(levels.size and levels.max() >= AUDIBLE_DBFS)


def as_json(call: Call, out: str | None) -> dict[str, Any]:
    """The call as the object that `--json` prints; docs/talk.md describes it."""
    reply = call.answer
    figures = asdict(measure(reply, call.track)) if reply else dict.fromkeys(_figure_names())
    error = call.error
    return {
        "heard": was_heard(call),
        "url": call.order.url,
        "model": call.order.model,
        "session": call.dialogue.session,
        "transcript": {
            "user": call.dialogue.turns[-1].transcript if call.dialogue.turns else None,
            "answer": reply.transcript if reply else None,
        },
        **figures,
        "barge_in_ms": barge_in_ms(call),
        "turns": [
            {
                "transcript": turn.transcript,
                "audio_start_ms": turn.audio_start_ms,
                "audio_end_ms": turn.audio_end_ms,
            }
            for turn in call.dialogue.turns
        ],
        "responses": [_response(call, reply) for reply in call.dialogue.replies],
        "out": out,
        "errors": call.dialogue.errors,
        "error": None if error is None else {"code": error.code, "message": error.message},
    }


def barge_in_ms(call: Call) -> float | None:
    """The barge-in time of the reply that the user cut off last; None: none was."""
    cut = [reply for reply in call.dialogue.replies if reply.interrupted]
    return measure(cut[-1], call.track).barge_in_ms if cut else None


def as_lines(call: Call) -> list[str]:
    """The call for a person: transcript of both sides, then the figures."""
    lines = []
    for turn in call.dialogue.turns:
        lines.append(f"you:      {turn.transcript if turn.transcript else '(nothing understood)'}")
    for each in call.dialogue.replies:
        cut = ""
        if each.status not in ("completed", "in_progress"):
            why = each.error or each.reason
            cut = f"  [{each.status}{f': {why}' if why else ''}]"
        lines.append(f"answer:   {each.transcript or '(no text)'}{cut}")
    reply = call.answer
    if reply is None:
        return lines
    figures = measure(reply, call.track)
    values = {**asdict(figures), "barge_in_ms": barge_in_ms(call)}
    lines.append("")
    for name, label, meaning in _LABELS:
        if values[name] is not None:
            lines.append(f"{label:<9} {values[name]:>8.0f} ms  {meaning}")
    if figures.server_rtf is not None:
        lines.append(f"{'RTF':<9} {figures.server_rtf:>8.3f}     measured by the server")
    if figures.rtf is not None:
        lines.append(
            f"{'RTF':<9} {figures.rtf:>8.3f}     seen by the client, the server's pacing included"
        )
    lines.append(f"{'audio':<9} {reply.player.received / RATE_HZ:>8.1f} s")
    return lines


def _response(call: Call, reply: Reply) -> dict[str, Any]:
    heard = reply.heard(time.monotonic())
    return {
        "id": reply.id,
        "status": reply.status,
        "reason": reply.reason,
        "error": reply.error,
        "interrupted": reply.interrupted,
        "transcript": reply.transcript,
        "audio_ms": reply.player.received * 1000 // RATE_HZ,
        "heard_ms": len(heard) // 2 * 1000 // RATE_HZ,
        "level_dbfs": round(level_dbfs(np.frombuffer(heard, "<i2")), 1),
        **asdict(measure(reply, call.track)),
    }


def _figure_names() -> list[str]:
    return list(Measures.__dataclass_fields__)
