"""Replies spoken by the default voice and written down again by the default transcriber."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
import soxr

from protocol.payloads import Payload, text_payload
from workers.engine import Turn
from workers.engines.codec import CodecEngine, CodecOptions
from workers.engines.codec.lexicon import Lexicon
from workers.engines.codec.normalise import MARKS, normalise
from workers.engines.speech_in.transcriber import WhisperTranscriber
from workers.models import locate

# What is written, and the words that have to be heard. Both were fixed before the first run.
REPLIES = {
    "Your flight to Denver leaves at 6:40 am from gate 12.": (
        "your flight to denver leaves at six forty am from gate twelve"
    ),
    "I added milk, bread and 3 apples to your shopping list.": (
        "i added milk bread and three apples to your shopping list"
    ),
    "Dr. Martinez can see you on Thursday, June 5th at 2:15 pm.": (
        "doctor martinez can see you on thursday june fifth at two fifteen pm"
    ),
    "It will rain this afternoon, with a low of 48°F tonight.": (
        "it will rain this afternoon with a low of forty eight degrees fahrenheit tonight"
    ),
    "The song was written by Paul McCartney in 1965.": (
        "the song was written by paul mccartney in nineteen sixty five"
    ),
    "You have 2 new messages, one from Emily and one from your brother.": (
        "you have two new messages one from emily and one from your brother"
    ),
    "That would cost $18.50, including tax.": (
        "that would cost eighteen dollars and fifty cents including tax"
    ),
    "Sure, I can turn off the kitchen lights and lock the front door.": (
        "sure i can turn off the kitchen lights and lock the front door"
    ),
    "Mount Everest is 8,849 meters high, which is about 29,000 feet.": (
        "mount everest is eight thousand eight hundred forty nine meters high "
        "which is about twenty nine thousand feet"
    ),
    "I'm sorry, I don't know the answer, but I can search the web for you.": (
        "i'm sorry i don't know the answer but i can search the web for you"
    ),
}


def words_heard(transcript: str, lexicon: Lexicon) -> list[str]:
    """The words of a transcript; the figures that a transcriber writes become words again.

    It writes times of day with a point: "6.40 am".
    """
    timed = re.sub(r"(?<=[0-9])\.(?=[0-9]{2} ?[ap]\.?m)", ":", transcript)
    words = normalise(timed, lexicon.knows).translate(str.maketrans("", "", MARKS))
    return words.replace("ay em", "am").replace("pee em", "pm").split()


def edits(wanted: list[str], heard: list[str]) -> int:
    """The fewest insertions, deletions and substitutions between two word lists."""
    row = list(range(len(heard) + 1))
    for index, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], index
        for column, other in enumerate(heard, 1):
            best = min(diagonal + (word != other), row[column] + 1, row[column - 1] + 1)
            diagonal, row[column] = row[column], best
    return row[-1]


def test_edits_are_counted() -> None:
    assert edits("a b c".split(), "a x c d".split()) == 2
    assert edits("a b c".split(), []) == 3


@pytest.mark.slow
async def test_ten_replies_are_understood_again(lexicon: Lexicon) -> None:
    engine = CodecEngine.create(CodecOptions())
    await engine.load()
    transcriber = WhisperTranscriber(locate("whisper-base"), 1)
    wrong = total = 0
    misheard = []
    for reply, wanted in REPLIES.items():
        pcm = await say(engine, reply)
        samples = soxr.resample(np.frombuffer(pcm, "<i2"), 24_000, 16_000)
        heard = words_heard(
            await asyncio.to_thread(transcriber.transcribe, samples, "en", threading.Event()),
            lexicon,
        )
        errors = edits(wanted.split(), heard)
        wrong, total = wrong + errors, total + len(wanted.split())
        if errors:
            misheard.append((wanted, " ".join(heard)))
    await engine.shutdown()
    print(f"word error rate {wrong / total:.3f}: {wrong} of {total} words", *misheard, sep="\n")
    assert wrong / total < 0.10, misheard


async def say(engine: CodecEngine, text: str) -> bytes:
    pieces: list[bytes] = []

    async def inputs() -> AsyncIterator[Payload]:
        yield text_payload(text, clause=0)

    def emit(payload: Payload) -> None:
        pieces.append(payload.data)

    session = engine.open("session", {}, lambda name, arguments: None)
    await session.run(Turn(1, "default", {}, inputs(), emit))
    session.close()
    return b"".join(pieces)
