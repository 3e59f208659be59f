"""Scenarios that the official client plays against a running gateway.

    .venv-client/bin/python tests/official_client/scenarios.py \\
        --url http://127.0.0.1:8080 --speech one.wav two.wav [NAME ...]

Speech files are 24 kHz mono WAVs, each with the words that must be heard, as
`FILE=word,word`. Prints a line a scenario; the exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from talker import (
    RATE_HZ,
    Event,
    Talker,
    audio_of,
    check,
    in_order,
    read_speech,
    talking,
)

OVERSIZE_BYTES = 16 * 1024 * 1024

# A slow voice makes even a short answer longer than what is sent ahead of its play-out,
# so that a cancel finds something to stop.
SLOW = {"audio": {"output": {"speed": 0.25}}}
BY_VOICE = {"output_modalities": ["audio"]}
BY_TEXT = {"output_modalities": ["text"]}

QUESTION = "What is the capital of France?"

SPOKEN_REPLY = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


@dataclass(frozen=True)
class Speech:
    """Something to say, and words that must be heard in it."""

    pcm: bytes
    words: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """What scenarios are played on."""

    url: str
    key: str
    speeches: list[Speech]


def heard(words: tuple[str, ...], transcript: str) -> bool:
    """Whether any of `words` is in the transcript."""
    return any(word.lower() in transcript.lower() for word in words)


def assistant_item(events: list[Event]) -> Event:
    """The output item of a response's events."""
    (event,) = [event for event in events if event["type"] == "response.output_item.done"]
    item: Event = event["item"]
    return item


def listening() -> dict[str, object]:
    """Session settings of a spoken conversation with transcripts."""
    return {
        "audio": {
            "input": {
                "transcription": {"model": "whisper-1"},
                "turn_detection": {"type": "server_vad"},
            }
        }
    }


