"""Numbers as English words, in lower case and without hyphens."""

from __future__ import annotations

_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_SMALL = _BELOW_TWENTY.split()
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
LARGEST = 10 ** (3 * len(_SCALES)) - 1
"""The largest number that has a name here; longer ones are read digit by digit."""


def cardinal(number: int) -> str:
    """205 -> "two hundred five".

    Raises ValueError below 0 or above `LARGEST`.
    """
    if not 0 <= number <= LARGEST:
        raise ValueError(f"no name for {number}")
    if number == 0:
        return _SMALL[0]
    words: list[str] = []
    for scale in range(len(_SCALES) - 1, -1, -1):
        group = number // 1000**scale % 1000
        if group:
            words.append(_below_thousand(group))
            if scale:
                words.append(_SCALES[scale])
    return " ".join(words)


def ordinal(number: int) -> str:
    """21 -> "twenty first". Raises ValueError as `cardinal` does."""
    *head, last = cardinal(number).split()
    if last in _ORDINALS:
        last = _ORDINALS[last]
    elif last.endswith("y"):
        last = last[:-1] + "ieth"
    else:
        last += "th"
    return " ".join((*head, last))


def digits(text: str) -> str:
    """Every digit of `text` by its name, everything else left out: "0-42" -> "zero four two"."""
    return " ".join(_SMALL[int(digit)] for digit in text if digit in "0123456789")


def year(number: int) -> str:
    """A year as it is said: 1984 -> "nineteen eighty four", 2005 -> "two thousand five".

    Numbers that are not said in pairs (below 1000, from 10000) are cardinals.
    """
    century, rest = divmod(number, 100)
    if not 1000 <= number <= 9999 or number % 1000 < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def plural(words: str) -> str:
    """The plural of the last number word: "nineteen ninety" -> "nineteen nineties"."""
    if words.endswith("y"):
        return words[:-1] + "ies"
    return words + ("es" if words.endswith("x") else "s")


def spoken(text: str) -> str:
    """A written number: "1,234.50" -> "one thousand two hundred thirty four point five zero".

    `text` is ASCII digits with optional thousands commas and one decimal point.
    Leading zeros, and numbers too large to have a name, are read digit by digit.
    """
    whole, point, fraction = text.replace(",", "").partition(".")
    if not whole:
        words = "zero"
    elif (len(whole) > 1 and whole[0] == "0") or len(whole) > 3 * len(_SCALES):
        words = digits(whole)
    else:
        words = cardinal(int(whole))
    return f"{words} point {digits(fraction)}" if point and fraction else words


def _below_thousand(number: int) -> str:
    words: list[str] = []
    hundreds, rest = divmod(number, 100)
    if hundreds:
        words += [_SMALL[hundreds], "hundred"]
    if rest >= 20:
        words.append(_TENS[rest // 10])
        rest %= 10
    if rest:
        words.append(_SMALL[rest])
    return " ".join(words)
