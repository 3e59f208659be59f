"""Dates, times, money, measures and every other figure of a text, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from workers.engines.codec import number_words
from workers.engines.codec.number_words import cardinal, ordinal, spoken
from workers.engines.codec.vocabulary import (
    COUNTED_IN_ROMAN,
    CURRENCIES,
    FRACTION_PARTS,
    MAGNITUDES,
    MONTH_ABBREVIATIONS,
    MONTHS,
    ROMAN_NUMERALS,
    RULERS,
    UNITS,
)

Match = re.Match[str]
Rule = tuple[re.Pattern[str], Callable[[Match], str]]


def either(names: Iterable[str]) -> str:
    """A pattern that matches any of `names`, the longest first."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_MONTH = rf"(?:{either([*MONTHS, *MONTH_ABBREVIATIONS])})"
_DAY = r"(?:3[01]|[12][0-9]|0?[1-9])"
_YEAR = r"(?:1[0-9]{3}|20[0-9]{2})"
_MERIDIEM = r"[AaPp](?:\.\s?[Mm]\.?|[Mm])"
_SCALE_WORDS = "hundred|thousand|million|billion|trillion"
_YEAR_FOLLOWS = (
    "in|since|until|till|during|circa|year|before|after|around|early|late|mid|winter|spring|"
    "summer|autumn|fall"
)
_PER = "second|minute|hour|night|day|week|month|year|person|seat|user|piece|kilogram|gallon|liter"


def speak_quantities(text: str) -> str:
    """`text` with every figure replaced by words.

    Expects ASCII digits; leaves letters and marks that are no part of a figure alone.
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _rule(pattern: str, replacement: Callable[[Match], str], flags: int = 0) -> Rule:
    return re.compile(pattern, flags), replacement


def _month(name: str) -> str:
    return MONTH_ABBREVIATIONS.get(name, name)


def _date(year: str | None, month: str, day: str) -> str:
    words = f"{month} {ordinal(int(day))}"
    return f"{words}, {number_words.year(int(year))}" if year else words


def _iso_date(match: Match) -> str:
    year, month, day = match[1], int(match[2]), match[3]
    return _date(year, MONTHS[month - 1], day) + (" at " if match[4] else "")


def _slash_date(match: Match) -> str:
    month, day = int(match[1]), int(match[2])
    if month > 12 >= day:
        month, day = day, month
    if not 1 <= month <= 12 or not 1 <= day <= 31:
        return match[0]
    return _date(match[3], MONTHS[month - 1], str(day))


def _dotted_date(match: Match) -> str:
    return _date(match[3], MONTHS[int(match[2]) - 1], match[1])


def _month_first(match: Match) -> str:
    words = f"{_month(match[1])} {ordinal(int(match[2]))}"
    if match[3]:
        words += f" to {ordinal(int(match[3]))}"
    return f"{words}, {number_words.year(int(match[4]))}" if match[4] else words


def _day_first(match: Match) -> str:
    article, first, day, month, year = match[1], match[2], match[3], match[4], match[5]
    days = f"{ordinal(int(first))} to {ordinal(int(day))}" if first else ordinal(int(day))
    words = f"{article or 'the '}{days} of {_month(month)}"
    return f"{words}, {number_words.year(int(year))}" if year else words


def _meridiem(text: str | None) -> str:
    if not text:
        return ""
    return " ay em" if text[0] in "Aa" else " pee em"


def _ends_sentence(match: Match, written: str | None) -> str:
    """The full stop of "p.m." is its sentence's too when nothing or a capital follows it."""
    if not written or not written.endswith("."):
        return ""
    rest = match.string[match.end() :].lstrip()
    return "." if not rest or rest[0].isupper() else ""


