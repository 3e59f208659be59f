"""The playback ledger: what audio of a reply was sent, when it plays, what text it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sessions.duplex.settings import OUTPUT_RATE_HZ

BYTES_PER_MS = OUTPUT_RATE_HZ * 2 // 1000


@dataclass
class _Clause:
    """A clause of the reply's text, and how many samples of it were sent."""

    text: str
    samples: int = 0


class Playback:
    """Audio sent for one item, aligned with its clauses, and a model of its play-out.

    Play-out is modelled as a player that starts with the first audio sent, plays
    in real time, and waits when it has nothing.
    """

    def __init__(self) -> None:
        self._clauses: list[_Clause] = []
        self._sent_samples = 0
        self._ends_at_ms = 0.0

    def clause(self, text: str) -> None:
        """The reply's next clause is `text`."""
        self._clauses.append(_Clause(text))

    def sent(self, clause: int, samples: int, now_ms: float) -> None:
        """`samples` of clause number `clause` were sent to the client."""
        self._clauses[clause].samples += samples
        self._sent_samples += samples
        self._ends_at_ms = max(self._ends_at_ms, now_ms) + samples * 1000 / OUTPUT_RATE_HZ

    @property
    def sent_ms(self) -> int:
        """The length of what was sent, in whole ms."""
        return self._sent_samples * 1000 // OUTPUT_RATE_HZ

    def may_send_at_ms(self, lead_ms: int) -> float:
        """From when more may be sent without being over `lead_ms` ahead of play-out."""
        return self._ends_at_ms - lead_ms

    def spoken_text(self, audio_end_ms: int) -> str:
        """The text of the first `audio_end_ms`: whole clauses, then words in proportion."""
        left = audio_end_ms * OUTPUT_RATE_HZ / 1000
        text = ""
        for clause in self._clauses:
            if clause.samples and left >= clause.samples:
                text += clause.text
                left -= clause.samples
                continue
            if clause.samples:
                words = re.findall(r"\s*\S+\s*", clause.text)
                text += "".join(words[: int(len(words) * left / clause.samples)])
            break
        return text.rstrip()
