"""Spoken questions are heard and answered, and what is said is what is written."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import pytest

from tests.deployment import Deployment
from tests.end_to_end.conversation import (
    SPEECH,
    audio_of,
    conversation,
    listening,
    loudness,
    speech,
    spoken_ms,
    transcript_of,
)
from tests.word_errors import word_errors

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Answer:
    """One spoken question, and what came back."""

    question: str
    keywords: list[str]
    heard: str
    written: str
    audio: bytes

    @property
    def accepted(self) -> bool:
        """Whether one of the keywords is in the answer."""
        return any(keyword.lower() in self.written.lower() for keyword in self.keywords)


async def asked(voice: Deployment, text: str, file: str, keywords: list[str]) -> Answer:
    """Ask the question of that file in a session of its own."""
    async with conversation(voice.ws_url, **listening()) as talker:
        await talker.say(speech(file))
        reply = await talker.reply()
        assert reply[-1]["response"]["status"] == "completed"
        (heard,) = talker.of("conversation.item.input_audio_transcription.completed")
        return Answer(text, keywords, heard["transcript"], transcript_of(reply), audio_of(reply))


async def test_eight_spoken_questions_are_answered(voice: Deployment) -> None:
    answers = [
        await asked(voice, entry["text"], entry["file"], entry["keywords"])
        for entry in json.loads((SPEECH / "questions.json").read_text())
    ]
    for answer in answers:
        print(f"{answer.accepted}: {answer.heard} -> {answer.written}")
        assert loudness(answer.audio) > 0.01
        assert spoken_ms(answer.audio) > 300
    assert len(answers) == 8
    assert sum(answer.accepted for answer in answers) >= 5
    counts = [word_errors(answer.question, answer.heard) for answer in answers]
    assert sum(wrong for wrong, _ in counts) / sum(total for _, total in counts) < 0.05
    await _what_is_said_is_what_is_written(voice, answers)


async def _what_is_said_is_what_is_written(voice: Deployment, answers: list[Answer]) -> None:
    """The product hears its own answers again: no audio is lost, doubled or another session's.

    How well the voice is understood is judged where it says ten longer replies; these are
    a few words each, where one word misheard is a third of the sentence.
    """
    errors = words = 0
    async with conversation(voice.ws_url, **listening()) as talker:
        for answer in answers:
            audio = base64.b64encode(answer.audio).decode()
            item = {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_audio", "audio": audio}],
            }
            await talker.send("conversation.item.create", item=item)
            heard = await talker.until("conversation.item.input_audio_transcription.completed")
            wrong, total = word_errors(answer.written, heard["transcript"])
            print(f"{wrong} of {total} words: {answer.written} -> {heard['transcript']}")
            errors, words = errors + wrong, words + total
    assert errors / words < 0.35