def _time(match: Match) -> str:
    hour, minute = int(match[1]), int(match[2])
    meridiem = _meridiem(match[4])
    if minute:
        words = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif meridiem:
        words = cardinal(hour)
    elif hour == 0:
        words = "midnight"
    elif hour <= 12:
        words = f"{cardinal(hour)} o'clock"
    else:
        words = f"{cardinal(hour)} hundred"
    if match[3]:
        words += f" and {_counted(match[3], ('second', 'seconds'))}"
    return words + meridiem + _ends_sentence(match, match[4])


def _hour(match: Match) -> str:
    first = f"{cardinal(int(match[1]))} to " if match[1] else ""
    hour = f"{first}{cardinal(int(match[2]))}"
    return hour + _meridiem(match[3]) + _ends_sentence(match, match[3])


def _counted(number: str, names: tuple[str, str]) -> str:
    return f"{spoken(number)} {names[0] if number == '1' else names[1]}"


def _minus(sign: str | None) -> str:
    return "minus " if sign else ""


def _money(match: Match) -> str:
    sign, symbol, amount, magnitude = match[1], match[2], match[3], match[4] or match[5]
    one, many, cent, cents = CURRENCIES[symbol]
    if magnitude:
        words = f"{spoken(amount)} {MAGNITUDES.get(magnitude, magnitude)} {many}"
        return _minus(sign) + words
    whole, _, fraction = amount.replace(",", "").partition(".")
    if len(fraction) != 2:
        return _minus(sign) + _counted(amount, (one, many))
    parts = []
    if int(whole or "0") or not int(fraction):
        parts.append(_counted(whole or "0", (one, many)))
    if int(fraction):
        parts.append(_counted(str(int(fraction)), (cent, cents)))
    return _minus(sign) + " and ".join(parts)


def _money_behind(match: Match) -> str:
    return match[2] + match[1]


def _telephone(match: Match) -> str:
    groups = re.findall(r"[0-9]+", match[0])
    plus = "plus " if match[0].startswith("+") else ""
    return plus + ", ".join(number_words.digits(group) for group in groups)


def _version(match: Match) -> str:
    return " point ".join(spoken(part) for part in match[0].split("."))


def _measure(match: Match) -> str:
    sign, first, number, unit = match[1], match[2], match[3], match[4]
    start = f"{spoken(first)} to " if first else ""
    return _minus(sign) + start + _counted(number, UNITS[unit])


def _counted_unit(match: Match) -> str:
    return _counted(match[1], UNITS[match[2]])


def _compound_measure(match: Match) -> str:
    return f"{spoken(match[1])} {UNITS[match[2]][0]}"


def _fraction(match: Match) -> str:
    whole, above, below = match[1], int(match[2]), int(match[3])
    if (above, below) == (24, 7) and not whole:
        return "twenty four seven"
    if not 0 < above < below <= 20 or len(match[2] + match[3]) > 4:
        over = f"{spoken(match[2])} over {spoken(match[3])}"
        return f"{spoken(whole)} {over}" if whole else over
    one, many = FRACTION_PARTS.get(below, (ordinal(below), ordinal(below) + "s"))
    part = f"{cardinal(above)} {one if above == 1 else many}"
    return f"{spoken(whole)} and {part}" if whole else part


def _ordinal(match: Match) -> str:
    number = int(match[1].replace(",", ""))
    return ordinal(number) if number <= number_words.LARGEST else number_words.digits(match[1])


def _decade(match: Match) -> str:
    number = int(match[1] or match[2] or match[3])
    words = number_words.year(number) if number >= 1000 else cardinal(number)
    return number_words.plural(words)


def _range(match: Match) -> str:
    return f"{_plain(match[1])} to {_plain(match[2])}"


def _plain(number: str) -> str:
    is_year = len(number) == 4 and number.isdigit() and 1900 <= int(number) <= 2099
    return number_words.year(int(number)) if is_year else spoken(number)


def _roman(match: Match) -> str:
    number = 1 if match[2] == "I" else ROMAN_NUMERALS[match[2]]
    return f"{match[1]} {cardinal(number)}"


def _ruler(match: Match) -> str:
    return f"{match[1]} the {ordinal(ROMAN_NUMERALS[match[2]])}"


