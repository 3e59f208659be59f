"""Word error rate between a sentence and what was understood of it."""

from __future__ import annotations

import re

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: value for value, word in enumerate(_UNITS)} | {
    word: 10 * value for value, word in enumerate(_TENS, 2)
}
_SCALES = {"hundred": 100, "thousand": 1000}
_SPELLINGS = {"dr": "doctor", "mr": "mister", "colour": "color"}


def normalise(text: str) -> list[str]:
    """The words of `text`: lower case, numbers as digits whichever way they were written.

    A time is one number (7:45, 7.45 and 745 are the same spoken words), an amount of
    money is a number and its unit.
    """
    text = text.lower().replace("’", "'").replace("-", " ").replace("%", " percent ")
    text = re.sub(r"\$\s?([\d.,]*\d)", r"\1 dollars", text)
    text = re.sub(r"(?<=\d)[:.,](?=\d)", "", text)
    text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    words = re.findall(r"[a-z0-9']+", text)
    return _numbers_as_digits([_SPELLINGS.get(word, word) for word in words])


def _numbers_as_digits(words: list[str]) -> list[str]:
    result: list[str] = []
    value: int | None = None
    last = 0
    for word in words:
        number = _VALUES.get(word)
        if number is not None and value is not None and last >= 20 and number < last:
            value, last = value + number, number
        elif number is not None:
            if value is not None:
                result.append(str(value))
            value, last = number, number
        elif word in _SCALES and value is not None:
            value, last = value * _SCALES[word], _SCALES[word]
        else:
            if value is not None:
                result.append(str(value))
                value = None
            result.append(word)
    if value is not None:
        result.append(str(value))
    return result


def word_errors(reference: str, heard: str) -> tuple[int, int]:
    """Words wrong, missing or too many in `heard`, and the words of `reference`."""
    wanted, got = normalise(reference), normalise(heard)
    row = list(range(len(got) + 1))
    for i, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            change = diagonal + (word != other)
            diagonal = row[j]
            row[j] = min(change, row[j] + 1, row[j - 1] + 1)
    return row[-1], len(wanted)
