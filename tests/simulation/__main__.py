"""`python -m tests.simulation`: replay one seed, or run many.

Exits with 1 when an invariant does not hold, or when a long run did not put all of them
to the test.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.many import EVENTS, FIRST_SEED, seeds_from, tally
from tests.simulation.report import Tally
from tests.simulation.schedule import run


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="replay this world alone")
    which.add_argument("--seeds", type=_range, metavar="A:B", help="run these worlds")
    which.add_argument(
        "--events", type=int, default=EVENTS, help="run worlds until so much has happened"
    )
    parser.add_argument("--from", type=int, default=FIRST_SEED, dest="first", help="the first seed")
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    return parser.parse_args()


def main() -> int:
    """Run what the command line asks for; the exit status."""
    arguments = _arguments()
    started_s = time.perf_counter()
    if arguments.seed is not None:
        result = Tally()
        result.add(run(arguments.seed))
    elif arguments.seeds is not None:
        result = tally(arguments.seeds, jobs=arguments.jobs)
    else:
        seeds = seeds_from(arguments.first)
        result = tally(seeds, events=arguments.events, jobs=arguments.jobs)
    print("\n".join(result.lines()))
    print(f"{time.perf_counter() - started_s:.1f} s")
    for outcome in result.failures:
        print(f"\n{outcome.failure}\nreplay: python -m tests.simulation --seed {outcome.seed}")
    if result.failures:
        return 1
    if arguments.seed is None and arguments.seeds is None and result.missing:
        print("never occurred: " + "; ".join(result.missing))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
