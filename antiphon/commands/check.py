"""`antiphon check`: say whether a config can be served."""

from __future__ import annotations

import argparse
from pathlib import Path

from protocol.config import read_config
from workers.check import check_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon check`."""
    parser.add_argument("config", type=Path, metavar="FILE", help="the config to check")


def run(arguments: argparse.Namespace) -> int:
    """Print a summary of the config. Raises ConfigError with everything wrong in it."""
    file = read_config(arguments.config)
    check_stages(file)
    for name, pipeline in file.config.pipelines.items():
        stages = " -> ".join(pipeline.stages)
        print(f"{arguments.config}: pipeline {name} ({pipeline.kind}): {stages}")
    return 0
