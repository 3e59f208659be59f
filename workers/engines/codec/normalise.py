"""Written English as spoken words: short forms, symbols, links, capitals, figures.

The result holds lower-case words of a to z and apostrophes, single spaces, and
the marks `. , ? ! ; :` behind words, which the voice reads as pauses and melody.
What cannot be spoken (emoji, markup, other scripts) is left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from workers.engines.codec.lexicon import LETTER_NAMES
from workers.engines.codec.quantities import either, speak_quantities
from workers.engines.codec.vocabulary import (
    ABBREVIATIONS,
    MID_SENTENCE_ABBREVIATIONS,
    MONTH_ABBREVIATIONS,
    PHRASES,
    SHORT_WORDS_IN_CAPITALS,
    SPOKEN_IN_CAPITALS,
    SYMBOLS,
    TITLES,
    VULGAR_FRACTIONS,
    WEEKDAYS,
)

Match = re.Match[str]
Knows = Callable[[str], bool]

MARKS = ",;:.!?"
"""The marks that stay in normalised text, from the weakest to the strongest."""

_LONGEST_SPELLED = 5
_TRANSLITERATED = str.maketrans(
    {
        "æ": "ae",
        "Æ": "Ae",
        "œ": "oe",
        "Œ": "Oe",
        "ø": "o",
        "Ø": "O",
        "ß": "ss",
        "ł": "l",
        "Ł": "L",
        "đ": "d",
        "Đ": "D",
        "ð": "th",
        "þ": "th",
        "Þ": "Th",
        "ı": "i",
        "‘": "'",
        "’": "'",
        "ʼ": "'",
        "`": "",
        "“": '"',
        "”": '"',
        "„": '"',
        "«": '"',
        "»": '"',
        "…": "... ",
        "‐": "-",
        "‑": "-",
        "‒": "–",
        "―": "—",
        "™": "",
        "®": "",
        "©": "",
        "²": "^2",
        "³": "^3",
        "。": ". ",
        "、": ", ",
    }
    | {fraction: f" {written}" for fraction, written in VULGAR_FRACTIONS.items()}
)

_DOMAIN = (
    r"(?<![\w.-])(?:[A-Za-z0-9-]{1,63}\.){1,8}"
    r"(?:com|org|net|edu|gov|info|dev|app|io|ai|co|uk|de|fr|eu|me|tv|us)\b"
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", re.ASCII)
_LINK = re.compile(
    rf"(?:https?://|www\.)[^\s<>()\"']*[\w/]|\b{_DOMAIN}(?:/[\w./%-]*[\w/])?", re.ASCII
)
_MARKED_LINK = re.compile(r"!?\[([^\[\]\n]{0,200})\]\([^()\s]{0,2000}\)")
_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"</?[A-Za-z][^<>\n]{0,200}>"), " "),
    (re.compile(r"^[ \t]*(?:[-*+•◦‣·]|#{1,6})\s+", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*(?:[-*_=][ \t]*){3,}$", re.MULTILINE), "."),
    (re.compile(r"(?<![\w*])\*{1,3}(?=\S)|(?<=\S)\*{1,3}(?![\w*])|_{2,}|~~"), ""),
    (re.compile(r"(?<=[^\s.,;:!?])[ \t]*(?:\n\s*)+(?=\S)"), ". "),
)
_TITLE_WITH_STOP = re.compile(rf"\b({either(TITLES)})\.(?=\s+[A-Z])")
_TITLE_WITHOUT_STOP = re.compile(r"\b(Mr|Mrs|Ms|Dr|Prof)(?=\s+[A-Z])")
_STREET = re.compile(r"(?<=[0-9]\s)((?:[A-Z][a-z]+\s){1,3})(St|Dr)\b\.?")
_ABBREVIATION = re.compile(rf"\b({either(ABBREVIATIONS)})\.(?![A-Za-z])")
_MID_SENTENCE = re.compile(rf"\b({either(MID_SENTENCE_ABBREVIATIONS)})\.(?=\s+[a-z0-9])")
_CALENDAR = re.compile(
    rf"\b({either([*MONTH_ABBREVIATIONS, *WEEKDAYS])})\.(?=,|\s+[0-9A-Z])|\b({either(WEEKDAYS)})"
    r"(?=,?\s+(?:[0-9]|[A-Z][a-z]{2,8}\s[0-9]))"
)
_CALENDAR_NAMES = MONTH_ABBREVIATIONS | WEEKDAYS
_PHRASE = re.compile(rf"(?<!\w)({either(PHRASES)})\.?(?!\w)")
_INITIALS = re.compile(r"\b((?:[A-Za-z]\.){2,}|[A-Z]\.(?=\s+[A-Z]))(?:([A-Z])\b)?")
_NAMED_BY_LETTER = re.compile(r"(?:\b[a-z]+|Plan|Vitamin|Class|Grade|Group|Type|Option)\s$")
_CAMEL = re.compile(r"\b[A-Z]?[a-z]+(?:[A-Z][a-z]+)+")
_CAPITALS = re.compile(r"\b([A-Z]{2,})('?s)?\b")
_ARTICLE = re.compile(r"\s+(?!and\s+[A-Z]\b)[a-z]")
_SINGLE_LETTER = re.compile(r"(?<![\w'])([A-Za-z])(?![\w'])")
_SYMBOL = re.compile(f"[{re.escape(''.join(SYMBOLS))}]")


def normalise(text: str, knows: Knows) -> str:
    """`text` as it is read aloud; an empty string when nothing in it can be spoken.

    `knows` says whether a lower-case word is in the dictionary: capitals that are
    not a word are spelled out.
    """
    text = _simplify(text)
    text = _MARKED_LINK.sub(r"\1", text)
    text = _EMAIL.sub(_email, text)
    text = _LINK.sub(_link, text)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    text = _expand_short_forms(text)
    text = speak_quantities(text)
    text = _SYMBOL.sub(lambda match: f" {SYMBOLS[match[0]]} ", text)
    text = _spell_capitals(text, knows)
    return _tidy(text)


def spelled(letters: str) -> str:
    """The names of ASCII letters: "FBI" -> "eff bee eye"."""
    return " ".join(LETTER_NAMES[letter] for letter in letters.lower())


def _simplify(text: str) -> str:
    """`text` in few kinds of characters: Latin letters without accents, ASCII digits."""
    simple: list[str] = []
    for character in unicodedata.normalize("NFKD", text.translate(_TRANSLITERATED)):
        if character.isascii():
            simple.append(character if character.isprintable() or character.isspace() else " ")
            continue
        category = unicodedata.category(character)
        if category == "Nd":
            simple.append(str(unicodedata.digit(character)))
        elif character in SYMBOLS or character in "–—−°²³№":
            simple.append(character)
        elif category[0] != "M" and character not in "\u200b\u200c\u200d\ufeff\u00ad":
            simple.append(" ")
    return "".join(simple)


def _dotted(address: str) -> str:
    """The parts of an address with its signs by name; short last names are spelled."""
    words = re.sub(
        r"\.(\w\w|edu)(?![\w])", lambda match: f" dot {_spelled_if_letters(match[1])}", address
    )
    words = words.replace(".", " dot ").replace("_", " underscore ").replace("-", " dash ")
    return words.replace("/", " slash ").replace("+", " plus ")


def _spelled_if_letters(text: str) -> str:
    """Two or three letters by name; anything else as it is."""
    return spelled(text) if text.isascii() and text.isalpha() and text != "me" else text


def _email(match: Match) -> str:
    name, _, domain = match[0].partition("@")
    return f"{_dotted(name)} at {_dotted(domain)}"


def _link(match: Match) -> str:
    address = re.sub(r"^(?:https?://)?(?:www\.)?|[?#&].*$", "", match[0])
    address = re.sub(r":(?=[0-9])", " port ", address)
    return _dotted(address.rstrip("/"))


def _expand_short_forms(text: str) -> str:
    text = _PHRASE.sub(lambda match: PHRASES[match[1]], text)
    text = _STREET.sub(lambda match: match[1] + ABBREVIATIONS[match[2]], text)
    text = _TITLE_WITH_STOP.sub(lambda match: TITLES[match[1]], text)
    text = _TITLE_WITHOUT_STOP.sub(lambda match: TITLES[match[1]], text)
    text = _MID_SENTENCE.sub(lambda match: MID_SENTENCE_ABBREVIATIONS[match[1]], text)
    text = _CALENDAR.sub(lambda match: _CALENDAR_NAMES[match[1] or match[2]], text)
    text = _ABBREVIATION.sub(lambda match: ABBREVIATIONS[match[1]] + _sentence_end(match), text)
    return re.sub(r"\bw/(?=\s?[a-z])", "with ", re.sub(r"\bw/o\b", "without", text))


def _sentence_end(match: Match) -> str:
    """A full stop when that of an abbreviation also ends the sentence."""
    rest = match.string[match.end() :].lstrip()
    return "." if not rest or rest[0].isupper() else ""


def _spell_capitals(text: str, knows: Knows) -> str:
    text = _INITIALS.sub(_initials, text)
    shouted = not re.search(r"[a-z]", text)

    def split_camel(match: Match) -> str:
        return (
            match[0] if knows(match[0].lower()) else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", match[0])
        )

    def capitals(match: Match) -> str:
        word, ending = match[1], match[2]
        return _capital_word(word, shouted, knows) + ("'s" if ending else "")

    text = _CAMEL.sub(split_camel, text)
    text = re.sub(r"(?<=[a-z])\.(?=[A-Z])", ". ", text)
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z])", " dot ", text)
    text = _CAPITALS.sub(capitals, text)
    return _SINGLE_LETTER.sub(_single_letter, text)


def _capital_word(word: str, shouted: bool, knows: Knows) -> str:
    if word in SPOKEN_IN_CAPITALS:
        return SPOKEN_IN_CAPITALS[word]
    is_word = knows(word.lower()) and (
        len(word) > 2 or word in SHORT_WORDS_IN_CAPITALS or (shouted and word == "IT")
    )
    has_vowel = bool(set(word) & set("AEIOUY"))
    if is_word or (len(word) > _LONGEST_SPELLED and has_vowel):
        return word.lower()
    return spelled(word)


def _initials(match: Match) -> str:
    last = match[2] or ""
    letters = match[1].replace(".", "")
    if len(letters) == 1 and not _NAMED_BY_LETTER.search(match.string[: match.start()]):
        return spelled(letters)
    return spelled(letters + last) + ("" if last else _sentence_end(match))


def _single_letter(match: Match) -> str:
    letter = match[1]
    if letter in "Ii":
        return "i"
    if letter == "a" or (letter == "A" and _ARTICLE.match(match.string, match.end())):
        return "a"
    return spelled(letter)


def _tidy(text: str) -> str:
    """Only words and marks: brackets and dashes become commas, runs of marks one mark."""
    text = text.lower()
    text = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text)
    text = re.sub(r"\s*(?:[()\[\]{}|]|--+|[–—]|(?<=\s)-(?=\s))\s*", " , ", text)
    text = re.sub(r"[^a-z',;:.!?]+", " ", text)
    text = re.sub(r"(?<![a-z])'+|'+(?![a-z])", "", text)
    text = re.sub(rf"(?:\s*[{MARKS}])+", _strongest, text)
    return " ".join(text.lstrip(f" {MARKS}").split())


def _strongest(match: Match) -> str:
    return max((mark for mark in match[0] if mark in MARKS), key=MARKS.index) + " "