_FIGURE = rf"({_NUMBER})"
_NOT_INSIDE = r"(?<![0-9A-Za-z.])"
_SIGN = r"((?:(?<=\s)|(?<=^)|(?<=[(\"]))[-−])?"
_RANGE_DASH = r"\s?[-–—]\s?"

_RULES: tuple[Rule, ...] = (
    _rule(rf"\b({either(COUNTED_IN_ROMAN.split())}) (I|{either(ROMAN_NUMERALS)})\b", _roman),
    _rule(rf"\b({either(RULERS.split())}) ({either(ROMAN_NUMERALS)})\b", _ruler),
    # Dates.
    _rule(r"\b([0-9]{4})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(?:(T)(?=[0-9])|\b)", _iso_date),
    _rule(r"\b([0-9]{1,2})/([0-9]{1,2})/([12][0-9]{3})\b", _slash_date),
    _rule(rf"\b({_DAY})\.(1[0-2]|0?[1-9])\.([12][0-9]{{3}})\b", _dotted_date),
    _rule(
        rf"\b({_MONTH})\.? ({_DAY})(?:st|nd|rd|th)?(?:{_RANGE_DASH}({_DAY}))?\b(?![:%.]?[0-9])"
        rf"(?:,? ({_YEAR})\b)?",
        _month_first,
    ),
    _rule(
        rf"\b([Tt]he )?(?:({_DAY}){_RANGE_DASH})?({_DAY})(?:st|nd|rd|th)?(?: of)? "
        rf"({_MONTH})\b\.?(?:,? ({_YEAR})\b)?(?!\s?[0-9])",
        _day_first,
    ),
    _rule(
        rf"\b({_MONTH})\b\.?,? ({_YEAR})\b",
        lambda match: f"{_month(match[1])} {number_words.year(int(match[2]))}",
    ),
    # Times of day.
    _rule(
        rf"(?<=[0-9])({_MERIDIEM})?{_RANGE_DASH}(?=[0-9]{{1,2}}:[0-9]{{2}})",
        lambda m: f"{m[1] or ''} to ",
    ),
    _rule(rf"(?<=[0-9])\s?({_MERIDIEM}){_RANGE_DASH}(?=[0-9])", lambda m: f"{m[1]} to "),
    _rule(rf"(?<=:[0-9]{{2}}){_RANGE_DASH}(?=[0-9])", lambda match: " to "),
    _rule(
        rf"\b([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?(?:\s?({_MERIDIEM})(?![A-Za-z]))?"
        r"(?![0-9:])",
        _time,
    ),
    _rule(
        rf"\b(?:(1[0-2]|[1-9]){_RANGE_DASH})?(1[0-2]|0?[1-9])\s?({_MERIDIEM})(?![A-Za-z])", _hour
    ),
    _rule(r"\b([0-9]+):([0-9]+)\b", _range),
    # Money.
    _rule(
        rf"({either(CURRENCIES)}){_FIGURE}{_RANGE_DASH}\1?(?={_NUMBER})",
        lambda m: f"{spoken(m[2])} to {m[1]}",
    ),
    _rule(rf"{_NOT_INSIDE}{_FIGURE}\s?([€£¥₹])", _money_behind),
    _rule(
        rf"([-−])?(?:\b(?:US|A|C|CA|AU|NZ|HK))?({either(CURRENCIES)})\s?{_FIGURE}"
        rf"(?:\s?({_SCALE_WORDS})\b|({either(MAGNITUDES)})(?![A-Za-z]))?",
        _money,
    ),
    # Strings of digits that are not numbers.
    _rule(
        r"(?<![\w.])\+?(?:[0-9]{1,3}[ .-])?(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}\b",
        _telephone,
    ),
    _rule(r"(?<![\w.,-])[0-9]{3}-[0-9]{4}\b", _telephone),
    _rule(r"(?<![\w])\+[0-9]{1,3}(?:[ .-]?[0-9]{2,5}){2,5}\b", _telephone),
    _rule(r"\b[0-9]+(?:\.[0-9]+){2,}\b", _version),
    _rule(r"\b([12][0-9]{2}0)'?s\b|(?<=[Tt]he )([2-9]0)'?s\b|'([0-9]0)'?s\b", _decade),
    # Measures.
    _rule(
        rf"{_SIGN}(?<![0-9A-Za-z.,])(?:{_FIGURE}(?:\s?[-–—]\s?| to ))?{_FIGURE}\s?"
        rf"(?!in\b)({either(UNITS)})(?![A-Za-z/^])",
        _measure,
    ),
    _rule(rf"{_NOT_INSIDE}{_FIGURE}(?:-| ?)(in)(?:\.(?=\s[a-z])|(?=[.,;:!?)]|$))", _counted_unit),
    _rule(rf"{_NOT_INSIDE}{_FIGURE}-({either(UNITS)})(?![A-Za-z])", _compound_measure),
    _rule(rf"(?<=[a-z])\s?/\s?(?=(?:{_PER})\b)", lambda match: " per "),
    # Fractions, ordinals, decades.
    _rule(r"(?<![\w.,/])(?:([0-9]+)[ -])?([0-9]+)/([0-9]+)(?![\w/]|\.[0-9])", _fraction),
    _rule(r"\b([0-9]+(?:,[0-9]{3})*)(?:st|nd|rd|th)\b", _ordinal, re.IGNORECASE),
    _rule(r"(?:#|\b[Nn]o\. ?|№ ?)(?=[0-9])", lambda match: "number "),
    # Arithmetic and ranges.
    _rule(rf"(?<![\w.,-]){_FIGURE}[-–—]{_FIGURE}(?![\w-]|\.[0-9])", _range),
    _rule(r"(?<=[0-9])\s?–\s?(?=[0-9])", lambda match: " to "),
    _rule(r"(?<=[0-9])\s+[-−—]\s+(?=[0-9])|(?<=[0-9])−(?=[0-9])", lambda match: " minus "),
    _rule(r"(?<=[0-9])\s?\*\s?(?=[0-9])|(?<=[0-9]) x (?=[0-9])", lambda match: " times "),
    _rule(r"(?<=[0-9])x(?=[0-9])", lambda match: " by "),
    _rule(r"(?<=[0-9]) / (?=[0-9])", lambda match: " divided by "),
    _rule(r"\s?\^2(?![0-9])", lambda match: " squared"),
    _rule(r"\s?\^3(?![0-9])", lambda match: " cubed"),
    _rule(r"(?<=[0-9A-Za-z)])\s?\^\s?(?=[0-9])", lambda match: " to the power of "),
    _rule(r"(?<=[0-9A-Za-z])\s?<\s?(?=[0-9A-Za-z])", lambda match: " is less than "),
    _rule(r"(?<=[0-9A-Za-z])\s?>\s?(?=[0-9])", lambda match: " is greater than "),
    _rule(r"~\s?(?=[0-9])", lambda match: "about "),
    _rule(r"(?<![\w)])[-−](?=\.?[0-9])", lambda match: "minus "),
    # What is left: years, numbers beside letters, plain numbers.
    _rule(
        rf"\b({_YEAR_FOLLOWS})(\s+)({_YEAR})\b(?![,.]?[0-9])",
        lambda match: f"{match[1]}{match[2]}{number_words.year(int(match[3]))}",
        re.IGNORECASE,
    ),
    _rule(
        rf"{_NOT_INSIDE}((?:19|20)[0-9]{{2}})\b(?![,.]?[0-9]|\s+(?:{_SCALE_WORDS})\b)",
        lambda match: number_words.year(int(match[1])),
    ),
    _rule(r"(?<=[A-Za-z])-?(?=[0-9])|(?<=[0-9])-?(?=[A-Za-z])", lambda match: " "),
    _rule(_FIGURE, lambda match: f" {spoken(match[1])} "),
)
