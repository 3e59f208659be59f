"""`antiphon eval robots`: judge a policy in closed loop, through a gateway that runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.commands.address import add_url
from antiphon.commands.admin_api import print_table
from antiphon.commands.numbers import listed, name, number, one_of, whole
from antiphon.evaluation.errors import EvaluationFailed
from antiphon.evaluation.evaluation import Evaluation
from antiphon.evaluation.gateway import check_address
from antiphon.evaluation.places import to_read, to_run, to_write, to_write_in
from antiphon.evaluation.plan import CONTROLS, IMAGES, Condition, Order, conditions
from antiphon.evaluation.plots import write_plots
from antiphon.evaluation.report import as_json, as_table
from antiphon.machine import Disturbance
from protocol.errors import InvalidRequest
from protocol.exit_status import ExitStatus

PYTHON = Path(".venv-openpi/bin/python")
FIRST_SEED = 1_000_000
"""Far from where trainings begin to count."""
CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
KEY = re.compile(r"[\x21-\x7e]*")
MAX_ACTIONS = 10_000
"""No chunk has more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon eval robots`."""
    parser.description = "Judge in closed loop what a running gateway serves."
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    add_robots_arguments(subjects.add_parser("robots", help="a policy for robots"))


def add_robots_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon eval robots`, on a parser of their own."""
    parser.description = (
        "Robots with the official OpenPI client play episodes in a simulation that waits for "
        "nobody. Options that take lists (a,b,c) are combined: each combination is a condition."
    )
    add_url(parser)
    parser.add_argument("--pipeline", required=True, help="the robot pipeline, by its own name")
    parser.add_argument(
        "--key",
        default=os.environ.get("ANTIPHON_KEY"),
        help="key of the gateway (default: the environment's ANTIPHON_KEY)",
    )
    world = parser.add_mutually_exclusive_group(required=True)
    world.add_argument("--simulation", metavar="MODULE:CLASS", help="the world and its robot")
    world.add_argument(
        "--recorded", type=Path, metavar="FILE", help="send what was recorded: load, no success"
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=PYTHON,
        help=f"Python of the robots' environment (default: {PYTHON})",
    )
    parser.add_argument("--tasks", type=listed(name), help="a,b,c (default: all of the simulation)")
    parser.add_argument(
        "--episodes",
        type=whole(1, 1_000_000),
        default=20,
        metavar="N",
        help="of each task (default: 20)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, 2**63 - 1),
        default=FIRST_SEED,
        metavar="N",
        help=f"seed of the first episode; the others count on from it (default: {FIRST_SEED})",
    )
    parser.add_argument(
        "--slow-motion",
        type=number(0.0, 1.0),
        default=1.0,
        metavar="F",
        help="seconds of the world in one second of the wall clock (default: 1)",
    )
    swept = parser.add_argument_group("conditions (lists)")
    swept.add_argument(
        "--control",
        type=listed(_control),
        default=CONTROLS[:1],
        metavar="WAY[:N]",
        help=f"{', '.join(CONTROLS)}; with N that many actions of each chunk are played "
        "(default: one in synchronous control, else all)",
    )
    swept.add_argument(
        "--robots", type=listed(whole(1, 256)), default=(1,), help="how many at once"
    )
    milliseconds = listed(number(0.0, 60_000.0, least=True))
    swept.add_argument(
        "--latency", type=milliseconds, default=(0.0,), metavar="MS", help="there and back, in all"
    )
    swept.add_argument(
        "--jitter", type=milliseconds, default=(0.0,), metavar="MS", help="at most so much more"
    )
    swept.add_argument(
        "--loss",
        type=listed(number(0.0, 1.0, least=True)),
        default=(0.0,),
        metavar="P",
        help="probability that a message is lost, and sent again",
    )
    swept.add_argument(
        "--images",
        type=listed(one_of(IMAGES)),
        default=IMAGES[:1],
        help="seen (default), blank, or frozen at an episode's first",
    )
    control = parser.add_argument_group("how chunks are played")
    control.add_argument(
        "--ask-ahead",
        type=whole(0, MAX_ACTIONS),
        metavar="N",
        help="ask for the next chunk when so many actions are left "
        "(default: 1 in chunked control, half of a chunk in real-time chunking)",
    )
    control.add_argument(
        "--while-waiting",
        choices=("hold", "last"),
        default="hold",
        help="without an action do what the simulation's `hold` says (default), or the last again",
    )
    control.add_argument(
        "--loss-ms",
        type=number(0.0, 60_000.0, least=True),
        default=200.0,
        metavar="MS",
        help="how much later what was lost arrives (default: 200, the least time after which "
        "Linux sends again)",
    )
    control.add_argument(
        "--timeout-s",
        type=number(0.0, 86_400.0),
        default=60.0,
        metavar="N",
        help="longest wait for an answer (default: 60)",
    )
    output = parser.add_argument_group("what is written")
    output.add_argument("--json", action="store_true", help="print the report, and no table")
    output.add_argument("--out", type=Path, metavar="FILE", help="write the report there")
    output.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there, as SVG")
    output.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write what robots sent, for --recorded"
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate. 0: all was played, and what was measured holds together; 1: not.

    Raises InvalidRequest for what cannot be played, before anything is, and EvaluationFailed for
    a report that cannot be written.
    """
    order = _order(arguments)
    wanted = conditions(
        arguments.control,
        arguments.robots,
        arguments.latency,
        arguments.jitter,
        arguments.loss,
        arguments.images,
    )
    if order.record is not None and len(wanted) > 1:
        raise InvalidRequest("--record is for one condition", field="record")
    # It would be a pity to find out afterwards.
    for option in ("record", "plots"):
        if (folder := getattr(arguments, option)) is not None:
            to_write_in(folder, option)
    if arguments.out is not None:
        to_write(arguments.out, "out")
    evaluation = Evaluation(order)
    disturbance = Disturbance()
    asyncio.run(evaluation.run(wanted, _Progress(wanted)))
    report = as_json(evaluation, disturbance)
    if arguments.json:
        print(json.dumps(report, indent=1))
    elif evaluation.results:
        print_table(as_table(evaluation))
    for fault in evaluation.faults:
        print(f"antiphon eval: {fault}", file=sys.stderr)
    try:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        if arguments.plots is not None:
            write_plots(evaluation.results, arguments.plots)
    except OSError as error:
        raise EvaluationFailed(f"what was measured cannot be written: {error}") from None
    return ExitStatus.FAILED if evaluation.faults else ExitStatus.OK


