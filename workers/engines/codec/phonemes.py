"""ARPAbet pronunciations as the IPA that espeak-trained English voices read.

The voices were trained on the American English phonemes of espeak: a stress
mark stands directly before its vowel, long vowels carry a length mark, `t`
between vowels is a tap, and unstressed endings have vowels of their own.
"""

from __future__ import annotations

Pronunciation = tuple[str, ...]
"""ARPAbet symbols; vowels end in their stress, 0 (none), 1 (primary) or 2 (secondary)."""

_CONSONANTS = {
    "B": "b",
    "CH": "tʃ",
    "D": "d",
    "DH": "ð",
    "F": "f",
    "G": "ɡ",
    "HH": "h",
    "JH": "dʒ",
    "K": "k",
    "L": "l",
    "M": "m",
    "N": "n",
    "NG": "ŋ",
    "P": "p",
    "R": "ɹ",
    "S": "s",
    "SH": "ʃ",
    "T": "t",
    "TH": "θ",
    "V": "v",
    "W": "w",
    "Y": "j",
    "Z": "z",
    "ZH": "ʒ",
}
_VOWELS = {
    "AA": "ɑː",
    "AE": "æ",
    "AH": "ʌ",
    "AO": "ɔː",
    "AW": "aʊ",
    "AY": "aɪ",
    "EH": "ɛ",
    "ER": "ɜː",
    "EY": "eɪ",
    "IH": "ɪ",
    "IY": "iː",
    "OW": "oʊ",
    "OY": "ɔɪ",
    "UH": "ʊ",
    "UW": "uː",
}
_UNSTRESSED = {"AH": "ə", "ER": "ɚ", "IY": "i"}
_STRESS_MARKS = {"0": "", "1": "ˈ", "2": "ˌ"}
_SIBILANTS = frozenset({"S", "Z", "SH", "ZH", "CH", "JH"})
_BEFORE_REDUCED_ENDING = _SIBILANTS | {"T", "D"}
_VOICELESS = frozenset({"P", "T", "K", "F", "TH", "S", "SH", "CH"})

ARPABET = frozenset(_CONSONANTS) | {vowel + stress for vowel in _VOWELS for stress in "012"}
"""Every symbol that a pronunciation may hold."""


def is_vowel(symbol: str) -> bool:
    """Whether an ARPAbet symbol is a vowel, with or without its stress digit."""
    return symbol.rstrip("012") in _VOWELS


def to_ipa(pronunciation: Pronunciation) -> str:
    """The IPA of one word, one character a voice symbol.

    Raises KeyError for a symbol outside `ARPABET`.
    """
    pieces: list[str] = []
    index = 0
    while index < len(pronunciation):
        before = pronunciation[index - 1] if index else ""
        symbol, after, *beyond = (*pronunciation[index : index + 4], "")[:4]
        index += 1
        if symbol[-1] in _STRESS_MARKS:
            is_last = index + 1 >= len(pronunciation)
            pieces.append(_vowel(symbol, before, after, is_last))
        elif symbol == "T" and _is_tapped(before, after):
            if after == "AH0" and beyond[:1] == ["N"] and not is_vowel("".join(beyond[1:])):
                # "button": its last vowel gives way to a syllabic n behind a glottal stop.
                pieces.append("ʔn̩")
                index += 2
            else:
                pieces.append("ɾ")
        else:
            pieces.append(_CONSONANTS[symbol])
    return "".join(pieces)


def unstressed(ipa: str) -> str:
    """`ipa` without its stress marks, as function words are spoken."""
    return ipa.replace("ˈ", "").replace("ˌ", "")


def with_plural(stem: Pronunciation) -> Pronunciation:
    """`stem` with the ending written -s, -es or -'s."""
    if stem[-1] in _SIBILANTS:
        return (*stem, "IH0", "Z")
    return (*stem, "S" if stem[-1] in _VOICELESS else "Z")


def with_past(stem: Pronunciation) -> Pronunciation:
    """`stem` with the ending written -d or -ed."""
    if stem[-1] in ("T", "D"):
        return (*stem, "IH0", "D")
    return (*stem, "T" if stem[-1] in _VOICELESS else "D")


def _vowel(symbol: str, before: str, after: str, is_last: bool) -> str:
    """`is_last`: at most one consonant follows."""
    vowel, stress = symbol[:-1], symbol[-1]
    if stress == "0" or (vowel == "IY" and stress == "2" and not after):
        ipa = _UNSTRESSED.get(vowel, _VOWELS[vowel])
        if vowel == "AH" and not before:
            ipa = "ʌ" if after == "N" else "ɐ"
        elif is_last and after in ("Z", "D") and before in _BEFORE_REDUCED_ENDING:
            ipa = "ᵻ" if vowel in ("AH", "IH") else ipa
    else:
        ipa = _STRESS_MARKS[stress] + _VOWELS[vowel]
    if vowel == "AO" and after == "R" and is_last:
        ipa = ipa.replace("ɔ", "o")
    elif vowel == "AO" and after in ("F", "S", "TH", "NG"):
        ipa = ipa.replace("ː", "")
    elif vowel == "ER" and is_vowel(after):
        ipa += "ɹ"
    return ipa


def _is_tapped(before: str, after: str) -> bool:
    """American `t` between vowels (or after r) and before an unstressed vowel is a tap."""
    follows_vowel = is_vowel(before) or before == "R"
    return follows_vowel and after[-1:] == "0"
