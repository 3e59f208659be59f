"""Two text sessions that alternate: does a long conversation cost more per turn?

    python -m loadtest.resident_prefix [--turns 12] [--url URL] [--check]

Prints TTFT by turn and the tokens that were read anew. With --check the exit status is
1 when the TTFT of the last turn is more than twice that of the second (medians over
both sessions and all rounds).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from antiphon.talk.realtime_client import RealtimeClient
from loadtest.machine import Disturbance, description
from loadtest.voice_turns import serving

QUESTIONS = (
    "Do you like music?",
    "What is your favourite season?",
    "Tell me about the sea.",
    "Is it cold in winter?",
    "Do cats sleep a lot?",
    "What grows in a garden?",
)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with serving(options.url) as (url, _):
        disturbance = Disturbance()
        rounds = [asyncio.run(alternate(url, options.turns)) for _ in range(options.rounds)]
    by_turn = [
        [turn for sessions in rounds for session in sessions for turn in session[index : index + 1]]
        for index in range(options.turns)
    ]
    ttft = [round(statistics.median(t["ttft_ms"] for t in turns), 1) for turns in by_turn]
    ratio = ttft[-1] / ttft[1]
    result = {
        "machine": description(),
        "disturbance": disturbance.result(),
        "ttft_ms": ttft,
        "prefill_tokens": [statistics.median(t["prefill"] for t in turns) for turns in by_turn],
        "input_tokens": [statistics.median(t["input"] for t in turns) for turns in by_turn],
        "last_over_second": round(ratio, 2),
    }
    print(json.dumps(result, indent=2))
    return 1 if options.check and ratio > 2.0 else 0


async def alternate(url: str, turns: int) -> list[list[dict[str, Any]]]:
    """The turns of two sessions that take turns."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RealtimeClient.open(url)) for _ in range(2)]
        for client in clients:
            await until(client, "session.created")
        measured: list[list[dict[str, Any]]] = [[], []]
        for number in range(turns):
            for client, record in zip(clients, measured, strict=True):
                record.append(await ask(client, QUESTIONS[number % len(QUESTIONS)]))
        return measured


async def ask(client: RealtimeClient, text: str) -> dict[str, Any]:
    """One text turn: TTFT from `response.create`, and the tokens by the server's count."""
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    await client.send({"type": "conversation.item.create", "item": item})
    asked = time.monotonic()
    response = {"output_modalities": ["text"]}
    await client.send({"type": "response.create", "response": response})
    first = await until(client, "response.output_text.delta")
    done = await until(client, "response.done")
    usage = done.event["response"]["usage"]
    return {
        "ttft_ms": (first.at - asked) * 1000.0,
        "input": usage["input_tokens"],
        "prefill": usage["input_tokens"] - usage["input_token_details"]["cached_tokens"],
    }


async def until(client: RealtimeClient, kind: str) -> Any:
    """The next event of a type; events of other types are passed over."""
    while True:
        received = await client.receive()
        if received.type == kind:
            return received
        if received.type == "error":
            raise RuntimeError(received.event["error"]["message"])


if __name__ == "__main__":
    sys.exit(main())