def _order(arguments: argparse.Namespace) -> Order:
    to_run(
        arguments.python,
        "python",
        "the robots need an environment of their own, with openpi-client and the simulation "
        "(docs/evaluating-robots.md)",
    )
    if arguments.recorded is not None:
        to_read(arguments.recorded, "recorded")
    if arguments.simulation is not None and not CLASS.fullmatch(arguments.simulation):
        raise InvalidRequest(
            f"--simulation is MODULE:CLASS, not {arguments.simulation!r}", field="simulation"
        )
    check_address(arguments.url)
    if arguments.key is not None and not KEY.fullmatch(arguments.key):
        raise InvalidRequest("--key has to be visible ASCII, to be sent", field="key")
    return Order(
        url=arguments.url,
        pipeline=arguments.pipeline,
        key=arguments.key,
        python=arguments.python,
        simulation=arguments.simulation,
        recorded=arguments.recorded,
        tasks=arguments.tasks,
        episodes=arguments.episodes,
        seed=arguments.seed,
        slow_motion=arguments.slow_motion,
        ask_ahead=arguments.ask_ahead,
        while_waiting=arguments.while_waiting,
        loss_ms=arguments.loss_ms,
        timeout_s=arguments.timeout_s,
        record=arguments.record,
    )


class _Progress:
    """What is played, on a terminal's standard error."""

    def __init__(self, wanted: Sequence[Condition]) -> None:
        self._wanted = list(wanted)
        self._shown = sys.stderr.isatty()
        self._played: dict[Condition, int] = {}

    def __call__(self, condition: Condition, episode: dict[str, Any]) -> None:
        played = self._played[condition] = self._played.get(condition, 0) + 1
        if self._shown:
            number = self._wanted.index(condition) + 1
            line = f"{number}/{len(self._wanted)} {condition}: {played} episodes"
            print(f"\r\x1b[K{line}", end="\r", file=sys.stderr, flush=True)


def _control(text: str) -> str:
    way, colon, actions = text.partition(":")
    one_of(CONTROLS)(way)
    return f"{way}:{whole(1, MAX_ACTIONS)(actions)}" if colon else way
