from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.engines.codec.lexicon import Lexicon
from workers.engines.codec.normalise import normalise

SPOKEN = {
    # Numbers.
    "I have 3 cats.": "i have three cats.",
    "1,234,567": "one million two hundred thirty four thousand five hundred sixty seven",
    "3.14": "three point one four",
    ".5": "zero point five",
    "It is -7 outside": "it is minus seven outside",
    "007": "zero zero seven",
    "1st, 2nd, 23rd and 100th": "first, second, twenty third and one hundredth",
    "pages 10-15": "pages ten to fifteen",
    "10–12 people": "ten to twelve people",
    "45%": "forty five percent",
    "1/2 a cup and 3 3/4 miles": "one half a cup and three and three quarters miles",
    "½ of it, ⅔ of that": "one half of it, two thirds of that",
    "open 24/7": "open twenty four seven",
    "a 3:1 ratio": "a three to one ratio",
    "number #5 and No. 7": "number number five and number seven",
    "version 1.2.3": "version one point two point three",
    "99999999999999999999": " ".join(["nine"] * 20),
    "٣ and ３": "three and three",
    # Money.
    "$5.20": "five dollars and twenty cents",
    "$1, $0.99 or €1": "one dollar, ninety nine cents or one euro",
    "£1,200 and 20€": "one thousand two hundred pounds and twenty euros",
    "$3.5 million, $5k, $3bn": "three point five million dollars, five thousand dollars, "
    "three billion dollars",
    "$5-10": "five to ten dollars",
    "-$4.01": "minus four dollars and one cent",
    "$10/month": "ten dollars per month",
    # Times of day.
    "at 3:45 pm": "at three forty five pee em",
    "at 14:05": "at fourteen oh five",
    "at 9:00": "at nine o'clock",
    "at 17:00": "at seventeen hundred",
    "at 00:00": "at midnight",
    "at 5 p.m. Then": "at five pee em. then",
    "at 5 p.m. on Monday": "at five pee em on monday",
    "9am-5pm": "nine ay em to five pee em",
    "10:15:30": "ten fifteen and thirty seconds",
    # Dates and years.
    "March 3rd, 2024": "march third, twenty twenty four",
    "Mar. 3": "march third",
    "4 July 1776": "the fourth of july, seventeen seventy six",
    "10–12 May": "the tenth to twelfth of may",
    "2024-03-15": "march fifteenth, twenty twenty four",
    "3/15/2024": "march fifteenth, twenty twenty four",
    "15.03.2024": "march fifteenth, twenty twenty four",
    "2024-03-15T14:05": "march fifteenth, twenty twenty four at fourteen oh five",
    "in 1984, 2005 and 2010": "in nineteen eighty four, two thousand five and twenty ten",
    "the 1990s and the '60s": "the nineteen nineties and the sixties",
    "Sept. 2021": "september twenty twenty one",
    # Telephone.
    "Call 555-1234": "call five five five, one two three four",
    "+1 (555) 123-4567": "plus one, five five five, one two three, four five six seven",
    # Measures.
    "5 km, 1 kg and 10 km/h": "five kilometers, one kilogram and ten kilometers per hour",
    "-5°C or 72°F": "minus five degrees celsius or seventy two degrees fahrenheit",
    "turn 90°": "turn ninety degrees",
    "a 5-km run": "a five kilometer run",
    "6 in. tall": "six inches tall",
    "5 in the box": "five in the box",
    "12 m²": "twelve square meters",
    "8GB of memory": "eight gigabytes of memory",
    "1500 meters": "one thousand five hundred meters",
    # Abbreviations.
    "Dr. Smith and Mrs Jones": "doctor smith and missus jones",
    "St. Louis": "saint louis",
    "12 Main St. is near": "twelve main street is near",
    "e.g. this, i.e. that, etc.": "for example this, that is that, et cetera.",
    "apples vs. pears": "apples versus pears",
    "approx. 5": "approximately five",
    "Acme Inc. sells": "acme incorporated sells",
    # Capitals.
    "the FBI's VPNs": "the fbi's vee pee en's",
    "the UK and the US": "the yu kay and the yu ess",
    "Stop it NOW": "stop it now",
    "the U.S. army": "the yu ess army",
    "J. K. Rowling": "jay kay rowling",
    "Plan B. A plan.": "plan bee. a plan.",
    "World War II and Henry VIII": "world war two and henry the eighth",
    "H2O and MP3": "aitch two oh and em pee three",
    # Symbols, links, markup.
    "salt & pepper": "salt and pepper",
    "2 + 2 = 4": "two plus two equals four",
    "10 - 3, 3 x 4, 6 / 2": "ten minus three, three times four, six divided by two",
    "1920x1080": "nineteen twenty by one thousand eighty",
    "x^2": "ex squared",
    "https://www.example.com/path?q=1": "example dot com slash path",
    "bob.smith@example.co.uk": "bob dot smith at example dot cee oh dot yu kay",
    "see [the page](http://x.y/z).": "see the page.",
    "**Bold**, _soft_ and `code`": "bold, soft and code",
    "- one\n- two": "one. two",
    "# Title\nText": "title. text",
    "Yes! 😀👍🏽": "yes!",
    "naïve café, Zoë": "naive cafe, zoe",
    "“It’s fine”": "it's fine",
    "well-known": "well known",
    "Wi-Fi and e-mail": "wifi and email",
    "yes — no (maybe)": "yes, no, maybe,",
    "Really?! Oh...": "really? oh.",
    "and/or": "and or",
    "rock 'n' roll": "rock n roll",
    "<b>bold</b>": "bold",
}


@pytest.mark.parametrize("written", SPOKEN)
def test_written_text_is_spoken_as_words(written: str, lexicon: Lexicon) -> None:
    assert normalise(written, lexicon.knows) == SPOKEN[written]


@pytest.mark.parametrize(
    "written", ["", " \n", "...", "😀", "Привет 你好", "***", "(—)", "\x00\ud800"]
)
def test_what_cannot_be_spoken_leaves_nothing(written: str, lexicon: Lexicon) -> None:
    assert normalise(written, lexicon.knows) == ""


FRAGMENTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(list(SPOKEN)),
        st.integers(-(10**25), 10**25).map(str),
        st.floats().map(str),
        st.sampled_from(["$", "€", "-", "–", "/", ":", ".", ",", " ", "\n", "°C", "%", "am", "'s"]),
    ),
    max_size=8,
).map("".join)


@given(FRAGMENTS)
@example("| 5 |")
def test_any_text_becomes_plain_words_and_marks(lexicon: Lexicon, written: str) -> None:
    spoken = normalise(written, lexicon.knows)
    assert re.fullmatch(r"([a-z][a-z']*[,;:.!?]?)?( [a-z][a-z']*[,;:.!?]?)*", spoken)


@pytest.mark.parametrize(
    "piece",
    [
        "1-",
        "1,",
        "(",
        "a.",
        "1/",
        "A.",
        "1:2",
        "$1-",
        "<a",
        "_ ",
        "*",
        "[a](",
        "Mr. ",
        "1 ",
        "a",
        "[",
        "\n",
        "- ",
    ],
)
def test_a_long_run_of_one_pattern_ends_the_same_way(piece: str, lexicon: Lexicon) -> None:
    spoken = normalise(piece * (16_000 // len(piece)), lexicon.knows)
    assert not re.search(r"[^a-z',;:.!? ]", spoken)
