"""`antiphon check`: say whether a config can be served."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from protocol.addresses import is_loopback
from protocol.config import Config, read_config
from workers.check import check_machine, check_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon check`."""
    parser.add_argument("config", type=Path, metavar="FILE", help="the config to check")


def run(arguments: argparse.Namespace) -> int:
    """Print a summary of the config. Raises ConfigError with everything wrong in it."""
    file = read_config(arguments.config)
    check_stages(file)
    check_machine(file)
    print(f"{arguments.config}: can be served")
    for line in _summary(file.config):
        print(f"  {line}")
    return 0


def _summary(config: Config) -> Iterator[str]:
    gateway = config.gateway
    if gateway.keys:
        who = f"with one of {len(gateway.keys)} keys"
    elif is_loopback(gateway.host):
        who = "from this machine, without a key"
    else:
        who = "without a key: needs --insecure"
    scheme = "http" if gateway.tls_cert is None else "https"
    yield f"gateway: {scheme} on {gateway.host} port {gateway.port}, {who}"
    for name, stage in config.stages.items():
        workers = "1 worker" if stage.replicas == 1 else f"{stage.replicas} workers"
        python = "" if stage.python is None else f", run by {stage.python}"
        yield f"stage {name}: engine {stage.engine}, {workers}{python}"
    for name, pipeline in config.pipelines.items():
        required = ", required" if pipeline.required else ""
        stages = " -> ".join(pipeline.stages)
        yield f"pipeline {name}: {pipeline.kind}{required}, {stages}"
        if pipeline.aliases:
            yield f"  also called {', '.join(pipeline.aliases)}"
        if pipeline.voices:
            yield f"  voices {', '.join(pipeline.voices)}"
        yield f"  at most {pipeline.limits.sessions} sessions"