async def spoken_turn(stage: Stage) -> None:
    """The user speaks and is answered by voice, without another word of the client."""
    speech = stage.speeches[0]
    async with talking(stage.url, stage.key, **listening()) as talker:
        await talker.say(speech.pcm)
        reply = await talker.whole_response()
        in_order(
            talker.events,
            [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                *SPOKEN_REPLY,
            ],
        )
        done = reply[-1]["response"]
        check(done["status"] == "completed", f"status {done['status']}: {done['status_details']}")
        check(done["usage"]["output_tokens"] > 0, "no tokens were counted")
        check(len(audio_of(reply)) > RATE_HZ // 2, "less than a quarter of a second of audio")
        (transcript,) = assistant_item(reply)["content"]
        check(transcript["transcript"].strip(), "the answer has no words")
        spoken = "".join(
            event["delta"]
            for event in reply
            if event["type"] == "response.output_audio_transcript.delta"
        )
        check(spoken == transcript["transcript"], "the deltas are not the transcript")
        (completed,) = [
            event
            for event in talker.events
            if event["type"] == "conversation.item.input_audio_transcription.completed"
        ]
        check(heard(speech.words, completed["transcript"]), f"heard {completed['transcript']!r}")


async def text_turn(stage: Stage) -> None:
    """A question and an answer in text."""
    async with talking(stage.url, stage.key, **BY_TEXT) as talker:
        item = await talker.write(QUESTION)
        reply = await talker.response(metadata={"topic": "geography"})
        in_order(
            reply,
            [
                "response.created",
                "response.output_item.added",
                "conversation.item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "conversation.item.done",
                "response.done",
            ],
        )
        check(audio_of(reply) == b"", "audio in a text turn")
        done = reply[-1]["response"]
        check(done["metadata"] == {"topic": "geography"}, "the metadata is not echoed")
        check(done["status"] == "completed", f"status {done['status']}")
        text = "".join(
            event["delta"] for event in reply if event["type"] == "response.output_text.delta"
        )
        check(text.strip(), "the answer has no words")
        check(assistant_item(reply)["content"][0]["text"] == text, "the deltas are not the text")
        added = next(event for event in reply if event["type"] == "conversation.item.added")
        check(added["previous_item_id"] == item["id"], "the answer does not follow the question")


async def cancel(stage: Stage) -> None:
    """A reply is cancelled in its middle; the next one works."""
    async with talking(stage.url, stage.key, **SLOW) as talker:
        await talker.write(QUESTION)
        await talker.send("response.create", response=BY_VOICE)
        await talker.until("response.output_audio.delta")
        cancelled = next(e for e in talker.events if e["type"] == "response.created")
        response_id = cancelled["response"]["id"]
        await talker.send("response.cancel", response_id=response_id)
        done = (await talker.until("response.done"))["response"]
        check(done["status"] == "cancelled", f"status {done['status']}")
        check(done["status_details"]["reason"] == "client_cancelled", "the reason is another")
        in_order(talker.events, SPOKEN_REPLY)
        check(done["output"][0]["status"] == "incomplete", "the item is not incomplete")
        event_id = await talker.send("response.cancel")
        error = await talker.error(event_id)
        check(error["code"] == "response_cancel_not_active", f"code {error['code']}")
        seen = len(talker.events)
        reply = await talker.response(**BY_TEXT)
        check(reply[-1]["response"]["status"] == "completed", "the next response fails")
        late = [e for e in talker.events[seen:] if e.get("response_id") == response_id]
        check(not late, f"{len(late)} events of the cancelled response came after its end")


async def truncate(stage: Stage) -> None:
    """An answer is cut to what was heard, and its transcript with it."""
    async with talking(stage.url, stage.key) as talker:
        await talker.write(QUESTION)
        reply = await talker.response(**BY_VOICE)
        item = assistant_item(reply)
        length_ms = len(audio_of(reply)) * 1000 // (RATE_HZ * 2)
        event_id = await talker.send(
            "conversation.item.truncate",
            item_id=item["id"],
            content_index=0,
            audio_end_ms=length_ms + 5000,
        )
        error = await talker.error(event_id)
        check(error["param"] == "audio_end_ms", f"param {error['param']}")
        half_ms = length_ms // 2
        await talker.send(
            "conversation.item.truncate",
            item_id=item["id"],
            content_index=0,
            audio_end_ms=half_ms,
        )
        truncated = await talker.until("conversation.item.truncated")
        check(truncated["audio_end_ms"] == half_ms, "another length")
        await talker.send("conversation.item.retrieve", item_id=item["id"])
        kept = (await talker.until("conversation.item.retrieved"))["item"]["content"][0]
        whole = item["content"][0]["transcript"]
        check(whole.startswith(kept["transcript"].strip()), "the transcript is another")
        check(len(kept["transcript"]) < len(whole), "the transcript was not cut")


async def delete(stage: Stage) -> None:
    """A deleted item is gone."""
    async with talking(stage.url, stage.key) as talker:
        item = await talker.write("Forget this.")
        await talker.send("conversation.item.delete", item_id=item["id"])
        deleted = await talker.until("conversation.item.deleted")
        check(deleted["item_id"] == item["id"], "another item")
        event_id = await talker.send("conversation.item.retrieve", item_id=item["id"])
        error = await talker.error(event_id)
        check(error["code"] == "item_retrieve_invalid_item_id", f"code {error['code']}")
        await talker.alive()


async def retrieve(stage: Stage) -> None:
    """An item comes back as it was given; a second of the same id is refused."""
    async with talking(stage.url, stage.key) as talker:
        item = await talker.write("Remember this.")
        await talker.send("conversation.item.retrieve", item_id=item["id"])
        found = (await talker.until("conversation.item.retrieved"))["item"]
        check(found == item, f"{found} is not {item}")
        copy = {"type": "message", "role": "user", "id": item["id"], "content": item["content"]}
        event_id = await talker.send("conversation.item.create", item=copy)
        error = await talker.error(event_id)
        check(error["code"] == "item_create_duplicate_item_id", f"code {error['code']}")
        await talker.alive()


async def two_sessions(stage: Stage) -> None:
    """Two conversations at once: each hears its own words only, and no id is in both."""
    async with (
        talking(stage.url, stage.key, **listening()) as one,
        talking(stage.url, stage.key, **listening()) as other,
    ):
        pairs = list(zip((one, other), stage.speeches, strict=False))
        async with asyncio.TaskGroup() as tasks:
            for talker, speech in pairs:
                tasks.create_task(_turn(talker, speech))
        for (talker, speech), (_, foreign) in zip(pairs, reversed(pairs), strict=True):
            (said,) = [
                event["transcript"]
                for event in talker.events
                if event["type"] == "conversation.item.input_audio_transcription.completed"
            ]
            check(heard(speech.words, said), f"heard {said!r}, not {speech.words}")
            check(not heard(foreign.words, said), f"{said!r} has words of the other session")
        mixed = _ids(one) & _ids(other)
        check(not mixed, f"ids of both sessions: {mixed}")


async def _turn(talker: Talker, speech: Speech) -> None:
    await talker.say(speech.pcm)
    reply = await talker.whole_response()
    check(reply[-1]["response"]["status"] == "completed", "a response failed")
    check(audio_of(reply), "no audio")


def _ids(talker: Talker) -> set[str]:
    names = ("event_id", "item_id", "response_id", "previous_item_id")
    return {event[name] for event in talker.events for name in names if event.get(name)}


async def unknown_event(stage: Stage) -> None:
    """An event that does not exist."""
    async with talking(stage.url, stage.key) as talker:
        await talker.send_raw(json.dumps({"type": "session.explode", "event_id": "mine"}))
        error = await talker.error("mine")
        check((error["code"], error["param"]) == ("invalid_value", "type"), f"{error}")
        await talker.alive()


async def malformed_json(stage: Stage) -> None:
    """A frame that is not JSON."""
    async with talking(stage.url, stage.key) as talker:
        await talker.send_raw('{"type": "response.create"')
        error = await talker.error(None)
        check(error["code"] == "invalid_json", f"{error}")
        await talker.alive()


async def bad_base64(stage: Stage) -> None:
    """Audio that is not base64, and audio of half a sample."""
    async with talking(stage.url, stage.key) as talker:
        for audio in ("not base64!", "AAAA=", "AA=="):
            event_id = await talker.send("input_audio_buffer.append", audio=audio)
            error = await talker.error(event_id)
            check((error["code"], error["param"]) == ("invalid_value", "audio"), f"{error}")
        await talker.alive()


async def wrong_rate(stage: Stage) -> None:
    """A sample rate that is not served, and nothing changed by asking for it."""
    async with talking(stage.url, stage.key) as talker:
        event_id = await talker.send(
            "session.update",
            session={
                "type": "realtime",
                "instructions": "Changed.",
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}},
            },
        )
        error = await talker.error(event_id)
        check(error["param"] == "session.audio.input.format.rate", f"{error}")
        await talker.send("session.update", session={"type": "realtime"})
        session = (await talker.until("session.updated"))["session"]
        check(session["audio"]["input"]["format"]["rate"] == 24000, "the rate changed")
        check(session["instructions"] != "Changed.", "half of the update was taken")


