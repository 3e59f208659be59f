"""`antiphon bench`: the benchmarks of the repository, which are no part of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "robots": "what a step costs over OpenPI, and with --faults what robots see of faults",
}
"""Those that have a `main(arguments)`, in the module `loadtest.NAME`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon bench`."""
    parser.description = "Run a benchmark of the repository, at its root."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks:\n" + "\n".join(
        f"  {name}  {summary}" for name, summary in BENCHMARKS.items()
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="BENCHMARK")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its own options; --help tells them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it; its exit status. Raises ConfigError outside of the repository."""
    if not (ROOT / "loadtest").is_dir():
        raise ConfigError("the benchmarks are in the repository of Antiphon, not in its package")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    benchmark = importlib.import_module(f"loadtest.{arguments.benchmark}")
    status: int = benchmark.main(arguments.arguments)
    return status
