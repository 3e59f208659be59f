"""Ask a gateway something over its own surface, and hear the answer whatever the network does.

    python examples/native/ask.py "How are you?" --out answer.wav

Needs httpx and websockets. A connection that breaks is made anew: the session goes on
meanwhile, and what was missed is told again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import wave
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

RATE_HZ = 24_000
TRIES = 8
QUEUE_S = 120
FINAL = {1000, 1008, 4001}
"""Close codes after which coming back is of no use."""


class Answer:
    """What came of the answer so far, and what is needed to come back for the rest."""

    def __init__(self, session: dict[str, Any]) -> None:
        self.session = session["id"]
        self.secret = session["secret"]
        self.cursor: str | None = None
        self.text = ""
        self.pcm = b""
        self.done: dict[str, Any] | None = None

    def take(self, frame: dict[str, Any]) -> None:
        """One frame of the server."""
        match frame["type"]:
            case "attached":
                # The old secret is good until something is said under the new one.
                self.secret = frame["secret"]
                if frame["lost"]:
                    print(f"outputs {frame['lost']} are gone")
            case "text_delta":
                self.text += frame["delta"]
            case "audio_delta":
                self.pcm += base64.b64decode(frame["pcm"])
            case "response_done":
                self.done = frame["response"]
            case "answer" if frame["error"]:
                raise SystemExit(f"refused: {frame['error']['message']}")
            case "refused" | "error":
                raise SystemExit(f"refused: {frame['error']['message']}")
        self.cursor = frame.get("cursor", self.cursor)


async def ask(url: str, key: str | None, question: str) -> Answer:
    """Open a session, ask, and wait for the whole answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        try:
            # Where there is a queue the answer comes when there is a place.
            opened = await http.post(
                "/v1/sessions", json={"limits": {"grace_s": 10}}, timeout=QUEUE_S
            )
        except httpx.TransportError as error:
            raise SystemExit(f"nobody answers at {url}: {error or 'too slow'}") from None
        if opened.is_error:
            raise SystemExit(f"no session: {opened.json()['error']['message']}")
        answer = Answer(opened.json())
        try:
            for attempt in range(TRIES):
                if await listen(url, headers, answer, question):
                    return answer
                await asyncio.sleep(0.1 * 2**attempt)
            raise SystemExit("the connection keeps breaking")
        finally:
            await http.delete(f"/v1/sessions/{answer.session}")


async def listen(url: str, headers: dict[str, str], answer: Answer, question: str) -> bool:
    """Attach and listen; whether the answer is complete, or else the connection broke."""
    address = f"ws{url.removeprefix('http')}/v1/sessions/{answer.session}/stream"
    attach = {"type": "attach", "role": "controller", "secret": answer.secret}
    if answer.cursor is not None:
        attach["cursor"] = answer.cursor
    item = {"role": "user", "parts": [{"kind": "input_text", "text": question}]}
    frames = [
        attach,
        # An id that comes again is answered again, and not carried out again.
        {"type": "update", "id": "question", "input": {"type": "item", "item": item}},
        {"type": "signal", "id": "respond", "signal": {"type": "respond"}},
    ]
    try:
        async with connect(
            address,
            subprotocols=[Subprotocol("antiphon.json")],
            additional_headers=headers,
            max_size=None,
        ) as socket:
            for frame in frames:
                await socket.send(json.dumps(frame))
            async for received in socket:
                answer.take(json.loads(received))
                if answer.done is not None:
                    return True
    except ConnectionClosed as closed:
        if closed.rcvd is not None and closed.rcvd.code in FINAL:
            raise SystemExit(f"closed: {closed.rcvd.reason}") from None
    except OSError:
        pass
    return False


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask a gateway something.")
    parser.add_argument("question")
    port = os.environ.get("ANTIPHON_PORT", "8080")
    parser.add_argument("--url", default=f"http://127.0.0.1:{port}")
    parser.add_argument("--key", help="the gateway's key, if it has keys")
    parser.add_argument("--out", help="write what was heard: a WAV file")
    arguments = parser.parse_args()
    answer = asyncio.run(ask(arguments.url, arguments.key, arguments.question))
    print(answer.text)
    if arguments.out:
        with wave.open(arguments.out, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE_HZ)
            out.writeframes(answer.pcm)


if __name__ == "__main__":
    main()
