"""The figures of a voice turn and their definitions.

All are taken at the client, from the times at which it sent and received, unless
their name begins with `server_`. A figure that the turn does not have is None.

end of turn     the moment at which the last sample of the user's speech was sent;
                where speech ends is found in the sound that is sent (`speech`), not
                asked of the server
ttft_ms         end of turn -> first text of the reply received (time to first text)
ttfp_ms         end of turn -> first audio packet of the reply received
first_audio_heard_ms
                end of turn -> first audible sample of the reply, played by a player
                that starts at the first packet and plays in real time
speech_stopped_ms
                end of turn -> `input_audio_buffer.speech_stopped` received
e2el_ms         end of turn -> response complete (`response.done` received)
rtf             (last audio packet received - first text received) / duration of the
                audio: the real-time factor as a client can see it. It includes the
                server's pacing, so a reply longer than the server's lead tends to 1:
                an upper bound
server_rtf      time to synthesise / duration of the audio, as the server measured it
                and reported with `response.done`
underrun_ms     the longest deficit of a player that starts at the first packet and
                plays in real time
barge_in_ms     first sample of the user's speech sent -> last sample of the old reply
                received; only of a reply that the user's speech cut off
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from antiphon.talk.dialogue import Reply
from antiphon.talk.speech import Speech, find_speech, first_audible
from antiphon.talk.wav import RATE_HZ, Pcm


class InputTrack:
    """What was sent: when each sample left, and where the user's speech lies."""

    def __init__(self) -> None:
        self.sent = 0
        self._ends: list[int] = []
        self._times: list[float] = []
        self._sounds: list[tuple[int, Speech]] = []

    def add(self, samples: int, now: float) -> None:
        """A chunk of `samples` was sent at `now`."""
        self.sent += samples
        self._ends.append(self.sent)
        self._times.append(now)

    def place(self, begin: int, pcm: Pcm) -> None:
        """The sound `pcm` begins at sample `begin`; what lies outside sounds is silence."""
        self._sounds.append((begin, find_speech(pcm)))

    def replace(self, begin: int, pcm: Pcm) -> None:
        """The only sound is `pcm`, which begins at sample `begin` (a microphone's)."""
        self._sounds = [(begin, find_speech(pcm))]

    def sent_at(self, sample: int) -> float | None:
        """When a sample was sent; None: not yet."""
        index = bisect_right(self._ends, sample)
        return self._times[index] if index < len(self._times) else None

    def last_speech(self, before: int | None = None) -> int | None:
        """The last sample of speech, among all or before a sample."""
        for begin, speech in reversed(self._sounds):
            found = speech.last(None if before is None else before - begin)
            if found is not None:
                return begin + found
        return None

    def first_speech_of_last_sound(self) -> int | None:
        """The first sample of speech in the sound that was placed last."""
        if not self._sounds:
            return None
        begin, speech = self._sounds[-1]
        found = speech.first()
        return None if found is None else begin + found


@dataclass(frozen=True)
class Measures:
    """The figures of one reply; the module's docstring defines them."""

    ttft_ms: float | None
    ttfp_ms: float | None
    first_audio_heard_ms: float | None
    speech_stopped_ms: float | None
    e2el_ms: float | None
    rtf: float | None
    server_rtf: float | None
    underrun_ms: float | None
    barge_in_ms: float | None


def measure(reply: Reply, track: InputTrack) -> Measures:
    """The figures of `reply`, which answered speech in `track`."""
    end = None
    if reply.turn is not None:
        last = track.last_speech(reply.turn.sent_at_stop)
        end = None if last is None else track.sent_at(last)
    barge_in = None
    if reply.interrupted and reply.last_audio_at is not None:
        first = track.first_speech_of_last_sound()
        begun = None if first is None else track.sent_at(first)
        barge_in = None if begun is None else max(begun, reply.last_audio_at)
        barge_in = _ms(begun, barge_in)
    rtf = None
    if reply.first_text_at and reply.last_audio_at and reply.player.received:
        span_s = reply.last_audio_at - reply.first_text_at
        rtf = round(max(0.0, span_s) / (reply.player.received / RATE_HZ), 3)
    audible = first_audible(np.frombuffer(bytes(reply.audio), "<i2"))
    underrun = None if reply.first_audio_at is None else round(reply.player.underrun_s * 1000, 1)
    return Measures(
        ttft_ms=_ms(end, reply.first_text_at),
        ttfp_ms=_ms(end, reply.first_audio_at),
        first_audio_heard_ms=_ms(end, None if audible is None else reply.player.due(audible)),
        speech_stopped_ms=_ms(end, reply.turn.stopped_at if reply.turn else None),
        e2el_ms=_ms(end, reply.done_at),
        rtf=rtf,
        server_rtf=reply.server_rtf,
        underrun_ms=underrun,
        barge_in_ms=barge_in,
    )


def _ms(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round((end - begin) * 1000.0, 1)
