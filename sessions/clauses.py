"""Cuts growing text into the clauses that a voice speaks one by one.

The first clause is small, so that speech starts early; once speech is buffered,
whole sentences are preferred, because they sound better.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r"[,;:.!?…](?:[\"')\]]*)\s+|\s[–—-]\s+|\n+")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|st|prof|sr|jr|vs|etc|no|e\.g|i\.e|a\.m|p\.m|u\.s)|\b[a-z])\.\s+$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?…][\"')\]]*\s+$|\n$")
# Only from where a word begins, and without a second try: a word may be thousands of characters.
_WORD = re.compile(r"(?<!\S)\S++\s+")

FIRST_CLAUSE_WORDS = 12
CLAUSE_WORDS = 30
SHORT_CLAUSE_CHARACTERS = 60


class Clauses:
    """Text in, clauses out; their concatenation is the text, white space included."""

    def __init__(self) -> None:
        self._text = ""
        self._cut_any = False

    def push(self, text: str) -> None:
        """The text goes on with `text`."""
        self._text += text

    def cut(self, buffered: bool) -> str | None:
        """The next complete clause, or None when the text so far holds none.

        `buffered` says that the voice has something to say already: then a clause
        shorter than a sentence waits for more, up to SHORT_CLAUSE_CHARACTERS.
        """
        for match in _BOUNDARY.finditer(self._text):
            clause = self._text[: match.end()]
            if _ABBREVIATION.search(clause) and "\n" not in match.group():
                continue
            sentence = _SENTENCE_END.search(clause) is not None
            if not sentence and len(clause.split()) < 2:
                continue
            if buffered and not sentence and len(clause) < SHORT_CLAUSE_CHARACTERS:
                continue
            return self._take(match.end())
        limit = CLAUSE_WORDS if self._cut_any else FIRST_CLAUSE_WORDS
        words = list(_WORD.finditer(self._text))
        if len(words) > limit:
            return self._take(words[limit - 1].end())
        return None

    def rest(self) -> str | None:
        """What is left when the text has ended."""
        return self._take(len(self._text)) if self._text else None

    def _take(self, end: int) -> str:
        clause, self._text = self._text[:end], self._text[end:]
        self._cut_any = True
        return clause
