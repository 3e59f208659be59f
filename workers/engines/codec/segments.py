"""A clause as the stretches that are synthesised one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.engines.codec.lexicon import Lexicon
from workers.engines.codec.normalise import MARKS, normalise

LONGEST_SEGMENT = 120
"""Characters of normalised text that are synthesised in one go, about 7 s of speech."""

_LONGEST_WORD = 40
_SHORTEST_OPENING = 16


@dataclass(frozen=True)
class Segment:
    """One stretch of speech: its IPA and the mark it ends with ("" inside a phrase)."""

    ipa: str
    mark: str


def segments_of(
    text: str, lexicon: Lexicon, longest: int = LONGEST_SEGMENT, *, soon: bool = False
) -> list[Segment]:
    """The segments of a clause of written text; none when nothing in it can be spoken.

    `soon` makes the first one short where a mark allows it, so that it is ready sooner.
    """
    segments: list[Segment] = []
    for stretch in split(normalise(text, lexicon.knows), longest, soon=soon):
        ipa = _ipa(stretch, lexicon)
        if ipa.strip(MARKS + " "):
            segments.append(Segment(ipa, ipa[-1] if ipa[-1] in MARKS else ""))
    return segments


def split(text: str, longest: int = LONGEST_SEGMENT, *, soon: bool = False) -> list[str]:
    """Normalised text in stretches of at most `longest` characters.

    Sentences stand alone; a longer sentence is cut behind its last mark that fits,
    or where it has none between words. `soon` cuts the first behind its first mark
    that leaves a phrase of a few words.
    """
    stretches: list[str] = []
    current: list[str] = []
    size = 0
    for word in _words(text, longest):
        if current and size + 1 + len(word) > longest:
            cut = _last_mark(current)
            stretches.append(" ".join(current[:cut]))
            current = current[cut:]
            size = len(" ".join(current))
        current.append(word)
        size += len(word) + (1 if size else 0)
        is_opening = soon and not stretches and size >= _SHORTEST_OPENING
        if word[-1] in ".!?" or (word[-1] in MARKS and is_opening):
            stretches.append(" ".join(current))
            current, size = [], 0
    if current:
        stretches.append(" ".join(current))
    return stretches


def _words(text: str, longest: int) -> Iterator[str]:
    limit = min(_LONGEST_WORD, longest)
    for word in text.split():
        for start in range(0, len(word), limit):
            yield word[start : start + limit]


def _last_mark(words: list[str]) -> int:
    """Where to cut `words`: behind the last mark, or at the end when the mark comes early."""
    for index in range(len(words), 0, -1):
        if words[index - 1][-1] in MARKS:
            return index if 2 * len(" ".join(words[:index])) > len(" ".join(words)) else len(words)
    return len(words)


def _ipa(stretch: str, lexicon: Lexicon) -> str:
    """The IPA of a stretch; each phrase between marks is pronounced as a whole."""
    pieces: list[str] = []
    phrase: list[str] = []
    for word in stretch.split():
        phrase.append(word.rstrip(MARKS))
        if word[-1] in MARKS:
            pieces.append(" ".join(lexicon.phrase(phrase)) + word[-1])
            phrase = []
    if phrase:
        pieces.append(" ".join(lexicon.phrase(phrase)))
    return " ".join(pieces)
