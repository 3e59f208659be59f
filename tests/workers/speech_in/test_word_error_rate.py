"""How well the committed sentences are understood through the whole engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.word_errors import word_errors
from tests.workers.speech_in.listener import (
    Listener,
    Sentence,
    questions,
    read_wav,
    sentences,
    silence,
)
from workers.engines.speech_in import SpeechInEngine

pytestmark = pytest.mark.slow


async def error_rate(engine: SpeechInEngine, chosen: list[Sentence]) -> float:
    """Word errors by words over sentences, each spoken into a session of its own."""
    errors = words = 0
    for sentence in chosen:
        listener = Listener(engine)
        await listener.feed(np.concatenate([silence(500), read_wav(sentence.file), silence(1200)]))
        assert len(listener.named("speech_stopped")) == 1, sentence.file
        text, _ = await listener.run_last_turn()
        wrong, total = word_errors(sentence.text, text)
        print(f"{sentence.file}: {wrong} of {total} words wrong: {text}")
        errors += wrong
        words += total
        listener.session.close()
    print(f"word error rate {errors / words:.1%} of {words} words")
    return errors / words


async def test_clean_sentences(engine: SpeechInEngine) -> None:
    clean = [s for s in sentences() if s.judged and s.condition == "clean"]
    assert len({s.synthesiser for s in clean}) > 1
    assert any(s.channels == 2 and s.rate_hz == 48_000 for s in clean)
    assert await error_rate(engine, clean) < 0.05


async def test_noisy_sentences(engine: SpeechInEngine) -> None:
    noisy = [s for s in sentences() if s.judged and s.condition != "clean"]
    assert {s.condition for s in noisy} == {"babble", "pink"}
    assert await error_rate(engine, noisy) < 0.15


async def test_spoken_questions(engine: SpeechInEngine) -> None:
    assert len(questions()) == 8
    assert await error_rate(engine, questions()) < 0.05


async def test_the_robotic_voice_is_heard_as_turns(engine: SpeechInEngine) -> None:
    robotic = [s for s in sentences() if not s.judged]
    assert len(robotic) == 2
    await error_rate(engine, robotic)
