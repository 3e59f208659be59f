"""Where a reply ends, decided while it is generated."""

from __future__ import annotations

import re

_NOT_AN_END = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|st|jr|sr|prof|vs|etc|approx)|\b[a-z](?:\.[a-z])*|^\s*\d+)\.$",
    re.IGNORECASE,
)
"""An abbreviation, an initial, or the number of a list's entry."""
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[」』”’)]*")


class ReplyCutter:
    """Passes a reply on piece by piece and ends it by rule.

    The reply ends before the first of `stops`, at the first line break if
    `line_break_ends`, and after its `sentences`-th sentence. A sentence is known to
    have ended when white space follows, so one token more is generated than said.
    Leading and trailing white space is not part of a reply.

    Only what could still be cut off is held back: white space, and the beginning of
    one of `stops`.
    """

    def __init__(
        self,
        *,
        stops: tuple[str, ...] = (),
        line_break_ends: bool = False,
        sentences: int | None = None,
    ) -> None:
        self._stops = stops
        self._line_break_ends = line_break_ends
        self._sentences = sentences
        self._text = ""
        self._emitted = 0
        self._sentence_start = 0
        self.ended = False
        """A rule has ended the reply; nothing more will be passed on."""

    def feed(self, piece: str) -> str:
        """What of the reply is certain after `piece`, beyond what was before."""
        if self.ended:
            return ""
        if not self._text:
            piece = piece.lstrip()
        self._text += piece
        end = self._cut()
        if end is None:
            return self._emit(self._certain())
        self._text = self._text[:end]
        self.ended = True
        return self._emit(len(self._text.rstrip()))

    def finish(self) -> str:
        """What was held back, once nothing more is generated."""
        return "" if self.ended else self._emit(len(self._text.rstrip()))

    def _emit(self, end: int) -> str:
        new = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new

    def _cut(self) -> int | None:
        cuts = [at for stop in self._stops if (at := self._text.find(stop, self._emitted)) >= 0]
        if self._line_break_ends and (at := self._text.find("\n", self._emitted)) >= 0:
            cuts.append(at)
        if (end := self._last_sentence_end()) is not None:
            cuts.append(end)
        return min(cuts, default=None)

    def _last_sentence_end(self) -> int | None:
        if self._sentences is None:
            return None
        while found := _SENTENCE_END.search(self._text, self._sentence_start):
            sentence = self._text[self._sentence_start : found.end()]
            self._sentence_start = found.end()
            if _NOT_AN_END.search(sentence):
                continue
            self._sentences -= 1
            if self._sentences == 0:
                return found.end()
        return None

    def _certain(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        start = max(self._emitted, len(self._text) - longest)
        for at in range(start, len(self._text)):
            tail = self._text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return max(self._emitted, len(self._text[:at].rstrip()))
        return max(self._emitted, len(self._text.rstrip()))