async def oversize_frame(stage: Stage) -> None:
    """An event that is too long."""
    async with talking(stage.url, stage.key) as talker:
        frame = json.dumps({"type": "input_audio_buffer.append", "audio": "A" * OVERSIZE_BYTES})
        await talker.send_raw(frame)
        error = await talker.error(None)
        check(error["code"] == "event_too_large", f"{error}")
        await talker.alive()


SCENARIOS: dict[str, Callable[[Stage], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        spoken_turn,
        text_turn,
        cancel,
        truncate,
        delete,
        retrieve,
        two_sessions,
        unknown_event,
        malformed_json,
        bad_base64,
        wrong_rate,
        oversize_frame,
    )
}


async def play(stage: Stage, names: list[str]) -> int:
    """Play scenarios one after the other; how many failed."""
    failed = 0
    for name in names:
        started = time.monotonic()
        try:
            await SCENARIOS[name](stage)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}: {error!r}", flush=True)
        else:
            print(f"ok {name} ({time.monotonic() - started:.1f} s)", flush=True)
    return failed


def main() -> int:
    """Read the options and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="unused")
    parser.add_argument("--speech", nargs=2, metavar="FILE=WORD,WORD", required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    options = parser.parse_args()
    speeches = []
    for entry in options.speech:
        file, _, words = entry.rpartition("=")
        speeches.append(Speech(read_speech(Path(file)), tuple(words.split(","))))
    stage = Stage(options.url, options.key, speeches)
    return 1 if asyncio.run(play(stage, options.names or list(SCENARIOS))) else 0


if __name__ == "__main__":
    sys.exit(main())
