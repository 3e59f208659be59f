"""How English words are pronounced: dictionary, overrides, endings, letters.

A word is looked up in this order: the overrides below, CMUdict, CMUdict without
a regular ending, its parts when it is a compound of two dictionary words, and at
last the letter-to-sound network. Function words are spoken without stress.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from protocol.errors import ModelFileError
from workers.engines.codec import phonemes
from workers.engines.codec.letters import LetterReader
from workers.engines.codec.phonemes import ARPABET, Pronunciation, is_vowel, to_ipa

OVERRIDES: dict[str, Pronunciation] = {
    word: tuple(sounds.split())
    for word, sounds in {
        # The letters by name, as the normaliser writes spelled-out words.
        "ay": "EY1",
        "bee": "B IY1",
        "cee": "S IY1",
        "dee": "D IY1",
        "ee": "IY1",
        "eff": "EH1 F",
        "gee": "JH IY1",
        "aitch": "EY1 CH",
        "eye": "AY1",
        "jay": "JH EY1",
        "kay": "K EY1",
        "ell": "EH1 L",
        "em": "EH1 M",
        "en": "EH1 N",
        "oh": "OW1",
        "pee": "P IY1",
        "cue": "K Y UW1",
        "ar": "AA1 R",
        "ess": "EH1 S",
        "tee": "T IY1",
        "yu": "Y UW1",
        "vee": "V IY1",
        "doubleyu": "D AH1 B AH0 L Y UW0",
        "ex": "EH1 K S",
        "wye": "W AY1",
        "zee": "Z IY1",
        # Where the dictionary's first pronunciation is not the usual one.
        "antiphon": "AE1 N T AH0 F AA2 N",
        "close": "K L OW1 Z",
        "coupon": "K UW1 P AA2 N",
        "data": "D EY1 T AH0",
        "lead": "L IY1 D",
        "live": "L IH1 V",
        "lives": "L IH1 V Z",
        "online": "AO0 N L AY1 N",
        "polish": "P AA1 L IH0 SH",
        "read": "R IY1 D",
        "record": "R EH1 K ER0 D",
        "records": "R EH1 K ER0 D Z",
        "route": "R UW1 T",
        "tear": "T IH1 R",
        "thirty": "TH ER1 T IY0",
        "tears": "T IH1 R Z",
        "vinci": "V IH1 N CH IY0",
        "wind": "W IH1 N D",
        "winds": "W IH1 N D Z",
        "wound": "W UW1 N D",
        # Words younger than the dictionary.
        "app": "AE1 P",
        "blog": "B L AA1 G",
        "bluetooth": "B L UW1 T UW2 TH",
        "chatbot": "CH AE1 T B AA2 T",
        "covid": "K OW1 V IH0 D",
        "emoji": "IH0 M OW1 JH IY0",
        "gif": "G IH1 F",
        "gmail": "JH IY1 M EY2 L",
        "kyiv": "K IY1 V",
        "linux": "L IH1 N AH0 K S",
        "podcast": "P AA1 D K AE2 S T",
        "selfie": "S EH1 L F IY0",
        "smartphone": "S M AA1 R T F OW2 N",
        "vlog": "V L AA1 G",
        "youtube": "Y UW1 T UW2 B",
    }.items()
}

_AS_VERB: dict[str, Pronunciation] = {
    word: tuple(sounds.split())
    for word, sounds in {
        "contract": "K AH0 N T R AE1 K T",
        "object": "AH0 B JH EH1 K T",
        "permit": "P ER0 M IH1 T",
        "present": "P R IH0 Z EH1 N T",
        "produce": "P R AH0 D UW1 S",
        "project": "P R AH0 JH EH1 K T",
        "rebel": "R IH0 B EH1 L",
        "record": "R IH0 K AO1 R D",
        "reject": "R IH0 JH EH1 K T",
        "subject": "S AH0 B JH EH1 K T",
        "use": "Y UW1 Z",
    }.items()
}
"""Words that are stressed or voiced otherwise when they are verbs."""

_VERB_FOLLOWS = (
    "to will would can could shall should may might must do did not i you we they please lets "
    "let's don't didn't won't can't i'll you'll we'll they'll i'd you'd cannot"
)
_PARTICIPLE_FOLLOWS = "has have had was were been is are be i've you've we've they've he's"
_BEFORE_VERB = frozenset(_VERB_FOLLOWS.split())
_HAVE = frozenset(_PARTICIPLE_FOLLOWS.split())
_AFTER_HAVE = {"read": ("R", "EH1", "D"), "lead": ("L", "EH1", "D")}
_CLOSE_TO = ("K", "L", "OW1", "S")

_UNSTRESSED_IPA: dict[str, str] = {
    "a": "ɐ",
    "am": "æm",
    "an": "ɐn",
    "and": "ænd",
    "are": "ɑːɹ",
    "as": "æz",
    "at": "æt",
    "be": "biː",
    "but": "bʌt",
    "by": "baɪ",
    "can": "kæn",
    "could": "kʊd",
    "did": "dɪd",
    "do": "duː",
    "does": "dʌz",
    "for": "fɔːɹ",
    "from": "fɹʌm",
    "had": "hæd",
    "has": "hæz",
    "have": "hæv",
    "he": "hiː",
    "her": "hɜː",
    "his": "hɪz",
    "i": "aɪ",
    "if": "ɪf",
    "in": "ɪn",
    "into": "ɪntʊ",
    "is": "ɪz",
    "it": "ɪt",
    "its": "ɪts",
    "it's": "ɪts",
    "i'm": "aɪm",
    "me": "miː",
    "my": "maɪ",
    "of": "ʌv",
    "on": "ɔn",
    "or": "ɔːɹ",
    "our": "aʊɚ",
    "she": "ʃiː",
    "should": "ʃʊd",
    "than": "ðɐn",
    "that": "ðæt",
    "the": "ðə",
    "their": "ðɛɹ",
    "them": "ðɛm",
    "they": "ðeɪ",
    "to": "tə",
    "was": "wʌz",
    "we": "wiː",
    "were": "wɜː",
    "will": "wɪl",
    "with": "wɪð",
    "would": "wʊd",
    "you": "juː",
    "your": "jʊɹ",
    "you're": "jʊɹ",
}
_BEFORE_VOWEL_IPA = {"the": "ðɪ", "to": "tʊ", "for": "fɚɹ", "or": "ɔːɹ", "your": "jʊɹ"}
_WEAK_BEFORE_WORDS_ONLY = (
    "am are be but by can could did do does for from had has have he her his in into is it me of "
    "on our she should than that them they to was we were will with would you your"
)
_STRESSED_AT_END = frozenset(_WEAK_BEFORE_WORDS_ONLY.split())

_SHORTEST_PART = 4
_SHORTEST_STEM = 2
_LONGEST_SPELLED = 3
_REMEMBERED_WORDS = 4096


def read_dictionary(path: Path) -> dict[str, str]:
    """The first pronunciation of every word of a CMUdict file, as one string each.

    Raises ModelFileError when the file cannot be read or has no pronunciations with stress.
    """
    words: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                word, _, sounds = line.partition("#")[0].strip().partition(" ")
                if sounds and not word.endswith(")"):
                    words[word] = sounds.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot read the dictionary ({error})") from error
    if not ARPABET.issuperset(words.get("hello", "?").split()):
        raise ModelFileError(f"{path}: not a CMUdict file with stress marks")
    return words


class Lexicon:
    """The pronunciations of English words."""

    def __init__(self, dictionary: dict[str, str], read_letters: LetterReader) -> None:
        self._dictionary = dictionary
        self._read_letters = read_letters.pronounce
        self._cached: Callable[[str], Pronunciation] = functools.lru_cache(_REMEMBERED_WORDS)(
            self._find
        )

    def knows(self, word: str) -> bool:
        """Whether a lower-case word is in the dictionary or the overrides as it is."""
        return word in OVERRIDES or word in self._dictionary

    def pronounce(self, word: str) -> Pronunciation:
        """The sounds of one lower-case word (a to z and apostrophes); empty for no letters."""
        return self._cached(word)

    def phrase(self, words: Sequence[str]) -> list[str]:
        """The IPA of each word of a phrase, as it is spoken beside its neighbours."""
        spoken: list[str] = []
        following = ""
        for index in range(len(words) - 1, -1, -1):
            word = words[index]
            before = words[index - 1] if index else ""
            after = words[index + 1] if index + 1 < len(words) else ""
            ipa = self._in_context(word, before, after, following)
            if ipa:
                spoken.append(ipa)
                following = ipa
        spoken.reverse()
        return spoken

    def _in_context(self, word: str, before: str, after: str, following: str) -> str:
        weak = _UNSTRESSED_IPA.get(word)
        if weak is not None and (after or word not in _STRESSED_AT_END):
            if following.lstrip("ˈˌ")[:1] in _VOWEL_LETTERS:
                weak = _BEFORE_VOWEL_IPA.get(word, weak)
            return weak
        sounds: Pronunciation | None = None
        if word in _AS_VERB and before in _BEFORE_VERB:
            sounds = _AS_VERB[word]
        elif word in _AFTER_HAVE and before in _HAVE:
            sounds = _AFTER_HAVE[word]
        elif word == "close" and (after == "to" or before in ("very", "so", "too", "is")):
            sounds = _CLOSE_TO
        return to_ipa(sounds if sounds is not None else self.pronounce(word))

    def _find(self, word: str) -> Pronunciation:
        known = self._known(word)
        if known is not None:
            return known
        for stem in _stems_of_plural(word):
            known = self._known(stem)
            if known is not None:
                return phonemes.with_plural(known)
        for ending, attach in (
            ("ed", phonemes.with_past),
            ("ing", lambda stem: (*stem, "IH0", "NG")),
            ("er", lambda stem: (*stem, "ER0")),
            ("ers", lambda stem: (*stem, "ER0", "Z")),
            ("est", lambda stem: (*stem, "IH0", "S", "T")),
            ("ly", lambda stem: (*stem, "L", "IY0")),
            ("ness", lambda stem: (*stem, "N", "AH0", "S")),
            ("less", lambda stem: (*stem, "L", "AH0", "S")),
            ("ish", lambda stem: (*stem, "IH0", "SH")),
        ):
            if word.endswith(ending):
                for stem in _stems(word[: -len(ending)], vowel_ending=ending[0] in "ei"):
                    known = self._known(stem)
                    if known is not None:
                        return attach(known)
        compound = self._compound(word)
        if compound is not None:
            return compound
        letters = "".join(letter for letter in word if "a" <= letter <= "z")
        if not letters:
            return ()
        if not set(letters) & set("aeiou" if len(letters) <= _LONGEST_SPELLED else "aeiouy"):
            return tuple(sound for letter in letters for sound in OVERRIDES[LETTER_NAMES[letter]])
        if letters.endswith("s") and word.endswith("'s"):
            return phonemes.with_plural(self._find(letters[:-1]))
        return self._read_letters(letters)

    def _known(self, word: str) -> Pronunciation | None:
        if word in OVERRIDES:
            return OVERRIDES[word]
        sounds = self._dictionary.get(word)
        return tuple(sounds.split()) if sounds is not None else None

    def _compound(self, word: str) -> Pronunciation | None:
        """Two dictionary words in one, the longest first part winning; its stress leads."""
        for cut in range(len(word) - _SHORTEST_PART, _SHORTEST_PART - 1, -1):
            first, second = self._known(word[:cut]), self._known(word[cut:])
            if first is not None and second is not None and _has_stress(first):
                return first + tuple(sound.replace("1", "2") for sound in second)
        return None


_NAMES_OF_A_TO_Z = (
    "ay bee cee dee ee eff gee aitch eye jay kay ell em en oh pee cue ar ess tee yu vee "
    "doubleyu ex wye zee"
)
LETTER_NAMES = dict(zip("abcdefghijklmnopqrstuvwxyz", _NAMES_OF_A_TO_Z.split(), strict=True))
"""What a letter is called, in the spelling that `OVERRIDES` pronounces."""

_VOWEL_LETTERS = frozenset("aæɐɑeɛɜəɚiɪᵻoɔuʊʌ")


def _has_stress(sounds: Pronunciation) -> bool:
    return any(is_vowel(sound) and sound[-1] == "1" for sound in sounds)


def _stems_of_plural(word: str) -> Iterator[str]:
    for ending in ("'s", "s'"):
        if word.endswith(ending):
            yield word[:-2]
    if word.endswith("ies"):
        yield word[:-3] + "y"
    if word.endswith("es"):
        yield word[:-2]
    if word.endswith("s") and not word.endswith("ss"):
        yield word[:-1]


def _stems(rest: str, *, vowel_ending: bool) -> Iterator[str]:
    """What a word may have been before an ending: plain, with its e, y for i, undoubled."""
    if len(rest) < _SHORTEST_STEM:
        return
    yield rest
    if rest.endswith("i"):
        yield rest[:-1] + "y"
    if vowel_ending:
        yield rest + "e"
        if rest[-1] == rest[-2]:
            yield rest[:-1]
