"""Spoken turns against the voice product, one session at a time: what a user waits for.

    python -m loadtest.voice_turns [--turns 16] [--url URL] [--check]

Without --url it serves `examples/voice.yaml` itself and reports the memory of each
process too. Prints one JSON object. With --check the exit status is 1 when a target
is missed: first audio heard <= 1.2 s and barge-in <= 100 ms (medians), RTF of
synthesis <= 0.25. The figures are defined in docs/metrics.md; quote them from an
undisturbed run only (`disturbance`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.talk.call import Call, Order
from antiphon.talk.measures import measure
from antiphon.talk.wav import Pcm, read_wav
from loadtest.machine import Disturbance, description, resident_mib
from tests.deployment import Deployment

QUESTIONS = Path("tests/data/speech/questions")
LONG_REPLY = "Answer in five long sentences, with many details."
FIGURES = ("speech_stopped_ms", "ttft_ms", "ttfp_ms", "first_audio_heard_ms", "underrun_ms")
TARGETS = {"first_audio_heard_ms": 1200.0, "barge_in_ms": 100.0, "server_rtf": 0.25}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--barge-ins", type=int, default=4)
    parser.add_argument("--url")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with serving(options.url) as (url, deployment):
        disturbance = Disturbance()
        before = server_rtf(deployment) if deployment else None
        sounds = [read_wav(path) for path in sorted(QUESTIONS.glob("*.wav"))]
        turns = [asyncio.run(one_turn(url, sounds[n % len(sounds)])) for n in range(options.turns)]
        after = server_rtf(deployment) if deployment else None
        barge_ins = [
            asyncio.run(one_barge_in(url, sounds[n % len(sounds)]))
            for n in range(options.barge_ins)
        ]
        result: dict[str, Any] = {
            "machine": description(),
            "disturbance": disturbance.result(),
            "turns": len(turns),
            **{name: spread([turn[name] for turn in turns]) for name in FIGURES},
            "barge_in_ms": spread(barge_ins),
        }
        if deployment is not None and before is not None and after is not None:
            count = after[1] - before[1]
            result["server_rtf"] = {"mean": round((after[0] - before[0]) / count, 3)}
            result["memory_mib"] = {
                name: resident_mib(pid) for name, pid in sorted(deployment.children().items())
            }
            result["memory_mib"]["supervisor"] = resident_mib(deployment.process.pid)
    missed = [name for name, limit in TARGETS.items() if figure(result.get(name)) > limit]
    result["missed"] = missed
    print(json.dumps(result, indent=2))
    return 1 if options.check and missed else 0


@contextlib.contextmanager
def serving(url: str | None) -> Iterator[tuple[str, Deployment | None]]:
    """The server to measure: the given one, or one started for the purpose."""
    if url is not None:
        yield url, None
        return
    with Deployment() as deployment:
        yield deployment.base_url, deployment


async def one_turn(url: str, sound: Pcm) -> dict[str, float | None]:
    """One question in a session of its own."""
    call = Call(Order(url, sound))
    await call.run()
    assert call.answer is not None
    figures = measure(call.answer, call.track)
    return {name: getattr(figures, name) for name in FIGURES}


async def one_barge_in(url: str, sound: Pcm) -> float | None:
    """A long reply that the user cuts off."""
    call = Call(Order(url, sound, instructions=LONG_REPLY, then=sound, barge_in_at_ms=800))
    await call.run()
    cut = [reply for reply in call.dialogue.replies if reply.interrupted]
    return measure(cut[0], call.track).barge_in_ms if cut else None


def server_rtf(deployment: Deployment) -> tuple[float, float]:
    """Sum and count of the server's RTF histogram."""
    samples = deployment.metrics()
    found = {"sum": 0.0, "count": 0.0}
    for name, value in samples.items():
        if (match := re.match(r"antiphon_server_rtf_(sum|count)", name)) is not None:
            found[match[1]] += value
    return found["sum"], found["count"]


def spread(values: list[float | None]) -> dict[str, float | int]:
    """Least, median, largest and how many turns had the figure."""
    there = [value for value in values if value is not None]
    if not there:
        return {"count": 0}
    return {
        "min": min(there),
        "p50": round(statistics.median(there), 1),
        "max": max(there),
        "count": len(there),
    }


def figure(spread_of: dict[str, float] | None) -> float:
    """What a target is held against; a figure that could not be had misses it."""
    if not spread_of:
        return float("inf")
    return spread_of.get("p50", spread_of.get("mean", float("inf")))


if __name__ == "__main__":
    sys.exit(main())
