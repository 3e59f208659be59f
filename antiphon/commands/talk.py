"""`antiphon talk`: speak a sound to a gateway, hear the answer, print the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from antiphon.commands.address import add_url
from antiphon.talk.call import Call, Order
from antiphon.talk.errors import NoAnswer, TalkError
from antiphon.talk.live_view import LiveView
from antiphon.talk.report import answer_audio, as_json, as_lines, was_heard
from antiphon.talk.wav import read_wav, write_wav

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon talk`."""
    parser.description = "Speak a WAV file or into the microphone, and hear the answer."
    add_url(parser)
    parser.add_argument(
        "--in",
        dest="sound",
        type=Path,
        metavar="WAV",
        help="what to say, any rate and channels (default: the microphone)",
    )
    parser.add_argument("--out", type=Path, metavar="WAV", help="write what was heard, 24 kHz mono")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--key",
        default=os.environ.get("ANTIPHON_KEY"),
        help="key of the gateway (default: the environment's ANTIPHON_KEY)",
    )
    parser.add_argument("--model", default="voice", help="pipeline to talk to (default: voice)")
    parser.add_argument("--instructions", help="instructions for this session")
    parser.add_argument(
        "--then",
        type=Path,
        metavar="WAV",
        help="interrupt the answer with this sound",
    )
    parser.add_argument(
        "--barge-in-at-ms",
        type=_milliseconds,
        default=1000,
        metavar="N",
        help="when --then starts, counted from the first audio heard (default: 1000)",
    )
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=60.0,
        metavar="N",
        help="longest wait without progress once all is said (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the call. 0: an answer was heard; 1: none; 2: no sound to send; 3: no connection."""
    order = Order(
        url=arguments.url,
        sound=None,
        model=arguments.model,
        key=arguments.key,
        instructions=arguments.instructions,
        barge_in_at_ms=arguments.barge_in_at_ms,
        timeout_s=arguments.timeout_s,
    )
    call = Call(order)
    try:
        call.order = replace(
            order,
            sound=None if arguments.sound is None else read_wav(arguments.sound),
            then=None if arguments.then is None else read_wav(arguments.then),
        )
        _make(call)
        if arguments.out is not None and call.dialogue.replies:
            write_wav(arguments.out, answer_audio(call))
        if not was_heard(call):
            raise NoAnswer(_silence(call))
    except TalkError as error:
        call.error = error
    except KeyboardInterrupt:
        print("antiphon talk: stopped", file=sys.stderr)
        return INTERRUPTED
    _print(call, arguments)
    return 0 if call.error is None else call.error.exit_status


def _make(call: Call) -> None:
    with LiveView() as view:
        asyncio.run(call.run(view.show))


def _silence(call: Call) -> str:
    reply = call.answer
    if reply is None:
        return "no answer came"
    if reply.status == "failed":
        return f"the answer failed: {reply.error or reply.reason or 'no reason given'}"
    return "the answer is silent" if reply.audio else "the answer has no audio"


def _print(call: Call, arguments: argparse.Namespace) -> None:
    if arguments.json:
        out = None if arguments.out is None else str(arguments.out)
        print(json.dumps(as_json(call, out)))
    else:
        for line in as_lines(call):
            print(line)
        if arguments.out is not None and call.error is None:
            print(f"written   {arguments.out}")
    if call.error is not None:
        print(f"antiphon talk: {call.error.message}", file=sys.stderr)


def _milliseconds(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError("must be above 0 and at most 86400")
    return value
